"""trees: golden trees, and plain Python as the oracle for random ones."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import vmap
from torch.utils._pytree import tree_map

from nanospec_fn import trees
from nanospec_fn.trees import Tree

GOLDEN = json.loads((Path(__file__).parent / "golden" / "trees.json").read_text())
INF = float("inf")


def grow(levels: list, top_k: int) -> Tree:
    """levels: per depth (token [m, k], logp [m, k]) as lists, None for -inf."""
    tree = trees.init(top_k * len(levels))
    for depth, (token, logp) in enumerate(levels, 1):
        logp = [[-INF if p is None else p for p in row] for row in logp]
        tree = trees.expand(tree, depth, torch.tensor(token), torch.tensor(logp))
    return tree


def level(tree: Tree, depth: int, top_k: int) -> Tree:
    """The nodes at `depth` of an unpruned tree."""
    return tree_map(lambda x: x[(depth - 1) * top_k : depth * top_k], tree)


def ancestors(tree: Tree, depth: int) -> torch.Tensor:
    """[N, D] each node's path to itself."""
    return trees.path(tree, torch.arange(len(tree.token)), depth)


def columns(tree: Tree) -> dict[str, list]:
    return {
        "token": tree.token.tolist(),
        "parent": tree.parent.tolist(),
        "depth": tree.depth.tolist(),
        "score": [None if s == -INF else round(s, 4) for s in tree.score.tolist()],
    }


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_golden(case):
    """Catches, case by case: ties by place in place of id, a dropped greedy chain, orphans, parents not re-indexed."""
    tree = grow(case["levels"], case["top_k"])
    assert columns(tree) == case["tree"]
    pruned = trees.prune(tree, case["num_nodes"], case["top_k"])
    assert columns(pruned) == case["pruned"]
    assert ancestors(pruned, len(case["levels"])).tolist() == case["ancestors"]


def oracle(levels: list, top_k: int) -> list[tuple]:
    """Nodes (token, parent, depth, logp, score) or None, level by level; scores as fp32 sums."""
    nodes: list = []
    for depth, (token, logp) in enumerate(levels, 1):
        first = (depth - 2) * top_k
        found, greedy = [], None
        for row in range(len(token)):
            above = None if depth == 1 else nodes[first + row]
            if depth > 1 and above is None:
                continue
            base = torch.tensor(0.0 if depth == 1 else above[4])
            mine = [
                (t, -1 if depth == 1 else first + row, depth, p, (base + torch.tensor(p)).item(), row)
                for t, p in zip(token[row], logp[row], strict=True)
                if t != -1 and p > -INF
            ]
            if row == 0 and mine:
                greedy = min(mine, key=lambda c: (-c[3], c[0]))
            found += mine
        found.sort(key=lambda c: (-c[4], c[5], c[0]))
        if greedy:
            found.remove(greedy)
        level = [greedy, *found][:top_k]
        nodes += [c and c[:5] for c in level] + [None] * (top_k - len(level))
    return nodes


def oracle_prune(nodes: list, num_nodes: int, top_k: int) -> list:
    chain = [i for i in range(0, len(nodes), top_k) if nodes[i]]
    others = sorted((i for i, n in enumerate(nodes) if n and i % top_k), key=lambda i: (-nodes[i][4], i))
    kept = sorted((chain + others)[:num_nodes])
    parent = {old: new for new, old in enumerate(kept)} | {-1: -1}
    return [(n[0], parent[n[1]], *n[2:]) for n in (nodes[i] for i in kept)] + [None] * (num_nodes - len(kept))


def as_tuples(tree: Tree) -> list:
    rows = zip(*(x.tolist() for x in (tree.token, tree.parent, tree.depth, tree.logp, tree.score)), strict=True)
    absent = (-1, -1, 0, -INF, -INF)
    return [None if row == absent else row for row in rows]


@st.composite
def drafts(draw):
    """top_k, levels of candidates with ties, absent ones and dead ends, and a number of nodes."""
    top_k, depth = draw(st.sampled_from([(1, 1), (1, 4), (2, 3), (3, 3), (4, 2)]))
    logp = st.sampled_from([0.0, -0.5, -0.5, -1.0, -2.25, -7.0, -INF])
    levels = []
    for d in range(1, depth + 1):
        rows = 1 if d == 1 else top_k
        token = [draw(st.permutations(range(6)))[:top_k] for _ in range(rows)]
        token = [[t if draw(st.integers(0, 3)) else Tree.NONE for t in row] for row in token]
        levels.append((token, [draw(st.lists(logp, min_size=top_k, max_size=top_k)) for _ in range(rows)]))
    return top_k, levels, draw(st.integers(1, top_k * depth))


@settings(max_examples=150, deadline=None)
@given(drafts())
def test_expand_and_prune_equal_the_oracle(case):
    """Catches a chain found by score, a stable order lost in sorting, and children of absent nodes."""
    top_k, levels, num_nodes = case
    tree = grow(levels, top_k)
    expected = oracle(levels, top_k)
    assert as_tuples(tree) == expected
    pruned = trees.prune(tree, num_nodes, top_k)
    assert as_tuples(pruned) == oracle_prune(expected, num_nodes, top_k)
    assert as_tuples(trees.prune(tree, top_k * len(levels), top_k)) == oracle_prune(expected, len(expected), top_k)


@settings(max_examples=60, deadline=None)
@given(drafts())
def test_a_pruned_tree_is_a_tree(case):
    """Catches orphans: every parent is kept, one level up, and earlier; the greedy chain is there from the top."""
    top_k, levels, num_nodes = case
    whole = grow(levels, top_k)
    tree = trees.prune(whole, num_nodes, top_k)
    parent, depth, token = tree.parent.tolist(), tree.depth.tolist(), tree.token.tolist()
    for i, (p, d) in enumerate(zip(parent, depth, strict=True)):
        if d:
            assert p < i
            assert d == (1 if p < 0 else depth[p] + 1)
    paths = ancestors(tree, len(levels)).tolist()
    for i, path in enumerate(paths):
        assert [x for x in path if x >= 0] == path[: depth[i]]
        assert depth[i] == 0 or path[depth[i] - 1] == i
        assert all(parent[b] == a for a, b in zip([-1, *path], path[: depth[i]], strict=False))
    chain = [t for t in whole.token[::top_k].tolist() if t != -1][:num_nodes]
    sequences = {tuple(token[x] for x in path if x >= 0) for path in paths}
    assert not chain or tuple(chain) in sequences


@settings(max_examples=30, deadline=None)
@given(st.lists(drafts(), min_size=2, max_size=2))
def test_vmap_equals_one_slot(cases):
    """Catches control flow on data, and a slot that sees another's nodes."""
    top_k, levels, num_nodes = cases[0]
    lists = [levels, [(t[::-1], p[::-1]) for t, p in levels]]
    tree = tree_map(lambda x: x.expand(2, -1), trees.init(top_k * len(levels)))
    for depth in range(1, len(levels) + 1):
        token, logp = (torch.tensor([x[depth - 1][i] for x in lists]) for i in (0, 1))
        tree = vmap(lambda t, c, p, d=depth: trees.expand(t, d, c, p))(tree, token, logp)
    pruned = vmap(partial(trees.prune, num_nodes=num_nodes, top_k=top_k))(tree)
    paths = vmap(partial(ancestors, depth=len(levels)))(pruned)
    for slot, mine in enumerate(lists):
        alone = trees.prune(grow(mine, top_k), num_nodes, top_k)
        assert as_tuples(tree_map(lambda x, i=slot: x[i], pruned)) == as_tuples(alone)
        assert torch.equal(paths[slot], ancestors(alone, len(levels)))


def test_level_and_parent_row():
    """Catches parents counted in the whole tree where a row of the level above is meant."""
    case = next(c for c in GOLDEN if c["name"] == "two levels, ties by id")
    tree = grow(case["levels"], case["top_k"])
    second = level(tree, 2, 2)
    assert second.token.tolist() == case["tree"]["token"][2:4]
    assert trees.parent_row(second, 2, 2).tolist() == case["tree"]["parent"][2:4]
    assert trees.parent_row(level(tree, 1, 2), 1, 2).tolist() == [0, 0]


def test_path_of_a_node_and_of_the_root():
    case = next(c for c in GOLDEN if c["name"] == "two levels, ties by id")
    tree = grow(case["levels"], case["top_k"])
    assert trees.path(tree, torch.tensor([-1, 0, 3]), 2).tolist() == [[-1, -1], [0, -1], case["path of node 3"]]

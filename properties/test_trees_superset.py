"""From one state a tree that holds another one accepts at least as many tokens, and which shapes hold which.

Under rule `exact` a node is accepted iff it is its parent row's own draw, which no other node can change: what is
accepted is the target's own continuation as far as the tree follows it. So more nodes never accept less. But a wider
tree need not hold a narrower one: a level keeps the best top_k of all its candidates, and children of nodes that the
narrower tree lacks may displace what it kept. `holds` says where a shape's tree is always part of another's.
"""

import dataclasses
import functools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import acceptance, sampling, trees
from nanospec_fn.draft import Ngram
from nanospec_fn.draft_model import Eagle3, LlamaDraft
from nanospec_fn.trees import Tree
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = settings(
    max_examples=18, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
CHANGES = {"num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 24}
CHANGES |= {"rope_scaling": None, "eos_token_id": None}
RAW = tiny.config("llama-3.2-1b", **CHANGES)
ROOM = ns.Speculation(top_k=4, depth=4)  # a state with room for every shape below
CONFIG = ns.EngineConfig(max_slots=3, num_pages=24, page_size=16, max_context=96)
ROUNDS = 3


def holds(large: ns.Speculation, small: ns.Speculation, by_chain: bool) -> bool:
    """Whether from every state `small`'s tree is part of `large`'s. by_chain: ngram, whose trees merge whole chains."""
    if small.top_k > large.top_k or small.depth > large.depth:
        return False
    if small.top_k == 1:
        return True  # the greedy chain is never dropped
    whole = large.nodes == large.lookahead
    if small.top_k == large.top_k:
        return whole or (small.depth == large.depth and small.nodes <= large.nodes)
    # Of the root's children a wider level keeps a longer part of one list; further down it has other candidates.
    return whole and (by_chain or small.depth == 1)


@functools.cache
def target(seed: int) -> ns.Model:
    return tiny.model("llama-3.2-1b", seed, **CHANGES)


@functools.cache
def draft(kind: str, seed: int) -> ns.Draft:
    """A draft for `target(seed)`: its own weights with noise, a random head, or ngram."""
    model = target(seed)
    if kind == "ngram":
        return ns.Draft(Ngram())
    if kind == "eagle":
        cfg, params, _ = tiny.head(RAW, model, seed, draft_vocab=16)
        return ns.Draft(Eagle3(cfg), params)
    generator = torch.Generator().manual_seed(seed)
    noisy = pytree.tree_map(lambda x: x + 0.15 * x.std() * torch.randn(x.shape, generator=generator), model.params)
    return ns.Draft(LlamaDraft(model.cfg), noisy)


@st.composite
def shapes(draw: st.DrawFn, coupled: bool) -> ns.Speculation:
    top_k, depth = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    nodes = draw(st.one_of(st.none(), st.integers(depth, top_k * depth)))
    return ns.Speculation(top_k, depth, nodes, coupled)


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, int, list[ns.Speculation], list[ns.Sampling], list[list[int]]]:
    """The kind and seed of a draft, shapes of one family among others, requests, prompts."""
    kind = draw(st.sampled_from(("llama", "eagle", "ngram")))
    coupled = kind != "ngram" and draw(st.booleans())
    some = draw(st.lists(shapes(coupled), min_size=2, max_size=4))
    one = some[0]
    some += [dataclasses.replace(one, num_nodes=None), dataclasses.replace(one, top_k=1, num_nodes=None)]
    some.append(dataclasses.replace(one, num_nodes=draw(st.integers(one.depth, one.lookahead))))
    seeds = draw(st.lists(st.integers(0, 2**40), min_size=3, max_size=3, unique=True))
    requests = [ns.Sampling(max_tokens=64, temperature=float(i > 0), seed=seed) for i, seed in enumerate(seeds)]
    token = st.integers(0, 3 if kind == "ngram" else RAW["vocab_size"] - 1)
    prompts = draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=3, max_size=3))
    return kind, draw(st.integers(0, 3)), list(dict.fromkeys(some)), requests, prompts


def paths(tree: Tree, slot: int) -> set[tuple[int, ...]]:
    """A slot's nodes, each as the tokens from the root's child down to it."""
    token, parent, depth = (x[slot].tolist() for x in (tree.token, tree.parent, tree.depth))
    found: list[tuple[int, ...]] = []
    for i, t in enumerate(token):
        found.append((*(found[parent[i]] if parent[i] >= 0 else ()), t) if depth[i] else ())
    return {path for path in found if path}


@SETTINGS
@given(cases())
def test_a_tree_that_holds_another_accepts_at_least_as_many(case):
    """Catches a dropped greedy chain, a pruning that is not nested, a node whose verdict depends on other nodes."""
    kind, seed, specs, requests, prompts = case
    model, drafted = target(seed), draft(kind, seed)
    room = dataclasses.replace(ROOM, coupled=specs[0].coupled)
    programs = {spec: ns.build(model, drafted, CONFIG, spec) for spec in (*specs, room)}
    params, state = ns.Params(target=model.params, draft=drafted.params), programs[room].init()
    for slot, (tokens, request) in enumerate(zip(prompts, requests, strict=True)):
        state = programs[room].insert(state, slot, tokens, request)
    state, _ = programs[room].prefill(params, state)
    for i in range(ROUNDS):
        after = {spec: program.speculate(params, state) for spec, program in programs.items()}
        infos = {spec: info for spec, (_, info) in after.items()}
        for small, a in infos.items():
            for large, b in infos.items():
                for slot in range(len(prompts)):
                    inside = paths(a.tree, slot) <= paths(b.tree, slot)
                    assert inside or not holds(large, small, kind == "ngram"), f"{small} is not part of {large}"
                    assert not inside or a.accepted[slot] <= b.accepted[slot], f"{small} accepts more than {large}"
        state = after[specs[i % len(specs)]][0]  # on from whichever tree, with what it left in the draft's KV


def grown(levels: list[list[list[float]]], names: list[list[list[int]]], top_k: int) -> Tree:
    """A tree of each level's candidate probabilities by row, cut to top_k rows and candidates as a draft gives them."""
    tree = trees.init(top_k * len(levels))
    for depth, (rows, tokens) in enumerate(zip(levels, names, strict=True), 1):
        m = 1 if depth == 1 else top_k
        logp = torch.tensor([row[:top_k] for row in rows[:m]]).log()
        tree = trees.expand(tree, depth, torch.tensor([row[:top_k] for row in tokens[:m]]), logp)
    return tree


def accepted(tree: Tree, continuation: tuple[int, ...], depth: int) -> int:
    """Tokens that a greedy target with this continuation accepts."""
    rows = tree.token.shape[0] + 1
    logits = torch.zeros(1, rows, 16)
    for row in range(rows):
        level = 0 if row == 0 else int(tree.depth[row - 1])
        if level < len(continuation):
            logits[0, row, continuation[level]] = 1.0
    batch = pytree.tree_map(lambda x: x[None], tree)
    _, verdict = acceptance.judge(logits, batch, sampling.controls([ns.Sampling()]), torch.tensor([0]), depth)
    return int(verdict.accepted)


# The root's children are 1, 2, 3 with these probabilities, each row of the second level is one of theirs.
FIRST = [[0.5, 0.1, 0.09]]
SECOND = [[0.9, 0.01, 0.001], [0.3, 0.2, 0.1], [0.5, 0.4, 0.01]]
NAMES = [[[1, 2, 3]], [[4, 5, 6], [7, 8, 9], [10, 11, 12]]]


def test_a_wider_level_may_drop_what_a_narrower_one_keeps():
    """Where the property ends: top_k 2 keeps 2 -> 7, which children of 3 displace under top_k 3."""
    two, three = (grown([FIRST, SECOND], NAMES, k) for k in (2, 3))
    assert paths(pytree.tree_map(lambda x: x[None], two), 0) == {(1,), (2,), (1, 4), (2, 7)}
    assert paths(pytree.tree_map(lambda x: x[None], three), 0) == {(1,), (2,), (3,), (1, 4), (3, 10), (3, 11)}
    assert accepted(two, (2, 7), 2) == 2
    assert accepted(three, (2, 7), 2) == 1


def test_a_deeper_tree_of_as_many_nodes_may_drop_a_shallow_node():
    """Where the property ends: the better nodes of a deeper level take the place of shallow ones when pruning."""
    shallow, deep = grown([FIRST], NAMES[:1], 3), grown([FIRST, SECOND], NAMES, 3)
    assert accepted(trees.prune(shallow, 3, 3), (2,), 1) == 1
    assert accepted(trees.prune(deep, 4, 3), (2,), 2) == 1
    assert accepted(trees.prune(shallow, 3, 3), (3,), 1) == 1
    assert accepted(trees.prune(deep, 3, 3), (3,), 2) == 0

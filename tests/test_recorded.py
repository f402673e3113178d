"""Acceptance on a recorded row against `acceptance.decide`, measured as a black box by forcing its draws."""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import nanospec_fn as ns
from nanospec_fn import acceptance, recorded, sampling, trace
from tests.rounds import random_tree

pytestmark = pytest.mark.usefixtures("one_thread")
DEPTH, WIDTH, VOCAB = 3, 3, 12
T1 = {"temperature": 1.0}
POWER = [ns.Sampling(**T1, rule="power", alpha=alpha, top_k=top_k) for alpha, top_k in ((0.3, 0), (1.0, 0), (0.6, 5))]
RELAXED = [ns.Sampling(**T1, rule="relaxed", tau=0.2), ns.Sampling(**T1, rule="relaxed", tau=1.0, accept_top_k=3)]
STEPS = 26  # of bisection, to the resolution of an fp32 draw


def some_round(seed: int, request: ns.Sampling) -> trace.Round:
    """A random tree with ties and absent nodes, a level's nodes in any order, on random rows, as a trace has it."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.cat([WIDTH * level + torch.randperm(WIDTH, generator=generator) for level in range(DEPTH)])
    tree = tree_map(lambda x: x[:, order], random_tree(seed, 1, WIDTH, DEPTH, VOCAB))
    place = torch.cat((order.argsort(), torch.tensor([-1])))  # by the parent's old one, -1 the root
    tree = dataclasses.replace(tree, parent=place[tree.parent.long()].to(torch.int32))
    logits = 2 * torch.randn(1, WIDTH * DEPTH + 1, VOCAB, generator=generator)
    evidence = acceptance.weigh(logits, tree, sampling.controls([request]), torch.tensor([5]), full=True)
    ((nodes, rows),) = trace.to_host(tree, evidence)
    return trace.Round(0, 0, False, seed, 5, nodes, rows, [], [], [], [], [], None, {}, 0, 0)


def accepted(record: trace.Round, request: ns.Sampling, accept: Tensor, target: Tensor) -> list[set[int]]:
    """The nodes that `decide` accepts, for draws accept [n, N] and target [n, R] in place of the recorded ones."""
    n = len(accept)
    evidence, tree = tree_map(lambda x: x.expand(n, -1), trace.to_evidence([record]))
    drawn = dataclasses.replace(evidence, accept=accept, target=target.to(torch.int32))
    return [
        set(path) - {-1}
        for path in acceptance.decide(drawn, tree, sampling.controls([request] * n), DEPTH).path.tolist()
    ]


def present(record: trace.Round) -> list[int]:
    return [i for i, d in enumerate(record.nodes.depth) if d > 0]


def above(record: trace.Round, node: int) -> list[int]:
    """A node's ancestors."""
    parent = record.nodes.parent[node]
    return [] if parent < 0 else [*above(record, parent), parent]


def chance_of(record: trace.Round, node: int, request: ns.Sampling) -> float:
    return recorded.chances(record, record.nodes.parent[node] + 1, request)[node]


@pytest.mark.parametrize("request_", POWER, ids=lambda r: f"{r.alpha:g}-{r.top_k}")
@pytest.mark.parametrize("seed", range(4))
def test_power_accepts_with_this_chance(seed, request_):
    """Bugs: earlier candidates forgotten, in the mass that they left or in their own chances; candidates in the order
    of the nodes; ties the other way around.

    The chance that a node is accepted once its row has got to it is the threshold of its draw, found by bisection;
    which of two siblings comes first is seen where the draws accept both.
    """
    record = some_round(seed, request_)
    token = torch.tensor(record.rows.token)
    nodes = present(record)

    def verdicts(forced: list[dict[int, float]]) -> list[set[int]]:
        accept = torch.ones(len(forced), WIDTH * DEPTH)  # a draw of 1 rejects
        for row, draws in enumerate(forced):
            for node, draw in draws.items():
                accept[row, node] = draw
        return accepted(record, request_, accept, token.expand(len(forced), -1))

    path = {i: dict.fromkeys(above(record, i), 0.0) for i in nodes}
    low, high = dict.fromkeys(nodes, 0.0), dict.fromkeys(nodes, 1.0)
    for _ in range(STEPS):
        middle = {i: (low[i] + high[i]) / 2 for i in nodes}
        for i, seen in zip(nodes, verdicts([path[i] | {i: middle[i]} for i in nodes]), strict=True):
            (low if i in seen else high)[i] = middle[i]
    reached = [i for i, seen in zip(nodes, verdicts([path[i] for i in nodes]), strict=True) if path[i].keys() <= seen]
    assert len(reached) > 3
    for i in reached:
        siblings = [j for j in nodes if j != i and record.nodes.parent[j] == record.nodes.parent[i]]
        both = verdicts([path[i] | {i: 0.0, j: 0.0} for j in siblings])
        chance = low[i]
        for j, seen in zip(siblings, both, strict=True):
            chance *= 1 - low[j] if j in seen else 1
        assert chance_of(record, i, request_) == pytest.approx(chance, abs=2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_exact_accepts_with_this_chance(seed):
    """Bug: a node that another draw than its own token accepts. Every draw of its row is tried, each of a candidate
    with that candidate's probability; any other token accepts none."""
    request = ns.Sampling(**T1)
    record = some_round(seed, request)
    for i in present(record):
        target = torch.full((VOCAB, WIDTH * DEPTH + 1), -9)
        for node in above(record, i):
            target[:, record.nodes.parent[node] + 1] = record.nodes.token[node]
        row = record.nodes.parent[i] + 1
        target[:, row] = torch.arange(VOCAB)
        seen = accepted(record, request, torch.rand(VOCAB, WIDTH * DEPTH), target)
        p = {
            record.nodes.token[j]: torch.tensor(record.nodes.target_logp[j]).exp()
            for j in recorded.candidates(record.nodes, row)
        }
        chance = sum(p[x] for x in range(VOCAB) if i in seen[x])
        assert chance_of(record, i, request) == pytest.approx(float(chance), rel=1e-6)


@pytest.mark.parametrize("request_", [*RELAXED, ns.Sampling()], ids=["tau", "top", "greedy"])
@pytest.mark.parametrize("seed", range(8))
def test_what_no_draw_changes_has_chance_one_or_none(seed, request_):
    """Bugs: `relaxed` accepts the most probable in place of the first; a draw at temperature 0."""
    record, generator = some_round(seed, request_), torch.Generator().manual_seed(seed)
    target = torch.randint(0, VOCAB, (20, WIDTH * DEPTH + 1), generator=generator)
    if request_.temperature == 0:  # its rows draw nothing
        target = torch.tensor(record.rows.token).expand(20, -1)
    first, *others = accepted(record, request_, torch.rand(20, WIDTH * DEPTH, generator=generator), target)
    assert all(seen == first for seen in others)
    for row in (0, *(node + 1 for node in first)):
        for node, chance in recorded.chances(record, row, request_).items():
            assert chance == float(node in first)

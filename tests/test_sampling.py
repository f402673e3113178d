"""sampling: hand-computed numbers, float64 and plain-Python oracles. The laws are in properties/test_acceptance.py."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from nanospec_fn import acceptance, filters, rng
from nanospec_fn.acceptance import Draws, Verdict
from nanospec_fn.filters import log_probs
from nanospec_fn.sampling import RULES, Sampling, controls
from nanospec_fn.struct import bytes_equal
from nanospec_fn.trees import Tree

INF = float("inf")


def accept(*args: Any) -> Verdict:
    """The verdict alone."""
    return acceptance.judge(*args)[1]


def tree_of(nodes):
    """nodes: (token, parent, logp), parents first; one slot, [1, N]."""
    depth, score = [], []
    for _, parent, logp in nodes:
        depth.append(1 if parent < 0 else depth[parent] + 1)
        score.append(logp if parent < 0 else score[parent] + logp)
    return Tree(
        token=torch.tensor([[n[0] for n in nodes]], dtype=torch.int32),
        parent=torch.tensor([[n[1] for n in nodes]], dtype=torch.int32),
        depth=torch.tensor([depth], dtype=torch.int32),
        logp=torch.tensor([[float(n[2]) for n in nodes]]),
        score=torch.tensor([[float(x) for x in score]]),
    )


def stack(*states):
    return tree_map(lambda *x: torch.cat(x), *states)


@pytest.mark.parametrize("rule", ["exact", "power", "relaxed"])
def test_c15_holds_for_accepted_corrected_and_bonus_tokens(rule):
    """Every token of a round reports the log-prob at its temperature, whichever way it came."""
    request = Sampling(temperature=0.5, rule=rule, **{"relaxed": {"tau": 0.1}}.get(rule, {}))
    rows = torch.tensor([[[2.0, 1.0, 0.0]] * 2])
    for token, noise, expected in ((0, [0.0, 0, 9], [0, 2]), (1, [9.0, 0, 0], None)):
        draws = Draws(torch.full((1, 1), 0.5), torch.tensor([[[9.0 if v == token else 0 for v in range(3)], noise]]))
        verdict = accept(rows, tree_of([(token, -1, 0.0)]), controls([request]), torch.tensor([4]), 1, draws)
        logp = torch.log_softmax(torch.tensor([4.0, 2.0, 0.0]), -1)
        emitted = verdict.tokens[0, : verdict.count[0]].tolist()
        assert expected is None or emitted == expected
        assert verdict.target_logp[0, : len(emitted)].tolist() == pytest.approx(logp[emitted].tolist(), abs=1e-6)


# The exact rule


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("right", [0, 1, 2, 3])
def test_an_exact_round_emits_what_plain_decoding_does(temperature, right):
    """The tokens and the bits of plain decoding, for a chain that is right for exactly `right` tokens."""
    size, depth = 40, 3
    table = torch.randn(size, size, generator=torch.Generator().manual_seed(4)) * 2
    request = controls([Sampling(temperature=temperature, seed=5, top_p=0.9)])
    tokens, logps, last = [], [], 0
    for step in range(depth + 1):
        row = table[last][None]
        logp = log_probs(row, request.temperature, request.top_k, request.top_p)
        token = filters.target_tokens(row, logp, request.key, request.temperature, torch.tensor([9 + step]))
        last = int(token)
        tokens.append(last)
        logps.append(logp[0, last])
    drafted = [t if i < right else (t + 1) % size for i, t in enumerate(tokens[:depth])]
    tree = tree_of([(t, i - 1, -1.0) for i, t in enumerate(drafted)])
    rows = table[torch.tensor([0, *drafted])][None]
    verdict = accept(rows, tree, request, torch.tensor([9]), depth)
    assert verdict.accepted.tolist() == [right]
    assert verdict.tokens[0].tolist() == tokens[: right + 1] + [-1] * (depth - right)
    assert torch.equal(verdict.target_logp[0, : right + 1], torch.stack(logps[: right + 1]))
    assert torch.equal(verdict.behaviour_logp, verdict.target_logp)
    assert verdict.path[0].tolist() == list(range(right)) + [-1] * (depth - right)


# Lossy rules, by hand

P = [0.5, 0.3, 0.2]
ROOT = torch.tensor(P, dtype=torch.float64).log()
TWO = [(1, -1, -0.5), (2, -1, -1.0)]  # candidates 1, then 2, at the root


def judge(request, uniforms, noise, nodes=TWO):
    rows = ROOT.expand(1, len(nodes) + 1, 3)
    draws = Draws(
        torch.tensor([uniforms[: len(nodes)]], dtype=torch.float64),
        torch.tensor(noise, dtype=torch.float64).expand(1, len(nodes) + 1, 3),
    )
    v = accept(rows, tree_of(nodes), controls([request]), torch.tensor([0]), 1, draws)
    return v.tokens[0].tolist(), v.behaviour_logp[0].exp().tolist(), v.target_logp[0].exp().tolist()


def power(alpha):
    return Sampling(temperature=1.0, rule="power", alpha=alpha)


def test_power_by_hand():
    """alpha 0.5: a_1 = sqrt(0.3), a_2 = sqrt(0.2 / 0.7); after both only token 0 is left."""
    a1, a2 = math.sqrt(0.3), math.sqrt(2 / 7)
    tokens, mu, pi = judge(power(0.5), [a1 - 1e-6, 0.0], [0, 9, 0])
    assert tokens == [1, 1]
    assert mu == pytest.approx([a1, 0.3])
    assert pi == pytest.approx([0.3, 0.3])
    tokens, mu, pi = judge(power(0.5), [a1 + 1e-6, a2 - 1e-6], [9, 0, 0])
    assert tokens == [2, 0]
    assert mu == pytest.approx([(1 - a1) * a2, 0.5])
    tokens, mu, pi = judge(power(0.5), [a1 + 1e-6, a2 + 1e-6], [0, 99, 99])
    assert tokens == [0, -1]
    assert mu[0] == pytest.approx((1 - a1) * (1 - a2))
    assert pi[0] == pytest.approx(0.5)


def test_candidates_go_by_draft_log_prob_then_id_whatever_their_place():
    """Catches the order of nodes: the same candidates, stored the other way round and with equal log-probs."""
    for nodes, first in (
        ([(2, -1, -1.0), (1, -1, -0.5)], 1),
        ([(2, -1, -0.5), (1, -1, -1.0)], 2),
        ([(2, -1, -0.5), (1, -1, -0.5)], 1),
    ):
        tokens, mu, _ = judge(power(0.5), [0.01, 0.01], [9, 0, 0], nodes)
        assert tokens[0] == first
        assert mu[0] == pytest.approx(math.sqrt(P[first]))


def test_one_candidate_power_closed_form():
    """mu(d) = p^alpha, the others kappa * p."""
    for alpha in (0.9, 0.3, 1e-3):
        kappa = (1 - 0.3**alpha) / 0.7
        assert judge(power(alpha), [0.0], [0, 0, 0], TWO[:1])[1][0] == pytest.approx(0.3**alpha, rel=1e-6)
        assert judge(power(alpha), [1.0], [0, 0, 9], TWO[:1])[1][0] == pytest.approx(kappa * 0.2, rel=1e-5)


def test_candidates_that_cover_everything():
    """The last one has a = 1, exactly: no draw reaches an empty rest."""
    nodes = [(1, -1, -0.1), (0, -1, -0.2), (2, -1, -0.3)]
    largest = 1 - 2.0**-53
    tokens, mu, _ = judge(power(0.7), [largest] * 3, [0, 0, 0], nodes)
    a1, a2 = 0.3**0.7, (0.5 / 0.7) ** 0.7
    assert tokens[0] == 2
    assert mu[0] == pytest.approx((1 - a1) * (1 - a2), rel=1e-6)


def test_relaxed_by_hand():
    """Deterministic: probability 0 has no support, 1 is reported; none accepted: the whole p, candidates included."""
    relaxed = Sampling(temperature=1.0, rule="relaxed", tau=0.25)
    assert judge(relaxed, [1.0, 1.0], [9, 0, 0])[:2] == ([1, 0], [1.0, pytest.approx(0.5)])
    strict = dataclasses.replace(relaxed, tau=0.6)
    assert judge(strict, [0.0, 0.0], [0, 9, 0])[:2] == ([1, -1], [pytest.approx(0.3), 1.0])
    ranked = Sampling(temperature=1.0, rule="relaxed", accept_top_k=2)
    assert judge(ranked, [1.0, 1.0], [9, 0, 0])[0][0] == 1
    assert judge(ranked, [1.0, 1.0], [9, 0, 0], [(2, -1, 0.0)])[0][0] == 0
    assert judge(dataclasses.replace(ranked, accept_top_k=3), [1.0, 1.0], [9, 0, 0], [(2, -1, 0.0)])[0][0] == 2


def test_rank_breaks_ties_by_id():
    rows = torch.zeros(1, 4, 4)
    tree = tree_of([(0, -1, -0.1), (2, -1, -0.2), (3, -1, -0.3)])
    evidence = acceptance.weigh(rows, tree, controls([Sampling(temperature=1.0)]), torch.tensor([0]), full=True)
    assert evidence.node_rank.tolist() == [[0, 2, 3]]


def test_a_candidate_outside_the_filters_is_never_accepted():
    """p = 0 after top-k: not by tau = 0, not by alpha near 0, not by rank."""
    for rule in (power(1e-6), Sampling(temperature=1.0, rule="relaxed", tau=0.0, accept_top_k=3)):
        tokens, _, pi = judge(dataclasses.replace(rule, top_k=2), [0.0], [9, 0, 0], [(2, -1, 0.0)])
        assert tokens == [0, -1]
        assert pi[0] == pytest.approx(0.5 / 0.8)


def test_an_absent_node_is_never_accepted():
    for rule in (power(1e-6), Sampling(temperature=1.0, rule="relaxed", tau=0.0), Sampling(temperature=1.0)):
        tree = tree_of([(1, -1, -0.5), (0, -1, -1.0)])
        absent = dataclasses.replace(
            tree,
            token=torch.full_like(tree.token, Tree.NONE),
            depth=torch.zeros_like(tree.depth),
            logp=torch.full_like(tree.logp, -INF),
        )
        draws = Draws(torch.zeros(1, 2), torch.zeros(1, 3, 3))
        verdict = accept(ROOT.expand(1, 3, 3), absent, controls([rule]), torch.tensor([0]), 2, draws)
        assert verdict.tokens.tolist() == [[0, -1, -1]]
        assert verdict.behaviour_logp[0, 0].item() == pytest.approx(math.log(0.5))
        assert (verdict.path == -1).all()


@pytest.mark.parametrize("peak", [0.0, 5.0, 10.0, 16.0, 40.0, 90.0])
@pytest.mark.parametrize("alpha", [1.0, 0.3, 1e-4])
def test_fp32_numbers_against_float64(peak, alpha):
    """Catches 1 - p in fp32, which is off by 0.13 nats at a residual of 4.5e-5, and log(1 - a) for a near 1."""
    x = torch.randn(1, 3, 128256, generator=torch.Generator().manual_seed(6))
    x[..., 17] += peak
    x[..., 99] += peak / 2
    tree = tree_of([(99, -1, -0.5), (17, -1, -1.0)])
    request = controls([power(alpha)])
    for uniforms in ([0.0, 0.0], [1.0, 0.0], [1.0, 1.0]):
        draws = Draws(torch.tensor([uniforms]), torch.zeros(1, 3, 128256))
        found, exact = (accept(logits, tree, request, torch.tensor([3]), 1, draws) for logits in (x, x.double()))
        assert found.tokens.tolist() == exact.tokens.tolist()
        n = int(exact.count)
        assert torch.isfinite(exact.behaviour_logp).all()
        assert found.behaviour_logp[0, :n].tolist() == pytest.approx(
            exact.behaviour_logp[0, :n].tolist(), rel=5e-6, abs=5e-6
        )


# Batches


def mixed(size=64, seed=7):
    """Five slots with all rules, and their trees, rows and positions."""
    generator = torch.Generator().manual_seed(seed)
    requests = [
        Sampling(temperature=0.9, seed=1),
        Sampling(temperature=1.0, seed=2, rule="power", alpha=0.4, top_p=0.9),
        Sampling(temperature=1.0, seed=3, rule="relaxed", tau=0.05),
        Sampling(temperature=0.0, seed=4),
        Sampling(temperature=0.7, seed=5, rule="power", alpha=0.2, top_k=20),
    ]
    trees = []
    for _ in requests:
        t = torch.randperm(size, generator=generator)[:5].tolist()
        trees.append(tree_of([(t[0], -1, -0.5), (t[1], -1, -1.0), (t[2], 0, -0.3), (t[3], 0, -2.0), (t[4], 2, -0.1)]))
    return torch.randn(5, 6, size, generator=generator), stack(*trees), controls(requests), torch.arange(5) * 3 + 2


def pick(x, rows):
    return tree_map(lambda t: t[rows], x)


def test_a_slot_follows_its_own_rule_in_any_batch():
    """Catches a rule, draw or bit that depends on the batch: alone, in pairs, and in another order."""
    logits, tree, request, position = mixed()
    whole = accept(logits, tree, request, position, 3)
    for rows in ([0], [1], [2], [3], [4], [1, 2], [4, 0], [3, 2, 1], [4, 3, 2, 1, 0]):
        index = torch.tensor(rows)
        part = accept(logits[index], pick(tree, index), pick(request, index), position[index], 3)
        assert bytes_equal(part, pick(whole, index))


def test_skipping_what_no_rule_asks_for_changes_no_bit():
    logits, tree, request, position = mixed()
    exact = dataclasses.replace(request, rule=torch.zeros_like(request.rule))
    for c in (request, exact):
        lazy, full = (acceptance.weigh(logits, tree, c, position, full=f) for f in (False, True))
        assert bytes_equal(acceptance.decide(lazy, tree, c, 3), acceptance.decide(full, tree, c, 3))


@pytest.mark.parametrize("seed", range(6))
def test_draws_do_not_depend_on_the_layout_of_the_tree(seed):
    """Catches draws keyed by node index: siblings swapped and an absent node put in front give the same tokens."""
    logits, tree, request, position = mixed(size=12, seed=seed)
    order = torch.tensor([1, 0, 3, 2, 4])  # nodes 0/1 and 2/3 swapped
    renumber = torch.tensor([1, 0, 3, 2, 4, -1])
    swapped = tree_map(lambda x: x[:, order], tree)
    swapped = dataclasses.replace(swapped, parent=renumber[swapped.parent.long()].to(torch.int32))
    rows = torch.cat((torch.zeros(1, dtype=torch.long), order + 1))
    a = accept(logits, tree, request, position, 3)
    b = accept(logits[:, rows], swapped, request, position, 3)
    assert torch.equal(a.tokens, b.tokens)
    assert torch.equal(a.target_logp, b.target_logp)
    assert torch.allclose(a.behaviour_logp, b.behaviour_logp, atol=1e-6)
    front = tree_map(lambda x: torch.nn.functional.pad(x, (1, 0)), tree)
    front = dataclasses.replace(
        front,
        token=torch.nn.functional.pad(tree.token, (1, 0), value=Tree.NONE),
        parent=torch.nn.functional.pad(torch.where(tree.parent < 0, -1, tree.parent + 1), (1, 0), value=Tree.ROOT),
        logp=torch.nn.functional.pad(tree.logp, (1, 0), value=-INF),
    )
    padded = torch.cat((logits[:, :1], torch.randn_like(logits[:, :1]), logits[:, 1:]), dim=1)
    assert torch.equal(accept(padded, front, request, position, 3).tokens, a.tokens)


def test_draws_are_named_by_position_purpose_and_token():
    """Catches a position by row in place of depth, one off, or a purpose used twice."""
    logits, tree, request, position = mixed()
    evidence = acceptance.weigh(logits, tree, request, position, full=True)
    logp = log_probs(logits[1], *(x[1].expand(6) for x in (request.temperature, request.top_k, request.top_p)))
    for node in range(5):
        at = position[1] + tree.depth[1, node] - 1
        token = tree.token[1, node]
        named = rng.uniform(rng.fold_in(rng.draw_key(request.key[1], at, rng.ACCEPT), token))
        assert evidence.accept[1, node] == named
    for row in range(6):
        at = position[1] + (tree.depth[1, row - 1] if row else 0)
        target, rest = (rng.gumbel(rng.draw_key(request.key[1], at, p), 64) for p in (rng.TARGET, rng.RESIDUAL))
        assert evidence.target[1, row] == (logp[row] + target).argmax()
        children = tree.token[1][tree.parent[1] == row - 1].long()
        assert evidence.rest[1, row] == (logp[row] + rest).index_fill(0, children, -INF).argmax()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_without_nodes_is_a_plain_step(temperature):
    logits, tree, _, position = mixed()
    request = controls([Sampling(temperature=temperature, seed=s) for s in range(5)])
    plain = accept(logits[:, :1], tree_map(lambda x: x[:, :0], tree), request, position, 0)
    assert plain.count.tolist() == [1] * 5
    assert plain.path.shape == (5, 0)
    verified = accept(logits, tree, request, position, 3)
    assert torch.equal(plain.tokens[:, 0], verified.tokens[:, 0])
    assert torch.equal(plain.target_logp[:, 0], verified.target_logp[:, 0])


# Bad input (C20)

BAD = [
    *(("max_tokens", x) for x in (-1, 0, 1.5, math.nan, math.inf, "abc", 2**70, True, None)),
    *(("temperature", x) for x in (-1, 1e-9, math.nan, math.inf, "abc", 10**30, True, None)),
    *(("top_k", x) for x in (-1, 1.5, math.nan, math.inf, "abc", 2**70, True, None)),
    *(("top_p", x) for x in (-1, 0, 1.5, math.nan, math.inf, "abc", 10**30, True, None)),
    *(("seed", x) for x in (-1, 1.5, math.nan, math.inf, "abc", 2**63, True, None)),
    *(("rule", x) for x in ("greedy", "", 0, None, ["exact"])),
    *(("tau", x) for x in (-0.1, 1.5, math.nan, math.inf, "abc", True, None)),
    *(("accept_top_k", x) for x in (-1, 1.5, math.nan, "abc", 2**70, True, None)),
    *(("alpha", x) for x in (-0.1, 0, 1.5, math.nan, math.inf, "abc", True, None)),
    *(("stop_ids", x) for x in (5, "5", (-1,), (1.5,), (True,), (2**70,), None)),
    *(("ignore_eos", x) for x in (1, 0, "yes", None)),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_c20_a_bad_value_is_named(name, value):
    with pytest.raises(ValueError, match=rf"^{name}\b") as error:
        Sampling(**{name: value}).validate()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rule": "power", "alpha": 0.5}, "temperature"),
        ({"rule": "relaxed", "tau": 0.5}, "temperature"),
        ({"alpha": 0.5, "temperature": 1.0}, "alpha"),
        ({"rule": "relaxed", "tau": 0.5, "alpha": 0.5, "temperature": 1.0}, "alpha"),
        ({"tau": 0.5, "temperature": 1.0}, "tau"),
        ({"rule": "power", "tau": 0.5, "temperature": 1.0}, "tau"),
        ({"accept_top_k": 2, "temperature": 1.0}, "accept_top_k"),
        ({"rule": "relaxed", "temperature": 1.0}, "accepts nothing"),
    ],
)
def test_c20_clashes_are_named(fields, named):
    with pytest.raises(ValueError, match=named):
        Sampling(**fields).validate()


def test_good_values_pass():
    for fields in (
        {},
        {"temperature": 1, "top_k": 5, "top_p": 0.5, "seed": 2**63 - 1, "stop_ids": (0, 7), "ignore_eos": True},
        {"temperature": 1.0, "rule": "power", "alpha": 1e-6},
        {"temperature": 1.0, "rule": "power"},
        {"temperature": 1.0, "rule": "relaxed", "tau": 0.0},
        {"temperature": 1.0, "rule": "relaxed", "accept_top_k": 1},
    ):
        asked = Sampling(**fields)
        asked.validate()
        row = controls([asked])
        assert (row.rule.item(), row.top_k.item()) == (RULES.index(asked.rule), asked.top_k)

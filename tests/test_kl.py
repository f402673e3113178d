"""KL(pi || mu): docs/promises.md's figures, the closed form against the engine's accept, and measurement."""

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nanospec_fn as ns
from nanospec_fn import __main__, kl, recorded, trace
from nanospec_fn.sampling import Sampling
from properties.enumerate import World, draft_trees, round_law
from tests.scripted import prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [prompt(n, seed=n) for n in (5, 3)]
T1 = {"max_tokens": 12, "temperature": 1.0}


def test_the_figures_of_the_docs():
    """Bug: 1 - p^alpha by subtraction, or a maximum found at the edge of a coarse grid."""
    for alpha, value in ((0.9, 0.0035), (0.7, 0.038), (0.5, 0.136), (0.3, 0.373)):
        assert kl.worst_case(alpha, 1) == pytest.approx(value, abs=0.5 * 10 ** -(4 if alpha == 0.9 else 3))
    found = [kl.worst_case(0.3, k) for k in (1, 2, 3, 4)]
    assert found == pytest.approx([0.373, 0.707, 1.02, 1.31], abs=0.005)
    assert kl.worst_case(1.0, 3) == pytest.approx(0, abs=1e-12)
    assert kl.worst_case(0.5, 0) == 0


def by_process(p: torch.Tensor, k: int, alpha: float) -> torch.Tensor:
    """KL(pi || mu) of p [V] with candidates 0..k-1: mu by walking the rule, the sum over the vocabulary."""
    mu, left, alive = [], torch.ones((), dtype=torch.float64), torch.ones((), dtype=torch.float64)
    for j in range(k):
        a = (p[j] / left) ** alpha
        mu.append(alive * a)
        alive, left = alive * (1 - a), left - p[j]
    mu += [alive * p[x] / p[k:].sum() for x in range(k, len(p))]
    return sum(p[x] * (p[x] / mu[x]).log() for x in range(len(p)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-6, 6), min_size=5, max_size=7), st.integers(0, 4), st.floats(0.05, 1.0))
def test_the_closed_form_is_the_sum_over_the_vocabulary(logits, k, alpha):
    """Bug: the mass that earlier candidates left is forgotten in the recursion."""
    logp = torch.log_softmax(torch.tensor(logits, dtype=torch.float64), -1)
    row = recorded.Row(tuple(logp[:k].tolist()), float(torch.logsumexp(logp[k:], -1)))
    assert kl.divergence(row, alpha) == pytest.approx(float(by_process(logp.exp(), k, alpha)), abs=1e-9)


@pytest.mark.parametrize("alpha", [0.875, 0.25])  # the engine's is fp32
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_closed_form_is_what_accept_does(alpha, k):
    """Bug: a formula that is right for another rule than the engine's. mu is measured on `sampling.accept` by bisection
    of its draws (properties/enumerate.py)."""
    generator = torch.Generator().manual_seed(k)
    logits = 2 * torch.randn(5, 5, dtype=torch.float64, generator=generator)
    draft = torch.log_softmax(torch.randn(5, 5, dtype=torch.float64, generator=generator), -1)
    tree = draft_trees(draft, k, 1, k)
    world = World(logits, tree, 1, Sampling(temperature=1.0, rule="power", alpha=alpha))
    for root, outcomes in enumerate(round_law(world)):
        mu = torch.zeros(5, dtype=torch.float64)
        for outcome in outcomes:
            mu[outcome.tokens[0]] += outcome.probability
        logp = torch.log_softmax(logits[root], -1)
        order = sorted(range(k), key=lambda i: (-float(tree.logp[root, i]), int(tree.token[root, i])))
        tokens = [int(tree.token[root, i]) for i in order]
        others = [x for x in range(5) if x not in tokens]
        row = recorded.Row(tuple(logp[tokens].tolist()), float(torch.logsumexp(logp[others], -1)))
        assert kl.divergence(row, alpha) == pytest.approx(float((logp.exp() * (logp - mu.log())).sum()), abs=1e-8)


def test_corners():
    """Bugs: 0 * log 0 is not a number; a candidate without probability counts."""
    zero = -math.inf
    assert kl.divergence(recorded.Row((), 0.0), 0.3) == 0
    assert kl.divergence(recorded.Row((zero,), 0.0), 0.3) == 0
    assert kl.divergence(recorded.Row((0.0,), zero), 0.3) == 0
    half = math.log(0.5)
    one = kl.divergence(recorded.Row((half,), half), 0.3)
    assert kl.divergence(recorded.Row((zero, half, zero), half), 0.3) == one
    # The second of two that cover all is always accepted, as the first's only alternative.
    assert kl.divergence(recorded.Row((half, half), zero), 0.3) == pytest.approx(one)
    for p in (1e-12, 1e-300, 1 - 1e-12):
        found = kl.divergence(recorded.Row((math.log(p),), math.log1p(-p)), 1e-6)
        assert 0 <= found < math.inf


@pytest.mark.parametrize(("alpha", "k"), [(0.3, 1), (0.3, 2), (0.3, 3), (0.7, 2)])
def test_no_row_is_worse_than_the_worst_case(alpha, k):
    """Bug: the recursion's maximum is not the rows' maximum. Gradient ascent over whole rows, on the sum by walking."""
    generator = torch.Generator().manual_seed(0)
    best = 0.0
    for _ in range(3):
        logits = torch.randn(k + 1, dtype=torch.float64, generator=generator)
        with torch.enable_grad():
            logits.requires_grad_()
            optimizer = torch.optim.Adam([logits], lr=0.1)
            for _ in range(200):
                optimizer.zero_grad()
                value = by_process(torch.softmax(logits, -1), k, alpha)
                (-value).backward()
                optimizer.step()
        best = max(best, float(value))
    worst = kl.worst_case(alpha, k)
    assert best <= worst + 1e-9
    assert best == pytest.approx(worst, abs=1e-4)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kl")
    rules = {
        "exact": Sampling(**T1),
        "power": Sampling(**T1, rule="power", alpha=0.3),
        "relaxed": Sampling(**T1, rule="relaxed", tau=0.05),
        "greedy": Sampling(max_tokens=4),
    }
    with torch.no_grad():
        draft, spec = ns.load_draft("frozen", target()), ns.Speculation(top_k=2, depth=2)
        for name, asked in rules.items():
            ns.generate(target(), PROMPTS, asked, draft=draft, speculation=spec, trace=folder / name)
        coupled = dataclasses.replace(spec, coupled=True)
        ns.generate(target(), PROMPTS, rules["exact"], draft=draft, speculation=coupled, trace=folder / "coupled")
    return folder


@pytest.mark.parametrize("name", ["exact", "power"])
def test_measured_is_the_sum_over_the_models_rows(name, files):
    """Bug: rows that emitted nothing are counted, or a row's candidates are another row's. The oracle runs the model
    on each prefix and sums over its 128 tokens."""
    found = trace.read(files / name)
    costs = {}
    known = [list(p) for p in PROMPTS]
    for r in found.rounds:
        rows = [0, *(node + 1 for node in r.path)]
        for row, token in zip(rows, r.tokens, strict=False):
            tokens = torch.tensor([known[r.request]])
            p = torch.softmax(ns.forward(target().params, target().cfg, tokens)[0, -1].double(), -1)
            mine = [i for i in range(len(r.nodes.token)) if r.nodes.parent[i] == row - 1]
            mine.sort(key=lambda i: -r.nodes.draft_logp[i])
            first = [r.nodes.token[i] for i in mine]
            order = [*first, *(x for x in range(128) if x not in first)]
            costs.setdefault(len(mine), []).append(float(by_process(p[order], len(mine), 0.3)))
            known[r.request].append(token)
    for m in kl.measure(found, None if name == "power" else 0.3):
        assert m.rows == len(costs[m.candidates])
        assert m.mean == pytest.approx(sum(costs[m.candidates]) / m.rows, abs=1e-5)
        assert m.largest == pytest.approx(max(costs[m.candidates]), abs=1e-5)
        assert m.largest <= kl.worst_case(0.3, m.candidates) + 1e-6
        assert m.missing_mass == 0
    assert set(costs) >= {0, 2}
    assert sum(m.rows for m in kl.measure(found)) == 24


def test_own_rules(files):
    """Bugs: exact has a cost; relaxed has a finite one where it accepts."""
    assert {m.mean for m in kl.measure(trace.read(files / "exact"))} == {0.0}
    assert {m.mean for m in kl.measure(trace.read(files / "greedy"))} == {0.0}
    found = trace.read(files / "relaxed")
    accepting, missing, rows = 0, 0.0, 0
    for r in found.rounds:
        # What `relaxed` accepted is all that the row could emit.
        for node in r.path:
            accepting += 1
            missing += 1 - math.exp(r.nodes.target_logp[node])
        rows += len(r.tokens)
    assert accepting > 3
    measured = kl.measure(found)
    assert sum(m.accepting for m in measured) == accepting
    assert sum(m.missing_mass * m.rows for m in measured) == pytest.approx(missing, abs=1e-9)
    assert [m.mean for m in measured if m.accepting] == [None] * sum(m.accepting > 0 for m in measured)


def test_a_row_that_could_emit_nothing_else_accepts_too(tmp_path):
    """Bug: `accepting` counts infinite costs, which a candidate of probability 1 does not have."""
    asked = Sampling(**T1, rule="relaxed", tau=0.5, top_k=1)
    draft, spec = ns.load_draft("frozen", target()), ns.Speculation(depth=2)
    ns.generate(target(), PROMPTS, asked, draft=draft, speculation=spec, trace=tmp_path / "t")
    found = trace.read(tmp_path / "t")
    measured = kl.measure(found)
    assert sum(m.accepting for m in measured) == sum(len(r.path) for r in found.rounds) > 3
    assert {m.mean for m in measured} == {0.0}


def run(capsys, *argv):
    try:
        code = __main__.main(["kl", *argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(files, capsys):
    """Bugs: a table without its figures; JSON that is not strict."""
    code, out, _ = run(capsys)
    assert code == 0
    for figure in ("0.0035", "0.0384", "0.1360", "0.3730", "0.7070", "1.0167", "1.3089"):
        assert figure in out
    code, out, _ = run(capsys, "--alpha", "0.3", "--json")
    assert code == 0
    assert json.loads(out)["worst_case"]["0.3"][0] == pytest.approx(0.373, abs=5e-4)
    code, out, _ = run(capsys, "--alpha", "0.3", str(files / "exact"))
    assert (code, "power(0.3)" in out) == (0, True)
    code, out, _ = run(capsys, str(files / "relaxed"))
    assert (code, "infinite" in out) == (0, True)
    code, out, _ = run(capsys, str(files / "relaxed"), "--json")

    def refuse(constant):
        raise AssertionError(constant)

    assert {row["mean"] for row in json.loads(out, parse_constant=refuse)["rows"]} >= {None}


@pytest.mark.parametrize("value", ["-1", "0", "1.5", "nan", "inf", "abc", str(10**30)])
def test_a_bad_alpha_is_refused_before_the_file_is_read(value, capsys):
    """Bug (C20)."""
    code, out, err = run(capsys, "--alpha", value, "absent")
    assert (code, out) == (2, "")
    assert "argument --alpha" in err
    assert len(err.splitlines()) == 1


def test_what_a_trace_cannot_answer_is_refused(files, capsys):
    """Bug: a lossy rule's cost for rows where it has no behaviour log-prob."""
    for name, message in (("greedy", "temperature 0"), ("coupled", "coupled"), ("absent", "absent")):
        code, out, err = run(capsys, "--alpha", "0.3", str(files / name))
        assert (code, out) == (2, "")
        assert message in err
        assert len(err.splitlines()) == 1

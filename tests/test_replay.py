"""Replays: the record re-derived, and counterfactuals against the engine itself, run at every recorded prefix."""

import dataclasses
import json

import pytest
import torch
from torch.utils._pytree import tree_map

import nanospec_fn as ns
from nanospec_fn import __main__, acceptance, counterfactual, narrow, sampling, trace
from nanospec_fn.counterfactual import Change
from tests.scripted import as_tree, prompt, scripted, target

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [prompt(n, seed=n) for n in (5, 3, 17)]
WIDE = ns.Speculation(top_k=3, depth=3)
PRUNED = ns.Speculation(top_k=3, depth=3, num_nodes=5)
T1 = {"max_tokens": 16, "temperature": 1.0}
RULES = {
    "exact": ns.Sampling(**T1, seed=1),
    "power": ns.Sampling(**T1, seed=2, rule="power", alpha=0.3),
    "relaxed": ns.Sampling(**T1, seed=3, rule="relaxed", tau=0.1, accept_top_k=1),
}
MIXED = tuple(RULES.values())
HUGE = str(10**30)


def record(path, spec=WIDE, asked=MIXED, draft="frozen", prompts=PROMPTS):
    ns.generate(target(), prompts, list(asked), draft=ns.load_draft(draft, target()), speculation=spec, trace=path)
    return trace.read(path)


@pytest.fixture(scope="module", params=["frozen", "ngram"])
def found(request, tmp_path_factory):
    with torch.no_grad():
        # ngram finds matches in prompts that repeat themselves.
        prompts = PROMPTS if request.param == "frozen" else [p[:3] * 4 + p[:2] for p in PROMPTS]
        path = tmp_path_factory.mktemp("replay") / "t.jsonl"
        return prompts, request.param, path, record(path, draft=request.param, prompts=prompts)


def placed(tokens, depths):
    """A tree's tokens with their depths."""
    return {(t, d) for t, d in zip(tokens, depths, strict=True) if d}


def run(capsys, *argv):
    try:
        code = __main__.main([*argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def rerun(prompts, found, record, asked, draft, spec):
    """The engine's own round at a recorded prefix under other parameters: tree [1, N], info."""
    model, method = target(), ns.load_draft(draft, target())
    before = [t for r in found.rounds if r.request == record.request and r.position < record.position for t in r.tokens]
    config = ns.EngineConfig(max_slots=1, num_pages=8)
    program = ns.build(model, method, config, spec)
    params = ns.Params(target=model.params, draft=method.params)
    tokens = [*prompts[record.request], *before]
    state = program.insert(program.init(), 0, tokens, asked, emitted=len(before))
    state, _ = program.prefill(params, state)
    _, info = program.speculate(params, state)
    return info


def test_the_record_is_rederived_as_bits(found, capsys):
    """Bug: a verdict that depends on something the record does not hold."""
    _, _, path, whole = found
    assert len(whole.rounds) > 12
    assert counterfactual.verify(whole) == ([], 0.0)
    code, out, _ = run(capsys, "replay", str(path))
    assert code == 0
    assert "decisions equal, both log-probs equal bit for bit" in out
    code, out, _ = run(capsys, "replay", str(path), "--json")
    assert code == 0
    assert json.loads(out)["equal"] is True


def test_a_verdict_does_not_depend_on_how_many_are_judged_together():
    """Bug: torch.logaddexp's vector form on a CPU is an ulp off its scalar one in 2% of cases, so that behaviour_logp
    depends on the batch (G1b), and a replay on how many rounds are judged at once."""
    b, vocab = 512, 16
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(b, 4, vocab, generator=generator)
    tree = as_tree([[(1, -1, 1, -0.5), (2, -1, 1, -1.0), (3, 0, 2, -0.5)]] * b)
    many = sampling.controls([ns.Sampling(temperature=1.0, rule="power", alpha=0.3, seed=s) for s in range(b)])
    evidence = acceptance.weigh(logits, tree, many, torch.zeros(b, dtype=torch.int32))
    together = acceptance.decide(evidence, tree, many, 2).behaviour_logp
    alone = []
    for i in range(b):
        one = tree_map(lambda x: x[i : i + 1].clone(), (evidence, tree, many))  # noqa: B023
        alone.append(acceptance.decide(*one, 2).behaviour_logp[0])
    assert torch.equal(torch.stack(alone), together)


CHANGES = {
    "token": lambda r: dataclasses.replace(r, tokens=[r.tokens[0] ^ 1, *r.tokens[1:]]),
    "ulp": lambda r: dataclasses.replace(r, behaviour_logp=[r.behaviour_logp[0] - 2**-22, *r.behaviour_logp[1:]]),
    "target": lambda r: dataclasses.replace(r, target_logp=[r.target_logp[0] - 1e-3, *r.target_logp[1:]]),
    "position": lambda r: dataclasses.replace(r, position=r.position + 1),
    "finish": lambda r: dataclasses.replace(r, finish_reason="stop"),
    "origin": lambda r: dataclasses.replace(r, origin=[9, *r.origin[1:]]),
    "accept": lambda r: dataclasses.replace(
        r, nodes=dataclasses.replace(r.nodes, accept=[u / 2 for u in r.nodes.accept])
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_record_that_contradicts_itself_is_found(name, found, capsys, tmp_path):
    """Bug: a replay that compares a value with itself."""
    whole = found[3]
    place = next(i for i, r in enumerate(whole.rounds) if any(r.nodes.depth))
    rounds = [*whole.rounds]
    rounds[place] = CHANGES[name](rounds[place])
    wrong, _ = counterfactual.verify(dataclasses.replace(whole, rounds=rounds))
    assert wrong
    assert all(line.startswith(f"line {place + 2}: ") for line in wrong[:1])
    file = trace.File(tmp_path / "t")
    trace.create(file, whole.header)
    with trace.Writer(file) as writer:
        for r in rounds:
            writer.write(r)
    code, out, _ = run(capsys, "replay", str(tmp_path / "t"))
    assert code == 1
    assert f"line {place + 2}" in out
    assert "DIFFERENT" in out


def test_a_trace_without_rounds_is_no_answer(found, capsys, tmp_path):
    """Bug: nothing was judged, and it is said to be equal."""
    *_, whole = found
    trace.create(trace.File(tmp_path / "t"), whole.header)
    for change in ((), ("--alpha", "0.5")):
        code, out, err = run(capsys, "replay", str(tmp_path / "t"), *change)
        assert (code, out) == (2, "")
        assert "has no rounds to judge" in err


def test_a_trace_of_prompts_alone_answers_no_question(found, capsys, tmp_path):
    """Bug: a rule is judged on no round, and every figure is null."""
    *_, whole = found
    trace.create(trace.File(tmp_path / "t"), whole.header)
    with trace.Writer(trace.File(tmp_path / "t")) as writer:
        for r in whole.rounds:
            if r.prefill:
                writer.write(r)
    assert run(capsys, "replay", str(tmp_path / "t"))[0] == 0
    code, out, err = run(capsys, "replay", str(tmp_path / "t"), "--alpha", "0.5")
    assert (code, out) == (2, "")
    assert "has no drafted rounds to judge" in err


def test_a_forged_draw_with_all_that_follows_from_it_is_found(found):
    """Bug: a draw is trusted, so that a decision can be forged with its log-probs, and later rounds dropped."""
    whole = found[3]
    asked = [r.sampling for r in whole.header.requests]
    for i, r in enumerate(whole.rounds):
        if r.request == 1 and any(r.nodes.depth):
            for u in (1e-6, 0.999999):
                nodes = dataclasses.replace(r.nodes, accept=[u] * len(r.nodes.accept))
                forged = dataclasses.replace(r, nodes=nodes)
                (block,) = counterfactual.judge(whole, [forged], [asked[1]])
                origin = [nodes.depth[n] for n in block.path] + [0] * (len(block.tokens) - len(block.path))
                parts = {f: getattr(block, f) for f in ("tokens", "path", "target_logp", "behaviour_logp")}
                forged = dataclasses.replace(forged, **parts, origin=origin, finish_reason=block.finish_reason)
                rest = [x for x in whole.rounds[i + 1 :] if x.request != 1]
                wrong, _ = counterfactual.verify(dataclasses.replace(whole, rounds=[*whole.rounds[:i], forged, *rest]))
                assert wrong
                assert all(f"line {i + 2}: " in line and "accept of node" in line for line in wrong)


def test_a_round_after_the_end_is_found_and_a_missing_end_is_said(found, capsys, tmp_path):
    """Bugs: lines appended behind a request's stop pass; a file that lost its last whole lines looks complete."""
    path, whole = found[2:]
    assert whole.unfinished == []
    last = whole.rounds[-1]
    more = dataclasses.replace(last, position=last.position + len(last.tokens), step=last.step + 1)
    wrong, _ = counterfactual.verify(dataclasses.replace(whole, rounds=[*whole.rounds, more]))
    assert any("has ended before" in line for line in wrong)
    (tmp_path / "t").write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    lost = trace.read(tmp_path / "t")
    assert (lost.cut, lost.unfinished) == (False, [last.request])
    code, out, _ = run(capsys, "replay", str(tmp_path / "t"))
    assert code == 0
    assert f"not ended in the file: request {last.request}" in out
    code, out, _ = run(capsys, "replay", str(tmp_path / "t"), "--json")
    assert json.loads(out)["unfinished"] == [last.request]


def test_another_machine_may_differ_by_rounding(found):
    """Bug: a trace from a GPU is called wrong for an ulp, or right whatever it says."""
    whole = found[3]
    other = dataclasses.replace(whole.header, engine=whole.header.engine | {"device": "cuda"})
    rounds = [CHANGES["ulp"](r) for r in whole.rounds]
    wrong, largest = counterfactual.verify(trace.Trace(other, rounds, False))
    assert not wrong
    assert 0 < largest < 1e-6
    rounds = [CHANGES["target"](r) for r in whole.rounds]
    assert len(counterfactual.verify(trace.Trace(other, rounds, False))[0]) == len(rounds)


QUESTIONS = [
    Change("power", alpha=0.3),
    Change("power", alpha=1e-6),
    Change("relaxed", tau=0.05),
    Change("relaxed", accept_top_k=2),
    Change("exact"),
    Change(depth=2),
    Change(top_k=2),
    Change(top_k=1),
    Change(depth=2, top_k=2),
]


@pytest.mark.parametrize("change", QUESTIONS, ids=str)
def test_a_counterfactual_is_what_the_engine_does_at_that_prefix(change, found):
    """Bugs: siblings removed but not given back to the rest; a draw kept that the smaller tree makes otherwise; a stop
    or the cap left out; a narrow tree guessed where nodes were displaced. The oracle is the engine, run at each prefix.
    """
    prompts, draft, _, whole = found
    outcomes = counterfactual.counterfactual(whole, change)
    rounds = [r for r in whole.rounds if not r.prefill]
    spec = dataclasses.replace(WIDE, depth=change.depth or 3, top_k=change.top_k or 3)
    answered = 0
    for r, o in zip(rounds, outcomes, strict=True):
        assert (o.request, o.position) == (r.request, r.position)
        asked = change.apply(whole.header.requests[r.request].sampling)
        info = rerun(prompts, whole, r, asked, draft, spec)
        smaller = change.depth or change.top_k
        kept = (
            narrow.nodes(r.nodes, whole.header, narrow.check(whole.header, change.depth, change.top_k))
            if smaller
            else None
        )
        if smaller and kept is None:
            assert o.changed is None
            continue
        judged = r if kept is None else narrow.apply(r, kept)
        drafted = {(t, d) for t, d in zip(judged.nodes.token, judged.nodes.depth, strict=True) if d}
        assert drafted == {
            (t, d) for t, d in zip(info.tree.token[0].tolist(), info.tree.depth[0].tolist(), strict=True) if d
        }
        (block,) = counterfactual.judge(whole, [judged], [asked])
        n = int(info.count[0])
        assert block.tokens == info.tokens[0, :n].tolist()
        assert len(block.path) == int(info.accepted[0])
        assert block.target_logp == pytest.approx(info.target_logp[0, :n].tolist(), abs=1e-6)
        assert block.behaviour_logp == pytest.approx(info.behaviour_logp[0, :n].tolist(), abs=1e-5)
        assert o.changed.accepted == block.accepted
        assert o.same == (block.tokens == r.tokens)
        answered += 1
    assert answered > len(rounds) / 2
    if draft == "ngram" or change.depth or not change.top_k:
        assert answered == len(rounds)


@pytest.mark.parametrize("spec", [PRUNED, ns.Speculation(top_k=3, depth=3, num_nodes=8)], ids=["5", "8"])
@pytest.mark.parametrize("draft", ["frozen", "ngram"])
def test_a_pruned_record_answers_only_what_it_holds(spec, draft, tmp_path):
    """Bug: pruned nodes are taken for never drafted, and the rest of their row for what a smaller tree left."""
    prompts = PROMPTS if draft == "frozen" else [p[:3] * 4 + p[:2] for p in PROMPTS]
    whole = record(tmp_path / "t", spec, draft=draft, prompts=prompts)
    answers = []
    for depth, top_k in ((2, None), (None, 2), (None, 1), (1, None)):
        smaller = narrow.check(whole.header, depth, top_k)
        for r in whole.rounds:
            if r.prefill:
                continue
            kept = narrow.nodes(r.nodes, whole.header, smaller)
            info = rerun(prompts, whole, r, whole.header.requests[r.request].sampling, draft, smaller)
            real = placed(info.tree.token[0].tolist(), info.tree.depth[0].tolist())
            there = placed(r.nodes.token, r.nodes.depth)
            answers.append(kept is not None)
            if kept is not None:
                assert {(r.nodes.token[i], r.nodes.depth[i]) for i in kept} == real
            else:
                assert not real <= there or len(there) == spec.nodes
    assert any(answers)
    assert draft == "ngram" or not all(answers)


def test_expected_acceptance_is_the_mean_over_draws(found):
    """Bug: a product over siblings that forgets the rejected ones, or counts only the deepest node.

    The oracle draws uniforms, and each row's token by its probability. The mean of n = 40000 is off by 0.04 with odds
    under 2 exp(-2 n (0.04 / 3)^2) = 1.4e-6 (Hoeffding, at most 3 accepted).
    """
    whole = found[3]
    n = 40000
    generator = torch.Generator().manual_seed(1)
    for r in [r for r in whole.rounds if not r.prefill and r.nodes.depth.count(1) > 0][:1]:
        (evidence, tree), size = trace.to_evidence([r]), len(r.nodes.token)
        many = tree_map(lambda x: x.expand(n, -1), evidence)
        accept = torch.rand(n, size, generator=generator)
        # A row's coupled draw: a candidate with its probability, else something that is not a candidate (-9).
        draw = torch.rand(n, size + 1, generator=generator)
        token = torch.full((n, size + 1), -9, dtype=torch.int32)
        for row in range(size + 1):
            below = torch.zeros(n)
            for i in range(size):
                if r.nodes.depth[i] and r.nodes.parent[i] == row - 1:
                    above = below + torch.tensor(r.nodes.target_logp[i]).exp()
                    token[(draw[:, row] >= below) & (draw[:, row] < above), row] = r.nodes.token[i]
                    below = above
        drawn = dataclasses.replace(many, accept=accept, target=token)
        wide = dataclasses.replace(
            tree, **{f.name: getattr(tree, f.name).expand(n, -1) for f in dataclasses.fields(tree)}
        )
        for asked in RULES.values():
            verdict = acceptance.decide(drawn, wide, sampling.controls([asked] * n), 3)
            mean = float(verdict.accepted.double().mean())
            assert counterfactual.expected(r, asked) == pytest.approx(mean, abs=0.04)


def test_sequences_are_exact_up_to_the_first_difference(found):
    """Bug: a round counted as exact although an earlier one had emitted something else."""
    prompts, draft, _, whole = found
    change = Change("power", alpha=0.6)
    outcomes = counterfactual.counterfactual(whole, change)
    asked = [change.apply(r.sampling) for r in whole.header.requests]
    other = ns.generate(target(), prompts, asked, draft=ns.load_draft(draft, target()), speculation=WIDE)
    rounds = [r for r in whole.rounds if not r.prefill]
    (blocks,) = [counterfactual.judge(whole, rounds, [asked[r.request] for r in rounds])]
    left = 0
    for i in range(len(prompts)):
        mine = [(r, o, b) for r, o, b in zip(rounds, outcomes, blocks, strict=True) if r.request == i]
        first = next((j for j, (_, o, _) in enumerate(mine) if not o.same), len(mine) - 1)
        assert [o.exact for _, o, _ in mine] == [j <= first for j in range(len(mine))]
        emitted = next(r.tokens for r in whole.rounds if r.request == i)
        for _, _, block in mine[: first + 1]:
            emitted = emitted + block.tokens
        assert other[i].tokens[: len(emitted)] == emitted
        left += first < len(mine) - 1
    assert left  # the question made a difference


def test_a_counterfactual_that_changes_nothing_changes_nothing(found, capsys):
    """Bug: recorded and changed figures computed in two ways."""
    whole = found[3]
    for change in (Change(depth=3), Change(top_k=3), Change()):
        for o in counterfactual.counterfactual(whole, change):
            assert o.same
            assert o.exact
            assert o.recorded == o.changed
    code, out, _ = run(capsys, "replay", str(found[2]), "--spec-depth", "3", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["recorded"] == report["changed"]
    assert report["same"] == report["rounds"] == len(report["by_round"])
    code, out, _ = run(capsys, "replay", str(found[2]), "--spec-topk", "1")
    assert code == 0
    assert "as a sequence" in out
    code, out, _ = run(capsys, "replay", str(found[2]), "--accept-topk", "1", "--json")
    assert json.loads(out)["changed"]["kl"] is None


def test_the_table_counts_drafted_tokens_and_names_its_unit(found, capsys):
    """Bug: a count without the bonus token under a name that reads like `generate`'s, which has it; bare log-probs."""
    code, out, _ = run(capsys, "replay", str(found[2]), "--spec-topk", "1")
    assert code == 0
    _, (heading, *table), *_ = (part.splitlines() for part in out.split("\n\n"))
    assert "nats" in heading
    edge = heading.index("recorded") + len("recorded")
    assert all(line[:edge] == line[:edge].rstrip() for line in table)  # the figures end below their heading
    by_name = {name.strip(): value for name, value in (line[:edge].rsplit(maxsplit=1) for line in table)}
    drafted = [sum(depth > 0 for depth in r.origin) for r in found[3].rounds if not r.prefill]
    mean = f"{sum(drafted) / len(drafted):.4f}"
    assert by_name["drafted tokens accepted a round, by the recorded draws"] == mean


def test_what_a_trace_cannot_answer_is_refused_by_name(tmp_path, capsys):
    """Bug: a number for a question that has no answer."""
    record(tmp_path / "greedy", asked=[ns.Sampling(max_tokens=5)] * 3)
    coupled = ns.Speculation(top_k=2, depth=2, coupled=True)
    record(tmp_path / "coupled", coupled, [ns.Sampling(**T1)] * 3)
    ns.generate(target(), PROMPTS, RULES["exact"], trace=tmp_path / "plain")
    own, greedy = scripted(PROMPTS[:1], 8), ns.Sampling(max_tokens=4)
    ns.generate(target(), PROMPTS[:1], greedy, draft=own, speculation=ns.Speculation(depth=4), trace=tmp_path / "own")
    for name, options, message in (
        ("greedy", ["--alpha", "0.5"], "temperature 0"),
        ("greedy", ["--tau", "0.5"], "temperature 0"),
        ("coupled", ["--alpha", "0.5"], "coupled"),
        ("coupled", ["--accept-topk", "1"], "coupled"),
        ("coupled", ["--spec-depth", "3"], "depth 3 is not in the record"),
        ("coupled", ["--spec-topk", "3"], "top_k 3 is not in the record"),
        ("plain", ["--spec-depth", "1"], "without a draft"),
        ("own", ["--spec-depth", "1"], "scripted"),
        ("absent", [], "absent"),
    ):
        code, out, err = run(capsys, "replay", str(tmp_path / name), *options)
        assert (code, out) == (2, "")
        assert message in err
        assert (options[0] if options else "argument FILE: ") in err
        assert len(err.splitlines()) == 1
    for name, options in (
        ("greedy", ["--spec-depth", "1"]),
        ("coupled", ["--spec-topk", "1"]),
        ("plain", ["--alpha", "0.5"]),
    ):
        code, out, _ = run(capsys, "replay", str(tmp_path / name), *options, "--json")
        assert code == 0
        assert name != "coupled" or json.loads(out)["changed"]["expected"] is None


BAD = {
    "--alpha": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--tau": ("-1", "1.5", "nan", "inf", "abc", HUGE, "1"),
    "--accept-topk": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE, "1_0", " 1", "\u0661"),
    "--spec-depth": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE, "1_0", " 1", "\u0661"),
    "--spec-topk": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE, "1_0", " 1", "\u0661"),
}
CLASHES = [
    ("--alpha", "0.5", "--tau", "0.5"),
    ("--alpha", "0.5", "--spec-depth", "1"),
    ("--spec-topk", "1", "--spec-depth", "1"),
]


@pytest.mark.parametrize("argv", [*((o, v) for o, values in BAD.items() for v in values), *CLASHES], ids=" ".join)
def test_bad_values_are_refused_by_option(argv, capsys, monkeypatch):
    """Bug (C20): a bad value is found after the file has been read, or not at all."""

    def read(*_):
        raise AssertionError("the trace was read before the arguments had been checked")

    monkeypatch.setattr(trace, "read", read)
    code, out, err = run(capsys, "replay", "t.jsonl", *argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert argv[-2] in err


@pytest.mark.parametrize("command", ["replay", "kl"])
def test_an_empty_path_is_refused_by_name(command, capsys):
    """Bug: "" is taken for the folder that one stands in."""
    code, out, err = run(capsys, command, "")
    assert (code, out) == (2, "")
    assert "argument FILE: the path of a trace is empty" in err


def test_generate_writes_a_trace_and_refuses_a_bad_path(capsys, monkeypatch, tmp_path):
    """Bugs: --trace is parsed and dropped; a bad path is found after the model was loaded."""
    model = dataclasses.replace(target(), tokenizer=None)
    monkeypatch.setattr(ns, "load", lambda *_, **__: model)
    monkeypatch.setattr("nanospec_fn.chat.encode", lambda *_: PROMPTS[0])
    argv = ["generate", "Hi", "--draft", "frozen", "--max-tokens", "6", "--device", "cpu", "--trace"]
    code, _, err = run(capsys, *argv, str(tmp_path / "t"))
    assert (code, err) == (0, "")
    assert sum(len(r.tokens) for r in trace.read(tmp_path / "t").rounds) == 6
    monkeypatch.delattr(ns, "load")
    for bad in (tmp_path, tmp_path / "absent" / "t", "", "x" * 300):
        code, out, err = run(capsys, *argv, str(bad))
        assert (code, out) == (2, "")
        assert "argument --trace" in err

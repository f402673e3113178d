"""The round trace: it changes nothing, holds what the verdicts rested on, and survives a cut."""

import dataclasses
import itertools
import json
import math

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import engine, rng, trace
from tests.scripted import prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
TREE = ns.Speculation(top_k=2, depth=3)
PRUNED = ns.Speculation(top_k=3, depth=3, num_nodes=5)
PROMPTS = [prompt(n, seed=n) for n in (5, 3, 17, 9, 4)]
MIXED = [
    ns.Sampling(max_tokens=16, temperature=1.0, seed=2**62 + 1),
    ns.Sampling(max_tokens=16, temperature=1.0, seed=2, rule="power", alpha=0.3, top_k=4),
    ns.Sampling(max_tokens=16, temperature=0.7, seed=3, rule="relaxed", tau=0.3, accept_top_k=1, top_p=0.3),
    ns.Sampling(max_tokens=16, temperature=1.0, seed=4, rule="power", alpha=0.7),
    ns.Sampling(max_tokens=16),
]


def run(path, spec=TREE, sampling=MIXED, **changes):
    draft = ns.load_draft("frozen", target()) if spec else None
    return ns.generate(target(), PROMPTS, sampling, draft=draft, speculation=spec, trace=path, **changes)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace of every rule in one batch, on trees, and the completions."""
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with torch.no_grad():
        return path, run(path)


@pytest.mark.parametrize(
    "spec", [None, ns.Speculation(depth=3), TREE, PRUNED], ids=["plain", "chain", "tree", "pruned"]
)
def test_tracing_changes_no_bit(spec, tmp_path):
    """Bug: evidence for rules that no request uses (rank, rest) gets into a verdict."""
    traced = run(tmp_path / "t", spec)
    assert [repr(vars(c)) for c in traced] == [repr(vars(c)) for c in run(None, spec)]


def test_rounds_add_up_to_the_completions(recorded):
    """Bugs: a round lost or written twice; a cut block recorded whole; one request's line under another's index."""
    path, out = recorded
    found = trace.read(path)
    assert not found.cut
    for index, completion in enumerate(out):
        mine = [r for r in found.rounds if r.request == index]
        assert [r.prefill for r in mine] == [True, *[False] * (len(mine) - 1)]
        for name in ("tokens", "target_logp", "behaviour_logp", "origin"):
            assert list(itertools.chain(*(getattr(r, name) for r in mine))) == getattr(completion, name)
        assert [len(r.path) for r in mine[1:]] == completion.accepted
        starts = itertools.accumulate((len(r.tokens) for r in mine), initial=len(PROMPTS[index]))
        assert [r.position for r in mine] == list(starts)[:-1]
        assert [r.finish_reason for r in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        assert [r.tokens[: len(r.path)] for r in mine] == [[r.nodes.token[i] for i in r.path] for r in mine]
        assert {r.seed for r in mine} == {MIXED[index].seed}
    assert all(r.ms["step"] > 0 for r in found.rounds)
    assert [r.step for r in found.rounds] == sorted(r.step for r in found.rounds)
    assert found.header.requests[2].sampling == MIXED[2]
    assert found.header.speculation == TREE
    assert found.header.draft == "model"


def test_evidence_is_that_of_a_full_recompute(recorded):
    """Bug: a node's log-prob read at another row, a rest mass over the wrong candidates, draws of another position.

    The oracle runs the model without a cache over prompt, emitted tokens and the node's path.
    """
    path, out = recorded
    rounds = [r for r in trace.read(path).rounds if r.request in (0, 3) and not r.prefill][:6]
    for r in rounds:
        known = PROMPTS[r.request] + out[r.request].tokens[: r.position - len(PROMPTS[r.request])]
        for row in range(len(r.rows.token)):
            tail, node = [], row - 1
            while node >= 0:
                tail, node = [r.nodes.token[node], *tail], r.nodes.parent[node]
            logits = ns.forward(target().params, target().cfg, torch.tensor([known + tail]))[0, -1].double()
            logp = torch.log_softmax(logits, -1)
            mine = [i for i in range(len(r.nodes.token)) if r.nodes.parent[i] == row - 1]
            outside = logp.clone()
            key = rng.key(torch.tensor(r.seed))
            at = r.position + len(tail)
            for i in mine:
                token = r.nodes.token[i]
                assert r.nodes.target_logp[i] == pytest.approx(float(logp[token]), abs=1e-4)
                assert r.nodes.rank[i] == int((logp > logp[token]).sum())
                draw = rng.fold_in(rng.draw_key(key, torch.tensor(at), rng.ACCEPT), torch.tensor(token))
                assert r.nodes.accept[i] == float(rng.uniform(draw))
                outside[token] = -math.inf
            assert r.rows.rest_mass[row] == pytest.approx(float(torch.logsumexp(outside, -1)), abs=1e-4)
            for purpose, from_, token, value in (
                (rng.TARGET, logp, r.rows.token[row], r.rows.logp[row]),
                (rng.RESIDUAL, outside, r.rows.rest[row], r.rows.rest_logp[row]),
            ):
                noise = rng.gumbel(rng.draw_key(key, torch.tensor(at), purpose), 128)
                assert token == int((from_ + noise).argmax())
                assert value == pytest.approx(float(logp[token]), abs=1e-4)


def test_the_file_is_strict_json_and_reads_back_the_same_bytes(recorded, tmp_path):
    """Bugs: NaN or Infinity in the file; a float printed with too few digits; minus infinity that comes back as 0."""
    path, _ = recorded

    def refuse(constant):
        raise AssertionError(constant)

    text = path.read_bytes()
    for line in text.splitlines():
        json.loads(line, parse_constant=refuse)
    assert b"null" in text.replace(b'"finish_reason":null', b"")  # top-p 0.3 leaves candidates without any
    found = trace.read(path)
    assert any(-math.inf in r.nodes.target_logp for r in found.rounds)
    file = trace.File(tmp_path / "again")
    trace.create(file, found.header)
    with trace.Writer(file) as writer:
        for r in found.rounds:
            writer.write(r)
    assert (tmp_path / "again").read_bytes() == text


def test_rebuilt_evidence_has_the_bits_of_the_step(monkeypatch, tmp_path):
    """Bug: absent nodes dropped, or a column in another order or dtype."""
    seen = []
    to_host = trace.to_host
    monkeypatch.setattr(trace, "to_host", lambda tree, e: seen.append((e, tree)) or to_host(tree, e))
    run(tmp_path / "t", PRUNED)
    found = trace.read(tmp_path / "t")
    checked = 0
    for step in {r.step for r in found.rounds}:
        mine = sorted((r for r in found.rounds if r.step == step), key=lambda r: r.request)
        evidence, tree = trace.to_evidence(mine)
        if len(mine) == seen[step][1].token.shape[0]:
            assert ns.struct.bytes_equal((evidence, tree), seen[step])
            checked += len(mine)
    assert checked > 10


def test_a_cut_off_file_gives_all_whole_rounds(recorded, tmp_path):
    """Bug: a half line fails the read, or becomes a round."""
    path, _ = recorded
    lines = path.read_bytes().splitlines(keepends=True)[:4]
    whole = trace.read(path).rounds
    file = tmp_path / "cut"
    text = b"".join(lines)
    starts = list(itertools.accumulate(len(x) for x in lines))
    for end in range(len(lines[0]), len(text) + 1, 7):
        file.write_bytes(text[:end])
        found = trace.read(file)
        complete = sum(s <= end for s in starts) - 1
        assert found.rounds == whole[:complete]
        assert found.cut == (end not in starts)
    for end in (0, 10, len(lines[0]) - 1):
        file.write_bytes(text[:end])
        with pytest.raises(ValueError, match="line 1: the header is incomplete"):
            trace.read(file)


def damage(raw, name):
    if name == "NaN":
        raw["target_logp"][0] = math.nan
    elif name == "missing":
        del raw["rows"]
    elif name == "unknown":
        raw["more"] = 1
    elif name == "type":
        raw["tokens"][0] = 1.5
    elif name == "length":
        raw["nodes"]["rank"].append(0)
    elif name == "request":
        raw["request"] = 99
    elif name == "seed":
        raw["seed"] += 1
    elif name == "huge":
        raw["rows"]["token"][0] = 2**40
    elif name == "parent":
        raw["nodes"]["parent"][0] = 1
    elif name == "accept":
        raw["nodes"]["accept"][0] = None
    return raw


DAMAGES = ["NaN", "missing", "unknown", "type", "length", "request", "seed", "huge", "parent", "accept"]


def first(column, value):
    return lambda raw: raw["nodes" if column in raw["nodes"] else "rows"][column].__setitem__(0, value)


IMPOSSIBLE = {  # name: what is done to a round, or to a prefill
    "a version": lambda raw: raw.update(policy_version=99),
    "prefill": lambda raw: raw.update(prefill=not raw["prefill"]),
    "position": lambda raw: raw.update(position=0),
    "path": lambda raw: raw.update(path=[99]),
    "path below 0": lambda raw: raw.update(path=[-5]),
    "absent with a parent": lambda raw: [c.__setitem__(-1, x) for c, x in absent(raw, 99)],
    "absent with a huge parent": lambda raw: [c.__setitem__(-1, x) for c, x in absent(raw, 10**12)],
    "absent with a parent below": lambda raw: [c.__setitem__(-1, x) for c, x in absent(raw, -9)],
    "a log-prob above 0": first("target_logp", 5.0),
    "draft_logp": first("draft_logp", 3.0),
    "score": first("score", -77.0),
    "infinite": first("draft_logp", "1e400"),
    "infinite mass": first("rest_mass", "1e400"),
    "beyond fp32": first("draft_logp", -1e39),
    "mass": first("rest_mass", -20.0),
    "no mass": first("rest_mass", None),
    "a draw of nothing": first("logp", None),
    "siblings": lambda raw: first("token", raw["nodes"]["token"][1])(raw),
    "a node less": lambda raw: [c.pop() for c in (*raw["nodes"].values(), *raw["rows"].values())],
    "step": lambda raw: raw.update(step=-7),
    "no ms": lambda raw: raw.update(ms={}),
    "ms": lambda raw: raw.update(ms={"step": None}),
    "emitted": lambda raw: raw["target_logp"].__setitem__(0, None),
    "token": lambda raw: raw["tokens"].__setitem__(0, -1),
}


def absent(raw, parent):
    nodes = raw["nodes"]
    return (nodes["depth"], 0), (nodes["token"], -1), (nodes["parent"], parent)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_evidence_that_no_round_has_is_a_damaged_line(name, recorded, tmp_path):
    """Bugs: a forged line is replayed as equal, counted by `kl`, or ends in an IndexError."""
    lines = recorded[0].read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"prefill":false' in line)
    raw = json.loads(lines[number])
    IMPOSSIBLE[name](raw)
    lines[number] = json.dumps(raw).replace('"1e400"', "1e400")
    file = tmp_path / "damaged"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"damaged: line {number + 1}: "):
        trace.read(file)


def test_a_prefill_is_one(recorded, tmp_path):
    """Bug: a prefill that is marked as a round is counted as one."""
    lines = recorded[0].read_text().splitlines()
    lines[1] = lines[1].replace('"prefill":true', '"prefill":false')
    (tmp_path / "t").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="line 2: prefill is False at position"):
        trace.read(tmp_path / "t")


@pytest.mark.parametrize("name", [*DAMAGES, "syntax", "empty"])
def test_a_damaged_line_is_named(name, recorded, tmp_path):
    """Bug: damage in the middle is skipped like a cut at the end, or ends in a traceback without a place."""
    path, _ = recorded
    lines = path.read_text().splitlines()
    number = next(i for i, line in enumerate(lines) if '"prefill":false' in line)
    if name in DAMAGES:
        lines[number] = json.dumps(damage(json.loads(lines[number]), name))
    else:
        lines[number] = lines[number][:-5] if name == "syntax" else ""
    file = tmp_path / "damaged"
    file.write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match=rf"damaged: line {number + 1}: "):
        trace.read(file)


def test_what_is_no_trace_of_this_version_is_refused(recorded, tmp_path):
    """Bug: a later format is read as if it were this one."""
    path, _ = recorded
    header, *rest = path.read_text().splitlines()
    file = tmp_path / "other"
    for change, message in (
        ({"version": 2}, "version 2 is not supported"),
        ({"version": True}, "version True is not supported"),
        ({"format": "x"}, "not the header"),
        ({"model": None}, "model"),
        ({"speculation": {"top_k": 0, "depth": 3, "num_nodes": None, "coupled": False}}, "top_k"),
        ({"requests": [json.loads(header)["requests"][0] | {"limit": 10**30}]}, "request 0"),
        ({"requests": [json.loads(header)["requests"][0] | {"prompt_tokens": -1}]}, "request 0"),
    ):
        file.write_text("\n".join([json.dumps(json.loads(header) | change), *rest]) + "\n")
        with pytest.raises(ValueError, match=f"other: line 1: .*{message}"):
            trace.read(file)
    with pytest.raises(FileNotFoundError, match="absent"):
        trace.read(tmp_path / "absent")
    with pytest.raises(ValueError, match=tmp_path.name):
        trace.read(tmp_path)
    for bad in ("", "a\0b"):
        with pytest.raises(ValueError, match=r"path|a.x00b"):
            trace.read(bad)


def test_an_unwritable_trace_is_refused_before_any_work(tmp_path, monkeypatch):
    """Bug: the error comes after the run, whose output is lost with it."""

    def work(*_, **__):
        raise AssertionError("the engine ran")

    monkeypatch.setattr(engine.Engine, "run", work)
    with pytest.raises(FileNotFoundError, match="absent"):
        run(tmp_path / "absent" / "t")
    with pytest.raises(ValueError, match="is a folder"):
        run(tmp_path)
    for bad in (3, True, b"t", "", "a\0b", "x" * 300):
        with pytest.raises(ValueError, match=r"^trace "):
            run(bad)
    with pytest.raises(ValueError, match="policy_version"):
        run(trace.File(tmp_path / "t", policy_version=-1))
    prepared = ns.prepare(target())
    with pytest.raises(ValueError, match="record=True"):
        ns.generate(target(), PROMPTS, engine=prepared, trace=tmp_path / "t")
    with pytest.raises(ValueError, match="record=True"):
        ns.stream(target(), PROMPTS, engine=prepared, trace=tmp_path / "t")
    assert not list(tmp_path.iterdir())


def test_bad_arguments_leave_an_older_trace_alone(recorded, tmp_path):
    """Bug: the file is truncated before the arguments have been checked."""
    file = tmp_path / "t"
    file.write_bytes(recorded[0].read_bytes())
    with pytest.raises(ValueError, match="max_tokens"):
        run(file, sampling=ns.Sampling(max_tokens=0))
    assert file.read_bytes() == recorded[0].read_bytes()


def test_a_prepared_engine_and_its_versions(tmp_path):
    """Bugs: a second call appends to the first one's rounds; the weights' versions are lost."""
    prepared = ns.prepare(target(), record=True)
    file = trace.File(tmp_path / "t", policy_version=7, draft_version=3)
    for n in (3, 2):
        ns.generate(target(), [PROMPTS[0]], ns.Sampling(max_tokens=n), engine=prepared, trace=file)
    found = trace.read(tmp_path / "t")
    assert [r.tokens for r in found.rounds] == [
        [t] for t in ns.generate(target(), [PROMPTS[0]], ns.Sampling(max_tokens=2))[0].tokens
    ]
    assert {(r.policy_version, r.draft_version) for r in found.rounds} == {(7, 3)}
    assert (found.header.policy_version, found.header.draft_version, found.header.draft) == (7, 3, None)


def test_a_stream_that_is_left_early_keeps_its_rounds(tmp_path):
    """Bug: rounds sit in a buffer until the end, and a stopped run has no trace."""
    chunks = ns.stream(target(), PROMPTS, MIXED, trace=tmp_path / "t")
    assert trace.read(tmp_path / "t").rounds == []
    seen = [next(chunks) for _ in range(9)]
    found = trace.read(tmp_path / "t")
    chunks.close()
    assert [(r.request, r.tokens) for r in found.rounds] == [(c.index, c.tokens) for c in seen]
    assert trace.read(tmp_path / "t") == found


def test_a_busy_engine_leaves_an_older_trace_alone(tmp_path):
    """Bug: the file is truncated, then the engine refuses."""
    prepared = ns.prepare(target(), record=True)
    chunks = ns.stream(target(), PROMPTS[:2], engine=prepared)
    next(chunks)
    (tmp_path / "t").write_text("older")
    with pytest.raises(ValueError, match="still serves"):
        ns.generate(target(), PROMPTS[:1], engine=prepared, trace=tmp_path / "t")
    chunks.close()
    assert (tmp_path / "t").read_text() == "older"


def test_a_full_disk_costs_the_trace_and_no_completion(tmp_path, monkeypatch):
    """Bug: the OSError of a trace loses what was generated, or lines follow on a torn one."""
    write, lines = trace.Writer.write, []

    def full(writer, record):
        lines.append(record)
        if len(lines) == 4:
            writer._out.write(b'{"step":')
            raise OSError(28, "No space left on device")
        write(writer, record)

    monkeypatch.setattr(trace.Writer, "write", full)
    with pytest.warns(RuntimeWarning, match=r"trace .*t ends early.*No space left on device"):
        out = run(tmp_path / "t")
    assert [repr(vars(c)) for c in out] == [repr(vars(c)) for c in run(None)]
    found = trace.read(tmp_path / "t")
    assert (found.rounds, found.cut, len(lines)) == (lines[:3], True, 4)


def test_an_interrupt_at_the_file_costs_no_tokens(tmp_path, monkeypatch):
    """Bug: the trace has a round that its completion lacks."""
    write, lines = trace.Writer.write, []

    def interrupted(writer, record):
        write(writer, record)
        lines.append(record)
        if len(lines) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(trace.Writer, "write", interrupted)
    out = run(tmp_path / "t")
    found = trace.read(tmp_path / "t")
    assert [[t for r in found.rounds if r.request == i for t in r.tokens] for i in range(5)] == [c.tokens for c in out]
    assert found.unfinished == [i for i, c in enumerate(out) if c.finish_reason == "aborted"] != []


def test_prompts_that_cannot_fit_keep_the_numbering(tmp_path):
    """Bug: requests and prompts are numbered alike although a prompt was left out."""
    config = ns.EngineConfig(num_pages=2, page_size=16)
    prompts = [prompt(60), prompt(4)]
    out = ns.generate(
        target(), prompts, ns.Sampling(max_tokens=3), engine=config, trace=tmp_path / "t", on_error="return"
    )
    assert [c.finish_reason for c in out] == ["error", "length"]
    found = trace.read(tmp_path / "t")
    assert [(r.index, r.prompt_tokens) for r in found.header.requests] == [(1, 4)]
    assert [t for r in found.rounds for t in r.tokens] == out[1].tokens
    assert ns.generate(target(), [], trace=tmp_path / "empty") == []
    assert trace.read(tmp_path / "empty").rounds == []


def test_a_preempted_request_is_recorded_once(tmp_path):
    """Bug: the recompute's prefill and tokens are written again."""
    config = ns.EngineConfig(max_slots=3, num_pages=12, page_size=4)
    prompts = [prompt(8, seed=s) for s in range(3)]
    asked = [dataclasses.replace(MIXED[i], max_tokens=20) for i in (0, 1, 3)]
    draft = ns.load_draft("frozen", target())
    tight = ns.generate(
        target(), prompts, asked, draft=draft, speculation=ns.Speculation(depth=3), engine=config, trace=tmp_path / "t"
    )
    found = trace.read(tmp_path / "t")
    # A request that waits for pages lets the others go on: steps without it.
    steps = {r.step for r in found.rounds}
    assert any(len({r.step for r in found.rounds if r.request == i}) < len(steps) - 3 for i in range(3))
    for i, completion in enumerate(tight):
        mine = [r for r in found.rounds if r.request == i]
        assert [t for r in mine for t in r.tokens] == completion.tokens
        assert sum(r.prefill for r in mine) == 1


def test_a_models_fingerprint_is_the_same_on_every_machine():
    """Bug: how `load` found this machine's products to be made goes into what names the model."""
    cfg = target().cfg
    other = dataclasses.replace(cfg, gemm="library", bmm="single")
    assert trace.fingerprint(other) == trace.fingerprint(cfg)
    assert trace.fingerprint(dataclasses.replace(cfg, num_layers=cfg.num_layers + 1)) != trace.fingerprint(cfg)

"""The roofline's figures: bytes and crossings worked by hand, phases of hand-made traces, and a whole run on a CPU."""

import dataclasses
import json
import sys

import pytest
import torch

import nanospec_fn as ns
from bench import payoff, phases, records, roofline, rounds, shapes, traffic
from nanospec_fn import attention, draft, eagle, model
from tests import tiny

LLAMA = model.Config(**{k: v for k, v in dataclasses.asdict(shapes.SHAPES["llama-3.1-8b"]).items() if k[:5] != "draft"},
                     max_context=8192)  # fmt: skip
HEAD = eagle.HeadConfig(
    **vars(LLAMA) | {"num_layers": 1}, target_hidden_size=4096, taps=(2, 16, 29), draft_vocab_size=32000
)
# 2 heads and 1 KV head of 4: qkv 16 x 10, out 10 x 8, MLP 3 x 6 x 10 -> 160 + 80 + 180 = 420 elements a layer.
SMALL = model.Config(
    vocab_size=7, hidden_size=10, intermediate_size=6, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=4,
    max_context=99,
)  # fmt: skip
SMALL_HEAD = eagle.HeadConfig(
    **vars(SMALL) | {"num_layers": 1}, target_hidden_size=10, taps=(0, 1, 2), draft_vocab_size=5
)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On matrices this small, threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_bytes_are_the_designs():
    """Design section 10: a decode step of Llama-3.1-8B reads 15.0 GB, a pass of its head 0.75 GB."""
    step = traffic.of_round(traffic.Load(1, 0), LLAMA, 2)
    assert step["draft"] == 0
    assert sum(step.values()) == pytest.approx(15.0e9, rel=5e-3)
    passes = [traffic.of_draft(traffic.Load(1, 0, 1, depth, depth), HEAD, 2) for depth in (4, 5)]
    assert passes[1] - passes[0] == pytest.approx(0.75e9, rel=5e-3)
    assert traffic.milliseconds(15.0e9, 4.38e12) == pytest.approx(3.43, abs=0.01)


def test_bytes_by_hand():
    """Bugs: weights counted once a slot; a draft pass counted once a round; KV of rows in place of slots."""
    tree = traffic.Load.of(2, 50, ns.Speculation(top_k=3, depth=4, num_nodes=5))
    assert traffic.of_round(tree, SMALL, 2, SMALL_HEAD) == {
        # 4 passes of (16 x 20 + 80 + 180 = 580, head 5 x 10), fc 10 x 30; KV of 16 bytes: 2 slots x 50 tokens read in
        # each pass, 2 x (1 + 3 x 3) rows written; as many rows of 5 logits, twice.
        "draft": (4 * (580 + 50) + 300) * 2 + 16 * (400 + 20) + 2 * 20 * 5 * 4,
        "target": 3 * 420 * 2,
        "attention": 3 * 16 * (2 * 50 + 2 * 6),
        "head": 7 * 10 * 2 + 2 * (2 * 6) * 7 * 4,
    }
    plain = traffic.of_round(traffic.Load.of(2, 50, None), SMALL, 2, SMALL_HEAD)
    assert plain == {"draft": 0, "target": 2520, "attention": 48 * 102, "head": 140 + 2 * 2 * 28}
    copy = traffic.of_round(dataclasses.replace(tree, slots=1), SMALL, 4, SMALL)
    assert copy["draft"] == 4 * (3 * 420 + 70) * 4 + 3 * 32 * (200 + 10) + 2 * 10 * 7 * 4


PLAIN = payoff.Cost("plain", {1: 4.0, 8: 4.0, 32: 5.0}, 1.0)


def test_crossing_by_hand():
    """Bugs: the acceptance left out; batches between the measured ones not looked at; no continuation beyond them."""
    assert [payoff.at(PLAIN.curve, b) for b in (1, 4, 8, 20, 32, 56)] == [4, 4, 4, 4.5, 5, 6]
    assert payoff.at({8: 3.0}, 500) == 3.0
    # 2 tokens a round pay while a round takes under twice a plain one: 8 + (b - 8) / 2 <= 8 + (b - 8) / 12 ends at 8;
    # with 3 tokens 8 + (b - 8) / 2 < 12 + (b - 8) / 8 until b - 8 = 4 / (3 / 8) = 10.67.
    chain = payoff.Cost("chain", {1: 8.0, 8: 8.0, 32: 20.0}, 3.0)
    assert payoff.stops_paying(PLAIN, chain) == 19
    assert payoff.stops_paying(PLAIN, dataclasses.replace(chain, tokens=2.0)) == 1
    assert payoff.stops_paying(PLAIN, payoff.Cost("cheap", PLAIN.curve, 1.5)) is None
    # Beyond 32: 20 + (b - 32) / 2 = 6 * (5 + (b - 32) / 24) at b - 32 = 40.
    cheap = payoff.describe(PLAIN, payoff.Cost("cheap", PLAIN.curve, 1.5))
    assert cheap == "cheap, 1.50 tokens a round: pays at every batch up to 4096 (measured up to 32, continued beyond)"
    late = dataclasses.replace(chain, tokens=6.0)
    assert payoff.stops_paying(PLAIN, late) == 72
    assert payoff.speed(late, 72) == pytest.approx(payoff.speed(PLAIN, 72))
    assert (
        payoff.describe(PLAIN, late) == "chain, 6.00 tokens a round: stops paying at batch 72, beyond the measured 32"
    )
    assert payoff.describe(PLAIN, chain) == "chain, 3.00 tokens a round: stops paying at batch 19"


def within(name, ts, dur):
    return {"ph": "X", "cat": "user_annotation", "name": f"phase:{name}", "ts": ts, "dur": dur, "tid": 1}


RANGES = [within("propose", 100, 100), within("attention", 120, 10), within("attention", 300, 50)]
RANGES += [within("fuse", 400, 20), within("attention", 999, 0)]
# name, launched at, microseconds, phase
KERNELS = [
    ("index_put", 50, 3.0, "accept"),
    ("_few_rows", 110, 5.0, "draft"),
    ("_attend", 125, 7.0, "draft"),
    ("_top", 190, 11.0, "draft"),
    ("gather", 210, 13.0, "pointwise"),
    ("_many_rows", 290, 17.0, "target"),
    ("_attend", 310, 19.0, "attention"),
    ("nvjet_tst_64x8", 390, 23.0, "target"),
    ("_few_rows", 405, 29.0, "draft"),
    ("_few_rows", 430, 31.0, "head"),
    ("find_peaks", 440, 37.0, "head"),
    ("_decide", 450, 41.0, "accept"),
    ("Memcpy DtoD", 460, 43.0, "accept"),
    ("_lost", None, 47.0, "other"),
]


def test_kernels_go_to_the_phase_they_were_launched_in():
    """Bugs: the draft's products counted as the target's; attention of the draft as the target's; the head's product as
    a layer's; a kernel placed by when it ran, which is long after its launch."""
    events, want = list(RANGES), dict.fromkeys(phases.PHASES, 0.0)
    for i, (name, at, us, phase) in enumerate(KERNELS):
        kind = "gpu_memcpy" if "Memcpy" in name else "kernel"
        events.append({"ph": "X", "cat": kind, "name": name, "ts": 5000 + i, "dur": us, "args": {"correlation": i}})
        if at is not None:
            cat = ("cuda_runtime", "cuda_driver")[i % 2]
            events.append({"ph": "X", "cat": cat, "name": "launch", "ts": at, "dur": 1, "args": {"correlation": i}})
        want[phase] += us / 1e3
    events.append({"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 290, "dur": 5, "tid": 1})
    assert phases.attribute(events) == pytest.approx(want)


def test_operators_count_without_those_that_they_call():
    """Bug: a nested operator counted twice, or its caller's own time lost."""
    events = list(RANGES)
    for name, ts, dur in (
        ("aten::linear", 210, 40),
        ("aten::mm", 215, 30),
        ("aten::fill_", 216, 4),
        ("aten::exp", 260, 7),
    ):
        events.append({"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "tid": 1})
    got = {name: ms for name, ms in phases.attribute(events).items() if ms}
    assert got == pytest.approx({"target": 0.026, "pointwise": 0.010 + 0.004 + 0.007})
    with pytest.raises(ValueError, match="no ranges"):
        phases.attribute([])


def test_marked_backends_are_the_same_and_leave_ranges():
    """Bugs: a class of another kind, which the engine treats otherwise; a method without its range."""
    sdpa = phases.mark_attention(attention.Sdpa(16, "tiles"))
    assert isinstance(sdpa, attention.Sdpa)
    assert vars(sdpa) == {"page_size": 16, "bmm": "tiles"}
    hash(sdpa)
    ngram = phases.mark_draft(draft.Ngram(longest=2))
    assert (ngram.longest, ngram.name, ngram.taps) == (2, "ngram", ())
    events, result = phases.trace(lambda: ngram.fuse((), torch.ones(3)), torch.device("cpu"))
    assert torch.equal(result, torch.ones(3))
    assert [e["name"] for e in events if e.get("cat") == "user_annotation" and "phase" in e["name"]] == ["phase:fuse"]


def test_read_ceiling_is_bytes_over_the_best_median(monkeypatch):
    medians = iter(([4.0, 2.0, 9.0], [8.0, 8.0, 8.0], [2.0, 5.0, 9.0], [7.0, 7.0, 7.0]))
    monkeypatch.setattr(rounds.Clock, "milliseconds", lambda self: next(medians))
    assert rounds.read_ceiling(torch.device("cpu"), 1 << 20, repeats=3) == pytest.approx((1 << 20) / 4e-3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("roofline")
    raw = tiny.config("tinyllama-1.1b", vocab_size=258, eos_token_id=1)  # 2 layers
    tiny.write(path / "model", raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(path / "model")
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}
    tiny.write_head(path / "head", raw, tiny.head_state(raw, taps=2), "sglang", **ids)
    (path / "prompts.txt").write_text("Hello\nWhat is it?\n")
    return ["--model", str(path / "model"), "--draft", f"eagle:{path / 'head'}", "--prompts", str(path / "prompts.txt")]


SHORT = [
    "--device",
    "cpu",
    "--bs",
    "1",
    "2",
    "--shape",
    "2x2",
    "--context",
    "20",
    "--repeats",
    "2",
    "--max-tokens",
    "6",
]


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory):
    """A run on the tiny model: its folder, and what it printed."""
    out = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setenv("NANOSPEC_COMMIT", "abc123")
        patch.setattr(rounds, "read_ceiling", lambda device: 1e9)
        printed = []
        patch.setattr("builtins.print", lambda *args, **_: printed.append(" ".join(args)))
        assert roofline.main([*checkpoint, *SHORT, "--out", str(out)]) == 0
    return out, "\n".join(printed)


def test_rows_of_a_run(finished):
    """Bugs: a phase left out of the sum; shares of another ceiling than the row's own."""
    out, printed = finished
    rows = [json.loads(line) for line in (out / "roofline-model.jsonl").read_text().splitlines()]
    assert [(row["config"], row["bs"]) for row in rows] == [
        (name, bs) for bs in (1, 2) for name in ("plain", "tree 2x2")
    ]
    for row in rows:
        assert sum(row["phase_ms"].values()) == pytest.approx(row["round_ms"])
        assert {"target", "attention", "pointwise", "head", "accept"} <= {
            k for k, v in row["phase_ms"].items() if v > 0
        }
        # The draft drafts or, in plain decoding, makes an empty tree.
        assert row["phase_ms"]["draft"] > (0.1 if row["config"] != "plain" else 0) * row["phase_ms"]["target"]
        assert row["floor_ms"] == pytest.approx(sum(row["phase_bytes"].values()) / 1e6)
        assert row["of_ceiling"] == pytest.approx(row["floor_ms"] / row["round_ms"])
        assert row["tok_s"] == pytest.approx(1e3 * row["bs"] * row["tokens_a_round"] / row["round_ms"])
        assert row["read_gb_s"] == 1.0
        assert {*records.about("x", "m", "d", torch.device("cpu")), "dtype"} <= set(row)
        assert 20 < row["context"] < 60
    assert "| plain | 1 |" in printed
    assert "tree 2x2, " in printed


def test_an_earlier_run_is_read_again(finished, tmp_path, capsys):
    """Bug: rows of another run in the table."""
    out, printed = finished
    lines = (out / "roofline-model.jsonl").read_text().splitlines()
    older = [json.dumps(json.loads(line) | {"commit": "older", "round_ms": 99999.0}) for line in lines]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join([*older, *lines]) + "\n")
    assert roofline.main(["--from", str(file)]) == 0
    shown = capsys.readouterr().out
    assert shown.rsplit("\n", 2)[0].strip() in printed  # all but the line about the picture


@pytest.mark.usefixtures("matplotlib")
def test_a_picture_of_a_run(finished):
    assert (finished[0] / "roofline-model.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert not list(finished[0].glob(".*.part"))


@pytest.mark.parametrize(
    "argv, said",
    [
        (["--draft", "none"], "argument --draft: a draft is needed for trees, got none"),
        (["--shape", "1x2", "1x2"], "argument --shape: a shape is given twice"),
        (["--shape", "0x2"], "argument --shape: '0x2': top_k must be"),
        (["--shape", "99x2"], "top_k is 99, the draft's vocabulary has 32 tokens"),
        (["--context", "1020"], "argument --context: 1020 tokens and 2 rounds need"),
        (["--accepted", "0.5"], "argument --accepted: must be a number from 1"),
        (["--like", "llama-4"], "like must be one of"),
        (["--prompts", "/nowhere"], "/nowhere: no such file"),
        (["--from", "/nowhere"], "/nowhere: no such file"),
        (["--backend", "canonical"], "argument --backend: canonical needs a CUDA device"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(checkpoint, tmp_path, capsys, argv, said):
    with pytest.raises(SystemExit) as stop:
        roofline.main([*checkpoint, *SHORT, "--out", str(tmp_path / "out"), *argv])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_file_without_plain_decoding_is_refused(finished, tmp_path, capsys):
    lines = (finished[0] / "roofline-model.jsonl").read_text().splitlines()
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(line for line in lines if '"plain"' not in line))
    with pytest.raises(SystemExit):
        roofline.main(["--from", str(file)])
    assert f"{file}: the newest run has no row of plain decoding" in capsys.readouterr().err


@pytest.mark.parametrize("line", ["{", "[]", '{"config": "plain"}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path, capsys, line):
    file = tmp_path / "rows.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(SystemExit):
        roofline.main(["--from", str(file)])
    assert f"{file}:1: not a row of bench.roofline" in capsys.readouterr().err


def test_without_matplotlib_the_table_is_there_and_the_picture_is_not(finished, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "rows.jsonl"
    file.write_bytes((finished[0] / "roofline-model.jsonl").read_bytes())
    assert roofline.main(["--from", str(file)]) == 0
    assert "| plain | 1 |" in (shown := capsys.readouterr().out)
    assert f"no picture: matplotlib is not installed; where it is, run python -m bench.roofline --from {file}" in shown


def test_a_widened_model_in_memory_is_measured(checkpoint, tmp_path, capsys):
    """Bug: --like that widens the model and not its head, or neither."""
    raw = tiny.config("tinyllama-1.1b", hidden_size=96, num_hidden_layers=3, vocab_size=300, head_dim=8)
    (tmp_path / "like.json").write_text(json.dumps(raw))
    argv = ["--like", str(tmp_path / "like.json"), "--bs", "1", "--shape", "1x2", "--accepted", "2.5", "--repeats", "1"]
    assert roofline.main([*checkpoint, *SHORT, *argv, "--out", str(tmp_path)]) == 0
    row = json.loads((tmp_path / "roofline-model-in-like.jsonl").read_text().splitlines()[-1])
    assert row["phase_bytes"]["target"] == 3 * 4 * ((8 + 2) * 8 * 96 + 64 * 96 + 3 * 80 * 96)
    assert row["tokens_a_round"] == 2.5
    assert "chain 2, 2.50 tokens a round: " in capsys.readouterr().out


def test_a_round_that_does_not_fit_is_left_out(checkpoint, tmp_path, capsys, monkeypatch):
    """Bugs: the largest batch ends the run, and its other rows are not shown; a tree timed as another, or without its
    draft."""
    asked = []

    def measure(model, draft, spec, bs, context, repeats, attend):
        asked.append((draft is not None, spec, bs, context, repeats))
        if draft and bs == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return rounds.Timing(5.0, 1.0, 20, dict.fromkeys(phases.PHASES, 0.5), None)

    monkeypatch.setattr(rounds, "measure", measure)
    monkeypatch.setattr(rounds, "read_ceiling", lambda device: 1e9)
    assert roofline.main([*checkpoint, *SHORT, "--accepted", "2", "--out", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "tree 2x2, batch 2: out of memory, left out" in shown.err
    rows = [json.loads(line) for line in (tmp_path / "roofline-model.jsonl").read_text().splitlines()]
    assert [(row["config"], row["bs"]) for row in rows] == [("plain", 1), ("tree 2x2", 1), ("plain", 2)]
    tree = ns.Speculation(top_k=2, depth=2)
    assert asked == [(bool(spec), spec, bs, 20, 2) for bs in (1, 2) for spec in (None, tree)]
    assert rows[0]["phase_ms"]["gaps"] == 5.0 - 7 * 0.5
    assert [row["tok_s"] for row in rows] == [200.0, 400.0, 400.0]  # 2 tokens a round count twice
    assert (
        "tree 2x2, 2.00 tokens a round: pays at batch 1; where it stops takes more than one measured batch" in shown.out
    )


def test_rows_are_drawn_at_other_lengths(checkpoint, tmp_path, capsys, monkeypatch):
    """Bugs: --accepted that --from does not hear; the first tree's length for all; plain decoding at a draft's."""
    monkeypatch.setattr(
        rounds, "measure", lambda *a: rounds.Timing(5.0, 1.0, 20, dict.fromkeys(phases.PHASES, 0.5), None)
    )
    monkeypatch.setattr(rounds, "read_ceiling", lambda device: 1e9)
    out = ["--out", str(tmp_path)]
    assert roofline.main([*checkpoint, "--bs", "1", "--shape", "1x2", "2x2", "--accepted", "2", "3", *out]) == 0
    assert "chain 2, 2.00 tokens a round: " in (shown := capsys.readouterr().out)
    assert "tree 2x2, 3.00 tokens a round: " in shown
    file = str(tmp_path / "roofline-model.jsonl")
    assert roofline.main(["--from", file, "--accepted", "1.5", "2.5"]) == 0
    shown = capsys.readouterr().out
    assert "chain 2, 1.50 tokens a round: " in shown
    assert "tree 2x2, 2.50 tokens a round: " in shown
    for line in shown.splitlines():
        if line.startswith(("| plain", "| chain", "| tree")):
            name, tok_s = line.split(" | ")[0].removeprefix("| "), line.split(" | ")[-1].removesuffix(" |")
            assert float(tok_s) == {"plain": 200, "chain 2": 300, "tree 2x2": 500}[name]
    with pytest.raises(SystemExit):
        roofline.main(["--from", file, "--accepted", "1", "2", "3"])
    assert "argument --accepted: 3 lengths for 2 trees" in capsys.readouterr().err

"""The benchmark's rows: the contract's keys, right figures on a tiny target, resuming, refusals."""

import json
from pathlib import Path

import pytest
import torch

import nanospec_fn as ns
from bench import acceptance, identity, measure, peers, prefill, roofline, run, table
from nanospec_fn import chat, program, prompts, revision, weights
from nanospec_fn.attention import Canonical
from tests import tiny

KEYS = {
    *("engine", "version", "config", "bs", "prompts", "out_tokens", "tok_s", "tpot_ms", "mean_accepted_len"),
    *("round_ms", "identical", "gpu", "torch", "commit", "model", "draft", "prompt_set", "run"),
}
PROMPTS = ["Hello", "What is it?", "ab ab ab"]
SMALL = ("--max-tokens", "13", "--runs", "2")


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On matrices this small, threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random target on disk with a byte-level tokenizer, which never emits its stop token 1 by chance."""
    path = tmp_path_factory.mktemp("bench") / "model"
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    tiny.write(path, raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def bench(folder, tmp_path, capsys, monkeypatch):
    """Call bench.run on three prompts: its exit code, the printed rows, stderr."""
    monkeypatch.setenv("NANOSPEC_COMMIT", "abc123")
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")

    def call(*argv):
        try:
            code = run.main([*argv, "--model", folder, "--prompts", str(file), "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, [strict(line) for line in captured.out.splitlines()], captured.err

    return call


def strict(line):
    def not_json(constant):
        raise AssertionError(f"{constant} in {line}")

    return json.loads(line, parse_constant=not_json)


def test_rows_hold_the_contract_and_right_figures(bench, tmp_path):
    """Bugs: the prefill's token counted as accepted (7.0 in place of 6.0) or the bonus left out (5.0); plain decoding
    compared with itself; one batch size's rows under another's."""
    code, rows, _ = bench("nanospec", "--config", "chain", "--draft", "frozen", "--bs", "1", "3", *SMALL)
    assert code == 0
    assert [(row["bs"], row["run"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]
    for row in rows:
        assert set(row) >= KEYS
        # 13 tokens: the prefill's one, then two rounds of five drafted tokens and a bonus.
        assert (row["out_tokens"], row["mean_accepted_len"], row["identical"]) == (39, 6.0, True)
        assert row["tok_s"] > 0
        assert row["round_ms"] == pytest.approx(6 * row["tpot_ms"])
        assert (row["engine"], row["config"], row["draft"], row["prompts"]) == ("nanospec", "chain", "frozen", 3)
        assert (row["commit"], row["gpu"], row["torch"]) == ("abc123", "cpu", torch.__version__)
    assert [strict(line) for line in (tmp_path / "out" / "nanospec-chain.jsonl").read_text().splitlines()] == rows


def test_every_benchmark_names_the_same_facts(folder, tmp_path, capsys, monkeypatch):
    """Bugs: a row without the code or the torch that it is of; "device" for "gpu"; a backend as it was asked for, which
    does not say which one it was; a line printed and not kept."""
    monkeypatch.setenv("NANOSPEC_COMMIT", "abc123")
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    model = ["--model", folder, "--draft", "frozen", "--device", "cpu"]
    ask = [*model, "--prompts", str(tmp_path / "prompts.txt"), "--out"]
    sizes = ["--shape", "1x2", "--max-tokens", "5"]
    assert acceptance.main([*ask, str(tmp_path / "a"), *sizes, "--bs", "3"]) == 0
    assert identity.main([*ask, str(tmp_path / "i"), "--shape", "1x2", "--bs", "2:2x5", "--score", "1"]) == 0
    assert run.main([*ask, str(tmp_path), "nanospec", "--config", "chain", "--bs", "1", *SMALL[:2], "--runs", "1"]) == 0
    assert prefill.main([*model, "--prompts", "2", "--tokens", "9", "--out", str(tmp_path)]) == 0
    found = {}
    for file in (tmp_path / "a", tmp_path / "i", tmp_path / "nanospec-chain.jsonl", tmp_path / "prefill-model.jsonl"):
        found[file.name] = [strict(line) for line in file.read_text().splitlines()]
    wanted = {"engine": "nanospec", "version": revision.version("nanospec"), "model": folder, "draft": "frozen"}
    wanted |= {"attend": "sdpa", "gpu": "cpu", "threads": 1}
    wanted |= {"torch": torch.__version__, "commit": "abc123", "gemm": ns.load(folder, device="cpu").cfg.gemm}
    rows = [row for rows in found.values() for row in rows]
    assert [{name: row[name] for name in wanted} for row in rows] == [wanted] * len(rows)
    assert [row.get("dtype") for row in rows] == ["float32"] * 5 + [None, "float32"]  # bench.run's keys are a contract
    assert {name: len(rows) for name, rows in found.items()} == dict(zip(found, (1, 4, 1, 1), strict=True))
    said = capsys.readouterr().out.splitlines()
    assert [strict(line) for line in said if line.startswith("{")] == rows


def test_rows_that_were_kept_can_be_read():
    """Bug: a reader that wants of old rows what new ones have."""
    results = Path(run.__file__).parent / "results"
    for folder in (results / "h200" / "mt-bench", results / "cpu" / "gsm8k"):
        rows = [row for file in folder.glob("*.jsonl") for row in table.read(file)]
        assert table.render(rows, [])
    rows = roofline.read(results / "h200" / "roofline-smollm2-in-llama-3.1-8b.jsonl")
    assert roofline.table(rows)
    assert not any(table.is_row(row) for row in table.read(results / "acceptance-h200.jsonl"))


def test_what_is_named_twice_is_measured_once(bench):
    """Bug: every row twice, and a file that bench.table refuses."""
    code, rows, _ = bench("nanospec", "nanospec", "--bs", "1", "3", "1", *SMALL)
    assert code == 0
    assert [(row["bs"], row["run"]) for row in rows] == [(1, 0), (1, 1), (3, 0), (3, 1)]


def test_a_folder_in_the_place_of_a_result_file_is_refused(bench, tmp_path):
    """Bug: a traceback."""
    file = tmp_path / "out" / "nanospec-nospec.jsonl"
    file.mkdir(parents=True)
    code, rows, err = bench("nanospec", "--bs", "1", *SMALL)
    assert (code, rows) == (2, [])
    assert err == f"python -m bench.run: error: argument --out: {file} is a folder, rows are kept in a file\n"


def test_a_shape_that_is_none_is_refused_under_its_option_before_a_model_is_loaded(bench, monkeypatch):
    monkeypatch.delattr(ns, "load")
    code, rows, err = bench("nanospec", "--like", "foo", *SMALL, "--bs", "1")
    assert (code, rows) == (2, [])
    assert err.startswith("python -m bench.run: error: argument --like: like must be one of llama-3.1-8b")


def test_present_rows_are_skipped_and_a_cut_off_row_is_measured_again(bench, tmp_path):
    """Bugs: a second call doubles every row; a row cut off by a crash spoils the file or counts as there."""
    argv = ("nanospec", "--config", "nospec", "--bs", "1", *SMALL)
    _, first, _ = bench(*argv)
    assert [(row["mean_accepted_len"], row["identical"], row["draft"]) for row in first] == [(1.0, True, "none")] * 2
    _, again, said = bench(*argv)
    assert again == []
    assert "nothing was measured" in said
    file = tmp_path / "out" / "nanospec-nospec.jsonl"
    for lost in (30, 1):  # part of a row, and its line's end alone
        file.write_text(file.read_text()[:-lost])
        _, again, _ = bench(*argv)
        assert [row["run"] for row in again] == [1]
    assert [strict(line)["run"] for line in file.read_text().splitlines()] == [0, 1]
    assert len(bench(*argv[:-1], "3")[1]) == 1
    assert len(bench(*argv, "--gemm", "library")[1]) == 2


@pytest.mark.parametrize("line", [b"{bad}\n", b"[1]\n", b'{"engine": "\xff"}\n', b'{"engine": "vllm"}\nno\n'])
def test_a_damaged_result_file_is_refused(bench, tmp_path, line):
    """Bugs: a traceback in place of the file's name; rows added behind what nobody can read."""
    file = tmp_path / "out" / "nanospec-nospec.jsonl"
    file.parent.mkdir()
    file.write_bytes(line)
    code, rows, err = bench("nanospec", "--bs", "1", *SMALL)
    assert (code, rows) == (2, [])
    assert f"nanospec-nospec.jsonl:{line.count(10)}: not a row of bench.run" in " ".join(err.split())
    assert file.read_bytes() == line


def test_a_prompt_that_does_not_fit_is_refused(bench, tmp_path):
    """Bug: the engine's own words, in a traceback, after the prompts before it were measured."""
    (tmp_path / "prompts.txt").write_text("a short one\n" + "a b " * 4000 + "\n")
    code, rows, err = bench("nanospec", "--bs", "1", *SMALL)
    assert (code, rows) == (2, [])
    assert "argument --prompts: prompt 1 has" in err


@pytest.mark.parametrize("gemm", ["onednn", "blocked"])
def test_a_cpus_matmul_is_refused_elsewhere(bench, monkeypatch, gemm):
    """Bug: the model of a GPU is told to use a product that only a CPU has, and dies within the first pass."""
    monkeypatch.setattr(weights, "pick_device", lambda device: torch.device("cuda"))
    code, rows, err = bench("nanospec", "--bs", "1", "--gemm", gemm)
    assert (code, rows) == (2, [])
    assert f"argument --gemm: {gemm} needs a CPU, got cuda" in err


def test_rows_name_the_attention_that_ran(bench, monkeypatch):
    """Bug: the label is derived from the device and not from the engine."""
    monkeypatch.setattr(program, "pick_attend", lambda engine, model: Canonical(engine.page_size))
    monkeypatch.setattr(measure.Nanospec, "measure", lambda *_: measure.Measured([[1]], 1.0, 1.0, 1.0, 1.0))
    assert [row["attend"] for row in bench("nanospec", "--bs", "1", "--runs", "1")[1]] == ["canonical"]


def test_identical_tells_a_difference(bench, monkeypatch):
    """Bug: `identical` is true whatever the engine emits, or null where it was to be checked."""
    honest = measure.timed

    def lossy(engine, requests, max_tokens):
        measured = honest(engine, requests, max_tokens)
        if engine.draft is not None:
            measured.outputs[1][5] += 1
        return measured

    monkeypatch.setattr(measure, "timed", lossy)
    argv = ("nanospec", "--config", "tree", "--draft", "ngram", "--bs", "2", "--max-tokens", "9", "--runs", "1")
    assert [row["identical"] for row in bench(*argv)[1]] == [False]
    assert [row["identical"] for row in bench(*argv, "--no-check", "--limit", "2")[1]] == [None]


def test_figures_of_nothing_are_null(bench):
    """Bug (C19): the mean over no rounds is written as NaN, or ends the run."""
    _, rows, _ = bench("nanospec", "--config", "chain", "--draft", "ngram", "--bs", "1", "--max-tokens", "1")
    assert [(row["mean_accepted_len"], row["round_ms"], row["tpot_ms"]) for row in rows] == [(None, None, None)] * 3
    assert rows[0]["out_tokens"] == 3


def test_transformers_emits_the_same_tokens(folder):
    """Bugs: left padding attended to; the peer runs past a stop token; other weights than this engine's."""
    model = ns.load(folder, device="cpu")
    plain = ns.generate(model, PROMPTS, ns.Sampling(max_tokens=12))
    # Declare a token of the first answer the stop token, so that one row of the batch ends early.
    peer = peers.Transformers(model)
    peer.stop = [plain[0].tokens[4]]
    want = ns.generate(model, PROMPTS, ns.Sampling(max_tokens=12, stop_ids=tuple(peer.stop), ignore_eos=True))
    requests = [chat.encode(model.tokenizer, prompt) for prompt in PROMPTS]
    measured = peer.measure(requests, bs=2, max_tokens=12)
    assert measured.outputs == [completion.tokens for completion in want]
    assert len(measured.outputs[0]) <= 5
    assert measured.seconds > 0
    assert measured.tpot_ms > 0


def test_engines_run_side_by_side(bench):
    _, rows, _ = bench("nanospec", "transformers", "--bs", "3", *SMALL)
    assert [(row["run"], row["engine"]) for row in rows] == [
        (run, engine) for run in (0, 1) for engine in ("nanospec", "transformers")
    ]
    assert {(row["engine"], row["identical"], row["mean_accepted_len"]) for row in rows} == {
        ("nanospec", True, 1.0),
        ("transformers", None, None),
    }
    assert {row["out_tokens"] for row in rows} == {39}
    assert [row["gemm"] is None for row in rows] == [False, True, False, True]  # this engine's backends, not theirs


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        *[((option, value), option) for option in ("--bs", "--max-tokens", "--runs", "--limit") for value in
          ("-1", "0", "1.5", "nan", "inf", "abc", str(10**30))],
        (("--config", "abc"), "--config"),
        (("--gemm", "abc"), "--gemm"),
        (("--draft", "abc"), "--draft"),
        (("--backend", "abc"), "--backend"),
        (("--device", "abc"), "--device"),
        (("--bs", "4"), "--bs"),
        (("--bs", "2", "--limit", "1"), "--bs"),
        (("--bs", "1", "--prompts", "absent.txt"), "absent.txt"),
    ],
)  # fmt: skip
def test_bad_values_are_refused_by_option(argv, named, folder, tmp_path, capsys, monkeypatch):
    """Bug (C20): a bad value dies after minutes of loading or measuring."""

    def load(*_, **__):
        raise AssertionError("a model was loaded before the arguments had been checked")

    monkeypatch.setattr(ns, "load", load)
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    with pytest.raises(SystemExit) as stop:
        run.main(["nanospec", "--model", folder, "--device", "cpu", "--prompts", str(file), *argv])
    err = capsys.readouterr().err
    assert (stop.value.code, len(err.splitlines())) == (2, 1)
    assert named in err


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (("abc",), "'abc' is not supported"),
        (("transformers", "--config", "tree", "--bs", "1"), "--config"),
        (("nanospec", "--config", "tree", "--draft", "none", "--bs", "1"), "--draft"),
        (("nanospec", "--config", "chain", "--draft", "eagle:/absent", "--bs", "1"), "/absent"),
    ],
)
def test_engines_and_drafts_that_cannot_be_are_refused(bench, argv, named):
    """Bug: a row of another engine or draft than the one asked for."""
    code, rows, err = bench(*argv)
    assert (code, rows) == (2, [])
    assert named in err


def test_prompts_come_from_nanospec_data(tmp_path, monkeypatch):
    """Bug: the second turn, the answer or the category taken for the prompt."""
    (tmp_path / "mt_bench_question.jsonl").write_text(
        '{"question_id": 81, "category": "writing", "turns": ["First?", "Second?"]}\n{"turns": ["Third?"]}\n'
    )
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "How many?", "answer": "#### 3"}\n')
    monkeypatch.setenv("NANOSPEC_DATA", str(tmp_path))
    assert prompts.load("mt-bench") == ["First?", "Third?"]
    assert prompts.load("mt-bench", 1) == ["First?"]
    assert prompts.load("gsm8k") == ["How many?"]
    (tmp_path / "own.jsonl").write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    assert prompts.load(str(tmp_path / "own.jsonl")) == ["a", "b"]


RECORDS = {
    '"a"': "a",
    "[1, 2]": [1, 2],
    '{"prompt": "a", "question": "b"}': "a",
    '{"prompt": "", "question": "b"}': "b",
    '{"prompt": {"role": "user"}, "turns": ["c", "d"]}': "c",
    '{"prompt": ["a", "b"]}': "a",  # MT-Bench as the hub has it
    '{"prompt": [1, 2]}': [1, 2],
    '{"turns": [[1, 2], [3]]}': [1, 2],
    '["a", "b"]': None,
    "[1, true]": None,
    "[]": None,
    '{"prompt": [[]], "answer": "a"}': None,
    "3": None,
}


@pytest.mark.parametrize("line", RECORDS)
def test_a_line_is_a_prompt_or_holds_one(line, tmp_path):
    """Bugs: two readers of one form that disagree; token ids taken for turns; the second key before the first."""
    file = tmp_path / "own.jsonl"
    file.write_text(f"\n{line}\n")
    assert list(prompts.lines(file)) == [(f"{file}:2", RECORDS[line])]
    if isinstance(RECORDS[line], str):
        assert prompts.read(file) == [RECORDS[line]]
    else:
        with pytest.raises(ValueError, match=r"own\.jsonl:2: has no text"):
            prompts.read(file)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"", "no prompt"),
        (b" \n", "no prompt"),
        (b"{", "bad.jsonl:1"),
        (b'{"prompt": "a"}\n[]', "bad.jsonl:2"),
        (b'{"turns": []}', "bad.jsonl:1"),
        (b"[]\n{", "bad.jsonl:1: has no text"),
        (b'"a"\n\n"\xff"', "bad.jsonl:3: not UTF-8"),
    ],
)
def test_bad_prompt_files_are_named(text, named, tmp_path):
    """Bug: a broken line is skipped, and two machines measure different prompts."""
    (tmp_path / "bad.jsonl").write_bytes(text)
    with pytest.raises(ValueError, match=named):
        prompts.load(str(tmp_path / "bad.jsonl"))


def test_a_name_that_no_file_can_have_names_none():
    """Bug: the system's "File name too long" as a traceback."""
    with pytest.raises(FileNotFoundError, match=r"^a{60}\.\.\.a{60}: no such file"):
        prompts.load("a" * 5000)


def test_absent_data_names_variable_and_file(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSPEC_DATA", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"gsm8k_test\.jsonl.*NANOSPEC_DATA"):
        prompts.load("gsm8k")
    monkeypatch.delenv("NANOSPEC_DATA")
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)  # as if it were not installed
    with pytest.raises(FileNotFoundError, match=r"NANOSPEC_DATA.*mt_bench_question\.jsonl"):
        prompts.load("mt-bench")

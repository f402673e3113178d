"""bench.table on rows made by hand: medians, ratios, what it refuses to mix, torn files, quoted figures."""

import json
from pathlib import Path

import pytest

from bench import run, table

RESULTS = Path(table.__file__).parent / "results"
BASE = json.loads(
    """{"version": "1", "run": 0, "prompts": 80, "max_tokens": 256, "gpu": "NVIDIA H100", "threads": 8, "torch": "2.11",
    "commit": "abc", "model": "M", "prompt_set": "mt-bench", "attend": null, "gemm": null, "draft": "none",
    "out_tokens": 100, "tpot_ms": 10.0, "mean_accepted_len": 1.0, "round_ms": 10.0, "identical": null}"""
)


def row(engine="nanospec", config="nospec", bs=1, tok_s=100.0, **changes):
    return BASE | {"engine": engine, "config": config, "bs": bs, "tok_s": tok_s} | changes


def lines(*rows):
    """The measured table as a dictionary a line, by column."""
    text = table.render(rows, [])
    header, _, *body = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line
    ]
    return [dict(zip(header, cells, strict=True)) for cells in body]


def test_medians_spread_and_ratios():
    """Bugs: a mean in place of the median; a ratio of another batch size's nospec, of another engine's, of a slower
    peer's, or of this engine's own line as a peer."""
    rows = [
        *(row(tok_s=t, run=i) for i, t in enumerate((90.0, 100.0, 200.0))),
        *(row(config="tree", draft="eagle:H", tok_s=t, run=i, identical=True, mean_accepted_len=3.5) for i, t in
          enumerate((290.0, 310.0, 250.0))),
        row(bs=8, tok_s=600.0),
        row("vllm", tok_s=125.0),
        row("vllm", "chain", tok_s=250.0, draft="eagle:H", round_ms=7.256),
        row("sglang", tok_s=145.0),
        row("sglang", bs=8, tok_s=800.0, mean_accepted_len=None),
    ]  # fmt: skip
    found = {(line["engine"], line["config"], line["batch"]): line for line in lines(*rows)}
    assert list(found) == [
        ("nanospec", "nospec", "1"),
        ("nanospec", "tree", "1"),
        ("sglang", "nospec", "1"),
        ("vllm", "nospec", "1"),
        ("vllm", "chain", "1"),
        ("nanospec", "nospec", "8"),
        ("sglang", "nospec", "8"),
    ]
    plain, tree = found["nanospec", "nospec", "1"], found["nanospec", "tree", "1"]
    assert (plain["tok/s"], tree["tok/s"]) == ("100.0 (90.0-200.0)", "290.0 (250.0-310.0)")
    assert (plain["against its nospec"], tree["against its nospec"]) == ("-", "2.90x")
    assert found["vllm", "chain", "1"]["against its nospec"] == "2.00x"
    assert [found[key]["against the best peer"] for key in found] == [
        *("0.40x", "1.16x", "0.58x", "0.50x", "1.00x", "0.75x", "1.00x"),
    ]
    assert (tree["tokens a round"], found["vllm", "chain", "1"]["round ms"]) == ("3.50", "7.26")
    assert found["sglang", "nospec", "8"]["tokens a round"] == "-"
    assert (plain["equals plain"], tree["equals plain"]) == ("-", "yes")


def test_one_run_that_differs_shows():
    """Bug: "yes" where some run's tokens were others."""
    rows = [row(config="tree", run=i, identical=i != 1) for i in range(3)]
    assert lines(*rows)[0]["equals plain"] == "NO"


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("tok_s", "fast", "a number"),
        ("tok_s", None, "a number"),
        ("mean_accepted_len", True, "a number"),
        ("bs", "1", "an integer"),
        ("run", None, "an integer"),
        ("config", ["tree"], "a string"),
        ("draft", {}, "one value"),
    ],
)
def test_a_value_that_no_table_can_show_is_named(field, value, said, tmp_path, capsys):
    """Bugs: a traceback; a row left out of a median without a word."""
    file = write(tmp_path / "a.jsonl", row() | {field: value})
    with pytest.raises(SystemExit) as stopped:
        table.main([str(file)])
    assert stopped.value.code == 2
    assert f"a.jsonl:1: {field} must be {said}, got {value!r}" in capsys.readouterr().err


def test_two_drafts_of_a_config_are_two_lines():
    """Bug: the median of a chain over n-grams and one over a head."""
    rows = [row(config="chain", draft=d, tok_s=t) for d, t in (("ngram", 110.0), ("eagle:H", 250.0))]
    assert [(line["draft"], line["tok/s"]) for line in lines(*rows)] == [("eagle:H", "250.0"), ("ngram", "110.0")]


def test_what_the_table_is_of_is_said():
    text = table.render([row(run=0), row(run=1), row("vllm", version="0.26.0"), row(config="tree", identical=True)], [])
    assert "NVIDIA H100, model M, mt-bench: 80 prompts x 256 tokens, greedy." in text
    assert "nanospec 1, vllm 0.26.0, torch 2.11; commit abc." in text
    assert "Medians of 1 to 2 runs" in text
    assert "vLLM has no EAGLE-3 tree" in text
    assert "vLLM" not in table.render([row(), row(config="tree")], [])


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"gpu": "NVIDIA H200"}, "rows mix gpu: NVIDIA H100, NVIDIA H200"),
        ({"model": "N"}, "rows mix model: M, N"),
        ({"prompt_set": "gsm8k"}, "rows mix prompt_set: gsm8k, mt-bench"),
        ({"commit": "def-dirty"}, "rows mix commit: abc, def-dirty"),
        ({"prompts": 40, "engine": "vllm"}, "rows of batch size 1 mix prompts: 40, 80"),
        ({"max_tokens": 64, "config": "tree"}, "rows of batch size 1 mix max_tokens: 256, 64"),
        ({"version": "2", "config": "tree"}, "rows of nanospec mix version: 1, 2"),
        ({"torch": "2.13", "bs": 8}, "rows of nanospec mix torch: 2.11, 2.13"),
        ({"gemm": "library", "bs": 8}, "rows of nanospec mix gemm: None, library"),
        ({}, "nanospec nospec, batch size 1: run 0 is there twice"),
    ],
)
def test_what_is_not_alike_is_refused_by_name(other, said):
    """Bug: a speed-up that is another machine's, another model's, other prompts' or another commit's."""
    with pytest.raises(ValueError, match=said):
        table.render([row(), row() | other], [])


def test_batch_sizes_may_take_part_of_the_prompts():
    assert len(lines(row(bs=1, prompts=4), row(bs=8, prompts=80))) == 2


@pytest.fixture
def call(tmp_path, capsys):
    def call(*argv):
        try:
            code = table.main([str(word) for word in argv])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def write(path, *rows, end="\n"):
    path.write_text("\n".join(map(json.dumps, rows)) + end)
    return path


def test_only_narrows(call, tmp_path):
    file = write(tmp_path / "a.jsonl", row(), row(gpu="cpu", tok_s=3.0))
    code, out, err = call(file)
    assert (code, out) == (2, "")
    assert "rows mix gpu: NVIDIA H100, cpu; choose with --only gpu=..." in err
    code, out, _ = call(file, "--only", "gpu=cpu", "--only", "bs=1")
    assert code == 0
    assert "| 3.0 " in out
    assert "100.0" not in out
    assert call(file, "--only", "gpu=tpu")[0] == 2
    assert "KEY=VALUE" in call(file, "--only", "gpu")[2]


def test_a_torn_last_line_is_left_out_and_any_other_named(call, tmp_path):
    """Bugs: one kill makes every result unreadable; a damaged line is dropped in silence."""
    file = write(tmp_path / "a.jsonl", row(tok_s=7.0), end='\n{"engine": "nanosp')
    code, out, err = call(file)
    assert (code, "| 7.0 " in out) == (0, True)
    assert "a.jsonl:2: torn" in err
    file.write_text('{"engine": "nanosp\n' + json.dumps(row()) + "\n")
    code, _, err = call(file)
    assert code == 2
    assert "a.jsonl:1: not valid JSON" in err
    keyless = row()
    del keyless["commit"]
    assert "a.jsonl:1: a row without 'commit'" in call(write(tmp_path / "a.jsonl", keyless))[2]
    code, _, err = call(tmp_path / "absent.jsonl")
    assert code == 2
    assert "absent.jsonl: no such file" in err


def test_other_benchmarks_rows_are_no_rows(call, tmp_path):
    """Bugs: `bench/results/*.jsonl` fails over a file of bench.roofline's or bench.acceptance's; it drops out without
    a word, or with a word for each of its rows."""
    file = write(tmp_path / "roofline-x.jsonl", {"phase": "draft", "ms": 1.0, "gpu": "other"}, [1])
    assert call(file)[0] == 2  # nothing at all
    mine, other = write(tmp_path / "a.jsonl", row()), write(tmp_path / "acceptance.jsonl", {"model": "M"})
    code, _, err = call(file, mine, other)
    assert (code, err) == (0, f"bench.table: left out, not of bench.run: {other}, {file}\n")
    assert call(mine)[::2] == (0, "")


def test_quoted_figures_are_labelled_and_enter_no_ratio(call, tmp_path):
    """Bug: a figure from elsewhere passes for one that was measured here, or a speed-up is taken against it."""
    quoted = {"engine": "vllm", "config": "nospec", "bs": 1, "tok_s": 999.0, "gpu": "other", "source": "a paper"}
    code, out, _ = call(write(tmp_path / "a.jsonl", row()), write(tmp_path / "quoted.jsonl", quoted))
    assert code == 0
    measured, elsewhere = out.split("Quoted, not measured here:")
    assert "999" not in measured
    assert "0.10x" not in measured
    assert "| 999.0 " in elsewhere
    assert "quoted [1]: a paper." in elsewhere
    # Narrowing by device leaves quoted figures in: they are of other devices, and say so.
    assert "999" in call(tmp_path / "a.jsonl", tmp_path / "quoted.jsonl", "--only", "gpu=NVIDIA H100")[1]


def test_the_repositorys_own_results_make_a_table(call):
    files = sorted(RESULTS.glob("*.jsonl"))
    code, out, err = call(*files)
    others = [str(file) for file in files if '"engine"' not in file.read_text()]
    assert (code, err) == (0, f"bench.table: left out, not of bench.run: {', '.join(others)}\n")
    assert "quoted [1]" in out
    for line in (RESULTS / "quoted.jsonl").read_text().splitlines():
        quoted = json.loads(line)
        assert quoted["source"]
        assert quoted["config"] in run.CONFIGS
        assert quoted["tok_s"] or quoted["round_ms"]

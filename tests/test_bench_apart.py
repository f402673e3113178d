"""vLLM and SGLang through bench.run: stand-ins that keep to the wheels' recorded signatures, in real processes."""

import inspect
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import apart, isolated, run, sglang_engine, vllm_engine
from tests import tiny
from tests.peers.fakes import behaviour

PEERS = Path(__file__).parent / "peers"
PROMPTS = ["Hello", "What is it?", "ab ab ab"]
JOB = isolated.Job("M", "D", 5, 4, "bfloat16", 8, 256, (1,), [[3, 4], [5, 6, 7]], 3)
TAPS = "eagle_aux_hidden_state_layer_ids"


def record(engine: str) -> dict:
    return json.loads((PEERS / f"{engine}-{apart.RELEASE[engine]}.json").read_text())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A tiny target with a tokenizer, and a head with an output head of its own."""
    path = tmp_path_factory.mktemp("apart")
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    tiny.write(path / "model", raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(path / "model")
    tiny.write_head(path / "head", raw, tiny.head_state(raw), "sglang")
    return path


@pytest.fixture
def bench(models, tmp_path, capsys, monkeypatch):
    """Call bench.run where the stand-ins are installed: its exit code, the printed rows, stderr."""
    for engine, version in apart.RELEASE.items():
        folder = tmp_path / f"{engine}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {engine}\nVersion: {version}\n")
    for path in (tmp_path, PEERS / "fakes"):
        monkeypatch.syspath_prepend(path)
    monkeypatch.setenv("PYTHONPATH", str(PEERS / "fakes"))
    monkeypatch.setenv("NANOSPEC_COMMIT", "abc123")
    monkeypatch.setattr(run.ns, "load", None)  # an engine apart has the device to itself
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")

    def call(*argv, mode="good"):
        monkeypatch.setenv("FAKE_ENGINE", mode)
        monkeypatch.setenv("FAKE_CHILD", str(tmp_path / "child"))
        common = ("--model", str(models / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "20")
        try:
            code = run.main([*argv, *common, "--out", str(tmp_path / "out")])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, [json.loads(line) for line in captured.out.splitlines()], captured.err

    return call


@pytest.mark.parametrize(
    "engine, config", [("vllm", "nospec"), ("vllm", "chain"), ("sglang", "chain"), ("sglang", "tree")]
)
def test_rows_of_an_engine_apart(bench, models, tmp_path, engine, config):
    """Bugs: rounds of earlier passes counted again; the prefill's token counted as accepted; a time per token over all
    tokens; keys that differ from this engine's rows, which a table could not put beside them."""
    draft = f"eagle:{models / 'head'}"
    argv = (engine, "--config", config, "--draft", draft, "--bs", "2", "3", "--runs", "2")
    code, rows, _ = bench(*argv)
    assert code == 0
    assert [(row["bs"], row["run"]) for row in rows] == [(2, 0), (2, 1), (3, 0), (3, 1)]
    answers = [behaviour.tokens(ids, 20) for ids in requests(models)]
    after_first = sum(map(len, answers)) - len(answers)
    rounds = after_first if config == "nospec" else sum(map(behaviour.rounds, answers))
    for row in rows:
        assert (row["engine"], row["version"], row["draft"]) == (
            engine,
            apart.RELEASE[engine],
            "none" if config == "nospec" else draft,
        )
        assert row["out_tokens"] == sum(map(len, answers))
        assert row["mean_accepted_len"] == pytest.approx(after_first / rounds)
        assert (row["tpot_ms"], row["round_ms"]) == (pytest.approx(2.0), pytest.approx(2.0 * after_first / rounds))
        assert (row["identical"], row["attend"], row["gemm"]) == (None, None, None)
    assert bench(*argv)[1] == []
    file = tmp_path / "out" / f"{engine}-{config}.jsonl"
    file.write_text(file.read_text()[:-30])
    assert [(row["bs"], row["run"]) for row in bench(*argv)[1]] == [(3, 1)]
    assert set(rows[0]) == set(own_row())


def requests(models):
    from nanospec_fn import chat

    tokenizer = chat.from_folder(models / "model")
    return [chat.encode(tokenizer, prompt) for prompt in PROMPTS]


def own_row() -> dict:
    """A row of this engine, from the repository's results."""
    return json.loads(
        (Path(run.__file__).parent / "results" / "cpu" / "nanospec-chain.jsonl").read_text().splitlines()[0]
    )


def test_a_hanging_engine_is_ended_with_all_that_it_started(bench, tmp_path, monkeypatch):
    """Bugs: a benchmark that never ends; a worker that keeps the device after its parent was killed."""
    child = tmp_path / "child"
    # An hour passes when the engine has started its worker, however slow this machine is.
    clock = SimpleNamespace(monotonic=lambda: 3601.0 if child.exists() and child.read_text() else 0.0)
    monkeypatch.setattr(isolated, "time", clock)
    code, rows, err = bench("sglang", "--bs", "2", mode="hang")
    assert (code, rows) == (1, [])
    assert "sglang nospec, batch size 2: took more than 3600 s, and gave 0 of 3 passes" in err
    assert "loading weights" in err  # the end of its log
    assert ends(int(child.read_text()))


def ends(pid: int) -> bool:
    """Whether a process does within a minute: a kill is delivered when the kernel gets to it, not when `kill` returns.

    One that has ended may wait to be reaped.
    """
    stat = Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            if stat.read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


def test_a_crash_names_the_engine_and_keeps_what_was_measured(bench):
    """Bugs: a crash that reads as an empty result; passes before it lost, and measured again."""
    code, rows, err = bench("vllm", "--bs", "2", mode="crash")
    assert (code, rows) == (1, [])
    assert "vllm nospec, batch size 2: ended with exit code 1 after 0 of 3 passes" in err
    assert "CUDA out of memory" in err
    code, rows, err = bench("vllm", "--bs", "2", mode="late")
    assert (code, [row["run"] for row in rows]) == (1, [0])
    assert "after 1 of 3 passes" in err
    code, rows, _ = bench("vllm", "--bs", "2")
    assert (code, [row["run"] for row in rows]) == (0, [1, 2])


def test_vllm_has_no_tree(bench):
    """Bug: a chain's figures under the name of a tree. A release with trees again has a parameter for them."""
    code, rows, err = bench("vllm", "--config", "tree", "--draft", "eagle:/absent", "--bs", "1")
    assert (code, rows) == (0, [])
    assert "vllm tree: skipped" in err
    trees = {name for name in record("vllm")["parameters"]["SpeculativeConfig"] if "tree" in name}
    assert trees <= {"suffix_decoding_max_tree_depth"}


def test_what_an_engine_cannot_load_is_refused(bench, tmp_path):
    """Bugs: SGLang leaves an output head that the file lacks uninitialised; vLLM reads taps of this form one layer
    early: both run, and accept next to nothing."""
    raw = tiny.config(vocab_size=258)
    state = tiny.head_state(raw)
    tapped = {"eagle_config": {TAPS: [1, 3, 5], "use_aux_hidden_state": True}}
    tiny.write_head(tmp_path / "tapped", raw, state, "sglang", **tapped)
    tiny.write_head(tmp_path / "nested", raw, state, "speculators")
    del state["lm_head.weight"]
    tiny.write_head(tmp_path / "rows", raw, state, "sglang", draft_vocab_size=32, lm_head="target_rows")
    for argv, named in (
        (("sglang", "--draft", f"eagle:{tmp_path / 'rows'}"), "lm_head.weight"),
        (("vllm", "--draft", f"eagle:{tmp_path / 'tapped'}"), TAPS),
        (("sglang", "--draft", f"eagle:{tmp_path / 'nested'}"), "speculators form"),
        (("sglang", "--draft", "ngram"), "got ngram"),
        (("sglang",), "got auto"),
        (("sglang", "--draft", "eagle:/absent"), "/absent"),
        (("sglang", "nanospec", "--draft", "ngram"), "measure it alone"),
    ):
        code, rows, err = bench(*argv, "--config", "chain", "--bs", "1")
        assert (code, rows) == (2, [])
        assert named in err


def test_sglang_gets_a_head_of_the_original_form_under_its_own_name(bench, tmp_path, monkeypatch):
    """Bug: SGLang picks a class by `architectures`, where this form has a target's: it loads that, and dies."""
    raw = tiny.config(vocab_size=258)
    head = tiny.write_head(tmp_path / "original", raw, tiny.head_state(raw), "original")
    assert json.loads((head / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    seen = []

    def look(module, job, limit):
        folder = Path(job.draft)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        seen.append((folder, json.loads(files.pop("config.json")), files))
        return iter([])

    monkeypatch.setattr(isolated, "run", look)
    monkeypatch.setenv("NANOSPEC_EAGLE", str(head))
    with pytest.raises(ValueError, match="zip"):  # a process that gave nothing and did not say so
        bench("sglang", "--config", "chain", "--bs", "1")
    folder, config, files = seen[0]
    assert config.pop("architectures") == ["LlamaForCausalLMEagle3"]
    assert json.loads((head / "config.json").read_text()) == config | {"architectures": ["LlamaForCausalLM"]}
    assert files == {"pytorch_model.bin": (head / "pytorch_model.bin").read_bytes()}
    assert not folder.exists()


def test_a_gguf_file_is_refused(bench, tmp_path, capsys):
    """Bug: the engine dies after a minute over a file that it cannot read."""
    raw = tiny.config()
    file = tiny.write_gguf(tmp_path / "m.gguf", raw, tiny.state_of(tiny.llama(raw)))
    with pytest.raises(SystemExit) as stop:
        run.main(["vllm", "--model", str(file), "--bs", "1", "--prompts", str(tmp_path / "prompts.txt")])
    assert stop.value.code == 2
    assert "argument --model: vllm loads a folder or a hub id" in capsys.readouterr().err


def test_another_device_than_the_first_is_refused(bench, monkeypatch):
    """Bug: rows that name one device and were measured on another."""
    monkeypatch.setattr(apart.weights, "pick_device", lambda name: torch.device("cuda:1"))
    code, rows, err = bench("vllm", "--bs", "1")
    assert (code, rows) == (2, [])
    assert "argument --device: vllm takes the first one" in err


@pytest.mark.parametrize("engine", apart.MODULE)
def test_an_absent_engine_is_named(engine, capsys):
    """Bug: a process dies over an import, minutes later."""
    with pytest.raises(SystemExit) as stop:
        run.main([engine, "--bs", "1"])
    assert stop.value.code == 2
    assert f"{engine} is not installed: pip install {engine}=={apart.RELEASE[engine]}" in capsys.readouterr().err


def test_every_argument_is_in_the_released_signatures():
    """Bug: a parameter that the release renamed: the run ends after its model has loaded, or takes a default."""
    known = record("vllm")["parameters"]
    options = vllm_engine.engine_options(JOB)
    assert set(options) <= {*known["LLM"], *known["EngineArgs"]}
    assert set(options["speculative_config"]) <= set(known["SpeculativeConfig"])
    assert set(vllm_engine.sampling_options(JOB)) <= set(known["SamplingParams"])
    assert {"prompts", "sampling_params", "use_tqdm"} <= set(known["LLM.generate"])
    assert vllm_engine.ROUNDS in record("vllm")["strings"]
    known = record("sglang")["parameters"]
    assert set(sglang_engine.engine_options(JOB)) <= set(known["ServerArgs"])
    assert set(sglang_engine.sampling_options(JOB)) <= set(known["SamplingParams"])
    assert {"input_ids", "sampling_params"} <= set(known["Engine.generate"])
    read = {"output_ids", "meta_info", "spec_verify_ct", "request_finished_ts", "prefill_finished_time"}
    assert read <= set(record("sglang")["strings"])
    assert all(f'"{name}"' in inspect.getsource(sglang_engine) for name in read)


def test_engines_are_asked_for_the_same_thing():
    """Bugs: a prefix cache that answers the second pass; another tree or depth than ours; drafts without a draft."""
    vllm, sglang = vllm_engine.engine_options(JOB), sglang_engine.engine_options(JOB)
    assert (vllm["max_num_seqs"], sglang["max_running_requests"]) == (8, 8)
    assert (vllm["enable_prefix_caching"], sglang["disable_radix_cache"]) == (False, True)
    assert vllm["speculative_config"] == {"method": "eagle3", "model": "D", "num_speculative_tokens": 5}
    speculative = {key.removeprefix("speculative_"): value for key, value in sglang.items() if "speculative" in key}
    assert speculative == {
        "algorithm": "EAGLE3",
        "draft_model_path": "D",
        "num_steps": 5,
        "eagle_topk": 4,
        "num_draft_tokens": run.CONFIGS["tree"].nodes + 1,
    }
    for module in (vllm_engine, sglang_engine):
        assert not [key for key in module.engine_options(replace(JOB, draft=None)) if "spec" in key]
        assert module.sampling_options(JOB)["stop_token_ids"] == [1]


def test_figures_by_hand():
    """Bug: a request of one token divides by zero, or counts as infinitely fast."""
    answers = [isolated.Answer([1] * 7, 0.3), isolated.Answer([1] * 4, 0.3), isolated.Answer([1], 0.0)]
    found = isolated.figures(answers, 3, 2.0)
    assert found["tpot_ms"] == pytest.approx((50 + 100) / 2)
    assert found["round_ms"] == pytest.approx(600 / 3)
    assert found["mean_accepted_len"] == pytest.approx(9 / 3)
    assert isolated.figures(answers, None, 2.0)["mean_accepted_len"] == 1.0
    assert os.path.samefile(isolated.ROOT, Path(__file__).parents[1])

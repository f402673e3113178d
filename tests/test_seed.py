"""The commands and names of the original project's README, which people know: each parses, runs or is there."""

import argparse
import importlib.util
import json
import shlex
from pathlib import Path

import pytest

import bench.run
import bench.table
import nanospec_fn.__main__
from nanospec_fn import arguments, sampling
from rl import grpo_options, policy_loss
from tests import tiny

ROOT = Path(__file__).parents[1]
# The `modal run` ones are in tests/test_modal.py.
COMMANDS = """\
python -m rl.grpo --task toy --steps 20 --draft frozen --acceptance power --alpha 0.3 --correction exact
python -m bench.table bench/results/*.jsonl
python -m bench.run nanospec --config tree --bs 1 8 32 --max-tokens 256 --runs 3
python -m bench.run sglang   --config chain
""".splitlines()
PARSERS = {
    "rl.grpo": grpo_options.build_parser,
    "bench.run": bench.run.build_parser,
    "bench.table": bench.table.build_parser,
}


@pytest.mark.parametrize("command", COMMANDS)
def test_module_commands_parse(command):
    """Bug: a command that people have in their notes ends with "unrecognized arguments"."""
    module, *words = shlex.split(command)[2:]
    assert importlib.util.find_spec(module)
    args = PARSERS[module]().parse_args(words)
    if module == "rl.grpo":
        assert (args.task, args.steps, args.draft, args.acceptance, args.alpha, args.correction) == (
            *("toy", 20, "frozen", "power", 0.3, "exact"),
        )
        grpo_options.parse(words)  # the combination too
    elif module == "bench.run" and "nanospec" in words:
        assert (args.config, args.bs, args.max_tokens, args.runs) == ("tree", [1, 8, 32], 256, 3)
    elif module == "bench.run":
        assert (args.engine, args.config, args.bs) == (["sglang"], "chain", [1, 8, 32])


def test_extras_exist():
    text = (ROOT / "pyproject.toml").read_text()
    assert "\ntest = [" in text
    assert "\nmodal = [" in text


def test_the_table_command_runs(capsys, monkeypatch):
    """`bench/results/*.jsonl`, as a shell would write it out."""
    monkeypatch.chdir(ROOT)
    assert bench.table.main([str(path) for path in sorted(Path("bench/results").glob("*.jsonl"))]) == 0
    assert "\n| engine" in capsys.readouterr().out


def test_vllm_tree_is_skipped(capsys):
    assert bench.run.main(["vllm", "--config", "tree"]) == 0
    assert "vllm tree: skipped" in capsys.readouterr().err


def test_names_that_it_tells_of_are_there():
    """Bug: a file, rule, correction, engine or configuration under another name."""
    for file in ("tests/diag_numerics.py", "tests/test_behavior.py", "rl/grpo.py", "modal_app.py"):
        assert (ROOT / file).exists(), file
    assert set(sampling.RULES) == {"exact", "relaxed", "power"}
    assert set(policy_loss.CORRECTIONS) == {"none", "exact", "clipped", "icepop", "m2po"}
    shapes = {name: spec and (spec.top_k, spec.depth) for name, spec in bench.run.CONFIGS.items()}
    assert {"nospec": None, "chain": (1, 5), "tree": (4, 5)}.items() <= shapes.items()


@pytest.fixture
def knobs(tmp_path, monkeypatch):
    """Every variable set, away from its default."""
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    tiny.write(tmp_path / "model", raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}}
    tiny.write_head(tmp_path / "head", raw, tiny.head_state(raw), "sglang", **taps)
    values = {"MODEL": tmp_path / "model", "EAGLE": tmp_path / "head", "DEVICE": "cpu", "BACKEND": "sdpa", "MAX_NEW": 7}
    for name, value in values.items():
        monkeypatch.setenv(f"NANOSPEC_{name}", str(value))
    return values


def test_environment_knobs_are_honoured(knobs, capsys):
    """Bug: a variable that is read nowhere: the default model, no head, another device or length, and no word of it."""
    main = nanospec_fn.__main__.main
    assert main(["generate", "Hello", "--json"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert len(drafted["tokens"]) == 7  # MODEL, DEVICE, BACKEND and EAGLE fit together: the head loads for this model
    assert main(["generate", "Hello"]) == 0
    assert f"draft eagle:{knobs['EAGLE']}" in capsys.readouterr().out
    args = argparse.Namespace(model="auto", device="auto", backend=None)
    arguments.check_engine(arguments.Parser(), args)
    assert args.backend == "sdpa"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("MODEL", "/absent", "/absent"),
        ("EAGLE", "/absent", "/absent"),
        ("DEVICE", "cuda:99", "NANOSPEC_DEVICE"),
        ("BACKEND", "triton", "NANOSPEC_BACKEND"),
        ("MAX_NEW", "0", "NANOSPEC_MAX_NEW"),
    ],
)
def test_each_knob_is_read(name, value, said, knobs, monkeypatch, capsys):
    """Bug: one variable's effect is another's, or nobody's."""
    monkeypatch.setenv(f"NANOSPEC_{name}", value)
    with pytest.raises(SystemExit) as stop:
        nanospec_fn.__main__.main(["generate", "Hello"])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("backend", ["auto", "sdpa", "flashinfer"])
def test_backends_of_the_knob_are_known(backend, monkeypatch, capsys):
    """flashinfer needs a CUDA device, which is what it says then; another name is refused as unknown."""
    monkeypatch.setenv("NANOSPEC_BACKEND", backend)
    args = argparse.Namespace(model="auto", device="cpu", backend=None)
    if backend != "flashinfer":
        arguments.check_engine(arguments.Parser(), args)
        assert args.backend == backend
        return
    with pytest.raises(SystemExit):
        arguments.check_engine(arguments.Parser(), args)
    assert "flashinfer needs a CUDA device" in capsys.readouterr().err

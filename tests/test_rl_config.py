"""The configs of the trainers: the command line makes them, and Python makes the same."""

import dataclasses
import json
from pathlib import Path

import pytest

import nanospec_fn as ns
from rl import grpo, grpo_options, rollouts, train_eagle, train_options
from rl.grpo_config import GrpoConfig
from rl.ranks import Ranks
from rl.train_config import TrainConfig
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
PAIRS = {"grpo": (grpo_options.build_parser, GrpoConfig), "train_eagle": (train_options.build_parser, TrainConfig)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    raw = tiny.config("smollm2-135m", num_hidden_layers=6)
    return tiny.write(tmp_path_factory.mktemp("target"), raw, tiny.state_of(tiny.llama(raw)))


@pytest.mark.parametrize("name", PAIRS)
def test_every_option_is_a_field_and_every_field_an_option(name):
    """Catches: a field that the command line cannot set, an option that nothing reads."""
    build, config = PAIRS[name]
    options = {action.dest for action in build()._actions} - {"help"}
    assert options == {field.name for field in dataclasses.fields(config)}


def test_the_command_line_has_the_defaults_of_the_config(tmp_path):
    """Catches: a default that is listed twice and changed once, a list where a config is hashable."""
    out = tmp_path / "run"
    assert grpo_options.parse(["--device", "cpu", "--out", str(out)]) == GrpoConfig(out=out, device="cpu")
    parsed = train_options.parse(["--out", str(out), "--prompts", "self:3", "self:2"])
    assert parsed == TrainConfig(out=out, prompts=("self:3", "self:2"))
    assert hash(parsed) == hash(TrainConfig(out=out, prompts=("self:3", "self:2")))


def test_the_page_s_python_is_its_first_command(tmp_path, monkeypatch):
    """Catches: an example that no longer runs, or runs something else than it says."""
    page = (Path(__file__).parent.parent / "docs/rl.md").read_text()
    command = page[page.index("python -m rl.grpo") :].split("\n")[0].split()[3:]
    monkeypatch.chdir(tmp_path)  # where runs/power is new
    asked: list[GrpoConfig] = []
    monkeypatch.setattr(grpo, "run", lambda config, ranks: asked.append(config))
    exec(page[page.index("```python\n") + 10 :].split("```")[0], {})
    parsed = grpo_options.parse(command)  # micro_tokens: the device's
    assert asked == [dataclasses.replace(parsed, micro_tokens=GrpoConfig.micro_tokens)]


def test_grpo_from_python_is_the_command_line_s_run(folder, tmp_path):
    """Catches: a value that only the parser fills in. The checkpoints are equal as bytes, what they belong to too."""
    a, b = tmp_path / "a", tmp_path / "b"
    config = GrpoConfig(a, str(folder), device="cpu", steps=2, prompts=2, group=2, slots=4, max_tokens=5, quiet=True)
    grpo.run(dataclasses.replace(config, draft="frozen", acceptance="power", alpha=0.3), Ranks())
    text = f"--model {folder} --device cpu --steps 2 --prompts 2 --group 2 --max-tokens 5 --quiet --out {b}"
    text += " --draft frozen --acceptance power --alpha 0.3"
    assert grpo.main(text.split()) == 0
    assert (a / "state.safetensors").read_bytes() == (b / "state.safetensors").read_bytes()
    header, other = (json.loads((out / "log.jsonl").read_text().splitlines()[0])["header"] for out in (a, b))
    assert header.pop("options") | {"out": ""} == other.pop("options") | {"out": ""}
    assert header == other


def test_head_training_from_python_is_the_command_line_s_run(folder, tmp_path):
    """Catches: as above, for a head."""
    sizes = {"steps": 2, "batch": 2, "unroll": 2, "max_len": 40, "response_tokens": 8, "held_out": 2, "draft_vocab": 64}
    made, prompts = tmp_path / "rollouts.npz", [[i + 1, 2 * i + 3, 5] for i in range(20)]
    drawn = rollouts.complete(ns.load(str(folder), device="cpu"), prompts, (0.0, 1.0), 8, 40, ns.EngineConfig(), 0)
    rollouts.save(made, drawn, {})
    a, b = tmp_path / "a", tmp_path / "b"
    train_eagle.run(TrainConfig(a, str(folder), "cpu", data=made, taps=(1, 3, 5), quiet=True, **sizes))
    options = [word for name, value in sizes.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    text = f"--model {folder} --device cpu --data {made} --taps 1 3 5 --quiet --out {b}"
    assert train_eagle.main([*text.split(), *options]) == 0
    for name in ("train.safetensors", "model.safetensors", "config.json"):
        assert (a / name).read_bytes() == (b / name).read_bytes()


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"correction": "icepopp"}, "correction must be one of none, exact"),
        ({"loss": "ppo"}, "loss must be one of dapo"),
        ({"task": "chess"}, "task must be one of toy"),
        ({"group": 0}, "group must be at least 1, got 0"),
        ({"icepop_low": 0.9, "icepop_high": 0.5}, "icepop_low 0.9 is above icepop_high 0.5"),
    ],
)
def test_a_config_that_means_nothing_is_refused_by_its_field(changes, said, tmp_path, monkeypatch):
    """Catches: a correction of another name that silently means `exact`."""
    monkeypatch.delattr(ns, "load")
    with pytest.raises(ValueError, match=f"^{said}"):
        grpo.run(GrpoConfig(tmp_path, **changes), Ranks())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"lm_head": "tied"}, "lm_head must be one of own, target-rows"),
        ({"head_dtype": "fp8"}, "head_dtype must be one of fp32"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_a_head_s_config_is_refused_before_training(changes, said, tmp_path, monkeypatch):
    """Catches: a type of the head's file that is only seen to be wrong when it is written, hours later."""
    monkeypatch.delattr(ns, "load")
    with pytest.raises(ValueError, match=f"^{said}"):
        train_eagle.run(TrainConfig(tmp_path, **changes))

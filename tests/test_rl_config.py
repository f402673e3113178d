"""The configs of the trainers: the command line makes them, and Python makes the same."""

import dataclasses
import json
import math
import re
from pathlib import Path

import pytest
import torch

import nanospec_fn as ns
from rl import grpo, grpo_config, grpo_options, rollouts, train_eagle, train_options
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
        ({"group": 0}, "group must be an integer from 1 to 2147483647, got 0"),
        ({"prompts": -4}, "prompts must be an integer from 1"),
        ({"lr": math.nan}, "lr must be a number above 0 and at most 1, got nan"),
        ({"lr": math.inf}, "lr must be a number"),
        ({"temperature": 0.0}, "temperature must be a number above 0"),
        ({"correction": "icepop", "icepop_high": 0.5}, "icepop_high must be a number at least 1"),
        ({"draft": "medusa"}, "draft must be one of none, frozen, eagle, eagle:X, model:X, got 'medusa'"),
        ({"draft": "eagle:"}, "draft must be one of"),
        ({"draft": "frozen:x"}, "draft must be one of"),
        ({"draft": "ngram"}, "draft must be one of"),
        ({"draft": "eagle", "model": "/nowhere"}, "draft: eagle: no head comes with model '/nowhere'"),
        ({"draft": "model:/nowhere/at-all"}, "draft: /nowhere/at-all"),
        ({"model": ""}, "model is empty"),
        ({"acceptance": "power"}, "acceptance: power needs a draft to accept from"),
        ({"acceptance": "best"}, "acceptance"),
        ({"draft": "frozen", "alpha": 0.3}, "alpha: needs acceptance power, got exact"),
        ({"draft": "frozen", "acceptance": "power", "alpha": math.nan}, "alpha must be a number from 1e-30 to 1"),
        ({"draft": "frozen", "acceptance": "relaxed"}, "acceptance 'relaxed' with tau=1"),
        ({"draft": "frozen", "draft_train": True}, "draft_train: needs draft eagle, got frozen"),
        ({"is_clip": 3.0}, "is_clip: needs correction clipped, got exact"),
        ({"draft": "frozen", "spec_topk": 300}, "spec_topk must be an integer from 1 to 256, got 300"),
        ({"draft": "frozen", "spec_depth": 0}, "spec_depth must be an integer from 1 to 256, got 0"),
        ({"slots": 5000}, "slots must be an integer from 1 to 4096, got 5000"),
        ({"deterministic": True}, "deterministic: call rl.grpo_options.deterministic"),
    ],
)
def test_a_config_that_means_nothing_is_refused_by_its_field(changes, said, tmp_path, monkeypatch):
    """Catches: a correction of another name that silently means `exact`."""
    monkeypatch.delattr(ns, "load")
    monkeypatch.delenv("NANOSPEC_MODEL", raising=False)
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        grpo.run(GrpoConfig(tmp_path, **changes), Ranks())


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"lm_head": "tied"}, "lm_head must be one of own, target-rows"),
        ({"head_dtype": "fp8"}, "head_dtype must be one of fp32"),
        ({"batch": 0}, "batch must be an integer from 1 to 2147483647, got 0"),
        ({"draft_vocab": 32001}, "draft_vocab: at most 32000, got 32001"),
        ({"unroll": 33}, "unroll: at most 32, got 33"),
        ({"max_len": 6}, "unroll: 5 steps need sequences of more than 6 tokens"),
        ({"taps": (3, 2)}, "taps: must ascend"),
        ({"taps": (0, 2)}, "taps: must ascend from 1"),
        ({"temperatures": ()}, "temperatures must be numbers from 0 to 100"),
        ({"temperatures": (0.0, math.nan)}, "temperatures must be numbers from 0 to 100"),
        ({"slots": 5000}, "slots must be an integer from 1 to 4096"),
        ({"clip": math.inf}, "clip must be a number"),
        ({"model": ""}, "model is empty"),
        ({}, "prompts: required, as the data does not exist yet"),
        ({"prompts": ("self",)}, "prompts: 'self': self needs a number"),
        ({"prompts": ("gsm8k_test.jsonl:5",)}, "prompts: 'gsm8k_test.jsonl:5': a test set is not for training"),
        ({"data": Path("/nowhere.npz")}, "data: /nowhere.npz does not exist"),
    ],
)
def test_a_head_s_config_is_refused_before_training(changes, said, tmp_path, monkeypatch):
    """Catches: a type of the head's file that is only seen to be wrong when it is written, hours later."""
    monkeypatch.delattr(ns, "load")
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        train_eagle.run(TrainConfig(tmp_path, **changes))


FIELDS = [(config, field) for config in (GrpoConfig, TrainConfig) for field in dataclasses.fields(config)]


@pytest.mark.parametrize("config, field", FIELDS, ids=lambda x: x.name if isinstance(x, dataclasses.Field) else "")
def test_a_field_of_another_type_is_refused_by_its_name(config, field, tmp_path):
    """Catches: GrpoConfig(steps="5"), or a folder given as text, that ends in an error of Python's, or in none."""
    wrong: list[object] = [object(), b"x", [1], {}]
    wrong += [] if field.type is str else ["5"]
    wrong += [] if field.type is bool else [True]
    wrong += [1.5] if field.type is int else []
    wrong += [] if "None" in str(field.type) else [None]
    for value in wrong:
        with pytest.raises(ValueError, match=f"^{field.name} must be of type"):
            dataclasses.replace(config(tmp_path), **{field.name: value}).validate()
    config(tmp_path).validate()


def test_whole_numbers_do_for_reals(tmp_path):
    """Catches: lr=1, which means 1.0, taken for an error."""
    config = GrpoConfig(tmp_path, temperature=1, kl_beta=0)
    config.validate()
    assert (grpo_config.sampling(config).temperature, grpo_config.recipe(config).kl_beta) == (1.0, 0.0)
    training = TrainConfig(tmp_path, clip=2, temperatures=(0, 1))
    training.validate()
    assert (training.clip, training.temperatures) == (2.0, (0.0, 1.0))


RELAXED = {"draft": "frozen", "acceptance": "relaxed"}
BESIDE: dict[str, dict[str, object]] = {  # what a field needs to mean something
    "alpha": {"draft": "frozen", "acceptance": "power"},
    "tau": RELAXED | {"accept_topk": 1},
    "accept_topk": RELAXED | {"tau": 0.5},
    "is_clip": {"correction": "clipped"},
    "icepop_low": {"correction": "icepop"},
    "icepop_high": {"correction": "icepop"},
    "m2po_tau": {"correction": "m2po"},
    "draft_refresh": {"draft": "frozen"},
    "draft_lr": {"draft": "eagle", "draft_train": True},
    "spec_topk": {"draft": "frozen"},
    "spec_depth": {"draft": "frozen"},
}
NUMBERS = ["-1", "0", "1e-9", "0.5", "1", "1.5", "2", "33", "1e7", "2147483647", "2147483648", "nan", "inf", "1e10"]
COUNTED = [(config, field) for config, field in FIELDS if field.type in (int, float, int | None)]


@pytest.mark.parametrize("config, field", COUNTED, ids=lambda x: x.name if isinstance(x, dataclasses.Field) else "")
def test_python_and_the_command_line_take_the_same_numbers(config, field, tmp_path, monkeypatch, capsys):
    """Catches: a range that the parser alone knows, so that Python takes what the command line refuses."""
    beside = BESIDE.get(field.name, {}) if config is GrpoConfig else {}
    words = [w for n, value in beside.items() for w in (f"--{n.replace('_', '-')}", str(value)) if w != "True"]
    parse = grpo_options.parse if config is GrpoConfig else train_options.parse
    kind = float if field.type is float else int
    taken = []
    for text in NUMBERS:
        try:
            parse(["--out", str(tmp_path / "x"), *words, f"--{field.name.replace('_', '-')}={text}"])
            shell = True
        except SystemExit:
            shell = False
        try:
            config(tmp_path / "x", **beside | {field.name: kind(text)}).validate()
            python = True
        except ValueError:
            python = False
        assert shell == python, (field.name, text, capsys.readouterr().err)
        taken.append(python)
    assert {*taken} == {True, False}, "values of one kind alone were tried"


@pytest.mark.parametrize(
    "words, said",
    [
        (
            "--draft frozen --acceptance relaxed",
            "--acceptance: acceptance 'relaxed' with tau=1 and --accept-topk=0 accepts nothing; "
            "lower tau or raise --accept-topk",
        ),
        ("--draft frozen --spec-depth 200 --spec-topk 200", "--spec-topk: spec_topk * --spec-depth"),
        ("--lr 0", "--lr: must be a number above 0 and at most 1, got '0'"),
        ("--icepop-low -1", "--icepop-low: must be a number from 0 to 1, got '-1'"),
    ],
)
def test_an_error_has_the_options_names_and_the_range_s_ends(words, said, capsys):
    """Bug: "raise accept_top_k", which no option is called; "from 0", where 0 is refused."""
    with pytest.raises(SystemExit):
        grpo_options.parse(words.split())
    assert f"argument {said}" in capsys.readouterr().err


def test_a_given_option_is_known_by_being_given(capsys):
    """Catches: --draft-lr 1e-4, the default, that passes where 2e-4 is refused."""
    for value in ("1e-4", "2e-4"):
        with pytest.raises(SystemExit):
            grpo_options.parse(["--draft-lr", value])
        assert "argument --draft-lr: needs --draft-train True, got False" in capsys.readouterr().err
    assert grpo_options.parse(["--draft", "eagle", "--draft-train", "--draft-lr", "1e-4"]).draft_lr == 1e-4


def test_a_run_that_is_there_is_not_written_over_from_python(folder, tmp_path):
    """Catches: a second run whose lines go behind those of the first."""
    sizes = {"device": "cpu", "steps": 1, "prompts": 1, "group": 2, "slots": 2, "max_tokens": 4, "quiet": True}
    config = GrpoConfig(tmp_path / "run", str(folder), **sizes)
    grpo.run(config, Ranks())
    before = (tmp_path / "run/log.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"^out: .*run holds a run"):
        grpo.run(config, Ranks())
    assert (tmp_path / "run/log.jsonl").read_bytes() == before
    with pytest.raises(ValueError, match=r"^resume: .* belongs to a run with lr 5e-05, not 0.5"):
        grpo.run(dataclasses.replace(config, lr=0.5, resume=True), Ranks())


def test_deterministic_is_refused_or_works(folder, tmp_path):
    """Catches: a field that does nothing, of a run that its log calls repeatable."""
    sizes = {"device": "cpu", "steps": 1, "prompts": 1, "group": 2, "slots": 2, "max_tokens": 4, "quiet": True}
    config = GrpoConfig(tmp_path / "run", str(folder), deterministic=True, **sizes)
    with pytest.raises(ValueError, match=r"^deterministic: call"):
        grpo.run(config, Ranks())
    assert not (tmp_path / "run").exists()
    try:
        grpo_options.deterministic()
        grpo.run(config, Ranks())
    finally:
        torch.use_deterministic_algorithms(False)
    assert json.loads((tmp_path / "run/log.jsonl").read_text().splitlines()[0])["header"]["options"]["deterministic"]

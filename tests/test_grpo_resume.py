"""What a GRPO run leaves behind when it ends early, and what --resume makes of it, or refuses in one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nanospec_fn.struct import bytes_equal
from rl import grpo, grpo_options, run_files
from rl.ranks import Ranks
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("tinyllama-1.1b")
STARTS = "python -m rl.grpo: no checkpoint yet: starting at step 1\n"


class Killed(Exception):
    """A run that ends where it stands."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tiny.write(tmp_path_factory.mktemp("target"), RAW, tiny.state_of(tiny.llama(RAW)))


def words_of(model: Path, out: Path, more: str = "", steps: int = 2) -> list[str]:
    text = f"--model {model} --device cpu --out {out} --steps {steps} --prompts 2 --group 2 --max-tokens 4 --quiet"
    return [*text.split(), *more.split()]


def train(model: Path, out: Path, more: str = "", steps: int = 2, end: int = 0) -> grpo.RunState | None:
    """A run; with `end` it is killed before the rollouts of that step."""

    def on(what: str, step: int) -> None:
        if (what, step) == ("rollout", end):
            raise Killed

    config = grpo_options.parse(words_of(model, out, more, steps))
    if not end:
        return grpo.run(config, Ranks(), on)
    with pytest.raises(Killed):
        grpo.run(config, Ranks(), on)
    return None


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(folder, tmp_path_factory) -> Path:
    """A run of two steps that is over."""
    out = tmp_path_factory.mktemp("done")
    train(folder, out)
    return out


def copy_of(done: Path, out: Path) -> Path:
    out.mkdir()
    for name in ("log.jsonl", "state.safetensors"):
        (out / name).write_bytes((done / name).read_bytes())
    return out


def test_without_a_checkpoint_the_log_says_which_run_it_is(folder, tmp_path, capsys):
    """Bug: a run killed before its first checkpoint went on as another one under the old header."""
    out = tmp_path / "run"
    train(folder, out, end=3, steps=5)
    assert [line.get("step") for line in lines_of(out)] == [None, 1, 2]
    before = (out / "log.jsonl").read_bytes()
    more = "--resume --lr 1e-2 --seed 7 --draft frozen --acceptance power --alpha 0.3"
    assert grpo.main(words_of(folder, out, more)) == 2
    differ = ["acceptance 'exact', not 'power'", "alpha 1.0, not 0.3", "draft 'none', not 'frozen'"]
    differ += ["lr 5e-05, not 0.01", "seed 0, not 7"]
    said = f"argument --resume: {out / 'log.jsonl'}: belongs to a run with {'; '.join(differ)}\n"
    assert capsys.readouterr().err == f"python -m rl.grpo: error: {said}"
    assert (out / "log.jsonl").read_bytes() == before
    again = train(folder, out, "--resume")
    assert capsys.readouterr().err == STARTS
    header, *steps = lines_of(out)
    assert header["header"]["options"]["steps"] == 2  # not the old one's 5
    assert [(line["step"], line["resumed"]) for line in steps] == [(1, False), (2, False)]
    assert bytes_equal(again, train(folder, tmp_path / "whole"))


def test_without_a_checkpoint_other_weights_and_ranks_are_refused(folder, tmp_path):
    model = tiny.write(tmp_path / "model", RAW, tiny.state_of(tiny.llama(RAW)))
    train(model, tmp_path / "run", end=2)
    header = lines_of(tmp_path / "run")[0]["header"]
    tiny.write(model, RAW, tiny.state_of(tiny.llama(RAW, seed=1)))
    with pytest.raises(ValueError, match=r"log.jsonl: belongs to a run with weights"):
        train(model, tmp_path / "run", "--resume")
    (tmp_path / "run/log.jsonl").write_text(json.dumps({"header": header | {"ranks": 2}}) + "\n")
    with pytest.raises(ValueError, match=r"log.jsonl: belongs to a run with ranks 2, not 1; weights"):
        train(model, tmp_path / "run", "--resume")


def test_a_run_that_is_over_says_so(folder, done, tmp_path, capsys):
    out = copy_of(done, tmp_path / "run")
    assert grpo.main(words_of(folder, out, "--resume")) == 0
    assert capsys.readouterr().err == "python -m rl.grpo: already at step 2\n"
    assert (out / "log.jsonl").read_bytes() == (done / "log.jsonl").read_bytes()


@pytest.mark.parametrize("end, left", [(2, "no checkpoint yet: --resume starts at step 1"),
                                       (3, "--resume goes on from the last checkpoint")])  # fmt: skip
def test_an_interrupt_says_what_there_is_to_go_on_from(folder, tmp_path, capsys, monkeypatch, end, left):
    """Bug: a checkpoint promised that had not been written."""
    step = grpo.train_step_

    def interrupted(setting, state):
        if state.step + 1 == end:
            raise KeyboardInterrupt
        return step(setting, state)

    monkeypatch.setattr(grpo, "train_step_", interrupted)
    assert grpo.main(words_of(folder, tmp_path / "run", "--save-every 2", 4)) == 1
    assert capsys.readouterr().err == f"python -m rl.grpo: interrupted; {left}\n"


def test_a_log_without_a_header_gets_one_and_keeps_its_steps(folder, done, tmp_path):
    out = copy_of(done, tmp_path / "run")
    _, *steps = (out / "log.jsonl").read_bytes().splitlines(keepends=True)
    (out / "log.jsonl").write_bytes(b"".join(steps))
    train(folder, out, "--resume", 3)
    header, *found = lines_of(out)
    assert header["header"]["options"]["steps"] == 3
    assert [(line["step"], line["resumed"]) for line in found] == [(1, False), (2, False), (3, True)]
    (out / "state.safetensors").unlink()
    (out / "log.jsonl").write_bytes(b"".join(steps))
    with pytest.raises(ValueError, match=r"resume: .*log.jsonl:1: no header, so nothing says which run"):
        train(folder, out, "--resume")


@pytest.mark.parametrize(
    "line", ["{}", '{"step": "3"}', '{"step": null}', '{"step": true}', '{"step": 1e1}', "[1]", ""]
)
def test_a_line_that_is_no_step_is_named(folder, done, tmp_path, capsys, line):
    """Bug: a traceback, or lines that a resumed run drops and says nothing."""
    out = copy_of(done, tmp_path / "run")
    header, *steps = (out / "log.jsonl").read_text().splitlines(keepends=True)
    text = "".join([header, line + "\n", *steps])
    (out / "log.jsonl").write_text(text)
    assert grpo.main(words_of(folder, out, "--resume", 3)) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m rl.grpo: error: {out / 'log.jsonl'}:2: ")
    assert said.count("\n") == 1
    assert (out / "log.jsonl").read_text() == text


@pytest.mark.parametrize("name", ["log.jsonl", "state.safetensors"])
@pytest.mark.parametrize("more", ["", "--resume"])
def test_what_is_no_file_is_named(folder, done, tmp_path, capsys, name, more):
    """Bug: a traceback for a folder, a link to nothing that is written through."""
    for i, what in enumerate(("a folder", "no regular file")):
        path = tmp_path / str(i) / name
        path.parent.mkdir()
        path.mkdir() if what == "a folder" else path.symlink_to(tmp_path / "nowhere")
        assert grpo.main(words_of(folder, path.parent, more)) == 2
        assert capsys.readouterr().err == f"python -m rl.grpo: error: argument --out: {path} is {what}\n"


@pytest.mark.parametrize("about", ["[1]", "3", "null", "{"])
def test_a_checkpoint_of_something_else_is_named(folder, done, tmp_path, capsys, about):
    out = copy_of(done, tmp_path / "run")
    save_file({"a": torch.zeros(2)}, out / "state.safetensors", metadata={"about": about})
    assert grpo.main(words_of(folder, out, "--resume")) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"python -m rl.grpo: error: argument --resume: {out / 'state.safetensors'}: not a training")
    assert said.count("\n") == 1


LIMITED = """
import resource, sys
from rl import grpo
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), resource.RLIM_INFINITY))
sys.exit(grpo.main(sys.argv[2:]))
"""


@pytest.mark.parametrize(
    "size, file, left",
    [
        (40000, "state.safetensors", "no checkpoint yet: --resume starts at step 1"),
        (300, "log.jsonl", "no checkpoint yet: --resume starts at step 1"),
    ],
)
def test_a_full_disk_ends_a_run_in_one_line(folder, tmp_path, size, file, left):
    """A file may not grow over `size` bytes. Bug: a traceback of safetensors', or of a log's write."""
    out = tmp_path / "run"
    command = [sys.executable, "-c", LIMITED, str(size), *words_of(folder, out)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1].startswith(f"python -m rl.grpo: {out / file}: cannot be written (")
    assert ended.stderr.endswith(f"; {left}\n")
    assert "Traceback" not in ended.stderr
    assert not list(out.glob(".*"))


def test_a_full_disk_leaves_the_last_checkpoint(folder, done, tmp_path, capsys, monkeypatch):
    out = copy_of(done, tmp_path / "run")

    def full(tensors, path, metadata) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_files, "save_file", full)
    assert grpo.main(words_of(folder, out, "--resume", 3)) == 1
    said = f"{out / 'state.safetensors'}: cannot be written (No space left on device)"
    assert capsys.readouterr().err == f"python -m rl.grpo: {said}; --resume goes on from the last checkpoint\n"
    assert (out / "state.safetensors").read_bytes() == (done / "state.safetensors").read_bytes()


def test_a_log_of_another_run_beside_a_checkpoint_is_refused(done, folder, tmp_path, capsys):
    """Bugs: steps go on under a header with another seed, by which rl.plot labels them; steps lost without a word; a
    checkpoint whose log is gone is trained over."""
    out = copy_of(done, tmp_path / "run")
    log, text = out / "log.jsonl", (out / "log.jsonl").read_text()
    header, *steps = text.splitlines(keepends=True)
    log.write_text(header.replace('"seed": 0', '"seed": 77') + "".join(steps))
    assert header not in log.read_text()
    with pytest.raises(ValueError, match=r"resume: .*log.jsonl: belongs to a run with seed 77, not 0"):
        train(folder, out, "--resume", 3)
    log.write_text(header + steps[1])
    capsys.readouterr()
    train(folder, out, "--resume", 3)
    assert "lacks 1 of the steps 1 to 2" in capsys.readouterr().err
    log.unlink()
    with pytest.raises(ValueError, match=r"out: .* holds a run; resume it"):
        train(folder, out, steps=3)

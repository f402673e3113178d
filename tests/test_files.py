"""Files that are written whole or not at all, and what is refused as a place to write to."""

import os
from pathlib import Path

import pytest

from nanospec_fn import arguments, files
from tests.test_docs import PARSERS


def test_what_is_no_plain_file_stays_what_it_is(tmp_path):
    """Catches: a device or pipe that becomes a file (as root, /dev/null), a link that leads nowhere, a lost mode."""
    pipe, file, link = tmp_path / "pipe", tmp_path / "file", tmp_path / "link"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, b"new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert pipe.is_fifo()
    file.touch(0o600)
    link.symlink_to(file)
    files.write(link, b"new")
    assert link.is_symlink()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"new", 0o600)
    assert sorted(tmp_path.iterdir()) == [file, link, pipe]


class Killed(BaseException):
    """A process that ends where it stands."""


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path, monkeypatch):
    """Catches: a file written in place, a part that stays behind for good, an error that is swallowed."""
    path = tmp_path / "a.svg"
    files.write(path, b"old")

    def fail(handle: int) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(Killed):
            files.write(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(OSError, match="Is a directory"):
        files.write(tmp_path, b"new")
    assert list(tmp_path.iterdir()) == [path]
    assert not list(tmp_path.parent.glob(".*.part"))


def test_bytes_are_on_the_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    """Catches: a rename of bytes that a power cut loses, and a rename that it takes back."""
    calls: list[tuple[str, str]] = []
    fsync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        calls.append(("fsync", os.path.basename(os.readlink(f"/proc/self/fd/{handle}"))))
        fsync(handle)

    def replaced(self: Path, target: Path) -> Path:
        calls.append(("replace", self.name))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    files.write(tmp_path / "a", b"new")
    assert calls == [("fsync", ".a.part"), ("replace", ".a.part"), ("fsync", tmp_path.name)]
    assert (tmp_path / "a").read_bytes() == b"new"


NEEDED = {"bench.run": ["nanospec"], "bench.table": ["x"], "rl.plot": ["x"], "bench.widen": ["--out", "x"]}
NEEDED |= {"rl.bias": ["--out", "x"], "rl.train_eagle": ["--out", "x", "--prompts", "self:1"]}
PLACES = [
    (module, action.option_strings[0])
    for module, build in PARSERS.items()
    if module != "nanospec_fn"  # picture's --out is a name that test_picture.py refuses in many forms
    for action in build()._actions
    if action.option_strings and action.option_strings[0] in ("--out", "--picture", "--data", "--plot")
]


def test_there_are_places_to_write_to():
    assert {module for module, _ in PLACES} >= {"bench.run", "bench.identity", "bench.widen", "rl.grpo", "rl.plot"}


WANTED = {"bench.acceptance": "file", "bench.identity": "file", "rl.bias": "file"}
FOLDERS = ("bench.prefill", "bench.run", "bench.roofline", "bench.widen", "rl.grpo", "rl.plot", "rl.train_eagle")
WANTED |= dict.fromkeys(FOLDERS, "folder")
LONG = "a" * 300


@pytest.mark.parametrize("module", WANTED)
def test_a_file_for_a_folder_and_a_folder_for_a_file_are_refused(module, tmp_path, capsys):
    """Catches: a place that is seen to be none when the first result is written, a model and a prompt set later."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    said = {
        "file": {
            tmp_path: "is a folder, or in",
            tmp_path / "no/such": "is a folder, or in one that does not exist",
            tmp_path / LONG: "File name too long",
        },
        "folder": {
            tmp_path / "file": f"{tmp_path}/file is a file",
            tmp_path / "file/x/y": f"{tmp_path}/file is a file",
            tmp_path / "link/x": f"{tmp_path}/link is a link to nothing",
            tmp_path / LONG: "File name too long",
        },
    }
    for place, words in said[WANTED[module]].items():
        with pytest.raises(SystemExit):
            PARSERS[module]().parse_args([*NEEDED.get(module, []), "--out", str(place)])
        error = capsys.readouterr().err
        assert error.startswith(f"python -m {module}: error: argument --out: ")
        assert words in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("module, option", PLACES)
def test_an_empty_place_is_refused_by_name(module, option, capsys):
    """Catches: "" taken for the current folder, into which a run would write."""
    with pytest.raises(SystemExit) as stopped:
        PARSERS[module]().parse_args([*NEEDED.get(module, []), f"{option}="])
    assert stopped.value.code == 2
    assert capsys.readouterr().err == f"python -m {module}: error: argument {option}: must be a path, got ''\n"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """Bug: a traceback, once the work is done."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"argument --out: .*/file/x: Not a directory"):
        arguments.make_folder(tmp_path / "file/x")

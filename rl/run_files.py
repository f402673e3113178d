"""The files of a run: its state, written whole or not at all, and a log whose lines survive a kill.

A log is strict JSON, one object a line; only its last line can be torn, and readers leave that one out.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.utils import _pytree as pytree

from nanospec_fn import files, jsonl, struct

MOST_STEP = 2**31 - 1


class RunError(RuntimeError):
    """Why a run cannot go on, in words for who started it."""


class WriteError(RunError):
    """A file of the run that cannot be written, such as on a full disk; what stood there before still does."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Errors: WriteError naming the file, for whatever the block cannot write."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path}: cannot be written ({getattr(error, 'strerror', None) or error})") from error


def save_state(path: Path, tree: Any, about: Mapping[str, Any]) -> None:
    """A pytree of tensors, no two of which share memory, and what it belongs to, as one safetensors file.

    Errors: WriteError; the file is the old one then.
    """
    leaves = zip(struct.leaf_names(tree), pytree.tree_leaves(tree), strict=True)
    tensors = {name: leaf.detach().cpu().contiguous() for name, leaf in leaves}
    with writing(path), files.whole(path) as part:
        save_file(tensors, part, metadata={"about": json.dumps(about)})


def load_state(path: Path, like: Any, check: Callable[[dict[str, Any]], None]) -> Any:
    """What `save_state` wrote, in the structure and on the devices of `like`.

    Args: check: raises where the file's `about` is not what is wanted.
    Errors: ValueError for a file that holds something else.
    """
    check(read_about(path))
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, the file is not iterable
    names, leaves = struct.leaf_names(like), pytree.tree_leaves(like)
    shapes = {name: leaf.shape for name, leaf in zip(names, leaves, strict=True)}
    if shapes != {name: tensor.shape for name, tensor in tensors.items()}:
        raise ValueError(f"{path}: holds the training state of a model of another shape")
    loaded = [tensors[name].to(leaf.device) for name, leaf in zip(names, leaves, strict=True)]
    return pytree.tree_unflatten(loaded, pytree.tree_structure(like))


def read_about(path: Path) -> dict[str, Any]:
    """What a saved state belongs to. Errors: ValueError for a file that is no state."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
    except (SafetensorError, OSError, KeyError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a training state ({error})") from error
    if not isinstance(about, dict):
        raise ValueError(f"{path}: not a training state (it belongs to {files.short(repr(about))})")
    return about


def same_run(saved: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to resume a file that belongs to another run, naming every option that differs. Errors: ValueError."""
    wanted = json.loads(json.dumps(wanted))
    differ = [
        f"{name} {saved.get(name)!r}, not {wanted.get(name)!r}"
        for name in sorted({*saved, *wanted})
        if saved.get(name) != wanted.get(name)
    ]
    if differ:
        raise ValueError(f"{path}: belongs to a run with {'; '.join(differ)}")


def append(log: Path, line: Mapping[str, Any]) -> None:
    """Add a line to a log, on the disk when this returns. Numbers that are not finite become null.

    Errors: WriteError.
    """
    with writing(log), log.open("ab") as file:
        file.write(jsonl.to_line(line).encode("ascii") + b"\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(log: Path, most: int | None = None) -> list[dict[str, Any]]:
    """The lines of a log, the first so many, a torn last one left out.

    Errors: ValueError naming the file and a line before the last that is not a JSON object.
    """
    *lines, _ = log.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines[:most], 1):
        found.append(jsonl.load(line, f"{log}:{number}: not valid JSON"))
        if not isinstance(found[-1], dict):
            raise ValueError(f"{log}:{number}: not a JSON object")
    return found


def step_of(line: Mapping[str, Any], where: str) -> int:
    """The step that a line of a log tells of. Errors: ValueError that begins with `where`, its file and line."""
    step = line.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step <= MOST_STEP:
        raise ValueError(f"{where}: step must be an integer from 0 to {MOST_STEP}, got {files.short(repr(step))}")
    return step


def keep_steps(log: Path, last: int) -> set[int]:
    """Leave only headers and steps up to `last` in a log -> these steps. Errors: ValueError naming any other line."""
    steps = {n: step_of(x, f"{log}:{n}") for n, x in enumerate(read_lines(log), 1) if "header" not in x}
    write_lines(log, [x for n, x in enumerate(read_lines(log), 1) if steps.get(n, 0) <= last])
    return {step for step in steps.values() if 0 < step <= last}


def write_lines(log: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a log anew, whole or not at all. Errors: WriteError."""
    with writing(log):
        files.write(log, "".join(jsonl.to_line(line) + "\n" for line in lines).encode("ascii"))

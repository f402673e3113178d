"""Prompts to measure with: MT-Bench first turns, GSM8K test questions, or a file of one's own."""

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from nanospec_fn import files

Prompt = str | list[int]  # text, or token ids

SETS = {
    # name: (file in $NANOSPEC_DATA, hub data set, its configuration, its split)
    "mt-bench": ("mt_bench_question.jsonl", "HuggingFaceH4/mt_bench_prompts", None, "train"),
    "gsm8k": ("gsm8k_test.jsonl", "openai/gsm8k", "main", "test"),
}


def load(name: str, limit: int | None = None) -> list[str]:
    """The first `limit` prompts (None: all) of "mt-bench", "gsm8k", or a file: .jsonl, else one prompt a line.

    Errors: FileNotFoundError or ValueError naming the file, its line, and NANOSPEC_DATA where that would help.
    """
    if name in SETS:
        file, hub, config, split = SETS[name]
        folder = os.environ.get("NANOSPEC_DATA")
        prompts = read(Path(folder) / file) if folder else from_hub(name, file, hub, config, split)
    else:
        prompts = read(Path(name))
    return prompts[:limit]


def read(path: Path) -> list[str]:
    """Every prompt of a file of texts, in order."""
    if not files.is_file(path):
        raise FileNotFoundError(f"{files.short(path)}: no such file; NANOSPEC_DATA is a folder that holds {names()}")
    return [text_of(prompt, where) for where, prompt in lines(path)]


def lines(path: Path) -> Iterator[tuple[str, Prompt | None]]:
    """What stands in each line of a file that is not blank: its place "FILE:LINE", and its prompt.

    In a .jsonl file that is `of_record`'s of the line's value, None where there is none; elsewhere it is the line.
    Errors: ValueError naming the file and line; OSError for a file that cannot be read.
    """
    raw = path.read_bytes()
    try:
        found = [line.removesuffix("\r") for line in raw.decode("utf-8").split("\n")]  # other breaks are text
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}:{raw[: error.start].count(10) + 1}: not UTF-8 text") from None
    if not any(line.strip() for line in found):
        raise ValueError(f"{path}: contains no prompts")
    for number, line in enumerate(found, 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        if path.suffix != ".jsonl":
            yield where, line
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            raise ValueError(f"{where}: not valid JSON") from None
        yield where, of_record(value)


def of_record(value: Any) -> Prompt | None:
    """The prompt that a JSON value is or, as an object, holds under "prompt", "question" or "turns"; None for none."""
    if not isinstance(value, dict):
        return value if is_prompt(value) else None
    held = [value.get(key) for key in ("prompt", "question", "turns")]
    # Of a chat's turns the first; a list of numbers is none of turns.
    held = [v[0] if isinstance(v, list) and v and not isinstance(v[0], int) else v for v in held]
    return next((v for v in held if is_prompt(v)), None)


def is_prompt(value: Any) -> bool:
    """Whether a JSON value is a text or a list of token ids, and not empty."""
    return bool(value) and (isinstance(value, str) or (isinstance(value, list) and all(type(i) is int for i in value)))


def text_of(prompt: Prompt | None, where: str) -> str:
    """A prompt that must be text. Errors: ValueError that begins with `where`."""
    if not isinstance(prompt, str):
        raise ValueError(f'{where}: has no text under "prompt", "question" or "turns"')
    return prompt


def from_hub(name: str, file: str, hub: str, config: str | None, split: str) -> list[str]:
    """The same prompts by `datasets`, where that is installed and the hub can be reached."""
    try:
        import datasets
    except ImportError:
        raise FileNotFoundError(
            f"{name}: set NANOSPEC_DATA to a folder that holds {file}, or install datasets"
        ) from None
    rows: Iterable[Any] = datasets.load_dataset(hub, config, split=split)
    return [text_of(of_record(dict(row)), f"{hub} row {i}") for i, row in enumerate(rows)]


def names() -> str:
    """The files that NANOSPEC_DATA is read for."""
    return " and ".join(file for file, *_ in SETS.values())

"""Prompts to measure with: MT-Bench first turns, GSM8K test questions, or a file of one's own."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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
    """Every prompt of a file, in order."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; NANOSPEC_DATA is a folder that holds {names()}")
    lines = path.read_text(encoding="utf-8").splitlines()
    if path.suffix != ".jsonl":
        prompts = [line for line in lines if line.strip()]
    else:
        prompts = [first_turn(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ValueError(f"{path}: contains no prompts")
    return prompts


def first_turn(line: str, where: str) -> str:
    """The prompt of a JSON line: its "prompt", "question", or the first of its "turns"."""
    try:
        record = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: not valid JSON") from None
    for key in ("prompt", "question", "turns"):
        value = record.get(key) if isinstance(record, dict) else None
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str) and value:
            return value
    raise ValueError(f'{where}: has no text under "prompt", "question" or "turns"')


def from_hub(name: str, file: str, hub: str, config: str | None, split: str) -> list[str]:
    """The same prompts by `datasets`, where that is installed and the hub can be reached."""
    try:
        import datasets
    except ImportError:
        raise FileNotFoundError(
            f"{name}: set NANOSPEC_DATA to a folder that holds {file}, or install datasets"
        ) from None
    rows: Iterable[Any] = datasets.load_dataset(hub, config, split=split)
    return [first_turn(json.dumps(dict(row)), f"{hub} row {i}") for i, row in enumerate(rows)]


def names() -> str:
    """The files that NANOSPEC_DATA is read for."""
    return " and ".join(file for file, *_ in SETS.values())

"""The rows of bench.run: what tells two of them apart, and the files that keep them."""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from bench.measure import Measured
from nanospec_fn import files, revision

MEASURED = ("out_tokens", "tok_s", "tpot_ms", "mean_accepted_len", "round_ms", "identical")  # the rest is a row's key


def label(args: argparse.Namespace, engine: str, bs: int, run: int) -> dict[str, Any]:
    """A row's own place in the table."""
    return {"engine": engine, "version": revision.version(engine), "config": args.config, "bs": bs, "run": run}


def describe(args: argparse.Namespace, count: int, device: torch.device) -> dict[str, Any]:
    """What all rows of a call have in common; `count` prompts."""
    return {
        "prompts": count,
        "max_tokens": args.max_tokens,
        "gpu": device_name(device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": revision.commit(),
        "prompt_set": args.prompts,
    }


def device_name(device: torch.device) -> str:
    """A row's "gpu": the name of the GPU, else the kind of device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def figures(measured: Measured, plain: list[list[int]] | None) -> dict[str, Any]:
    """A row's measured part; `plain`: the tokens that plain decoding gives, where that was checked."""
    tokens = sum(map(len, measured.outputs))
    return {
        "out_tokens": tokens,
        "tok_s": tokens / measured.seconds,
        "tpot_ms": measured.tpot_ms,
        "mean_accepted_len": measured.mean_accepted_len,
        "round_ms": measured.round_ms,
        "identical": None if plain is None else measured.outputs == plain,
    }


def key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement."""
    return json.dumps({name: row[name] for name in sorted(row) if name not in MEASURED})


def present(path: Path) -> set[str]:
    """The keys of the rows that a result file holds. A line cut off by a crash is removed, so that rows can follow.

    Errors: ValueError naming the file and a line that is no row.
    """
    keys = set()
    if path.exists():
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict):
                raise ValueError(f"{path}:{number}: not a row of bench.run")
            keys.add(key(row))
        if whole != raw:
            files.write(path, whole)
    return keys

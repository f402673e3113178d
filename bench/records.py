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
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": revision.commit(),
        "prompt_set": args.prompts,
    }


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
    """The keys of the rows that a result file holds. A line cut off by a crash is removed, so that rows can follow."""
    keys = set()
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            files.write(path, text[: text.rfind("\n") + 1].encode())
        keys = {key(json.loads(line)) for line in text.splitlines() if line.endswith("}")}
    return keys

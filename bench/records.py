"""The rows of the benchmarks: what each says of what was measured, what tells two apart, the files that keep them.

Every benchmark names the same facts by the same keys (`about`). Older rows in bench/results lack some, and name others
as they did then: bench.acceptance's GPU is their "device", and a dtype is "torch.bfloat16" in some.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

import nanospec_fn as ns
from bench.measure import Measured
from nanospec_fn import files, jsonl, revision

MEASURED = ("out_tokens", "tok_s", "tpot_ms", "mean_accepted_len", "round_ms", "identical")  # the rest is a row's key
OWN = "nanospec"


def about(
    engine: str, model: str, draft: str, device: torch.device, attend: str | None = None, gemm: str | None = None
) -> dict[str, Any]:
    """What a row says of the engine, its weights, the machine and the code.

    Args: model, draft: names; attend, gemm: `backends`, None for other projects' engines.
    """
    return {
        "engine": engine,
        "version": revision.version(engine),
        "model": model,
        "draft": draft,
        "attend": attend,
        "gemm": gemm,
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": revision.commit(),
    }


def about_own(model: ns.Model, draft: str, attend: str) -> dict[str, Any]:
    """`about` of this engine, and its dtype, which bench.run's rows do not have: their keys are a contract."""
    weight = model.params.embed
    found = about(OWN, model.name, draft, weight.device, *backends(model, attend))
    return found | {"dtype": str(weight.dtype).removeprefix("torch.")}


def backends(model: ns.Model, attend: str) -> tuple[str, str]:
    """This engine's attention and matmul. Args: attend: as it was asked for."""
    static = ns.build(model, engine=ns.EngineConfig(attend=attend)).static
    return type(static.attend).__name__.lower(), model.cfg.gemm


def append(path: Path | None, row: dict[str, Any]) -> dict[str, Any]:
    """Print a row as one strict JSON line and append it to a file, where one is named -> the row as it is read back."""
    line = jsonl.to_line(row)
    print(line, flush=True)
    if path:
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    found: dict[str, Any] = json.loads(line)
    return found


def label(args: argparse.Namespace, bs: int, run: int, count: int) -> dict[str, Any]:
    """A row of bench.run's own place in the table, and what was asked of it; `count` prompts."""
    asked = {"prompts": count, "max_tokens": args.max_tokens, "prompt_set": args.prompts}
    return {"config": args.config, "bs": bs, "run": run} | asked


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
    if path.is_dir():
        raise ValueError(f"argument --out: {path} is a folder, rows are kept in a file")
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

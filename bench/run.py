"""Measure engines on one set of prompts: `python -m bench.run nanospec --config tree --bs 1 8 32`.

One strict JSON line per (engine, config, batch size, run) is printed and appended to <out>/<engine>-<config>.jsonl; a
row already in the file is not measured again. Decoding is greedy. Units: see measure.Measured; tok_s counts emitted
tokens over the whole call, prefill included.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import nanospec_fn as ns
from bench import measure, peers, prompts
from bench.measure import Engine, Measured
from nanospec_fn import arguments, chat, weights

CONFIGS: dict[str, ns.Speculation | None] = {
    "nospec": None,
    "chain": ns.Speculation(top_k=1, depth=5),
    "tree": ns.Speculation(top_k=4, depth=5),
}
ENGINES = ("nanospec", "transformers")
GEMMS = ("library", "onednn", "blocked")
MEASURED = ("out_tokens", "tok_s", "tpot_ms", "mean_accepted_len", "round_ms", "identical")  # the rest is a row's key


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.run."""
    parser = arguments.Parser(
        prog="python -m bench.run",
        description="Measure engines on the same prompts, greedily.",
    )
    parser.add_argument("engine", nargs="+", type=engine_name, help=f"{', '.join(ENGINES)}: several run side by side")
    parser.add_argument(
        "--config", choices=CONFIGS, default="nospec", help="chain: depth 5; tree: depth 5, top-k 4 (%(default)s)"
    )
    parser.add_argument(
        "--bs", metavar="N", nargs="+", type=arguments.positive, default=[1, 8, 32], help="requests at once (1 8 32)"
    )
    parser.add_argument(
        "--max-tokens", metavar="N", type=arguments.positive, default=256, help="per prompt (%(default)s)"
    )
    parser.add_argument("--runs", metavar="N", type=arguments.positive, default=3, help="repetitions (%(default)s)")
    parser.add_argument(
        "--prompts",
        default="mt-bench",
        metavar="SET",
        help="mt-bench, gsm8k (from NANOSPEC_DATA) or a file (%(default)s)",
    )
    parser.add_argument("--limit", metavar="N", type=arguments.positive, help="use the first so many prompts (all)")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=Path,
        default=Path("bench/results"),
        help="folder of the result files (%(default)s)",
    )
    parser.add_argument("--gemm", choices=GEMMS, help="matmul on a CPU, to see what row-canonical arithmetic costs")
    parser.add_argument("--no-check", action="store_true", help="leave `identical` null: plain decoding is not run")
    arguments.add_engine(parser)
    return parser


def engine_name(text: str) -> str:
    """The type of the engine argument."""
    if text not in ENGINES:
        raise argparse.ArgumentTypeError(f"{text!r} is not supported: choose from {', '.join(ENGINES)}")
    return text


def main(argv: list[str] | None = None) -> int:
    """Measure the rows that are missing; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    arguments.check_engine(parser, args)
    device = weights.pick_device(args.device)
    if args.gemm not in (None, "library") and device.type != "cpu":
        parser.error(f"argument --gemm: {args.gemm} needs a CPU, got {device}")
    if "transformers" in args.engine and args.config != "nospec":
        parser.error(f"argument --config: transformers is measured without a draft, got {args.config}")
    try:
        texts = prompts.load(args.prompts, args.limit)
        for bs in args.bs:
            if bs > len(texts):
                raise ValueError(f"argument --bs: {bs} is more than the {len(texts)} prompts of {args.prompts}")
            ns.EngineConfig(max_slots=bs, attend=args.backend).validate()
        model = ns.load(args.model, device=args.device)
        if args.gemm:
            model = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, gemm=args.gemm))
        name, draft = arguments.load_draft(args.draft if args.config != "nospec" else "none", model)
        common = describe(model, args, len(texts)) | {"draft": name}
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    if draft is None and args.config != "nospec":
        parser.error(f"argument --draft: {args.config} needs a draft, got none")
    requests = [chat.encode(model.tokenizer, text) for text in texts]
    args.out.mkdir(parents=True, exist_ok=True)
    for row in rows(args, model, draft, requests, common):
        line = arguments.json_line(row)
        print(line, flush=True)
        with (args.out / f"{row['engine']}-{row['config']}.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


def rows(
    args: argparse.Namespace,
    model: ns.Model,
    draft: ns.Draft | None,
    requests: list[list[int]],
    common: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Measure every row that is missing, the engines side by side within a run."""
    config = ns.EngineConfig(attend=args.backend)
    make: dict[str, Callable[[], Engine]] = {
        "nanospec": lambda: measure.Nanospec(model, draft, CONFIGS[args.config], config),
        "transformers": lambda: peers.Transformers(model),
    }
    engines: dict[str, Engine] = {}
    plain: list[list[int]] | None = None
    seen = {name: present(args.out / f"{name}-{args.config}.jsonl") for name in args.engine}
    for bs, run, name in itertools.product(args.bs, range(args.runs), args.engine):
        row = {"engine": name, "version": version(name), "config": args.config, "bs": bs, "run": run} | common
        if name != "nanospec":
            row |= {"attend": None, "gemm": None}
        if key(row) in seen[name]:
            continue
        if name not in engines:
            engines[name] = make[name]()
        if name == "nanospec" and plain is None and not args.no_check:
            # Plain decoding has the same bits at any batch size (docs/promises.md, G1): run it once, at the quickest.
            plain = measure.Nanospec(model, None, None, config).measure(requests, max(args.bs), args.max_tokens).outputs
        measured = engines[name].measure(requests, bs, args.max_tokens)
        yield row | figures(measured, plain if name == "nanospec" else None)


def figures(measured: Measured, plain: list[list[int]] | None) -> dict[str, Any]:
    """A row's measured part."""
    tokens = sum(map(len, measured.outputs))
    return {
        "out_tokens": tokens,
        "tok_s": tokens / measured.seconds,
        "tpot_ms": measured.tpot_ms,
        "mean_accepted_len": measured.mean_accepted_len,
        "round_ms": measured.round_ms,
        "identical": None if plain is None else measured.outputs == plain,
    }


def describe(model: ns.Model, args: argparse.Namespace, count: int) -> dict[str, Any]:
    """What all rows of this call have in common."""
    device = model.params.embed.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    attend = ns.build(model, engine=ns.EngineConfig(attend=args.backend)).static.attend
    return {
        "prompts": count,
        "max_tokens": args.max_tokens,
        "gpu": gpu,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": commit(),
        "model": model.name,
        "prompt_set": args.prompts,
        "attend": type(attend).__name__.lower(),
        "gemm": model.cfg.gemm,
    }


def commit() -> str | None:
    """$NANOSPEC_COMMIT, else the checkout's commit ("-dirty" where it has changes), else None."""
    if given := os.environ.get("NANOSPEC_COMMIT"):
        return given
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def version(engine: str) -> str | None:
    """The installed version of an engine; None for a checkout that is not installed."""
    try:
        return importlib.metadata.version({"nanospec": "nanospec-fn"}.get(engine, engine))
    except importlib.metadata.PackageNotFoundError:
        return None


def present(path: Path) -> set[str]:
    """The keys of the rows that a result file holds. A line cut off by a crash is removed, so that rows can follow."""
    keys = set()
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")
        keys = {key(json.loads(line)) for line in text.splitlines() if line.endswith("}")}
    return keys


def key(row: dict[str, Any]) -> str:
    """What makes two rows the same measurement."""
    return json.dumps({name: row[name] for name in sorted(row) if name not in MEASURED})


if __name__ == "__main__":
    sys.exit(main())

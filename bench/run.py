"""Measure engines on one set of prompts: `python -m bench.run nanospec --config tree --bs 1 8 32`.

One strict JSON line per (engine, config, batch size, run) is printed and appended to <out>/<engine>-<config>.jsonl; a
row already in the file is not measured again. Decoding is greedy. Units: see measure.Measured; tok_s counts emitted
tokens over the whole call, prefill included. vLLM and SGLang are measured alone, each in a process of its own, and this
one loads no model then.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from bench import apart, isolated, measure, peers, records, widen
from bench.measure import Contender
from nanospec_fn import arguments, chat, kernels, prompts, weights

CONFIGS: dict[str, ns.Speculation | None] = {
    "nospec": None,
    "chain": ns.Speculation(top_k=1, depth=5),
    "tree": ns.Speculation(top_k=4, depth=5),
    "tree6": ns.Speculation(top_k=6, depth=5),
    "auto": ns.Speculation(top_k=4, depth=5),  # the host picks among no draft, chains and this tree
}
BESIDE = (records.OWN, "transformers")  # in this process


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.run."""
    parser = arguments.Parser(
        prog="python -m bench.run",
        description="Measure engines on the same prompts, greedily.",
    )
    parser.add_argument(
        "engine",
        nargs="+",
        type=engine_name,
        help=f"{' and '.join(BESIDE)}, side by side, or one of {', '.join(apart.MODULE)}",
    )
    parser.add_argument(
        "--config",
        choices=CONFIGS,
        default="nospec",
        help="chain: depth 5; tree, tree6: depth 5, top-k 4 or 6; auto: picked round by round",
    )
    parser.add_argument(
        "--bs", metavar="N", nargs="+", type=arguments.positive, default=[1, 8, 32], help="requests at once"
    )
    parser.add_argument("--max-tokens", metavar="N", type=arguments.positive, default=256, help="per prompt")
    parser.add_argument("--runs", metavar="N", type=arguments.positive, default=3, help="repetitions")
    parser.add_argument(
        "--prompts",
        default="mt-bench",
        metavar="SET",
        help="mt-bench, gsm8k (from NANOSPEC_DATA) or a file",
    )
    parser.add_argument("--limit", metavar="N", type=arguments.positive, help="use the first so many prompts (all)")
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=arguments.folder,
        default=Path("bench/results"),
        help="folder of the result files",
    )
    parser.add_argument(
        "--gemm", choices=kernels.cpu.GEMMS, help="matmul on a CPU, to see what row-canonical arithmetic costs"
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=arguments.positive,
        default=3600,
        help="of a process of vllm or sglang: one batch size, every run",
    )
    parser.add_argument("--like", metavar="SHAPE", help="widen model and head in memory first, see bench.widen")
    parser.add_argument("--no-check", action="store_true", help="leave `identical` null: plain decoding is not run")
    arguments.add_engine(parser)
    return parser


def engine_name(text: str) -> str:
    """The type of the engine argument."""
    if text not in (*BESIDE, *apart.MODULE):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not supported: choose from {', '.join((*BESIDE, *apart.MODULE))}"
        )
    return text


def main(argv: list[str] | None = None) -> int:
    """Measure the rows that are missing; the exit code."""
    parser = build_parser()
    args, measured = parser.parse_args(argv), 0
    args.engine, args.bs = list(dict.fromkeys(args.engine)), list(dict.fromkeys(args.bs))  # named twice, measured once
    arguments.check_engine(parser, args)
    speculation = CONFIGS[args.config]
    if args.engine[0] in apart.CHAINS_ONLY and args.config != "auto" and speculation and speculation.top_k > 1:
        print(f"{parser.prog}: {args.engine[0]} {args.config}: skipped, it has no EAGLE-3 tree", file=sys.stderr)
        return 0
    check(parser, args)
    try:
        texts = prompts.load(args.prompts, args.limit)
        for bs in args.bs:
            if bs > len(texts):
                raise ValueError(f"argument --bs: {bs} is more than the {len(texts)} prompts of {args.prompts}")
            ns.EngineConfig(max_slots=bs, attend=args.backend).validate()
        make_rows = apart.plan if args.engine[0] in apart.MODULE else plan
        missing = make_rows(args, texts, speculation)
        arguments.make_folder(args.out)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    try:
        for row in missing:
            records.append(args.out / f"{row['engine']}-{row['config']}.jsonl", row)
            measured += 1
        if not measured:
            print(f"{parser.prog}: every row is in {args.out} already, nothing was measured", file=sys.stderr)
    except isolated.EngineError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    return 0


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what cannot be measured by its options alone."""
    device = weights.pick_device(args.device)
    if args.gemm not in (None, "library") and device.type != "cpu":
        parser.error(f"argument --gemm: {args.gemm} needs a CPU, got {device}")
    if "transformers" in args.engine and args.config != "nospec":
        parser.error(f"argument --config: transformers is measured without a draft, got {args.config}")
    for name in set(args.engine) & set(apart.MODULE):
        if args.config == "auto":
            parser.error(f"argument --config: auto is nanospec's, not {name}'s")
        if args.like:
            parser.error(f"argument --like: {name} loads a folder: write one with bench.widen")
        if len(args.engine) > 1:
            parser.error(f"argument engine: {name} wants the device to itself: measure it alone")
        if importlib.util.find_spec(name) is None:
            parser.error(f"argument engine: {name} is not installed: pip install {name}=={apart.RELEASE[name]}")


def plan(args: argparse.Namespace, texts: list[str], speculation: ns.Speculation | None) -> Iterator[dict[str, Any]]:
    """Load what this process measures; the rows that are missing, each measured when it is asked for.

    Errors: as `ns.load` and `ns.load_draft`, ValueError for a config without its draft; all before any row.
    """
    seen = {name: records.present(args.out / f"{name}-{args.config}.jsonl") for name in args.engine}
    model, name, draft = widen.load(args.model, args.draft if speculation else "none", args.like, args.device)
    if args.gemm:
        model = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, gemm=args.gemm))
    if speculation and draft is None:
        raise ValueError(f"argument --draft: {args.config} needs a draft, got none")
    engine = ns.EngineConfig(attend=args.backend, variants="auto" if args.config == "auto" else "fixed")
    used = {records.OWN: records.backends(model, args.backend)}
    where = model.params.embed.device
    about = {one: records.about(one, model.name, name, where, *used.get(one, ())) for one in args.engine}
    requests = [chat.encode(model.tokenizer, text) for text in texts]
    for number, request in enumerate(requests):
        if len(request) >= model.cfg.max_context:
            raise ValueError(
                f"argument --prompts: prompt {number} has {len(request)} tokens, the model's context is "
                f"{model.cfg.max_context}"
            )
    make: dict[str, Callable[[], Contender]] = {
        records.OWN: lambda: measure.Nanospec(model, draft, speculation, engine),
        "plain": lambda: measure.Nanospec(model, None, None, engine),
        "transformers": lambda: peers.Transformers(model),
    }
    return rows(args, make, requests, about, seen)


def rows(
    args: argparse.Namespace,
    make: dict[str, Callable[[], Contender]],
    requests: list[list[int]],
    about: dict[str, dict[str, Any]],
    seen: dict[str, set[str]],
) -> Iterator[dict[str, Any]]:
    """Measure every row that is missing, the engines side by side within a run.

    Args: make: an engine by name, and "plain", which nanospec's tokens are compared with; about: each engine's
      `records.about`; seen: the keys of each engine's rows that are there.
    """
    engines: dict[str, Contender] = {}
    plain: list[list[int]] | None = None
    for bs, run, name in itertools.product(args.bs, range(args.runs), args.engine):
        row = about[name] | records.label(args, bs, run, len(requests))
        if records.key(row) in seen[name]:
            continue
        if name not in engines:
            engines[name] = make[name]()
        if name == records.OWN and plain is None and not args.no_check:
            # Plain decoding has the same bits at any batch size (docs/promises.md, G1): run it once, at the quickest.
            print(f"plain decoding of {len(requests)} prompts, to compare with", file=sys.stderr)
            plain = make["plain"]().measure(requests, max(args.bs), args.max_tokens).outputs
        print(f"measuring {name} {args.config}, batch size {bs}, run {run}", file=sys.stderr)
        measured = engines[name].measure(requests, bs, args.max_tokens)
        yield row | records.figures(measured, plain if name == records.OWN else None)


if __name__ == "__main__":
    sys.exit(main())

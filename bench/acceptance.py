"""How much of a draft a target accepts: `python -m bench.acceptance --draft eagle --prompts mt-bench --shape 1x5 4x5`.

One strict JSON line per shape is printed, and appended to --out. mean_accepted_len = (emitted tokens - completions) /
rounds: the prefill's own token left out, the bonus token counted. It does not depend on batch size or hardware but for
the bits of the target's logits.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import nanospec_fn as ns
from bench import records
from nanospec_fn import arguments, chat, prompts


def measure(
    model: ns.Model,
    draft: ns.Draft,
    requests: Sequence[list[int]],
    speculation: ns.Speculation,
    temperature: float = 0.0,
    max_tokens: int = 256,
    max_slots: int = 16,
    attend: str = "auto",
    progress: bool = False,
) -> dict[str, Any]:
    """Complete token-id prompts, prompt i with seed i.

    Returns: mean_accepted_len, tokens, rounds, seconds, and by_depth: of the rounds, the share that accepted at least
      1, 2, .. drafted tokens. A round that the request's end cut short counts what was emitted.
    """
    model = replace(model, tokenizer=None)
    # Off the CPU attention reads the whole page table: one for the longest request saves most of the time.
    longest = max(map(len, requests)) + max_tokens
    engine = ns.EngineConfig(max_slots=max_slots, max_context=longest, attend=attend)
    sampling = [ns.Sampling(max_tokens=max_tokens, temperature=temperature, seed=i) for i in range(len(requests))]
    start = time.perf_counter()
    out = ns.generate(model, requests, sampling, draft=draft, speculation=speculation, engine=engine, progress=progress)
    seconds = time.perf_counter() - start
    accepted = torch.tensor([a for o in out for a in o.accepted])
    return {
        "mean_accepted_len": ns.mean_accepted_len(out),
        "by_depth": [float((accepted >= d).double().mean()) for d in range(1, speculation.depth + 1)],
        "tokens": sum(len(o.tokens) for o in out),
        "rounds": len(accepted),
        "seconds": seconds,
    }


def shape(text: str) -> ns.Speculation:
    """The type of --shape: TOPKxDEPTH, or TOPKxDEPTHxNODES for a pruned tree."""
    parts = text.split("x")
    if len(parts) not in (2, 3) or not all(part.isascii() and part.isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"must be TOPKxDEPTH or TOPKxDEPTHxNODES, got {text!r}")
    numbers = [int(part) for part in parts]
    nodes = numbers[2] if len(numbers) == 3 else None
    speculation = ns.Speculation(numbers[0], numbers[1], nodes)
    try:
        speculation.validate()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    return speculation


def name_of(spec: ns.Speculation | None) -> str:
    """A shape as --shape writes it, "plain" for no tree."""
    if spec is None:
        return "plain"
    return f"{spec.top_k}x{spec.depth}" + (f"x{spec.nodes}" if spec.nodes < spec.lookahead else "")


def temperature(text: str) -> float:
    """The type of --temperature."""
    try:
        ns.Sampling(temperature=float(text)).validate()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number from 0, got {text!r}") from None
    return float(text)


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.acceptance."""
    parser = arguments.Parser(
        prog="python -m bench.acceptance",
        description="Measure how many drafted tokens a target accepts.",
    )
    parser.add_argument("--prompts", default="mt-bench", help="mt-bench, gsm8k (from NANOSPEC_DATA) or a file")
    parser.add_argument("--limit", type=arguments.positive, help="use the first so many prompts (all)")
    parser.add_argument(
        "--shape",
        nargs="+",
        type=shape,
        default=[ns.Speculation()],
        metavar="TOPKxDEPTH[xNODES]",
        help=f"trees ({name_of(ns.Speculation())})",
    )
    parser.add_argument("--temperature", type=temperature, default=0.0, help="0: greedy")
    parser.add_argument("--coupled", action="store_true", help="proposals share the target's noise")
    parser.add_argument("--max-tokens", type=arguments.positive, default=256, help="per prompt")
    parser.add_argument("--bs", type=arguments.positive, default=16, help="requests at once")
    parser.add_argument("--out", type=arguments.file, help="file that the lines are appended to")
    arguments.add_engine(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure every shape; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    arguments.check_engine(parser, args)
    try:
        ns.EngineConfig(max_slots=args.bs).validate()
        texts = prompts.load(args.prompts, args.limit)
        model = ns.load(args.model, device=args.device)
        name, draft = arguments.load_draft(args.draft, model)
        if draft is None:
            raise ValueError("argument --draft: a draft is needed, got none")
        requests = [chat.encode(model.tokenizer, text) for text in texts]
        about = records.about_own(model, name, args.backend)
        for one in args.shape:
            speculation = replace(one, coupled=args.coupled)
            found = measure(
                model, draft, requests, speculation, args.temperature, args.max_tokens, args.bs, args.backend, True
            )
            asked = {"prompt_set": args.prompts, "prompts": len(texts)}
            asked |= {"top_k": one.top_k, "depth": one.depth, "num_nodes": speculation.nodes, "coupled": args.coupled}
            asked |= {"temperature": args.temperature, "max_tokens": args.max_tokens}
            records.append(args.out, about | asked | found)
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`python -m nanospec_fn kl`: what a lossy rule costs, as nanospec_fn/kl.py computes it.

python -m nanospec_fn kl                    worst case per alpha and number of candidates
python -m nanospec_fn kl --alpha 0.3 FILE   on the rows of a trace
"""

import argparse
import functools

import nanospec_fn as ns
from nanospec_fn import arguments, jsonl, kl, trace

ALPHAS = (0.9, 0.7, 0.5, 0.3, 0.1)
CANDIDATES = (1, 2, 3, 4)


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `kl` command."""
    parser = commands.add_parser(
        "kl",
        help="what a lossy rule costs: KL(pi || mu)",
        description="KL(pi || mu) in nats a token: the worst case by number of candidates, or as measured on a trace.",
        epilog="Exit codes: 0; 2 for bad arguments.",
    )
    parser.add_argument("file", metavar="FILE", nargs="?", help="a trace written by --trace")
    parser.add_argument(
        "--alpha", type=float, metavar="A", help="rule power's exponent (a table; with FILE: each request's own rule)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`kl`; the exit code."""
    if args.alpha is not None:
        arguments.checked(
            parser, functools.partial(ns.Sampling, rule="power", temperature=1.0), {"alpha": ("--alpha", args.alpha)}
        )
    if args.file is None:
        alphas = ALPHAS if args.alpha is None else (args.alpha,)
        table = {alpha: [kl.worst_case(alpha, k) for k in CANDIDATES] for alpha in alphas}
        if args.json:
            print(jsonl.to_line({"candidates": CANDIDATES, "worst_case": table}))
            return 0
        print("worst case of KL(pi || mu), nats a token, by candidates at the row\n")
        print("alpha" + "".join(f"{k:>9}" for k in CANDIDATES))
        for alpha, values in table.items():
            print(f"{alpha:<5g}" + "".join(f"{value:>9.4f}" for value in values))
        return 0
    try:
        measured = kl.measure(trace.read(args.file), args.alpha)
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument FILE: {error}")
    if args.json:
        print(jsonl.to_line({"alpha": args.alpha, "rows": [vars(m) for m in measured]}))
        return 0
    rule = "each request's own rule" if args.alpha is None else f"power({args.alpha:g})"
    print(f"KL(pi || mu) under {rule}, nats a token, on the rows that emitted a token\n")
    print("candidates     rows       mean    largest  accepting  missing mass")
    for m in measured:
        mean, largest = (f"{x:>10.4f}" if x is not None else "  infinite" for x in (m.mean, m.largest))
        print(f"{m.candidates:<10}{m.rows:>9} {mean} {largest}{m.accepting:>11}{m.missing_mass:>14.4f}")
    return 0

"""What a lossy sampler does to a policy when nobody corrects for it, on a task whose optimum is known.

`python -m rl.bias --seeds 5 --out FILE.jsonl --picture FILE.png`; bias_study.py says what is trained.
"""

import argparse
import importlib.util
import sys
from dataclasses import asdict
from typing import Any

import torch

import nanospec_fn as ns
from nanospec_fn import arguments, files, jsonl
from rl import bias_report, bias_study, plot
from rl.bias_study import BETA, CONTEXT, CORRECTIONS, PROMPT, REFERENCE, REWARD, Study


def header(study: Study, seeds: int) -> dict[str, Any]:
    """The first line of a study's file."""
    task = {"first": REFERENCE, "reward": REWARD, "beta": BETA, "optimum": bias_study.optimum().tolist()}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return {"header": {"study": asdict(study), "seeds": seeds, "task": task, "versions": versions}}


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.bias."""
    parser = arguments.Parser(
        prog="python -m rl.bias",
        description="Train a policy with a known optimum on tokens of a lossy sampler, corrected and not.",
    )
    add, count = parser.add_argument, arguments.positive
    add("--out", type=arguments.file, required=True, metavar="FILE", help="a JSON line per run, after a header")
    add("--picture", type=arguments.file, metavar="FILE.png", help="a picture too; needs matplotlib")
    add("--corrections", nargs="+", choices=CORRECTIONS, default=["none", "exact"], help="one run each, per seed")
    add("--seeds", type=count, default=5, help="runs per correction")
    add("--steps", type=count, default=Study.steps, help="policy updates")
    add("--samples", type=count, default=Study.samples, help="completions a step")
    add("--tokens", type=count, default=Study.tokens, help="tokens of a completion that are trained on")
    add("--depth", type=count, default=Study.depth, help="tokens that the draft proposes a round")
    add("--alpha", type=arguments.real(0, 1), default=Study.alpha, help="of rule power; 1 draws from the policy itself")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Study:
    """The study that options ask for; what they cannot mean is refused before any work."""
    if args.samples < 2:
        parser.error("argument --samples: at least 2, a baseline is the mean of the others")
    if args.tokens > CONTEXT - len(PROMPT) - 1:
        parser.error(f"argument --tokens: at most {CONTEXT - len(PROMPT) - 1}, got {args.tokens}")
    if len(set(args.corrections)) < len(args.corrections):
        parser.error("argument --corrections: one is named twice")
    if args.picture is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"argument --picture: {plot.MISSING}")
    study = Study(args.alpha, args.tokens, args.depth, args.samples, args.steps)
    try:
        bias_study.sizes(study).validate()
        ns.Speculation(depth=study.depth).validate()
        bias_study.sampling(study, args.seeds, 0)[-1].validate()  # the largest of all seeds
    except ValueError as error:
        parser.error(f"these sizes do not fit: {error}")
    return study


def main(argv: list[str] | None = None) -> int:
    """Run the study, write its file and picture, print its table; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    study = check(parser, args)
    lines: list[dict[str, Any]] = [header(study, args.seeds)]
    for seed in range(args.seeds):
        lines += [bias_study.fit(study, correction, seed, progress=not args.quiet) for correction in args.corrections]
    files.write(args.out, "".join(jsonl.to_line(line) + "\n" for line in lines).encode())
    if args.picture:
        files.write(args.picture, plot.png(bias_report.picture(lines)))
    print(bias_report.table(lines), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

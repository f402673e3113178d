"""`python -m nanospec_fn doctor`: what is wrong with a draft, and how it is known. The last line is one verdict.

python -m nanospec_fn doctor --model smollm2 --draft eagle
python -m nanospec_fn doctor --model M --draft eagle:HEAD --prompts FILE --json
"""

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from nanospec_fn import arguments, chat, jsonl, prompts, weights
from nanospec_fn.doctor import diagnosis, examine
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.verdict import CHANCE, LIFT, SOUND, Report, Trial
from nanospec_fn.prompts import Prompt

PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five tips for growing tomatoes on a balcony.",
    "A train travels 60 miles in 90 minutes. What is its average speed in miles per hour?",
    "Translate into French: The library opens at nine in the morning.",
    "Summarise the plot of Romeo and Juliet.",
    "What is the difference between a virus and a bacterium?",
    "Write a short poem about the sea in autumn.",
    "Draft a polite email that asks a colleague to move a meeting to Thursday.",
    "Name three renewable sources of energy and one drawback of each.",
    "How do I make pancakes without eggs?",
    "Give me a JSON object that describes a book, with title, author and year.",
)
BAR = 40  # characters of a full bar


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `doctor` command."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with a draft, and how it is known",
        description="Examine a draft: its files, the chat template, and the target's greedy completions drafted along "
        "in every way that a known damage would have needed. The last line is the verdict.",
        epilog="Exit codes: 0 for a verdict of healthy or weak; 1 for a damage, not_enough_evidence, or no round; 2 "
        "for bad arguments.",
    )
    arguments.add_engine(parser)
    parser.add_argument("--dtype", default="auto", help=f"auto, {', '.join(weights.DTYPES)} (%(default)s)")
    parser.add_argument(
        "--prompts", metavar="FILE", type=Path, help="a prompt a line, in .jsonl a text or token ids (12 built-in ones)"
    )
    parser.add_argument("--limit", type=arguments.positive, metavar="N", help="use the first so many prompts")
    parser.add_argument(
        "--max-tokens", type=arguments.positive, default=64, metavar="N", help="per prompt (%(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object and nothing else")
    parser.set_defaults(run=functools.partial(run, parser))


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`doctor`; the exit code."""
    arguments.check_engine(parser, args)
    if args.draft == "none":
        parser.error("argument --draft: there is nothing to examine in none")
    try:
        listed = (read_prompts(args.prompts) if args.prompts else built_in())[: args.limit]
    except (ValueError, OSError) as error:
        parser.error(f"argument --prompts: {error}")
    try:
        model = ns.load(args.model, device=args.device, dtype=args.dtype)
        name = arguments.draft_for(args.draft, model)
        check_prompts(model, listed)
        asked = [prompt for _, prompt in listed]
        case = Case(model, asked, args.backend, args.max_tokens, progress=not args.json)
        report = diagnosis.diagnose(case, name)
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    print(jsonl.to_line(as_record(report)) if args.json else as_text(report))
    return int(report.verdict.name not in SOUND)


def built_in() -> list[tuple[str, Prompt]]:
    """The prompts that come with the doctor, each with its name in a message."""
    return [(f"built-in prompt {index}", prompt) for index, prompt in enumerate(PROMPTS)]


def read_prompts(path: Path) -> list[tuple[str, Prompt]]:
    """The prompts of a file, texts or token ids, one a line, each with its place; errors as of `prompts.lines`."""
    found: list[tuple[str, Prompt]] = []
    for where, prompt in prompts.lines(path):
        if prompt is None:
            raise ValueError(f"{where}: holds neither a text nor a list of token ids")
        found.append((where, prompt))
    return found


def check_prompts(target: ns.Model, listed: Sequence[tuple[str, Prompt]]) -> None:
    """Refuse prompts that the target cannot be asked, before anything is measured.

    Errors: ValueError naming the option and the prompt's place.
    """
    for place, prompt in listed:
        where = f"argument --prompts: {place}"
        try:
            tokens = chat.encode(target.tokenizer, prompt)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if not all(0 <= token < target.cfg.vocab_size for token in tokens):
            raise ValueError(f"{where}: holds a token outside the vocabulary of {target.cfg.vocab_size}")
        if len(tokens) >= target.cfg.max_context:
            raise ValueError(f"{where}: {len(tokens)} tokens leave no room in the context of {target.cfg.max_context}")


def as_record(report: Report) -> dict[str, Any]:
    """A report for programs."""
    verdict = report.verdict
    return {
        "target": report.target,
        "draft": report.draft,
        "findings": [finding._asdict() for finding in report.findings],
        "doubts": report.doubts,
        "trials": [{"damage": t.damage, "how": t.how} | vars(t.comparison) for t in report.trials],
        "controls": [{"how": t.how} | vars(t.comparison) for t in report.controls],
        "positions": report.positions,
        "accepted_length": report.accepted_length,
        "by_depth": [vars(r) for r in report.by_depth],
        "by_position": [
            {"from": s.start, "rounds": s.rounds, "accepted_length": s.mean_length} for s in report.by_position
        ],
        "damages": [{"damage": damage.name, "reason": damage.reason} for damage in report.damages],
        "verdict": verdict.name,
        "reason": verdict.reason,
    }


def as_text(report: Report) -> str:
    """A report for people."""
    lines = [f"target {report.target}, draft {report.draft}", ""]
    lines += [f"{finding.check:<12} {finding.text}" for finding in report.findings]
    if report.trials:
        lines += ["", f"Run in other ways, drafting {examine.DEPTH} tokens from every position of the completions:", ""]
        lines += table(report.trials)
        lines.append(
            f"(better: by luck under {CHANCE:.0e}, and {LIFT:.0%} more tokens where the files say nothing of it)"
        )
    if report.controls:
        lines += ["", "Run on inputs from elsewhere, which a working draft does worse with:", ""]
        lines += table(report.controls)
    if report.by_depth:
        lines += ["", "Rounds that accept a draft of this depth, of those that were not cut short before it:", ""]
        lines += [f"{r.depth:>7} {r.share:>6.1%} {bar(r.share)} {r.tested} tested" for r in report.by_depth]
        lines += ["", "Tokens a round, by the position in the sequence:", ""]
        lines += [
            f"{s.start:>7} {s.mean_length:>6.2f} {bar(s.mean_length / (examine.DEPTH + 1))} {s.rounds} rounds"
            for s in report.by_position
        ]
    return "\n".join([*lines, "", f"verdict: {report.verdict.name}: {report.verdict.reason}"])


def table(trials: Sequence[Trial]) -> list[str]:
    """Trials, a line each."""
    lines = [f"{'way':<58} {'tokens a round':>16}  better  worse  by luck"]
    for t in trials:
        c = t.comparison
        lines.append(f"{t.how:<58} {c.given:>7.2f} -> {c.other:.2f} {c.more:>8} {c.fewer:>6}  {c.chance:.0e}")
    return lines


def bar(share: float) -> str:
    """A share as a bar."""
    return "#" * round(BAR * share)

"""`python -m nanospec_fn doctor`: what is wrong with a draft, and how it is known. The last line is one verdict.

python -m nanospec_fn doctor --model smollm2 --draft eagle
python -m nanospec_fn doctor --model M --draft eagle:HEAD --prompts FILE --json
"""

import argparse
import functools
import json
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from nanospec_fn import arguments, chat, weights
from nanospec_fn.doctor import diagnosis, examine
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.verdict import Report

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
SOUND = ("healthy", "weak")
BAR = 40  # characters of a full bar


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `doctor` command."""
    parser = commands.add_parser(
        "doctor",
        help="what is wrong with a draft, and how it is known",
        description="Examine a draft: its files, the chat template, and the target's greedy completions drafted along "
        "in every way that a known damage would have needed. The last line is the verdict.",
        epilog="Exit codes: 0 for a verdict of healthy or weak; 1 for a damage, or a draft without a round; 2 for bad "
        "arguments.",
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
        prompts = (read_prompts(args.prompts) if args.prompts else list(PROMPTS))[: args.limit]
    except (ValueError, OSError) as error:
        parser.error(f"argument --prompts: {error}")
    try:
        model = ns.load(args.model, device=args.device, dtype=args.dtype)
        name = arguments.draft_for(args.draft, model)
        case = Case(model, prompts, args.backend, args.max_tokens, progress=not args.json)
        check_prompts(case)
        report = diagnosis.diagnose(case, name)
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    print(arguments.json_line(as_record(report)) if args.json else as_text(report))
    return int(report.verdict[0] not in SOUND)


def read_prompts(path: Path) -> list[str | list[int]]:
    """One prompt a line; in a .jsonl file a line is a text, a list of token ids, or an object that holds one.

    Errors: ValueError naming the line; OSError for a file that cannot be read.
    """
    found: list[str | list[int]] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        found.append(parse_line(line, f"{path}:{number}") if path.suffix == ".jsonl" else line)
    if not found:
        raise ValueError(f"{path}: contains no prompts")
    return found


def parse_line(line: str, where: str) -> str | list[int]:
    """The prompt of a JSON line, under "prompt", "question" or the first of "turns" where it is an object."""
    try:
        value = json.loads(line)
    except ValueError:
        raise ValueError(f"{where}: not valid JSON") from None
    if isinstance(value, dict):
        turns = value.get("turns")
        value = (
            value.get("prompt") or value.get("question") or (turns[0] if isinstance(turns, list) and turns else None)
        )
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        return value
    raise ValueError(f"{where}: holds neither a text nor a list of token ids")


def check_prompts(case: Case) -> None:
    """Refuse prompts that the target cannot be asked, before anything is measured.

    Errors: ValueError naming the prompt's index.
    """
    for index, prompt in enumerate(case.prompts):
        try:
            tokens = chat.encode(case.target.tokenizer, prompt)
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
        if not all(0 <= token < case.target.cfg.vocab_size for token in tokens):
            raise ValueError(f"prompt {index}: holds a token outside the vocabulary of {case.target.cfg.vocab_size}")


def as_record(report: Report) -> dict[str, Any]:
    """A report for programs."""
    verdict, reason = report.verdict
    return {
        "target": report.target,
        "draft": report.draft,
        "findings": [{"check": check, "text": text} for check, text in report.findings],
        "trials": [{"damage": t.damage, "how": t.how} | vars(t.comparison) for t in report.trials],
        "accepted_length": report.accepted_length,
        "by_depth": report.by_depth,
        "by_position": [{"from": start, "rounds": n, "accepted_length": mean} for start, n, mean in report.by_position],
        "damages": [{"damage": damage, "reason": why} for damage, why in report.damages],
        "verdict": verdict,
        "reason": reason,
    }


def as_text(report: Report) -> str:
    """A report for people."""
    lines = [f"target {report.target}, draft {report.draft}", ""]
    lines += [f"{check:<12} {text}" for check, text in report.findings]
    if report.trials:
        lines += ["", f"Run in other ways, drafting {examine.DEPTH} tokens from every position of the completions:", ""]
        lines += [f"{'way':<58} {'tokens a round':>16}  better  worse  by luck"]
        for trial in report.trials:
            c = trial.comparison
            lines.append(f"{trial.how:<58} {c.given:>7.2f} -> {c.other:.2f} {c.more:>8} {c.fewer:>6}  {c.chance:.0e}")
    if report.by_depth:
        lines += ["", "Rounds that accepted a draft of this depth:", ""]
        lines += [f"{d:>7} {share:>6.1%} {bar(share)}" for d, share in enumerate(report.by_depth, 1)]
        lines += ["", "Tokens a round, by the position in the sequence:", ""]
        lines += [
            f"{start:>7} {mean:>6.2f} {bar(mean / (examine.DEPTH + 1))} {rounds} rounds"
            for start, rounds, mean in report.by_position
        ]
    verdict, reason = report.verdict
    return "\n".join([*lines, "", f"verdict: {verdict}: {reason}"])


def bar(share: float) -> str:
    """A share as a bar."""
    return "#" * round(BAR * share)

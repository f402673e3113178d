"""`python -m nanospec_fn replay`: the rounds of a trace judged again; see counterfactual.py for what an answer covers.

python -m nanospec_fn replay FILE                 re-derive every decision and both log-probs
python -m nanospec_fn replay FILE --alpha 0.3     the same rows under rule power(0.3)
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import nanospec_fn as ns
from nanospec_fn import arguments, jsonl, trace
from nanospec_fn.counterfactual import Change, Figures, Outcome, counterfactual, verify

SHOWN = 8  # lines of a list


def add_parser(commands: "argparse._SubParsersAction[arguments.Parser]") -> None:
    """The `replay` command."""
    parser = commands.add_parser(
        "replay",
        help="judge recorded rounds again, or under another rule or a smaller tree",
        description="Re-derive every decision and both log-probs from a trace alone; or say what another rule or a "
        "smaller tree would have accepted on the recorded rows.",
        epilog="Exit codes: 0; 2 for bad arguments; 1 for a trace that its own evidence contradicts.",
    )
    parser.add_argument("file", metavar="FILE", help="a trace written by generate --trace")
    change = parser.add_argument_group("counterfactuals, one at a time")
    change.add_argument("--alpha", type=float, metavar="A", help="rule power with this exponent")
    change.add_argument("--tau", type=float, metavar="P", help="rule relaxed: accept from this probability on")
    change.add_argument(
        "--accept-topk", type=arguments.positive, metavar="K", help="rule relaxed: or among the K most probable"
    )
    change.add_argument("--spec-depth", type=arguments.positive, metavar="D", help="no more than D levels")
    change.add_argument("--spec-topk", type=arguments.positive, metavar="K", help="no more than K nodes a level")
    parser.add_argument("--json", action="store_true", help="one JSON object, with every round")
    parser.set_defaults(run=functools.partial(run, parser))


def question(parser: argparse.ArgumentParser, args: argparse.Namespace) -> tuple[str, Change | None]:
    """The option and the counterfactual it asks for; exits with code 2 and the option's name where one is wrong."""
    relaxed = args.tau is not None or args.accept_topk is not None
    asked = {"--alpha": args.alpha is not None, "--tau/--accept-topk": relaxed}
    asked |= {"--spec-depth": args.spec_depth is not None, "--spec-topk": args.spec_topk is not None}
    named = [name for name, given in asked.items() if given]
    if len(named) > 1:
        parser.error(f"argument {named[1]}: not allowed with {named[0]}")
    if args.spec_depth or args.spec_topk:
        return named[0], Change(depth=args.spec_depth, top_k=args.spec_topk)
    if not named:
        return "", None
    alpha = 1.0 if args.alpha is None else args.alpha
    tau, top_k = 1.0 if args.tau is None else args.tau, args.accept_topk or 0
    rule = "relaxed" if relaxed else "power"
    options = {"rule": (named[0], rule), "alpha": ("--alpha", alpha)}
    options |= {"tau": ("--tau", tau), "accept_top_k": ("--accept-topk", top_k)}
    arguments.checked(parser, functools.partial(ns.Sampling, temperature=1.0), options)
    return named[0], Change(rule=rule, alpha=alpha, tau=tau, accept_top_k=top_k)


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """`replay`; the exit code."""
    option, change = question(parser, args)
    try:
        found = trace.read(args.file)
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument FILE: {error}")
    if not found.rounds:
        parser.error(f"argument FILE: {args.file} has no rounds to judge")
    try:
        outcomes = [] if change is None else counterfactual(found, change)
    except ValueError as error:
        parser.error(f"argument {option}: {error}")
    if change is not None and not outcomes:
        parser.error(f"argument FILE: {args.file} has no drafted rounds to judge")
    if change is not None:
        report = summary(found, change, outcomes)
        print(jsonl.to_line(report) if args.json else "\n".join(lines(report)))
        return 0
    wrong, largest = verify(found)
    report = {"rounds": len(found.rounds), "requests": len(found.header.requests), "cut": found.cut}
    report |= {"unfinished": found.unfinished, "equal": not wrong, "largest_difference": largest, "differences": wrong}
    if args.json:
        print(jsonl.to_line(report))
    else:
        how = f"equal to {largest:.1e} nats" if largest else "equal bit for bit"
        print(_title(report))
        print(*_list(wrong), f"{len(wrong)} DIFFERENT" if wrong else f"decisions equal, both log-probs {how}", sep="\n")
    return int(bool(wrong))


def summary(found: trace.Trace, change: Change, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """A counterfactual's answer as one JSON object; both rules' means are over the rounds with an answer."""
    answered = [o for o in outcomes if o.changed]
    sequences = []
    for i in range(len(found.header.requests)):
        mine = [o for o in outcomes if o.request == i]
        exact = [o for o in mine if o.exact]
        end = next((o.position for o in mine if not o.same), None)
        sequences.append({"request": i, "rounds": len(mine), "exact_rounds": len(exact), "leaves_at": end})
    return {
        "change": str(change),
        "requests": len(found.header.requests),
        "rounds": len(outcomes),
        "cut": found.cut,
        "unfinished": found.unfinished,
        "recorded": _means([o.recorded for o in answered]),
        "changed": _means([o.changed for o in answered if o.changed]),
        "same": sum(o.same for o in outcomes),
        "sequences": sequences,
        "not_in_record": [{"request": o.request, "round": o.round} for o in outcomes if o.changed is None],
        "by_round": [dataclasses.asdict(o) for o in outcomes],
    }


def _means(figures: Sequence[Figures]) -> dict[str, float | None]:
    """Accepted tokens per round, the others per token; None where one of them is undefined or infinite."""
    tokens = sum(f.tokens for f in figures)
    found: dict[str, float | None] = {}
    for name in ("expected", "accepted", "target_logp", "behaviour_logp", "kl", "missing_mass"):
        values = [getattr(f, name) for f in figures]
        n = len(figures) if name in ("expected", "accepted") else tokens
        found[name] = math.fsum(values) / n if n and None not in values else None
    return found


def lines(report: dict[str, Any]) -> list[str]:
    """The answer as text."""
    names = {
        # The bonus token is left out here; the mean accepted length of `generate` counts it.
        "expected": "drafted tokens accepted a round, expected",
        "accepted": "drafted tokens accepted a round, by the recorded draws",
        "target_logp": "target log-prob a token",
        "behaviour_logp": "behaviour log-prob a token",
        "kl": "KL(pi || mu) a token",
        "missing_mass": "probability out of reach, a token",
    }

    def cell(which: str, name: str) -> str:
        value = report[which][name]
        return f"{value:.4f}" if value is not None else "infinite" if name == "kl" and report["rounds"] else "-"

    unit = "(log-probs and KL in nats)"
    first, width = max(map(len, names.values())) + 2, max(10, len(report["change"]) + 2)
    table = [f"{text:<{first}}{cell('recorded', n):>10}{cell('changed', n):>{width}}" for n, text in names.items()]
    unknown = [f"  request {o['request']} round {o['round']}" for o in report["not_in_record"]]
    ends = [
        f"  request {s['request']}: {s['exact_rounds']} of {s['rounds']} rounds"
        + (f", up to the one at position {s['leaves_at']}" if s["leaves_at"] is not None else "")
        for s in report["sequences"]
    ]
    return [
        _title(report),
        "",
        f"{unit:<{first}}{'recorded':>10}{report['change']:>{width}}",
        *table,
        "",
        f"{report['same']} rounds emit the same. Each round's answer is exact given its recorded prefix; as a sequence",
        "it is exact up to the first round that emits something else:",
        *_list(ends),
        *(
            [f"{len(unknown)} rounds have no answer: the smaller tree has nodes that were not recorded"]
            if unknown
            else []
        ),
        *_list(unknown),
    ]


def _title(report: dict[str, Any]) -> str:
    cut = "; the last line is not whole" if report["cut"] else ""
    open_ = report["unfinished"]
    shown = ", ".join(map(str, open_[:SHOWN])) + (", ..." if len(open_) > SHOWN else "")
    end = f"; not ended in the file: request{'s' * (len(open_) > 1)} {shown}" if open_ else ""
    return f"{report['rounds']} rounds of {report['requests']} requests{cut}{end}"


def _list(items: Sequence[str]) -> list[str]:
    return [*items[:SHOWN], *([f"  and {len(items) - SHOWN} more"] if len(items) > SHOWN else [])]

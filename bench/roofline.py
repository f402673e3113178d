"""Where a round's milliseconds go, and what they could be: `python -m bench.roofline --bs 1 8 32 --shape 1x5 4x5`.

Plain decoding and each tree shape are timed as captured rounds (on a CPU eagerly), and eager rounds cut into phases
(phases.py); `gaps` is what a round takes beyond its work. A phase's floor is its bytes (traffic.py) at the read
bandwidth measured in the same run. From the times and the measured acceptance follows the batch size at which
speculation stops paying (payoff.py). A strict JSON line for each round is printed and appended to
<out>/roofline-<model>.jsonl; a table and <out>/roofline-<model>.png follow. --from reads such a file in place
of a run; --accepted then draws it at other lengths.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import nanospec_fn as ns
from bench import acceptance, payoff, phases, records, rounds, traffic, widen
from nanospec_fn import arguments, chat, files, prompts

Row = dict[str, Any]
PLAIN = "plain"


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.roofline."""
    parser = arguments.Parser(
        prog="python -m bench.roofline",
        description="Cut rounds into phases and compare each with the device's read bandwidth.",
    )
    parser.add_argument("--bs", metavar="N", nargs="+", type=arguments.positive, default=[1, 8, 32], help="slots")
    parser.add_argument(
        "--shape", nargs="*", type=acceptance.shape, default=["1x5", "4x5"], metavar="TOPKxDEPTH[xNODES]", help="trees"
    )
    parser.add_argument("--context", metavar="N", type=arguments.positive, default=200, help="tokens of each prompt")
    parser.add_argument("--repeats", metavar="N", type=arguments.positive, default=20, help="rounds that are timed")
    parser.add_argument("--like", metavar="SHAPE", help="widen model and head in memory first, see bench.widen")
    parser.add_argument(
        "--accepted",
        metavar="X",
        nargs="+",
        type=tokens,
        help="mean accepted length, of all trees or of each (measured)",
    )
    parser.add_argument("--prompts", default="mt-bench", metavar="SET", help="to measure acceptance with")
    parser.add_argument("--limit", metavar="N", type=arguments.positive, default=8, help="so many of them")
    parser.add_argument("--max-tokens", metavar="N", type=arguments.positive, default=64, help="for each of them")
    parser.add_argument(
        "--out", metavar="FOLDER", type=arguments.folder, default=Path("bench/results"), help="of the results"
    )
    parser.add_argument("--from", dest="source", metavar="FILE", type=Path, help="rows of an earlier run: no new one")
    arguments.add_engine(parser)
    return parser


def tokens(text: str) -> float:
    """The type of --accepted."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1 <= value <= 257:
        raise argparse.ArgumentTypeError(f"must be a number from 1 to 257, got {text!r}")
    return value


def main(argv: list[str] | None = None) -> int:
    """Measure, or read, rows; print their table; draw them. The exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        if args.source:
            found, file = read(args.source), args.source
            trees = list(dict.fromkeys(row["config"] for row in found if row["config"] != PLAIN))
            found = [at_length(row, lengths(args.accepted, trees).get(row["config"])) for row in found]
        else:
            arguments.check_engine(parser, args)
            shapes = [acceptance.shape(x) if isinstance(x, str) else x for x in args.shape]
            if len({name_of(x) for x in shapes}) < len(shapes):
                raise ValueError("argument --shape: a shape is given twice")
            missing, file = plan(args, shapes)
            found = [records.append(file, row) for row in missing]
        if not any(row["config"] == PLAIN for row in found):
            raise ValueError(f"{file}: the newest run has no row of plain decoding")
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    costs = curves(found)
    print("\n".join(["", table(found), "", *(payoff.describe(costs[0], cost) for cost in costs[1:])]))
    picture = file.with_suffix(".png")
    try:
        payoff.plot(costs, f"{found[-1]['model']}, {found[-1]['gpu']}, context {found[-1]['context']}", picture)
        print(f"picture: {picture}")
    except ImportError:
        print(f"no picture: matplotlib is not installed; where it is, run {parser.prog} --from {file}")
    return 0


def plan(args: argparse.Namespace, shapes: Sequence[ns.Speculation]) -> tuple[Iterator[Row], Path]:
    """Load what is measured: the rows, each measured when it is asked for, and the file that they belong to.

    Errors: ValueError or FileNotFoundError naming the option, model, draft or file; before any row.
    """
    for bs in args.bs:
        ns.EngineConfig(max_slots=bs, attend=args.backend).validate()
    lengths(args.accepted, [name_of(shape) for shape in shapes])
    texts = prompts.load(args.prompts, args.limit) if shapes and args.accepted is None else []
    model, name, draft = widen.load(args.model, args.draft if shapes else "none", args.like, args.device)
    if shapes and draft is None:
        raise ValueError(
            "argument --draft: a draft is needed for trees, got none; an empty --shape measures plain rounds"
        )
    for shape in shapes:
        ns.build(model, draft=draft, speculation=shape)
    longest = max(rounds.most_tokens(spec, args.context, args.repeats) for spec in (None, *shapes))
    if longest > model.cfg.max_context:
        raise ValueError(
            f"argument --context: {args.context} tokens and {args.repeats} rounds need {longest}, "
            f"the model's context is {model.cfg.max_context}"
        )
    requests = [chat.encode(model.tokenizer, text) for text in texts]
    arguments.make_folder(args.out)
    file = args.out / f"roofline-{Path(model.name).name}.jsonl"
    return measured(args, model, draft, shapes, requests, name), file


def measured(
    args: argparse.Namespace,
    model: ns.Model,
    draft: ns.Draft | None,
    shapes: Sequence[ns.Speculation],
    requests: list[list[int]],
    name: str,
) -> Iterator[Row]:
    """Measure the ceiling, the acceptance of each shape, and then every round. Args: name: the draft's."""
    ceiling = rounds.read_ceiling(model.params.embed.device)
    common = records.about_own(model, name, args.backend) | {"repeats": args.repeats, "read_gb_s": ceiling / 1e9}
    kinds: list[tuple[ns.Speculation | None, float]] = [(None, 1.0)]
    given = lengths(args.accepted, [name_of(shape) for shape in shapes])
    for shape in shapes:
        accepted = given.get(name_of(shape))
        if accepted is None:
            assert draft is not None
            slots = min(len(requests), 8)
            sizes = {"max_tokens": args.max_tokens, "max_slots": slots, "attend": args.backend}
            found = acceptance.measure(model, draft, requests, shape, **sizes)
            accepted = found["mean_accepted_len"]
            if accepted is None:
                raise ValueError("argument --max-tokens: no round was run, so nothing is known of acceptance")
        kinds.append((shape, accepted))
    for bs, (spec, accepted) in itertools.product(args.bs, kinds):
        used = draft if spec else None
        try:
            timing = rounds.measure(model, used, spec, bs, args.context, args.repeats, args.backend)
        except torch.OutOfMemoryError:
            print(f"{name_of(spec)}, batch {bs}: out of memory, left out", file=sys.stderr)
            continue
        yield common | figures(model, used, spec, bs, timing, accepted, ceiling)


def lengths(given: Sequence[float] | None, trees: Sequence[str]) -> dict[str, float]:
    """--accepted by tree. Errors: ValueError for another number of them than of trees, and than one."""
    if given is None:
        return {}
    if len(given) not in (1, len(trees)):
        raise ValueError(f"argument --accepted: {len(given)} lengths for {len(trees)} trees")
    return dict(zip(trees, [*given] * (len(trees) if len(given) == 1 else 1), strict=True))


def at_length(row: Row, accepted: float | None) -> Row:
    """The row as it would be at another mean accepted length."""
    if accepted is None:
        return row
    return row | {"tokens_a_round": accepted, "tok_s": 1e3 * row["bs"] * accepted / row["round_ms"]}


def figures(
    model: ns.Model,
    draft: ns.Draft | None,
    spec: ns.Speculation | None,
    bs: int,
    timing: rounds.Timing,
    accepted: float,
    ceiling: float,
) -> Row:
    """A row's measured part."""
    load = traffic.Load.of(bs, timing.context, spec)
    moved = traffic.of_round(
        load, model.cfg, model.params.embed.element_size(), getattr(draft and draft.method, "cfg", None)
    )
    ms = timing.phases | {"gaps": timing.round_ms - sum(timing.phases.values())}
    floor = {name: traffic.milliseconds(size, ceiling) for name, size in moved.items()}
    return {
        "config": name_of(spec),
        "bs": bs,
        "context": timing.context,
        "round_ms": timing.round_ms,
        "beyond_gib": timing.beyond_gib,
        "tokens_a_round": accepted,
        "tok_s": 1e3 * bs * accepted / timing.round_ms,
        "floor_ms": sum(floor.values()),
        "of_ceiling": sum(floor.values()) / timing.round_ms,
        "phase_ms": ms,
        "phase_bytes": moved,
        "phase_of_ceiling": {name: floor[name] / ms[name] for name in floor if floor[name] and ms[name] > 0},
    }


def name_of(spec: ns.Speculation | None) -> str:
    """A round's name in tables."""
    if spec is None:
        return PLAIN
    pruned = f"x{spec.nodes}" if spec.nodes < spec.lookahead else ""
    return f"chain {spec.depth}" if spec.top_k == 1 else f"tree {spec.top_k}x{spec.depth}{pruned}"


def read(file: Path) -> list[Row]:
    """The rows of the newest run in a file: those of the last row's commit, model, device and settings.

    Errors: ValueError naming the file and line; FileNotFoundError.
    """
    if not files.is_file(file):
        raise FileNotFoundError(f"{file}: no such file")
    rows = []
    for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            rows.append(json.loads(line))
            curves(rows[-1:])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{file}:{i}: not a row of bench.roofline") from None
    same = ("commit", "model", "draft", "gpu", "attend", "dtype", "read_gb_s")
    return [row for row in rows if all(row.get(key) == rows[-1].get(key) for key in same)]


def curves(rows: Sequence[Row]) -> list[payoff.Cost]:
    """The cost of each kind of round, plain decoding first."""
    found: dict[str, payoff.Cost] = {}
    for row in rows:
        known = found[row["config"]].curve if row["config"] in found else {}
        curve = dict(known) | {row["bs"]: row["round_ms"]}
        found[row["config"]] = payoff.Cost(row["config"], curve, row["tokens_a_round"])
    return sorted(found.values(), key=lambda cost: cost.name != PLAIN)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown: milliseconds, and in brackets the share of the read bandwidth."""
    names = [name for name in (*phases.PHASES, "gaps") if any(row["phase_ms"][name] for row in rows)]
    lines = [["round", "bs", "ms", "floor", "of ceiling", *names, "tokens a round", "tok/s"]]
    lines.append(["---"] * len(lines[0]))
    for row in rows:
        cells = []
        for name in names:
            share = row["phase_of_ceiling"].get(name)
            cells.append(f"{row['phase_ms'][name]:.3f}" + ("" if share is None else f" ({share:.0%})"))
        head = [row["config"], str(row["bs"]), f"{row['round_ms']:.3f}", f"{row['floor_ms']:.3f}"]
        ends = [f"{row['tokens_a_round']:.2f}", f"{row['tok_s']:.0f}"]
        lines.append([*head, f"{row['of_ceiling']:.0%}", *cells, *ends])
    notes = "; ".join(f"{name}: {what}" for name, what in phases.PHASES.items() if name in names)
    read = f"Read bandwidth measured: {rows[-1]['read_gb_s']:.0f} GB/s. "
    return "\n".join([*("| " + " | ".join(line) + " |" for line in lines), "", read + notes + "; gaps: the rest."])


if __name__ == "__main__":
    sys.exit(main())

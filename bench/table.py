"""Rows of bench.run as a Markdown table: `python -m bench.table bench/results/*.jsonl`.

One line per (engine, config, batch size): the median over runs, with the least and the greatest. A table is of one
device, model, prompt set and commit; rows that would mix them are refused by name. Rows with a "source" are quoted from
elsewhere and stand in a table of their own, which no ratio looks at.
"""

import argparse
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nanospec_fn import arguments, files, jsonl

OWN = "nanospec"
ONE = ("gpu", "model", "prompt_set", "commit")  # of these a table has one value
ONE_PER_ENGINE = ("version", "torch", "threads", "attend", "gemm")
ONE_PER_SIZE = ("prompts", "max_tokens")  # a batch size may take part of the prompts
LINE = ("engine", "config", "draft", "bs")  # what a line of the table is
ORDER = ("nospec", "chain", "tree", "tree6", "auto")
COLUMNS = {"tok_s": 1, "tpot_ms": 2, "round_ms": 2, "mean_accepted_len": 2}  # a row's figures, and their digits
HEADER = ("engine", "config", "draft", "batch", "tok/s", "ms/token", "round ms", "tokens a round")
RATIOS = ("against its nospec", "against the best peer", "equals plain")
Row = dict[str, Any]
Line = tuple[Any, ...]


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.table."""
    parser = arguments.Parser(
        prog="python -m bench.table", description="Medians over runs of bench.run's rows, in Markdown."
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="JSON lines that bench.run wrote")
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        type=condition,
        metavar="KEY=VALUE",
        help="keep the rows that say so, as in gpu=cpu; several narrow further",
    )
    return parser


def condition(text: str) -> tuple[str, str]:
    """The type of --only."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"must be KEY=VALUE, got {text!r}")
    return key, value


def main(argv: list[str] | None = None) -> int:
    """Print the tables; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        found = [(path, row) for path in args.files for row in read(path)]
        others = sorted({str(path) for path, row in found if not is_row(row)})
        if others:
            print(f"bench.table: left out, not of bench.run: {', '.join(others)}", file=sys.stderr)
        rows = [row for _, row in found if is_row(row)]
        measured = [row for row in rows if "source" not in row and matches(row, args.only)]
        print(render(measured, [row for row in rows if "source" in row]), end="")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def read(path: Path) -> list[Any]:
    """What the lines of a file hold, other benchmarks' rows too. Its last line may be torn, and is left out.

    Errors: ValueError for any other line that is not a row, FileNotFoundError, each naming the file.
    """
    if files.is_folder(path):
        raise ValueError(f"{path} is a folder: name its files, {path}/*.jsonl")
    if not files.is_file(path):
        raise FileNotFoundError(f"{files.short(path)}: no such file")
    lines = path.read_bytes().split(b"\n")
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = jsonl.load(line, f"{path}:{number}: not valid JSON")
        except ValueError:
            if number < len(lines):
                raise
            print(f"bench.table: {path}:{number}: torn, left out", file=sys.stderr)
            continue
        if is_row(row):
            check_row(row, f"{path}:{number}")
        found.append(row)
    return found


def check_row(row: Row, where: str) -> None:
    """Errors: ValueError that begins with `where`, for a row that lacks a field or holds what no table can show."""
    quoted = "source" in row
    absent = sorted({*ONE, "run", "tok_s"} - set(row)) if not quoted else []
    if absent:
        raise ValueError(f"{where}: a row without {absent[0]!r}")
    for name, value in row.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in ("engine", "config") and not isinstance(value, str):
            raise ValueError(f"{where}: {name} must be a string, got {value!r}")
        if name in ("bs", "run") and not (number and isinstance(value, int)):
            raise ValueError(f"{where}: {name} must be an integer, got {value!r}")
        missing = value is None and (quoted or name != "tok_s")
        if name in COLUMNS and not number and not missing:
            raise ValueError(f"{where}: {name} must be a number, got {value!r}")
        if isinstance(value, list | dict):
            raise ValueError(f"{where}: {name} must be one value, got {value!r}")


def is_row(value: Any) -> bool:
    """Whether a line's value is a row of bench.run, or one that is quoted in its form."""
    return isinstance(value, dict) and {"engine", "config", "bs"} <= set(value) and bool({"run", "source"} & set(value))


def matches(row: Row, only: Iterable[tuple[str, str]]) -> bool:
    """Whether a row says what --only asks for."""
    return all(str(row.get(key)) == value for key, value in only)


def render(measured: Sequence[Row], quoted: Sequence[Row]) -> str:
    """Markdown of measured rows, then of quoted ones.

    Errors: ValueError where there is nothing, or what may not be mixed is, naming the values.
    """
    if not measured and not quoted:
        raise ValueError("no rows")
    parts = []
    if measured:
        parts += [*table(measured), "", *notes(measured)]
    if quoted:
        parts += [""] * bool(measured) + ["Quoted, not measured here:", "", *quotations(quoted)]
    return "\n".join(parts) + "\n"


def table(rows: Sequence[Row]) -> list[str]:
    """The lines of the measured table."""
    check(rows)
    lines: dict[Line, list[Row]] = {}
    for row in sorted(rows, key=position):
        lines.setdefault(tuple(row.get(key) for key in LINE), []).append(row)
    speed = {line: median(runs, "tok_s") for line, runs in lines.items()}
    return markdown([*HEADER, *RATIOS], [cells(line, runs, speed) for line, runs in lines.items()])


def cells(line: Line, runs: Sequence[Row], speed: Mapping[Line, float]) -> list[str]:
    """One line's text; `speed`: the median tok/s of every line."""
    ratios = [ratio(speed[line], base) for base in (plain(speed, line), best_peer(speed, line))]
    figures = [spread(runs, key, digits) for key, digits in COLUMNS.items()]
    return [*map(shown, line), *figures, *ratios, agreement(runs)]


def check(rows: Sequence[Row]) -> None:
    """Refuse rows that one table may not hold together, and a run that is there twice."""
    for key in ONE:
        refuse_mixture("rows", key, rows)
    for engine in sorted({row["engine"] for row in rows}):
        for key in ONE_PER_ENGINE:
            refuse_mixture(f"rows of {engine}", key, [row for row in rows if row["engine"] == engine])
    for bs in sorted({row["bs"] for row in rows}):
        for key in ONE_PER_SIZE:
            refuse_mixture(f"rows of batch size {bs}", key, [row for row in rows if row["bs"] == bs])
    seen = set()
    for row in rows:
        run = tuple(row.get(key) for key in (*LINE, "run"))
        if run in seen:
            raise ValueError(
                f"{row['engine']} {row['config']}, batch size {row['bs']}: run {row.get('run')} is there twice"
            )
        seen.add(run)


def refuse_mixture(what: str, key: str, rows: Sequence[Row]) -> None:
    """Raise where rows hold different values of a key, naming them."""
    values = sorted({str(row.get(key)) for row in rows})
    if len(values) > 1:
        raise ValueError(f"{what} mix {key}: {', '.join(values)}; choose with --only {key}=...")


def position(row: Row) -> tuple[Any, ...]:
    """Where a row stands: by batch size, this engine first, plain decoding before chains and trees."""
    config = row["config"]
    rank = ORDER.index(config) if config in ORDER else len(ORDER)
    return row["bs"], row["engine"] != OWN, row["engine"], rank, config, str(row.get("draft")), row.get("run", 0)


def plain(speed: Mapping[Line, float], line: Line) -> float | None:
    """The same engine's tok/s without speculation, at the same batch size."""
    engine, config, _, bs = line
    found = [value for (e, c, _, b), value in speed.items() if (e, c, b) == (engine, "nospec", bs)]
    return found[0] if found and config != "nospec" else None


def best_peer(speed: Mapping[Line, float], line: Line) -> float | None:
    """The greatest tok/s of any other project's engine and configuration, at the same batch size."""
    return max((value for (engine, _, _, bs), value in speed.items() if engine != OWN and bs == line[3]), default=None)


def median(runs: Sequence[Row], key: str) -> float:
    """The median over the runs that have the figure; NaN where none has."""
    values = [row[key] for row in runs if row.get(key) is not None]
    return statistics.median(values) if values else float("nan")


def spread(runs: Sequence[Row], key: str, digits: int) -> str:
    """A median, and in brackets the least and the greatest where they are shown apart."""
    values = [row[key] for row in runs if row.get(key) is not None]
    if not values:
        return "-"
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return middle if low == high else f"{middle} ({low}-{high})"


def ratio(value: float, base: float | None) -> str:
    """A speed-up."""
    return f"{value / base:.2f}x" if base else "-"


def agreement(runs: Sequence[Row]) -> str:
    """Whether the tokens were plain decoding's, in every run that was checked."""
    checked = [row["identical"] for row in runs if row.get("identical") is not None]
    return "-" if not checked else "yes" if all(checked) else "NO"


def notes(rows: Sequence[Row]) -> list[str]:
    """What the table is of."""
    runs = sorted({sum(tuple(r.get(k) for k in LINE) == tuple(row.get(k) for k in LINE) for r in rows) for row in rows})
    versions = sorted({" ".join(filter(None, (row["engine"], row.get("version")))) for row in rows})
    sizes = sorted({f"{row.get('prompts')} prompts x {row.get('max_tokens')} tokens" for row in rows})
    torches = sorted({f"torch {row.get('torch')}" for row in rows})
    lines = [f"{rows[0]['gpu']}, model {rows[0]['model']}, {rows[0]['prompt_set']}: {', '.join(sizes)}, greedy."]
    lines += [f"{', '.join([*versions, *torches])}; commit {rows[0]['commit']}."]
    lines += [
        f"Medians of {' to '.join({str(runs[0]): 0, str(runs[-1]): 0})} run{'s' * (runs[-1] > 1)} (least-greatest)."
    ]
    if any(row["engine"] == "vllm" for row in rows) and any(row["config"].startswith("tree") for row in rows):
        lines.append("vLLM has no EAGLE-3 tree (removed in 2026), so it has no such line.")
    return lines


def quotations(rows: Sequence[Row]) -> list[str]:
    """The lines of the quoted table: figures as they were given, and below it where they are from."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    names = ("engine", "version", "config", "batch", *HEADER[4:], "device", "model", "figures")
    lines = []
    for row in sorted(rows, key=lambda row: (sources.index(row["source"]), *position(row))):
        about = [shown(row.get(key)) for key in ("engine", "version", "config", "bs")]
        figures = [spread([row], key, digits) for key, digits in COLUMNS.items()]
        lines.append([*about, *figures, shown(row.get("gpu")), shown(row.get("model")), mark(row["source"], sources)])
    return [*markdown(names, lines), "", *(f"{mark(source, sources)}: {source}." for source in sources)]


def mark(source: str, sources: Sequence[str]) -> str:
    """What a figure from elsewhere is labelled with."""
    return f"quoted [{sources.index(source) + 1}]"


def shown(value: Any) -> str:
    """A cell's text."""
    return "-" if value is None else str(value).replace("|", "\\|")


def markdown(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """A table's lines, its columns aligned so that it reads as text too."""
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    rows = [header, ["-" * width for width in widths], *cells]
    return ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in rows]


if __name__ == "__main__":
    sys.exit(main())

"""What reinforcement learning runs did, as pictures and a table: `python -m rl.plot RUN... --out DIR`.

DIR gets curves.png (reward, accepted length, speed and both KLs over steps), knee.png (reward against speed, the
corrections of one acceptance rule joined by a line) and table.md, which is also printed.
"""

import argparse
import importlib.util
import io
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanospec_fn import arguments, files
from rl import run_files

MISSING = "matplotlib is not installed: pip install 'nanospec-fn[rl]'"
NAMED = 16  # runs or settings that a legend has room for
WIDEST = 60  # characters of its line
END = 5  # steps at either end of a run that its figures are means over
# field of a log line: (title, axis with its unit)
PANELS = {
    "reward": ("Reward", "mean reward of a completion"),
    "accepted_len": ("Accepted length", "tokens per round, bonus counted"),
    "tok_s": ("Rollout speed, first step left out", "tokens per second"),
    "kl_mu_old": ("KL(mu || pi_old): what the lossy rule costs", "nats per token"),
    "kl_old_0": ("KL(pi_old || pi_0): how far training went", "nats per token"),
}
WRITTEN = ("curves.png", "knee.png", "table.md")
HUGE = 1e300  # JSON knows no limit; NaN is not below it either
FIELDS = ("solved", "w_max", "ess", *PANELS)
# Options that make no other setting: the corrections, which are compared, and what no figure should depend on.
CORRECTION = ("correction", "is_clip", "icepop_low", "icepop_high", "m2po_tau")
FREE = (*CORRECTION, "seed", "steps", "out", "resume", "device", "eval_every", "save_every", "quiet")
ACCEPTANCE = ("acceptance", "alpha", "tau", "accept_topk")


@dataclass(frozen=True)
class Run:
    """One run's log."""

    name: str
    options: Mapping[str, Any]  # of its command line
    steps: Sequence[int]  # ascending
    values: Mapping[str, Sequence[float]]  # field: a value for each step, nan where the log has none


def read(path: Path) -> Run:
    """The run of a folder that holds log.jsonl, or of a log. A last line that is not whole is left out.

    A step that stands there twice, because a run was resumed, counts as it was logged last.

    Errors: FileNotFoundError, or ValueError naming the file and line that is no line of such a log.
    """
    log = path / "log.jsonl" if files.is_folder(path) else path
    if not files.is_file(log):
        raise FileNotFoundError(
            f"{files.short(log)}: no such file; a run is a folder that holds log.jsonl, or such a file"
        )
    options: dict[str, Any] | None = None
    rows: dict[int, dict[str, float]] = {}
    for i, record in enumerate(run_files.read_lines(log), 1):
        if "header" in record:
            options = options_of(record, f"{log}:{i}")
        elif options is None:
            raise ValueError(f"{log}:{i}: the first line of a log is its header")
        else:
            step, values = row_of(record, f"{log}:{i}")
            rows[step] = values
    if options is None:
        raise ValueError(f"{log}: empty, the first line of a log is its header")
    steps = sorted(rows)
    name = (log.parent if log.name == "log.jsonl" else log.with_suffix("")).resolve().name
    return Run(name, options, steps, {field: [rows[step][field] for step in steps] for field in FIELDS})


def distinct(runs: Sequence[Run], paths: Sequence[Path]) -> list[Run]:
    """The same runs; those that share a name are called by their path."""
    often = Counter(run.name for run in runs)
    return [replace(run, name=str(p)) if often[run.name] > 1 else run for run, p in zip(runs, paths, strict=True)]


def options_of(record: Mapping[str, Any], where: str) -> dict[str, Any]:
    header = record["header"]
    options = header.get("options") if isinstance(header, dict) else None
    if not isinstance(options, dict):
        raise ValueError(f'{where}: the header has no "options"')
    return options


def row_of(record: Mapping[str, Any], where: str) -> tuple[int, dict[str, float]]:
    """A line's step, and its value of each field that is drawn."""
    step, values = run_files.step_of(record, where), {}
    for field in FIELDS:
        value = record.get(field)
        real = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE
        if value is not None and not real:
            raise ValueError(f"{where}: {field} must be a finite number or null, got {value!r}")
        values[field] = math.nan if value is None else float(value)
    return step, values


def mean(values: Iterable[float]) -> float:
    """The mean of what is there, nan where nothing is."""
    there = [value for value in values if not math.isnan(value)]
    return statistics.fmean(there) if there else math.nan


def smooth(values: Sequence[float], window: int) -> list[float]:
    """At each step the mean of the last `window` steps' values, fewer at the beginning."""
    return [mean(values[max(0, i + 1 - window) : i + 1]) for i in range(len(values))]


def speed(run: Run) -> float:
    """Tokens per second after the first step, which pays for kernels and graphs."""
    return mean(run.values["tok_s"][1:])


def acceptance(options: Mapping[str, Any]) -> str:
    """The rule that accepted drafts, with the parameters that it has."""
    rule = str(options.get("acceptance", "exact"))
    if str(options.get("draft", "none")) == "none":
        return "no draft"
    if rule == "power":
        return f"power, alpha {options.get('alpha')}"
    return f"relaxed, tau {options.get('tau')}, top {options.get('accept_topk')}" if rule == "relaxed" else rule


def correction_of(run: Run) -> str:
    return str(run.options.get("correction", "none"))


def label(run: Run) -> str:
    return f"{run.name} ({acceptance(run.options)}; {correction_of(run)})"


def printable(text: str) -> str:
    """A text that UTF-8 can hold: a folder's name may have other bytes, JSON half of a surrogate pair."""
    return text.encode(errors="replace").decode()


def as_it_stands(text: str) -> str:
    """A text for a figure, whose dollar signs begin no formula."""
    return printable(files.short(text, WIDEST)).replace("$", r"\$")


def settings(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in correction and seed alone, by a name: the rule, and the options that tell them apart."""
    keys = sorted({key for run in runs for key in run.options} - {*FREE, *ACCEPTANCE})
    varied = [key for key in keys if len({repr(run.options.get(key)) for run in runs}) > 1]
    found: dict[str, list[Run]] = {}
    for run in runs:
        rest = [f"{key} {run.options.get(key)}" for key in varied if (key, run.options.get(key)) != ("draft", "none")]
        found.setdefault("; ".join([acceptance(run.options), *rest]), []).append(run)
    return found


def number(value: float, digits: int) -> str:
    return "" if math.isnan(value) else f"{value:.{digits}f}"


def summary(run: Run) -> dict[str, str]:
    """A run's line of the table, by column. "First" and "last" are means over END steps, the rest over the run.

    A cell is empty where the log has no such figure, "-" where the first and the last steps would share some.
    """
    v = run.values
    apart = len(run.steps) >= 2 * END
    weights = [w for w in v["w_max"] if not math.isnan(w)]
    return {
        "run": run.name,
        "draft": str(run.options.get("draft", "")),
        "acceptance": acceptance(run.options),
        "correction": correction_of(run),
        "seed": str(run.options.get("seed", "")),
        "steps": str(len(run.steps)),
        f"reward, first {END}": number(mean(v["reward"][:END]), 3) if apart else "-",
        f"reward, last {END}": number(mean(v["reward"][-END:]), 3) if apart else "-",
        f"solved, last {END}": number(mean(v["solved"][-END:]), 3),
        "accepted length": number(mean(v["accepted_len"]), 2),
        "tok/s": number(speed(run), 1),
        "KL(mu, pi_old)": number(mean(v["kl_mu_old"]), 4),
        f"KL(pi_old, pi_0), last {END}": number(mean(v["kl_old_0"][-END:]), 4),
        "largest w": number(max(weights, default=math.nan), 2),
        "ESS": number(mean(v["ess"]), 3),
    }


def table(runs: Sequence[Run]) -> str:
    """A Markdown table, a run a line, and what a "-" in it means."""
    lines = [summary(run) for run in runs]
    texts = [
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |"
        for line in [lines[0], *map(dict.values, lines)]
    ]
    if any(len(run.steps) < 2 * END for run in runs):
        texts += [
            "",
            f'"-": a run of fewer than {2 * END} steps, whose first {END} and last {END} share some; '
            "the rest is over all steps.",
        ]
    return printable("\n".join([texts[0], "|" + "---|" * len(lines[0]), *texts[1:]]) + "\n")


def curves(runs: Sequence[Run]) -> Any:
    """A figure with a panel per entry of PANELS and the legend in the last cell."""
    from matplotlib.figure import Figure

    window = max(1, min(25, max(len(run.steps) for run in runs) // 8))
    figure = Figure(figsize=(15, 8.5), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    for (field, (title, unit)), ax in zip(PANELS.items(), axes, strict=False):
        for i, run in enumerate(runs):
            look = {"color": f"C{i % 10}", "linestyle": ("-", "--", ":", "-.")[i // 10 % 4]}
            start = 1 if field == "tok_s" else 0
            steps, values = run.steps[start:], run.values[field][start:]
            marker = "o" if len(steps) == 1 else None  # one point makes no line
            ax.plot(steps, values, alpha=0.25, linewidth=0.9, color=look["color"], marker=marker)
            ax.plot(steps, smooth(values, window), linewidth=2, label=as_it_stands(label(run)), **look)
        ax.set(title=title, xlabel="step (policy updates)", ylabel=unit)
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(alpha=0.3)
        if all(math.isnan(value) for run in runs for value in run.values[field]):
            ax.text(0.5, 0.5, "not in these logs", ha="center", transform=ax.transAxes)
    axes[-1].axis("off")
    drawn = "Faint: each step." + (f" Bold: mean of the last {window} steps." if window > 1 else " No smoothing.")
    title = f"run (acceptance rule; correction)\n{drawn}"
    handles, _ = axes[0].get_legend_handles_labels()
    legend = axes[-1].legend(handles=capped(handles), title=title, loc="upper left", fontsize=9, frameon=False)
    legend.set_in_layout(False)  # a long name would take its room from the panels
    return figure


def capped(handles: Sequence[Any]) -> list[Any]:
    """The entries of a legend, the last of too many replaced by their number."""
    from matplotlib.lines import Line2D

    if len(handles) <= NAMED:
        return list(handles)
    more = Line2D([], [], linestyle="none", label=f"and {len(handles) - NAMED} more, see table.md")
    return [*handles[:NAMED], more]


MARKERS = {"none": "X", "exact": "o", "clipped": "s", "icepop": "D", "m2po": "^"}


def knee(runs: Sequence[Run]) -> Any:
    """A figure of reward against speed: a colour per setting, a marker per correction, each seed faint."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.5, 6), layout="constrained")
    ax = figure.subplots()
    handles, seen, faint = [], set(), False
    for i, (name, members) in enumerate(settings(runs).items()):
        color, points = f"C{i % 10}", []
        for correction in sorted({correction_of(run) for run in members}, key=order):
            same = [run for run in members if correction_of(run) == correction]
            x, y = [speed(run) for run in same], [mean(run.values["reward"][-END:]) for run in same]
            marker = MARKERS.get(correction, "v")
            if len(same) > 1:
                faint = True
                ax.plot(x, y, linestyle="none", marker=marker, color=color, alpha=0.3, markersize=5)
            ax.plot(mean(x), mean(y), linestyle="none", marker=marker, color=color, markersize=11, markeredgecolor="k")
            points.append((mean(x), mean(y)))
            seen.add(correction)
        ax.plot(*zip(*points, strict=True), color=color, linewidth=1.5, zorder=1)
        handles.append(Line2D([], [], color=color, linewidth=4, label=as_it_stands(name)))
    handles, marks = capped(handles), []
    for correction in sorted(seen, key=order):
        marker = MARKERS.get(correction, "v")
        marks.append(
            Line2D([], [], linestyle="none", marker=marker, color="0.4", label=as_it_stands(f"correction {correction}"))
        )
    ax.set(xlabel="rollout speed (tokens per second, first step left out)")
    ax.set(ylabel=f"mean reward of the last {END} steps", title="What speed costs in reward")
    ax.grid(alpha=0.3)
    ax.margins(0.12)
    note = "acceptance rule (colour) and correction (marker);\na line joins the corrections of one rule"
    note += "\nfaint: each seed" if faint else ""
    figure.legend(
        handles=[*handles, *capped(marks)], title=note, loc="outside right upper", fontsize=9, title_fontsize=9
    )
    return figure


def order(correction: str) -> tuple[int, str]:
    """The key that sorts corrections as MARKERS has them, unknown ones behind."""
    return list(MARKERS).index(correction) if correction in MARKERS else len(MARKERS), correction


def png(figure: Any) -> bytes:
    """A figure's picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    FigureCanvasAgg(figure)
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=80)
    return made.getvalue()


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.plot."""
    parser = arguments.Parser(
        prog="python -m rl.plot", description="Pictures and a table of the runs of rl.grpo, side by side."
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that holds log.jsonl, or a log")
    parser.add_argument("--out", type=arguments.folder, default="plots", metavar="DIR", help="folder of the pictures")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Read the runs, write the pictures and the table, print the table; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error(MISSING)
    try:
        found = distinct([read(path) for path in args.runs], args.runs)
    except (ValueError, OSError) as error:
        parser.error(f"argument RUN: {error}")
    runs = [run for run in found if run.steps]
    for run in found:
        if not run.steps:
            print(f"{run.name}: no step is logged yet, left out", file=sys.stderr)
    if not runs:
        parser.error("argument RUN: no step is logged yet")
    try:
        arguments.make_folder(args.out)
        for name in WRITTEN:
            if (args.out / name).is_dir():
                raise ValueError(f"argument --out: {args.out / name} is a folder")
    except ValueError as error:
        parser.error(str(error))
    text = table(runs)
    try:
        for name, made in zip(WRITTEN, (png(curves(runs)), png(knee(runs)), text.encode()), strict=True):
            files.write(args.out / name, made)
    except OSError as error:
        parser.exit(1, f"{parser.prog}: error: {args.out / name}: cannot be written ({error.strerror})\n")
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

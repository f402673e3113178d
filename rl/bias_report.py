"""What a bias study found, as a table and a picture. The lines are those of its file: a header, then one a run."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rl import bias_study
from rl.bias_study import REFERENCE, Study


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of a study's lines: per correction the mean over seeds, and the smallest and largest."""
    study = Study(**lines[0]["header"]["study"])
    rows = ["| correction | seeds | distance to the optimum | by enumeration | objective lost | likeliest token |"]
    rows.append("|" + "---|" * 6)
    for correction in dict.fromkeys(line["correction"] for line in lines[1:]):
        runs = [line for line in lines[1:] if line["correction"] == correction]
        end = (
            f"{bias_study.distance(bias_study.expected_end(study, correction), bias_study.optimum()):.3f}"
            if study.tokens == 1
            else ""
        )
        spreads = [spread([run[key] for run in runs], 4 if key == "gap" else 3) for key in ("distance", "gap")]
        top = spread([run["policy"][0] for run in runs], 3)
        rows.append(f"| {correction} | {len(runs)} | {spreads[0]} | {end} | {spreads[1]} | {top} |")
    return "\n".join([*rows, f"| (the optimum) | | 0 | 0 | 0 | {float(bias_study.optimum()[0]):.3f} |", ""])


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def picture(lines: Sequence[Mapping[str, Any]]) -> Any:
    """A figure: distance to the optimum over steps, a line per seed; and the mean final policy beside the optimum."""
    from matplotlib.figure import Figure

    study = Study(**lines[0]["header"]["study"])
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    corrections = list(dict.fromkeys(line["correction"] for line in lines[1:]))
    width = 0.8 / (len(corrections) + 1)
    ids = range(len(REFERENCE))
    right.bar(
        [i - 0.4 + width / 2 for i in ids], bias_study.optimum().tolist(), width, color="0.3", label="the optimum"
    )
    for k, correction in enumerate(corrections):
        runs = [line for line in lines[1:] if line["correction"] == correction]
        for run in runs:
            name = f"correction {correction}, {len(runs)} seeds" if run is runs[0] else None
            left.plot(range(1, len(run["path"]) + 1), run["path"], color=f"C{k}", alpha=0.6, linewidth=1.2, label=name)
        if study.tokens == 1:
            end = bias_study.distance(bias_study.expected_end(study, correction), bias_study.optimum())
            left.axhline(end, color=f"C{k}", linestyle="--", label=f"{correction}, by enumeration: {end:.3f}")
        means = [statistics.fmean(run["policy"][i] for run in runs) for i in ids]
        low = [mean - min(run["policy"][i] for run in runs) for i, mean in enumerate(means)]
        high = [max(run["policy"][i] for run in runs) - mean for i, mean in enumerate(means)]
        place = [i - 0.4 + width * (k + 1.5) for i in ids]
        right.bar(place, means, width, yerr=[low, high], capsize=2, color=f"C{k}", label=f"correction {correction}")
    left.set(xlabel="step (policy updates)", ylabel="total variation distance to the optimum", ylim=(0, None))
    left.set(title=f"Tokens drawn under power, alpha {study.alpha:g}")
    right.set(xlabel="token id (the draft always proposes 0)", ylabel="probability", xticks=list(ids))
    right.set(title="Mean policy of the last half; bars: all seeds")
    for ax in (left, right):
        ax.grid(alpha=0.3, axis="y")
        ax.legend(fontsize=8)
    return figure

"""When speculation pays: from measured costs of a round at some batch sizes, and the tokens that a round gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nanospec_fn import files

Curve = Mapping[int, float]  # slots -> ms of a round

MOST = 4096  # slots that are looked at


@dataclass(frozen=True)
class Cost:
    """One kind of round."""

    name: str
    curve: Curve
    tokens: float  # that a round emits for each slot: 1 for plain decoding, else the mean accepted length


def at(curve: Curve, slots: int) -> float:
    """A round's ms at a batch size: linear between the measured ones, the outer two continued beyond them."""
    known = sorted(curve)
    if len(known) == 1:
        return curve[known[0]]
    right = next((i for i, x in enumerate(known) if x >= slots), len(known) - 1)
    a, b = known[max(right, 1) - 1], known[max(right, 1)]
    return curve[a] + (curve[b] - curve[a]) * (slots - a) / (b - a)


def speed(cost: Cost, slots: int) -> float:
    """Tokens a second over all slots."""
    return 1e3 * slots * cost.tokens / at(cost.curve, slots)


def stops_paying(plain: Cost, drafted: Cost, most: int = MOST) -> int | None:
    """The smallest batch at which drafting gives no more tokens a second than plain decoding; None: none up to `most`.

    With one token a slot and round, plain decoding at batch b costs c(b) a token; drafting costs r(b) / tokens.
    """
    return next((b for b in range(1, most + 1) if speed(drafted, b) <= speed(plain, b)), None)


def describe(plain: Cost, drafted: Cost) -> str:
    """The prediction as a sentence."""
    batch, measured = stops_paying(plain, drafted), max(set(plain.curve) & set(drafted.curve), default=0)
    said = f"{drafted.name}, {drafted.tokens:.2f} tokens a round: "
    if batch != 1 and min(len(plain.curve), len(drafted.curve)) == 1:
        return said + f"pays at batch {measured}; where it stops takes more than one measured batch"
    if batch is None:
        return said + f"pays at every batch up to {MOST} (measured up to {measured}, continued beyond)"
    if batch == 1:
        return said + "never pays"
    beyond = f", beyond the measured {measured}" if batch > measured else ""
    return said + f"stops paying at batch {batch}{beyond}"


def labelled(cost: Cost) -> str:
    """A kind of round's entry in the legend."""
    return cost.name if cost.tokens == 1 else f"{cost.name}, {cost.tokens:.2f} tokens a round"


def plot(costs: Sequence[Cost], title: str, path: Path) -> None:
    """Speed against batch, the measured points and the predicted crossings, as a PNG; plain decoding is costs[0].

    Errors: ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    measured = max(x for cost in costs for x in cost.curve)
    crossings = {cost.name: stops_paying(costs[0], cost) for cost in costs[1:]}
    shown = max([2 * measured, *(min(2 * b, 8 * measured) for b in crossings.values() if b)])
    batches = sorted({*range(1, min(shown, 64) + 1), *(round(1.05**i) for i in range(400) if 1.05**i <= shown)})
    for i, cost in enumerate(costs):
        color = f"C{i}"
        axes.plot(batches, [speed(cost, b) for b in batches], color=color, label=labelled(cost))
        known = sorted(cost.curve)
        axes.plot(known, [speed(cost, b) for b in known], "o", color=color)
        crossing = crossings.get(cost.name)
        if crossing and crossing <= shown:
            axes.axvline(crossing, color=color, linestyle=":", label=f"{cost.name} stops paying: {crossing}")
    axes.axvspan(measured, shown, color="0.93", zorder=0, label="not measured")
    axes.set(
        xscale="log", yscale="log", xlim=(1, shown), xlabel="requests at once", ylabel="tokens a second", title=title
    )
    axes.set_xticks([b for b in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096) if b <= shown])
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.minorticks_off()
    axes.legend(fontsize="small")
    with files.whole(path) as part:
        FigureCanvasAgg(figure).print_png(part)

"""How often drafted tokens were accepted, by their place in the draft and in the answer, from a trace.

A trial is an emitted token that stands where a draft of full depth has one: it succeeds where the token was drafted and
accepted. So the share at draft position d is of the rounds that got there, whether or not their tree went on; rounds
that a stop token or the limit cut short count as far as they were emitted.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

from nanospec_fn.trace import Trace
from nanospec_fn.trees import Tree

CONFIDENCE = 0.95
BINS = 16  # at most, of a table or picture
BAR = 20  # characters of a full bar


@dataclass(frozen=True)
class Trial:
    """One token that a draft could have been right about."""

    depth: int  # draft position, from 1
    place: int  # position in the answer, 0 for its first token, which is the prefill's
    accepted: bool
    offered: bool  # the draft had candidates there


@dataclass(frozen=True)
class Share:
    """The trials at positions first to last."""

    first: int
    last: int
    accepted: int
    tried: int
    offered: int  # of `tried`, where the draft had candidates

    @property
    def name(self) -> str:
        return f"{self.first}" if self.first == self.last else f"{self.first}-{self.last}"

    @property
    def interval(self) -> tuple[float, float]:
        return wilson(self.accepted, self.tried)


def trials(found: Trace, request: int | None = None) -> list[Trial]:
    """The trials of a trace, or of one of its requests.

    Errors: ValueError where no token was drafted.
    """
    spec, out = found.header.speculation, []
    for r in found.rounds:
        if spec is None or r.prefill or request not in (None, r.request):
            continue
        parents = {p for p, d in zip(r.nodes.parent, r.nodes.depth, strict=True) if d > 0}
        start = r.position - found.header.requests[r.request].prompt_tokens
        for i, row in enumerate((Tree.ROOT, *r.path)[: min(len(r.tokens), spec.depth)]):
            out.append(Trial(i + 1, start + i, i < len(r.path), row in parents))
    if not any(t.offered for t in out):
        raise ValueError(
            "no round has drafted tokens" if request is None else f"request {request} has no drafted token"
        )
    return out


def by_depth(tried: Iterable[Trial]) -> list[Share]:
    """Shares by draft position, from 1."""
    return _bins([(t.depth, t) for t in tried], 1)


def by_place(tried: Iterable[Trial]) -> list[Share]:
    """Shares by position in the answer, from 0."""
    return _bins([(t.place, t) for t in tried], 0)


def _bins(placed: Sequence[tuple[int, Trial]], first: int) -> list[Share]:
    """At most BINS equal ranges of positions, their width a power of two, from `first` to the last that was tried."""
    span = max(at for at, _ in placed) + 1 - first
    width = 1 << max(0, math.ceil(math.log2(span / BINS)))
    shares = []
    for low in range(first, first + span, width):
        mine = [t for at, t in placed if low <= at < low + width]
        accepted, offered = sum(t.accepted for t in mine), sum(t.offered for t in mine)
        shares.append(Share(low, low + width - 1, accepted, len(mine), offered))
    return shares


def wilson(accepted: int, tried: int) -> tuple[float, float]:
    """The interval of a share at CONFIDENCE, trials taken as independent; (0, 1) without trials.

    Source: Wilson 1927, Probable inference, the law of succession, and statistical inference.
    """
    if not tried:
        return 0.0, 1.0
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    share, shrink = accepted / tried, 1 + z * z / tried
    centre = (share + z * z / (2 * tried)) / shrink
    half = z / shrink * math.sqrt(share * (1 - share) / tried + z * z / (4 * tried * tried))
    return max(0.0, centre - half), min(1.0, centre + half)


def lines(title: str, shares: Sequence[Share]) -> list[str]:
    """A table: positions, counts, trials where nothing was drafted, share, interval, and the share as a bar."""
    out = [title, f"{'position':<10}{'accepted / tried':>18}{'undrafted':>11}{'share':>8}   {CONFIDENCE:.0%} interval"]
    for s in shares:
        counts, (low, high) = f"{s.accepted} / {s.tried}", s.interval
        if not s.tried:
            out.append(f"{s.name:<10}{counts:>18}{0:>11}{'-':>8}")
            continue
        share = s.accepted / s.tried
        bar = "#" * round(share * BAR)
        cells = f"{s.name:<10}{counts:>18}{s.tried - s.offered:>11}{share:>8.1%}"
        out.append(f"{cells}   {low:>6.1%} to {high:>6.1%}   {bar}".rstrip())
    return out

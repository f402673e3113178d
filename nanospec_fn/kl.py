"""What a lossy acceptance rule costs: KL(pi || mu) per row of the target, in closed form, its worst case and as measured.

    python -m nanospec_fn kl                    worst case per alpha and number of candidates
    python -m nanospec_fn kl --alpha 0.3 FILE   on the rows of a trace

pi is the target's distribution after the filters, mu that of the emitted token given prefix and tree (design.md
section 6). Everything is in nats and in float64.
"""

import argparse
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import nanospec_fn as ns
from nanospec_fn import arguments, trace
from nanospec_fn.sampling import Sampling
from nanospec_fn.trees import Tree

ALPHAS = (0.9, 0.7, 0.5, 0.3, 0.1)
CANDIDATES = (1, 2, 3, 4)
GRID = 4000


def log_add(a: float, b: float) -> float:
    """log(exp(a) + exp(b))."""
    high, low = max(a, b), min(a, b)
    return high if high == -math.inf else high + math.log1p(math.exp(low - high))


def log_one_minus(log_x: float) -> float:
    """log(1 - exp(log_x)) for log_x <= 0."""
    if log_x >= 0:
        return -math.inf
    return math.log(-math.expm1(log_x)) if log_x > -0.7 else math.log1p(-math.exp(log_x))


@dataclass(frozen=True)
class Row:
    """A row of the target as the rules see it."""

    logp: tuple[float, ...]  # of each candidate, in the order in which they are tried
    rest: float  # log of the probability outside the candidates

    def ratios(self) -> list[tuple[float, float, float]]:
        """Per candidate: log p / r, log 1 - p / r and log r, r the mass that the earlier candidates left."""
        later, found = self.rest, []
        for logp in reversed(self.logp):
            left = log_add(logp, later)
            found.append((-math.inf, 0.0, left) if logp == -math.inf else (logp - left, later - left, left))
            later = left
        return found[::-1]


def divergence(row: Row, alpha: float) -> float:
    """KL(pi || mu) of a row under `power`: KL_k = kl(first) + (1 - first) KL_{k-1}."""
    ratios = row.ratios()
    whole = ratios[0][2] if ratios else 0.0  # 0 up to rounding
    return math.fsum(math.exp(left - whole) * _of_one(log_p, log_q, alpha) for log_p, log_q, left in ratios)


def _of_one(log_p: float, log_q: float, alpha: float) -> float:
    """One candidate of probability p = 1 - q: p (1 - alpha) log p + q log(q / (1 - p^alpha))."""
    if log_p == -math.inf or log_q == -math.inf:
        return 0.0  # it is never, or always, emitted: by pi and by mu
    return math.exp(log_p) * (1 - alpha) * log_p + math.exp(log_q) * (log_q - log_one_minus(alpha * log_p))


def worst_case(alpha: float, candidates: int) -> float:
    """The largest `divergence` that any row with so many candidates can have."""
    worst = 0.0
    for _ in range(candidates):  # the first's share of the row is free, whatever the others make of what it leaves
        worst = _maximum(lambda log_p, below=worst: _of_one(log_p, log_one_minus(log_p), alpha)  # type: ignore[misc]
                         - math.expm1(log_p) * below)
    return worst


def _maximum(f: "functools.partial[float]") -> float:
    """The maximum of a smooth function of log p over p in (0, 1): on a grid, then by golden section around its best."""
    at = [-math.exp(-20 + 27 * i / GRID) for i in range(GRID + 1)]
    best = max(range(1, GRID), key=lambda i: f(at[i]))
    low, high = at[best + 1], at[best - 1]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (a, high) if f(a) < f(b) else (low, b)
    return f((low + high) / 2)

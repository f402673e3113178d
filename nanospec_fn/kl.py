"""What a lossy acceptance rule costs: KL(pi || mu) per row of the target, its worst case and as measured.

pi is the target's distribution after the filters, mu that of the emitted token given prefix and tree
(docs/promises.md, "Behaviour log-probs"). Everything is in nats and in float64.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanospec_fn import trace
from nanospec_fn.sampling import Sampling

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
    for _ in range(candidates):
        worst = _maximum(functools.partial(_with_rest, alpha=alpha, below=worst))
    return worst


def _with_rest(log_p: float, alpha: float, below: float) -> float:
    """The first candidate's share p of a row is free, whatever the others make (`below`) of what it leaves."""
    return _of_one(log_p, log_one_minus(log_p), alpha) - math.expm1(log_p) * below


def _maximum(f: Callable[[float], float]) -> float:
    """The maximum of a smooth function of log p over p in (0, 1): on a grid, then by golden section around its best."""
    at = [-math.exp(-20 + 27 * i / GRID) for i in range(GRID + 1)]
    best = max(range(1, GRID), key=lambda i: f(at[i]))
    low, high = at[best + 1], at[best - 1]
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        low, high = (a, high) if f(a) < f(b) else (low, b)
    return f((low + high) / 2)


def candidates(nodes: trace.Nodes, row: int) -> list[int]:
    """The nodes that a row tries, in order."""
    mine = [i for i, (p, d) in enumerate(zip(nodes.parent, nodes.depth, strict=True)) if p == row - 1 and d > 0]
    return sorted(mine, key=lambda i: (-nodes.draft_logp[i], nodes.token[i]))


def row_of(record: trace.Round, row: int) -> Row:
    """A recorded row."""
    return Row(tuple(record.nodes.target_logp[i] for i in candidates(record.nodes, row)), record.rows.rest_mass[row])


def passing(record: trace.Round, row: int, request: Sampling) -> int | None:
    """The candidate that `relaxed` accepts at a recorded row, in fp32 as `acceptance.decide` has it."""
    logp, rank = record.nodes.target_logp, record.nodes.rank
    likely = (torch.tensor(logp).exp() >= torch.tensor(request.tau)).tolist()
    for i in candidates(record.nodes, row):
        if logp[i] > -math.inf and (likely[i] or rank[i] < request.accept_top_k):
            return i
    return None


@dataclass(frozen=True)
class Measured:
    """The rows of a trace that emitted a token and have so many candidates."""

    candidates: int
    rows: int
    mean: float | None  # KL(pi || mu), nats a token; None: infinite at some row
    largest: float | None
    accepting: int  # rows where `relaxed` accepts, and so never emits anything else; those with p = 1 among them
    missing_mass: float  # of pi, that mu cannot reach, on average over the rows


def measure(found: trace.Trace, alpha: float | None = None) -> list[Measured]:
    """KL(pi || mu) on a trace's rows under `power(alpha)`, or under each request's own rule for None.

    The rows are those on the recorded sequences. If these were sampled by `exact`, the mean is an estimate of the cost
    per token, KL(pi || mu) being an expectation under pi.

    Errors: ValueError for an alpha at temperature 0 or with coupled proposals.
    """
    if alpha is not None:
        check_lossy(found)
    by_count: dict[int, list[tuple[float, float, bool]]] = {}
    requests = [r.sampling for r in found.header.requests]
    if alpha is not None:
        requests = [dataclasses.replace(r, rule="power", alpha=alpha, tau=1.0, accept_top_k=0) for r in requests]
    for record in found.rounds:
        for row in (0, *(node + 1 for node in record.path))[: len(record.tokens)]:
            count = len(candidates(record.nodes, row))
            request = requests[record.request]
            accepts = request.rule == "relaxed" and passing(record, row, request) is not None
            by_count.setdefault(count, []).append((*cost(record, row, request), accepts))
    return [
        Measured(
            candidates=k,
            rows=len(costs),
            mean=_finite(math.fsum(kl for kl, _, _ in costs) / len(costs)),
            largest=_finite(max(kl for kl, _, _ in costs)),
            accepting=sum(accepts for _, _, accepts in costs),
            missing_mass=math.fsum(mass for _, mass, _ in costs) / len(costs),
        )
        for k, costs in sorted(by_count.items())
    ]


def _finite(x: float) -> float | None:
    return None if x == math.inf else x


def cost(record: trace.Round, row: int, request: Sampling) -> tuple[float, float]:
    """KL(pi || mu) at a recorded row under a request's rule, and the mass of pi that mu cannot reach."""
    if request.rule == "power":
        return divergence(row_of(record, row), request.alpha), 0.0
    if request.rule == "relaxed" and (node := passing(record, row, request)) is not None:
        missing = max(0.0, -math.expm1(record.nodes.target_logp[node]))
        return math.inf if missing else 0.0, missing
    return 0.0, 0.0


def check_lossy(found: trace.Trace) -> None:
    """Errors: ValueError naming why no lossy rule has behaviour log-probs on a trace's rows."""
    for i, request in enumerate(found.header.requests):
        if request.sampling.temperature == 0:
            raise ValueError(f"request {i} was sampled at temperature 0, where only 'exact' has a behaviour log-prob")
    if found.header.speculation and found.header.speculation.coupled:
        raise ValueError("the proposals were coupled: a lossy rule has no closed-form behaviour log-prob with them")

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
from torch import Tensor

from nanospec_fn import kernels, recorded, trace
from nanospec_fn.recorded import Row
from nanospec_fn.sampling import Sampling

GRID = 4000


def divergence(row: Row, alpha: float) -> float:
    """KL(pi || mu) of a row under `power`: KL_k = kl(first) + (1 - first) KL_{k-1}."""
    log_p, log_q, left = row.ratios()
    if not len(left):
        return 0.0
    share = (left - left[0]).exp()  # left[0] is 0 up to rounding
    return math.fsum((share * _of_one(log_p, log_q, alpha)).tolist())


def _of_one(log_p: Tensor, log_q: Tensor, alpha: float) -> Tensor:
    """[N], one candidate of probability p = 1 - q each: p (1 - alpha) log p + q log(q / (1 - p^alpha))."""
    sure = (log_p == -math.inf) | (log_q == -math.inf)  # it is never, or always, emitted: by pi and by mu
    cost = log_p.exp() * (1 - alpha) * log_p + log_q.exp() * (log_q - kernels.log_one_minus_exp(alpha * log_p))
    return cost.masked_fill(sure, 0.0)


def worst_case(alpha: float, candidates: int) -> float:
    """The largest `divergence` that any row with so many candidates can have."""
    worst = 0.0
    for _ in range(candidates):
        worst = _maximum(functools.partial(_with_rest, alpha=alpha, below=worst))
    return worst


def _with_rest(log_p: Tensor, alpha: float, below: float) -> Tensor:
    """[N]: the first candidate's share p of a row is free, whatever the others make (`below`) of what it leaves."""
    return _of_one(log_p, kernels.log_one_minus_exp(log_p), alpha) - torch.expm1(log_p) * below


def _maximum(f: Callable[[Tensor], Tensor]) -> float:
    """The maximum of a smooth function of log p over p in (0, 1): on a grid, then by golden section around its best."""
    at = -torch.exp(-20 + 27 * torch.arange(GRID + 1, dtype=torch.float64) / GRID)
    best = 1 + int(f(at)[1:-1].argmax())
    low, high = float(at[best + 1]), float(at[best - 1])
    golden = (math.sqrt(5) - 1) / 2
    for _ in range(60):
        a, b = high - golden * (high - low), low + golden * (high - low)
        left, right = f(torch.tensor([a, b], dtype=torch.float64)).tolist()
        low, high = (a, high) if left < right else (low, b)
    return float(f(torch.tensor([(low + high) / 2], dtype=torch.float64)))


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
        recorded.check_lossy(found)
    by_count: dict[int, list[tuple[float, float, bool]]] = {}
    requests = [r.sampling for r in found.header.requests]
    if alpha is not None:
        requests = [dataclasses.replace(r, rule="power", alpha=alpha, tau=1.0, accept_top_k=0) for r in requests]
    for record in found.rounds:
        for row in (0, *(node + 1 for node in record.path))[: len(record.tokens)]:
            count = len(recorded.candidates(record.nodes, row))
            request = requests[record.request]
            accepts = request.rule == "relaxed" and recorded.passing(record, row, request) is not None
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
        return divergence(recorded.row_of(record, row), request.alpha), 0.0
    if request.rule == "relaxed" and (node := recorded.passing(record, row, request)) is not None:
        missing = max(0.0, -math.expm1(record.nodes.target_logp[node]))
        return math.inf if missing else 0.0, missing
    return 0.0, 0.0

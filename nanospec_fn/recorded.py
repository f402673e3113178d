"""A recorded round as the acceptance rules see it: a row's candidates in order, and how likely each is accepted.

`acceptance.decide` judges a round by its draws, in fp32. Here is what it does over all draws, in float64, from the
record alone; tests/test_recorded.py holds the two together.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn.sampling import Sampling
from nanospec_fn.trace import Nodes, Round, Trace


@dataclass(frozen=True)
class Row:
    """A row of the target as the rules see it."""

    logp: tuple[float, ...]  # of each candidate, in the order in which they are tried
    rest: float  # log of the probability outside the candidates

    def ratios(self) -> tuple[Tensor, Tensor, Tensor]:
        """[K] float64 each, by candidate: log p / r, log 1 - p / r and log r, r the mass that the earlier ones left."""
        mass = torch.tensor([*self.logp, self.rest], dtype=torch.float64)
        left = mass.flip(0).logcumsumexp(0).flip(0)  # no mass is found by subtraction
        logp, left, later = mass[:-1], left[:-1], left[1:]
        never = logp == -math.inf
        return logp.where(never, logp - left), torch.where(never, 0.0, later - left), left


def candidates(nodes: Nodes, row: int) -> list[int]:
    """The nodes that a row tries, in order."""
    mine = [i for i, (p, d) in enumerate(zip(nodes.parent, nodes.depth, strict=True)) if p == row - 1 and d > 0]
    return sorted(mine, key=lambda i: (-nodes.draft_logp[i], nodes.token[i]))


def row_of(record: Round, row: int) -> Row:
    """A recorded row."""
    return Row(tuple(record.nodes.target_logp[i] for i in candidates(record.nodes, row)), record.rows.rest_mass[row])


def passing(record: Round, row: int, request: Sampling) -> int | None:
    """The candidate that `relaxed` accepts at a recorded row, in fp32 as `acceptance.decide` has it."""
    logp, rank = record.nodes.target_logp, record.nodes.rank
    likely = (torch.tensor(logp).exp() >= torch.tensor(request.tau)).tolist()
    for i in candidates(record.nodes, row):
        if logp[i] > -math.inf and (likely[i] or rank[i] < request.accept_top_k):
            return i
    return None


def chances(record: Round, row: int, request: Sampling) -> dict[int, float]:
    """Each candidate of a recorded row, and the probability that the row emits it, over all draws."""
    nodes, mine = record.nodes, candidates(record.nodes, row)
    if request.temperature == 0:
        return {i: float(nodes.token[i] == record.rows.token[row]) for i in mine}
    if request.rule == "exact":
        return {i: math.exp(nodes.target_logp[i]) for i in mine}
    if request.rule == "relaxed":
        accepted = passing(record, row, request)
        return {i: float(i == accepted) for i in mine}
    log_a = [request.alpha * log_p for log_p in row_of(record, row).ratios()[0].tolist()]
    passed = [math.prod(-math.expm1(a) for a in log_a[:place]) for place in range(len(mine))]
    return {i: before * math.exp(a) for i, a, before in zip(mine, log_a, passed, strict=True)}


def check_lossy(found: Trace) -> None:
    """Errors: ValueError naming why no lossy rule has behaviour log-probs on a trace's rows."""
    for i, request in enumerate(found.header.requests):
        if request.sampling.temperature == 0:
            raise ValueError(f"request {i} was sampled at temperature 0, where only 'exact' has a behaviour log-prob")
    if found.header.speculation and found.header.speculation.coupled:
        raise ValueError("the proposals were coupled: a lossy rule has no closed-form behaviour log-prob with them")

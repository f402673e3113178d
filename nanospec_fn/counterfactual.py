"""Recorded rounds judged again from their trace alone, under their own rule, another rule, or a smaller tree.

A counterfactual is exact for each round given the round's recorded prefix. As a sequence it is exact up to the first
round that emits something else: what follows there is on a prefix that was never run.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nanospec_fn import acceptance, kl, narrow, recorded, rng, sampling, trace
from nanospec_fn.draft import Speculation
from nanospec_fn.sampling import Sampling
from nanospec_fn.trace import Round, Trace

TOLERANCE = 1e-5  # nats, where another machine's exp and log took part


@dataclass(frozen=True)
class Change:
    """A question to a trace: another rule (None: each request's own), or a smaller tree."""

    rule: str | None = None
    alpha: float = 1.0
    tau: float = 1.0
    accept_top_k: int = 0
    depth: int | None = None
    top_k: int | None = None

    def apply(self, request: Sampling) -> Sampling:
        if self.rule is None:
            return request
        return dataclasses.replace(
            request, rule=self.rule, alpha=self.alpha, tau=self.tau, accept_top_k=self.accept_top_k
        )

    def __str__(self) -> str:
        if self.rule is None:
            parts = [f"{n} {getattr(self, n)}" for n in ("depth", "top_k") if getattr(self, n) is not None]
            return ", ".join(parts) or "as recorded"
        fields = {"power": ("alpha",), "relaxed": ("tau", "accept_top_k"), "exact": ()}[self.rule]
        return f"{self.rule}({', '.join(f'{n}={getattr(self, n):g}' for n in fields)})"


@dataclass(frozen=True)
class Block:
    """What a round emits under a rule."""

    tokens: list[int]  # cut by a stop id or the limit
    target_logp: list[float]
    behaviour_logp: list[float]
    path: list[int]  # accepted nodes whose tokens are emitted
    finish_reason: str | None
    accepted: int  # drafted tokens that were accepted, those that a cut dropped among them


def judge(found: Trace, rounds: Sequence[Round], requests: Sequence[Sampling]) -> list[Block]:
    """What `acceptance.decide` makes of recorded evidence. Args: requests: how each of `rounds` is sampled."""
    blocks: list[Block] = [Block([], [], [], [], None, 0)] * len(rounds)
    for size in sorted({len(r.nodes.token) for r in rounds}):
        mine = [i for i, r in enumerate(rounds) if len(r.nodes.token) == size]
        evidence, tree = trace.to_evidence([rounds[i] for i in mine])
        depth = max((max(rounds[i].nodes.depth, default=0) for i in mine), default=0)
        verdict = acceptance.decide(evidence, tree, sampling.controls([requests[i] for i in mine]), depth)
        columns = (verdict.tokens, verdict.target_logp, verdict.behaviour_logp, verdict.path, verdict.accepted)
        for i, tokens, target, behaviour, path, accepted in zip(mine, *(x.tolist() for x in columns), strict=True):
            record = rounds[i]
            count, reason = _cut(tokens[: accepted + 1], found.header.requests[record.request], record.position)
            emitted = path[: min(accepted, count)]
            blocks[i] = Block(tokens[:count], target[:count], behaviour[:count], emitted, reason, accepted)
    return blocks


def _cut(tokens: list[int], request: trace.Request, position: int) -> tuple[int, str | None]:
    """How many of a round's tokens are emitted, and whether the request ends with them."""
    room = max(0, request.limit - position)
    for i, token in enumerate(tokens[:room]):
        if token in request.stop_ids:
            return i + 1, "stop"
    return min(room, len(tokens)), "length" if len(tokens) >= room else None


def verify(found: Trace) -> tuple[list[str], float]:
    """Re-derive every round of a trace from its evidence and compare it with the record.

    The draws of the acceptance test come from the request's seed again; log-probs and the rows' own draws, which would
    take the model, are the record's.
    Log-probs must have the recorded bits where this torch on this kind of CPU wrote the trace; elsewhere they may be
    `TOLERANCE` apart.
    Returns: a line for each difference that is not allowed; the largest difference of a log-prob, in nats.
    """
    here, there = trace.arithmetic(torch.device("cpu")), found.header.engine
    same = all(there.get(name) == value for name, value in here.items())
    requests = [found.header.requests[r.request] for r in found.rounds]
    wrong, largest = [], 0.0
    position = [request.prompt_tokens for request in found.header.requests]
    ended: set[int] = set()
    draws = accept_draws(found.rounds)
    blocks = judge(found, found.rounds, [r.sampling for r in requests])
    for line, (record, block) in enumerate(zip(found.rounds, blocks, strict=True), start=2):
        where = f"line {line}: request {record.request}, position {record.position}"
        if record.position != position[record.request]:
            wrong.append(f"{where}: the earlier rounds end at {position[record.request]}")
        if record.request in ended:
            wrong.append(f"{where}: the request has ended before")
        position[record.request] = record.position + len(record.tokens)
        if record.finish_reason:
            ended.add(record.request)
        for node, depth in enumerate(record.nodes.depth):
            drawn, named = record.nodes.accept[node], next(draws)
            if depth > 0 and drawn != named:
                wrong.append(f"{where}: accept of node {node} is {drawn!r}, its seed and token give {named!r}")
        origin = [record.nodes.depth[node] for node in block.path] + [0] * (len(block.tokens) - len(block.path))
        derived = {"origin": origin} | vars(block)
        for name in ("tokens", "path", "origin", "finish_reason"):
            if getattr(record, name) != derived[name]:
                wrong.append(f"{where}: {name} is {getattr(record, name)}, its evidence gives {derived[name]}")
        for name in ("target_logp", "behaviour_logp"):
            for a, b in zip(getattr(record, name), derived[name], strict=False):
                if a.hex() == b.hex():  # minus infinity included
                    continue
                apart = abs(a - b)
                largest = max(largest, apart)
                if same or not apart <= TOLERANCE:
                    wrong.append(f"{where}: {name} is {a!r}, its evidence gives {b!r}")
    return wrong, largest


def accept_draws(rounds: Sequence[Round]) -> Iterator[float]:
    """The uniform that names each node of each round: a function of seed, position and token."""
    nodes = [(r.seed, r.position + d - 1, t) for r in rounds for t, d in zip(r.nodes.token, r.nodes.depth, strict=True)]
    seed, position, token = torch.tensor(nodes, dtype=torch.int64).view(-1, 3).unbind(1)
    key = rng.draw_key(rng.key(seed), position, rng.ACCEPT)
    return iter(rng.uniform(rng.fold_in(key, token)).tolist())


@dataclass(frozen=True)
class Figures:
    """What a round gives under a rule. Log-probs and KL are sums over its tokens, in nats."""

    tokens: int
    expected: float | None  # accepted drafted tokens, over all draws; None: not defined for coupled proposals
    accepted: int  # by the recorded draws
    target_logp: float
    behaviour_logp: float
    kl: float | None  # KL(pi || mu) at the rows that emit; None: infinite
    missing_mass: float  # of pi at these rows, that mu cannot reach


@dataclass(frozen=True)
class Outcome:
    """One round under the recorded rule and under a changed one."""

    request: int
    round: int  # of the request, its prefill not counted
    position: int
    recorded: Figures
    changed: Figures | None  # None: the smaller tree cannot be told from the recorded one
    same: bool  # it emits the same tokens
    exact: bool  # its prefix is what the changed rule or tree would have emitted


def counterfactual(found: Trace, change: Change) -> list[Outcome]:
    """What another rule or a smaller tree makes of each recorded round.

    Errors: ValueError naming why the trace cannot answer: temperature 0 or coupled proposals with a lossy rule, a rule
      that accepts nothing, a tree that is deeper or wider than the recorded one, a draft whose trees it cannot narrow.
    """
    if change.rule not in (None, "exact"):
        recorded.check_lossy(found)
    requests = [change.apply(r.sampling) for r in found.header.requests]
    for request in requests:
        request.validate()
    spec = found.header.speculation
    smaller = change.depth is not None or change.top_k is not None
    shape = narrow.check(found.header, change.depth, change.top_k) if smaller else None
    rounds = [r for r in found.rounds if not r.prefill]
    kept = [_narrowed(r, found.header, shape) if shape else r for r in rounds]
    known = [i for i, r in enumerate(kept) if r is not None]
    changed = [r for r in kept if r is not None]
    before = judge(found, rounds, [found.header.requests[r.request].sampling for r in rounds])
    after = dict(zip(known, judge(found, changed, [requests[r.request] for r in changed]), strict=True))
    coupled = spec is not None and spec.coupled
    count, on_record = [0] * len(requests), [True] * len(requests)
    outcomes = []
    for i, (record, other) in enumerate(zip(rounds, kept, strict=True)):
        own = found.header.requests[record.request].sampling
        same = other is not None and after[i].tokens == record.tokens
        figures = None if other is None else _figures(other, after[i], requests[record.request], coupled)
        outcomes.append(
            Outcome(
                request=record.request,
                round=count[record.request],
                position=record.position,
                recorded=_figures(record, before[i], own, coupled),
                changed=figures,
                same=same,
                exact=on_record[record.request] and other is not None,
            )
        )
        count[record.request] += 1
        on_record[record.request] &= same
    return outcomes


def _narrowed(record: Round, header: trace.Header, shape: Speculation) -> Round | None:
    nodes = narrow.nodes(record.nodes, header, shape)
    return None if nodes is None else narrow.apply(record, nodes)


def _figures(record: Round, block: Block, request: Sampling, coupled: bool) -> Figures:
    rows = [0, *(node + 1 for node in block.path)][: len(block.tokens)]
    costs = [kl.cost(record, row, request) for row in rows]
    divergence = math.fsum(c for c, _ in costs)
    return Figures(
        tokens=len(block.tokens),
        expected=None if coupled else expected(record, request),
        accepted=block.accepted,
        target_logp=math.fsum(block.target_logp),
        behaviour_logp=math.fsum(block.behaviour_logp),
        kl=None if divergence == math.inf else divergence,
        missing_mass=math.fsum(mass for _, mass in costs),
    )


def expected(record: Round, request: Sampling) -> float:
    """Drafted tokens that a round accepts on average over its draws, given prefix and tree."""
    reach = [1.0] + [0.0] * len(record.nodes.token)  # by row, parents before their children
    for row in range(len(reach)):
        for node, chance in recorded.chances(record, row, request).items():
            reach[node + 1] = reach[row] * chance
    return math.fsum(reach[1:])

"""How a request is sampled, and the acceptance rules with their exact behaviour log-probs.

Shapes: B slots, N drafted nodes, R = N + 1 rows (row 0 the root, row i + 1 node i), V vocabulary, W = depth + 1 tokens
at most per round. Log-probs are in nats, fp32; float64 logits keep their precision throughout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import rng
from nanospec_fn.filters import log_probs, log_sum_exp, lowest_argmax, target_tokens
from nanospec_fn.struct import state
from nanospec_fn.trees import Tree

RULES = ("exact", "relaxed", "power")  # a rule's code is its index
EXACT, RELAXED, POWER = range(3)
INT32_MAX = 2**31 - 1
LANES = 64  # fp32 values of a CPU's widest vectors, unrolled loops included
SMALLEST = 1e-30  # of alpha and top_p: fp32 keeps it apart from 0 with room to spare


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. `validate` names what is wrong with it."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0: the argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0
    rule: str = "exact"
    tau: float = 1.0  # relaxed: accept a token of at least this probability
    accept_top_k: int = 0  # relaxed: or one among this many most probable
    alpha: float = 1.0  # power: the exponent of the acceptance probability
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise a ValueError that names the first parameter which is out of range or clashes with another."""
        _check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        _check_real("temperature", self.temperature, 0, 1e6)
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature must be 0 or at least 1e-6, got {self.temperature!r}")
        _check_int("top_k", self.top_k, 0, INT32_MAX)
        _check_real("top_p", self.top_p, SMALLEST, 1)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        _check_real("tau", self.tau, 0, 1)
        _check_int("accept_top_k", self.accept_top_k, 0, INT32_MAX)
        _check_real("alpha", self.alpha, SMALLEST, 1)
        if not isinstance(self.stop_ids, tuple | list):
            raise ValueError(f"stop_ids must be a tuple of token ids, got {self.stop_ids!r}")
        for token in self.stop_ids:
            _check_int("stop_ids", token, 0, INT32_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        self._check_clashes()

    def _check_clashes(self) -> None:
        if self.rule != "exact" and self.temperature == 0:
            raise ValueError(
                f"rule {self.rule!r} needs a temperature above 0: at 0 only 'exact' has a behaviour log-prob"
            )
        if self.rule != "power" and self.alpha != 1:
            raise ValueError(f"alpha belongs to rule 'power', got alpha={self.alpha!r} with rule {self.rule!r}")
        for name, off in (("tau", 1), ("accept_top_k", 0)):
            if self.rule != "relaxed" and getattr(self, name) != off:
                got = f"{name}={getattr(self, name)!r}"
                raise ValueError(f"{name} belongs to rule 'relaxed', got {got} with rule {self.rule!r}")
        if self.rule == "relaxed" and self.tau == 1 and self.accept_top_k == 0:
            raise ValueError(
                "rule 'relaxed' with tau=1 and accept_top_k=0 accepts nothing; lower tau or raise accept_top_k"
            )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    # The range refuses nan and inf too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


@state
class Controls:
    """What the device needs of a `Sampling`, per slot or per row."""

    key: Tensor  # [n] int64, rng key of the request
    temperature: Tensor  # [n] fp32
    top_k: Tensor  # [n] int32, 0 off
    top_p: Tensor  # [n] fp32, 1 off
    rule: Tensor  # [n] int32, EXACT, RELAXED or POWER
    tau: Tensor  # [n] fp32, probability
    accept_top_k: Tensor  # [n] int32
    alpha: Tensor  # [n] fp32


def controls(batch: Sequence[Sampling], device: torch.device | str = "cpu") -> Controls:
    """One slot per request, in order."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Controls(
        key=rng.key(column([s.seed for s in batch], torch.int64)),
        temperature=column([s.temperature for s in batch], torch.float32),
        top_k=column([s.top_k for s in batch], torch.int32),
        top_p=column([s.top_p for s in batch], torch.float32),
        rule=column([RULES.index(s.rule) for s in batch], torch.int32),
        tau=column([s.tau for s in batch], torch.float32),
        accept_top_k=column([s.accept_top_k for s in batch], torch.int32),
        alpha=column([s.alpha for s in batch], torch.float32),
    )


@state
class Draws:
    """Named draws given from outside in place of the keyed ones: for tests and for exact enumeration."""

    accept: Tensor  # [B, N], a node is accepted by `power` iff this is below its acceptance probability
    gumbel: Tensor  # [B, R, V], the noise of the row's target draw and of its residual draw; temperatures above 0


@state
class Evidence:
    """All that a verdict needs of the target's rows; nothing here is as wide as the vocabulary."""

    node_logp: Tensor  # [B, N], target log-prob of the node's token at its parent's row
    node_rank: Tensor  # [B, N] int32, tokens that are more probable there, ties by id (0 if left out)
    accept: Tensor  # [B, N], uniform draw of the acceptance test
    target: Tensor  # [B, R] int32, the row's coupled draw
    target_logp: Tensor  # [B, R], of `target`
    rest: Tensor  # [B, R] int32, the row's draw outside its candidates (NONE if left out)
    rest_logp: Tensor  # [B, R], of `rest` under the row's whole distribution
    rest_mass: Tensor  # [B, R], log of the probability outside the row's candidates


@state
class Verdict:
    """What one round emits, padded with -1 (log-probs with 0)."""

    tokens: Tensor  # [B, W] int32
    target_logp: Tensor  # [B, W], under the distribution that temperature, top-k and top-p leave
    behaviour_logp: Tensor  # [B, W], of emitting the token given prefix and tree; under `exact` target_logp's bits
    count: Tensor  # [B] int32, tokens emitted: accepted + 1
    accepted: Tensor  # [B] int32, draft tokens among them
    path: Tensor  # [B, W - 1] int32, the accepted node of each depth
    taken: Tensor  # [B, N] bool, the accepted nodes


def accept(
    logits: Tensor, tree: Tree, controls: Controls, position: Tensor, depth: int, draws: Draws | None = None
) -> Verdict:
    """One round's verdict: which path of each slot's tree is accepted, and what is emitted with which log-probs.

    `exact` accepts a node iff it is its parent row's coupled draw. `power` and `relaxed` walk a row's candidates by
    falling draft log-prob, then token id, and accept the first that passes. Source: design.md sections 4 and 6;
    Leviathan et al. 2023 for the ratio test that `power` raises to alpha.

    Args:
      logits: [B, R, V] of the target at the root and at each node.
      tree: [B, N], batched; siblings carry distinct tokens. Absent nodes are never accepted.
      controls: [B].
      position: [B] integer, the absolute position of the token that row 0 predicts.
      depth: at least the tree's.
      draws: None for the keyed ones.
    """
    return decide(weigh(logits, tree, controls, position, draws), tree, controls, depth)


def weigh(
    logits: Tensor,
    tree: Tree,
    controls: Controls,
    position: Tensor,
    draws: Draws | None = None,
    full: bool = False,
) -> Evidence:
    """The part of `accept` that reads whole rows. Arguments as there.

    On a CPU what no slot's rule asks for is left out, unless `full`, which a record needs that is to be judged under
    other rules. A verdict has the same bits either way.
    """
    if logits.is_cuda and draws is None:
        return weigh_on_device(logits, tree, controls, position, full)
    full = full or logits.is_cuda
    b, rows, v = logits.shape
    token = tree.token.clamp_min(0).long()
    row_position = position[:, None] + torch.nn.functional.pad(tree.depth, (1, 0))

    def per_row(x: Tensor) -> Tensor:
        return x.repeat_interleave(rows)

    key, temperature = per_row(controls.key), per_row(controls.temperature)
    flat = logits.reshape(b * rows, v)
    logp = log_probs(flat, temperature, per_row(controls.top_k), per_row(controls.top_p))
    if draws is None:
        target = target_tokens(flat, logp, key, temperature, row_position.flatten())
        uniform = _accept_uniform(tree, controls.key, position)
    else:
        target = lowest_argmax(logp + draws.gumbel.reshape(b * rows, v))
        uniform = draws.accept
    parent = tree.parent.long() + 1
    row_logp = logp.view(b, rows, v)
    node_logp = row_logp.flatten(1).gather(1, parent * v + token)
    node_rank = torch.zeros_like(tree.token)
    if full or bool((controls.rule == RELAXED).any()):
        node_rank = _rank(row_logp, parent, token, node_logp)
    target_logp = logp.gather(1, target[:, None].long()).view(b, rows)
    target = target.view(b, rows)
    rest, rest_logp, rest_mass = torch.full_like(target, Tree.NONE), torch.zeros_like(target_logp), target_logp
    if full or bool((controls.rule == POWER).any()):
        # Absent nodes write to a column behind the vocabulary.
        spot = torch.where(tree.depth > 0, parent * (v + 1) + token, v)
        taken = torch.zeros(b, rows * (v + 1), dtype=torch.bool, device=logits.device).scatter(1, spot, True)
        outside = logp.masked_fill(taken.view(b * rows, v + 1)[:, :v], -torch.inf)
        if draws is None:
            noise = rng.gumbel(rng.draw_key(key, row_position.flatten(), rng.RESIDUAL), v)
        else:
            noise = draws.gumbel.reshape(b * rows, v)
        rest = lowest_argmax(outside + noise)
        rest_logp = logp.gather(1, rest[:, None].long()).view(b, rows)
        rest_mass = log_sum_exp(outside).view(b, rows)
        rest = rest.view(b, rows)
    return Evidence(node_logp, node_rank, uniform, target, target_logp, rest, rest_logp, rest_mass)


def weigh_on_device(logits: Tensor, tree: Tree, controls: Controls, position: Tensor, full: bool) -> Evidence:
    """`weigh` by kernels that read the logits only, and of each row only what its rule asks for."""
    from nanospec_fn.kernels import head  # needs Triton

    c, every = controls, torch.full_like(controls.rule, full, dtype=torch.bool)
    ranked, residual = every | (c.rule == RELAXED), every | (c.rule == POWER)
    request = head.Request(c.temperature, c.top_k, c.top_p, c.key, position, ranked=ranked, residual=residual)
    return Evidence(**head.weigh(logits.float(), request, tree.token, tree.parent, tree.depth)._asdict())


def decide(evidence: Evidence, tree: Tree, controls: Controls, depth: int) -> Verdict:
    """The part of `accept` that needs the evidence alone, so that a recorded round can be judged again."""
    e, rule = evidence, controls.rule[:, None]
    parent = tree.parent.long() + 1  # row
    present = tree.depth > 0
    siblings = (parent[:, :, None] == parent[:, None, :]) & present[:, :, None] & present[:, None, :]
    before = siblings & _goes_before(tree)  # [B, i, j]: candidate j of the same row is tried before i
    possible = present & (e.node_logp > -torch.inf)
    power, reject = _power(e, parent, before, possible, controls.alpha)

    likely = (_exp(e.node_logp) >= controls.tau[:, None]) | (e.node_rank < controls.accept_top_k[:, None])
    passes = torch.where(
        rule == EXACT,
        present & (tree.token == e.target.gather(1, parent)),
        possible & torch.where(rule == RELAXED, likely, e.accept < _exp(power)),
    )
    first = passes & ~(before & passes[:, None, :]).any(-1)

    earlier = torch.where(before, reject[:, None, :], 0).sum(-1)
    node_behaviour = torch.where(rule == EXACT, e.node_logp, torch.where(rule == RELAXED, 0, power + earlier))
    here = (parent[:, None, :] == torch.arange(e.target.shape[1], device=parent.device)[:, None]) & present[:, None, :]
    tested = (rule == POWER) & here.any(-1)  # [B, R]; at a leaf nothing was tested, and the target's own draw stands
    rejected = torch.where(here, reject[:, None, :], 0).sum(-1)
    row_token = torch.where(tested, e.rest, e.target)
    row_logp = torch.where(tested, e.rest_logp, e.target_logp)
    row_behaviour = torch.where(tested, rejected + e.rest_logp - e.rest_mass, e.target_logp)

    # What each row emits: its accepted child's token, or the row's own.
    index = torch.arange(1, e.target.shape[1], device=parent.device)
    child = torch.where(here & first[:, None, :], index, 0).sum(-1)  # row, 0 where none was accepted

    def emit(of_node: Tensor, of_row: Tensor) -> Tensor:
        return torch.where(child > 0, torch.nn.functional.pad(of_node, (1, 0)).gather(1, child), of_row)

    rows = _walk(child, depth)
    alive, at = rows >= 0, rows.clamp_min(0)
    count = alive.sum(-1).to(torch.int32)
    path = torch.where(alive, rows - 1, -1)[:, 1:]
    return Verdict(
        tokens=torch.where(alive, emit(tree.token, row_token).gather(1, at), Tree.NONE),
        target_logp=torch.where(alive, emit(e.node_logp, row_logp).gather(1, at), 0),
        behaviour_logp=torch.where(alive, emit(node_behaviour, row_behaviour).gather(1, at), 0),
        count=count,
        accepted=count - 1,
        path=path.to(torch.int32),
        taken=(path[:, None, :] == index[:, None] - 1).any(-1),
    )


def _walk(child: Tensor, depth: int) -> Tensor:
    """child [B, R], 0 for none -> [B, depth + 1] rows from the root downwards, -1 after the last."""
    row = torch.zeros_like(child[:, :1])
    rows = [row]
    for _ in range(depth):
        row = torch.where(row >= 0, child.gather(1, row.clamp_min(0)), 0)
        row = torch.where(row > 0, row, -1)
        rows.append(row)
    return torch.cat(rows, dim=1)


def _power(e: Evidence, parent: Tensor, before: Tensor, possible: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    """[B, N] twice: log a and log(1 - a), with a = (p / (p + the mass of what comes later))^alpha, 0 where p = 0.

    What comes later is the later candidates and the tokens that are none: no mass is found by subtraction, and where
    nothing comes later a is 1.
    """
    n = parent.shape[1]
    after = torch.where(before.transpose(1, 2), e.node_logp[:, None, :], -torch.inf)
    terms = torch.cat((after, e.rest_mass.gather(1, parent)[:, :, None]), dim=-1)
    terms = torch.nn.functional.pad(terms, (0, -(n + 1) % LANES, 0, -n % LANES), value=-torch.inf)
    later = torch.logsumexp(terms, dim=-1)
    ratio = -torch.logaddexp(torch.zeros_like(later), later - _whole(e.node_logp))
    log_a = torch.where(_whole(possible), alpha.to(ratio.dtype)[:, None] * ratio, -torch.inf)
    reject = torch.where(log_a > -math.log(2), torch.log(-torch.expm1(log_a)), torch.log1p(-log_a.exp()))
    return log_a[:, :n], reject[:, :n]


def _whole(x: Tensor) -> Tensor:
    """x [B, N] with N padded to whole vectors: what is left over of the last one takes scalar code, to other bits."""
    return torch.nn.functional.pad(x, (0, -x.shape[1] % LANES))


def _exp(x: Tensor) -> Tensor:
    """exp of x [B, N], each slot's bits its own."""
    return _whole(x).exp()[:, : x.shape[1]]


def _goes_before(tree: Tree) -> Tensor:
    """[B, i, j]: whether node j is tried before node i, were they candidates of one row."""
    mine, other = tree.logp[:, :, None], tree.logp[:, None, :]
    return (other > mine) | ((other == mine) & (tree.token[:, None, :] < tree.token[:, :, None]))


def _rank(row_logp: Tensor, parent: Tensor, token: Tensor, node_logp: Tensor) -> Tensor:
    """[B, N] int32: how many tokens of the parent's row [B, R, V] are more probable than the node's, ties by id."""
    row = row_logp[torch.arange(row_logp.shape[0], device=parent.device)[:, None], parent]
    ids = torch.arange(row.shape[-1], device=row.device)
    ahead = (row > node_logp[..., None]) | ((row == node_logp[..., None]) & (ids < token[..., None]))
    return ahead.sum(-1).to(torch.int32)


def _accept_uniform(tree: Tree, key: Tensor, position: Tensor) -> Tensor:
    """[B, N]: one uniform per candidate, named by its position and token and thus not by its place in the tree."""
    at = rng.draw_key(key[:, None], position[:, None] + tree.depth - 1, rng.ACCEPT)
    return rng.uniform(rng.fold_in(at, tree.token))

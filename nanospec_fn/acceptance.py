"""The acceptance rules, with exact behaviour log-probs: `judge`, in the two parts `weigh` and `decide`.

Shapes: B slots, N drafted nodes, R = N + 1 rows (row 0 the root, row i + 1 node i), V vocabulary, W = depth + 1 tokens
at most per round. Log-probs are in nats, fp32; float64 logits keep their precision throughout.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from nanospec_fn import kernels, rng
from nanospec_fn.filters import log_probs, lowest_argmax, target_tokens
from nanospec_fn.sampling import EXACT, POWER, RELAXED, Controls
from nanospec_fn.struct import state
from nanospec_fn.trees import Tree


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


# Turns a round's evidence, tree [B, N], controls [B] and depth into a verdict: `decide`, or a rule of one's own.
Rule = Callable[[Evidence, Tree, Controls, int], Verdict]


def judge(
    logits: Tensor,
    tree: Tree,
    controls: Controls,
    position: Tensor,
    depth: int,
    draws: Draws | None = None,
    rule: Rule | None = None,
    full: bool = False,
) -> tuple[Evidence, Verdict]:
    """One round's verdict, which path of each slot's tree is accepted and what is emitted; and what it rests on.

    `exact` accepts a node iff it is its parent row's coupled draw. `power` and `relaxed` walk a row's candidates by
    falling draft log-prob, then token id, and accept the first that passes. The laws are in docs/promises.md; source:
    Leviathan et al. 2023 for the ratio test that `power` raises to alpha.

    Args:
      logits: [B, R, V] of the target at the root and at each node.
      tree: [B, N], batched; siblings carry distinct tokens. Absent nodes are never accepted.
      controls: [B].
      position: [B] integer, the absolute position of the token that row 0 predicts.
      depth: at least the tree's.
      draws: None for the keyed ones.
      rule: None for `decide`. Any other is given all evidence.
      full: see `weigh`.
    Errors: ValueError for what a rule of one's own returned and is no verdict of such a round.
    """
    if rule is None or rule is decide:
        evidence = weigh(logits, tree, controls, position, draws, full)
        return evidence, decide(evidence, tree, controls, depth)
    evidence = weigh(logits, tree, controls, position, draws, full=True)
    verdict = rule(evidence, tree, controls, depth)
    check(verdict, len(logits), depth)
    return evidence, verdict


def check(verdict: Verdict, slots: int, depth: int) -> None:
    """Errors: ValueError naming a wrong shape in a verdict, and on a CPU, where looking is free, a wrong count."""
    if not isinstance(verdict, Verdict):
        raise ValueError(f"decide must return a Verdict, got {verdict!r}")
    tokens = (slots, depth + 1)
    wanted = {"tokens": tokens, "target_logp": tokens, "behaviour_logp": tokens, "path": (slots, depth)}
    for name, shape in (wanted | {"count": (slots,), "accepted": (slots,)}).items():
        if tuple(getattr(verdict, name).shape) != shape:
            raise ValueError(f"decide: {name} must be {list(shape)}, got {list(getattr(verdict, name).shape)}")
    if verdict.tokens.is_cuda:
        return
    if bool(((verdict.count < 1) | (verdict.count > depth + 1) | (verdict.accepted >= verdict.count)).any()):
        raise ValueError(f"decide: count must be accepted + 1 and from 1 to {depth + 1}, got {verdict.count}")
    if bool(((torch.arange(depth + 1) < verdict.count[:, None]) & (verdict.tokens < 0)).any()):
        raise ValueError("decide: tokens has padding among the first `count`")


def weigh(
    logits: Tensor,
    tree: Tree,
    controls: Controls,
    position: Tensor,
    draws: Draws | None = None,
    full: bool = False,
) -> Evidence:
    """The part of `judge` that reads whole rows. Arguments as there.

    What no slot's rule asks for is left out (but by torch on CUDA, where looking would wait), unless `full`, which a
    record needs that is to be judged under other rules. A verdict has the same bits either way.
    """
    if kernels.on_device(logits) and draws is None:
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
        # Absent nodes write to a column past the vocabulary.
        spot = torch.where(tree.depth > 0, parent * (v + 1) + token, v)
        taken = torch.zeros(b, rows * (v + 1), dtype=torch.bool, device=logits.device).scatter(1, spot, True)
        outside = logp.masked_fill(taken.view(b * rows, v + 1)[:, :v], -torch.inf)
        if draws is None:
            noise = rng.gumbel(rng.draw_key(key, row_position.flatten(), rng.RESIDUAL), v)
        else:
            noise = draws.gumbel.reshape(b * rows, v)
        rest = lowest_argmax(outside + noise)
        rest_logp = logp.gather(1, rest[:, None].long()).view(b, rows)
        rest_mass = kernels.log_sum_exp(outside).view(b, rows)
        rest = rest.view(b, rows)
    return Evidence(node_logp, node_rank, uniform, target, target_logp, rest, rest_logp, rest_mass)


def weigh_on_device(logits: Tensor, tree: Tree, controls: Controls, position: Tensor, full: bool) -> Evidence:
    """`weigh` by kernels that read the logits only, and of each row only what its rule asks for."""
    from nanospec_fn.kernels import head  # needs Triton

    c = controls
    request = head.Request(c.temperature, c.top_k, c.top_p, c.key, position, c.rule)
    nodes = (tree.token, tree.parent, tree.depth)
    return Evidence(**head.weigh(logits.float(), request, (RELAXED, POWER), full, *nodes)._asdict())


def decide(evidence: Evidence, tree: Tree, controls: Controls, depth: int) -> Verdict:
    """The part of `judge` that needs the evidence alone, so that a recorded round can be judged again."""
    if kernels.on_device(evidence.node_logp):
        return decide_on_device(evidence, tree, controls, depth)
    e, rule = evidence, controls.rule[:, None]
    parent = tree.parent.long() + 1  # row
    present = tree.depth > 0
    siblings = (parent[:, :, None] == parent[:, None, :]) & present[:, :, None] & present[:, None, :]
    before = siblings & _goes_before(tree)  # [B, i, j]: candidate j of the same row is tried before i
    possible = present & (e.node_logp > -torch.inf)
    power, reject = _power(e, parent, before, possible, controls.alpha)

    likely = (kernels.exp(e.node_logp) >= controls.tau[:, None]) | (e.node_rank < controls.accept_top_k[:, None])
    passes = torch.where(
        rule == EXACT,
        present & (tree.token == e.target.gather(1, parent)),
        possible & torch.where(rule == RELAXED, likely, e.accept < kernels.exp(power)),
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
    )


def decide_on_device(evidence: Evidence, tree: Tree, controls: Controls, depth: int) -> Verdict:
    """`decide` in one launch. Under `exact` the same bytes; lossy rules have the device's logarithms, in float64."""
    from nanospec_fn.kernels import verdict  # needs Triton

    e, c = evidence, controls
    seen = (e.node_logp, e.node_rank, e.accept, e.target, e.target_logp, e.rest, e.rest_logp, e.rest_mass)
    nodes, chosen = (tree.token, tree.parent, tree.depth, tree.logp), (c.rule, c.tau, c.accept_top_k, c.alpha)
    return Verdict(**verdict.decide(seen, nodes, chosen, depth, (EXACT, POWER)))


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

    What comes later is the later candidates and the tokens that are not candidates: no mass is found by subtraction,
    and where nothing comes later a is 1.
    """
    after = torch.where(before.transpose(1, 2), e.node_logp[:, None, :], -torch.inf)
    later = kernels.log_sum_exp_few(torch.cat((after, e.rest_mass.gather(1, parent)[:, :, None]), dim=-1))
    ratio = -kernels.log_add_exp(torch.zeros_like(later), later - e.node_logp)
    log_a = torch.where(possible, alpha.to(ratio.dtype)[:, None] * ratio, -torch.inf)
    return log_a, kernels.log_one_minus_exp(log_a)


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

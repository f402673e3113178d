"""`acceptance.decide` on a GPU, in Triton: a program per slot walks its tree from the root, whatever the slot's rule.

Nodes are read once and kept in registers; a step of the walk looks at the candidates of one row. Log-probs of `power`
go through float64, where the two logarithms of sums close to 1 need no series.

Shapes: B slots, N nodes, R = N + 1 rows, W tokens at most.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _at(x, lane, i):
    """Element i of a vector in registers; 0 where i is -1."""
    return tl.sum(tl.where(lane == i, x, 0), 0)


@triton.jit
def _first(left, logp, token, lane):
    """The candidate that is tried first: the largest draft log-prob, then the lowest token; -1 where there is none."""
    best = tl.max(tl.where(left, logp, -float("inf")), 0)
    left = left & (logp == best)
    lowest = tl.min(tl.where(left, token, 2147483647), 0)
    return tl.max(tl.where(left & (token == lowest), lane, -1), 0)


@triton.jit
def _log_power(p, later, alpha):
    """log a and log(1 - a) of a = (p / (p + later))^alpha, from log p > -inf and log later: float64 scalars."""
    d = later - p
    e = tl.exp(-tl.abs(d))
    ratio = -(tl.maximum(d, 0.0) + tl.where(e < 1e-5, e * (1 - 0.5 * e), tl.log(1 + e)))
    log_a = alpha * ratio
    gap = tl.where(log_a > -1e-5, -log_a * (1 + 0.5 * log_a), 1 - tl.exp(log_a))
    return log_a, tl.where(gap > 0, tl.log(tl.where(gap > 0, gap, 1.0)), -float("inf"))


@triton.jit
def _decide(
    node_logp, node_rank, accept, target, target_logp, rest, rest_logp, rest_mass, tree_token, tree_parent, tree_depth,
    tree_logp, rules, taus, accept_top_ks, alphas, tokens, logps, behaviours, count, accepted, path,
    N, W, NODES: tl.constexpr, EXACT: tl.constexpr, POWER: tl.constexpr,
):  # fmt: skip
    slot, lane = tl.program_id(0).to(tl.int64), tl.arange(0, NODES)
    at, here = slot * N + lane, lane < N
    token = tl.load(tree_token + at, mask=here, other=-1)
    parent = tl.load(tree_parent + at, mask=here, other=-2)
    present = tl.load(tree_depth + at, mask=here, other=0) > 0
    draft = tl.load(tree_logp + at, mask=here, other=-float("inf"))
    known = tl.load(node_logp + at, mask=here, other=-float("inf"))
    rule = tl.load(rules + slot)
    possible = present & (known > -float("inf"))
    likely = tl.exp(known) >= tl.load(taus + slot)
    likely = likely | (tl.load(node_rank + at, mask=here, other=0) < tl.load(accept_top_ks + slot))
    draw = tl.load(accept + at, mask=here, other=1.0)
    alpha = tl.load(alphas + slot).to(tl.float64)

    row = tl.zeros((), tl.int32)  # 0 the root; -1 behind the last row of the path
    taken = tl.zeros((), tl.int32)
    for step in range(W):
        alive = row >= 0
        origin = slot * (N + 1) + tl.maximum(row, 0)
        word, word_logp = tl.load(target + origin), tl.load(target_logp + origin)
        mu = word_logp
        child = tl.full((), -1, tl.int32)
        mine = present & (parent + 1 == row)
        if rule == EXACT:
            child = tl.max(tl.where(mine & (token == word), lane, -1), 0)
        elif rule == POWER:
            left = mine.to(tl.int32)
            spare = tl.load(rest_mass + origin).to(tl.float64)
            tested = tl.max(left, 0) > 0
            rejected = tl.zeros((), tl.float64)
            while (tl.max(left, 0) > 0) & (child < 0):
                i = _first(left > 0, draft, token, lane)
                left = tl.where(lane == i, 0, left)
                p = _at(known, lane, i).to(tl.float64)
                if p > -float("inf"):
                    others = tl.where(left > 0, known, -float("inf")).to(tl.float64)
                    top = tl.maximum(tl.max(others, 0), spare)
                    safe = tl.where(top > -float("inf"), top, 0.0)
                    mass = tl.sum(tl.exp(others - safe), 0) + tl.exp(spare - safe)
                    later = tl.where(mass > 0, safe + tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf"))
                    log_a, log_reject = _log_power(p, later, alpha)
                    if _at(draw, lane, i) < tl.exp(log_a.to(tl.float32)):
                        child = i
                        mu = (rejected + log_a).to(tl.float32)
                    rejected += log_reject
            if tested & (child < 0):
                word, word_logp = tl.load(rest + origin), tl.load(rest_logp + origin)
                mu = (rejected + word_logp.to(tl.float64) - spare).to(tl.float32)
        else:
            child = _first(mine & possible & likely, draft, token, lane)
            mu = tl.where(child >= 0, 0.0, mu)
        if child >= 0:
            word, word_logp = _at(token, lane, child), _at(known, lane, child)
            mu = tl.where(rule == EXACT, word_logp, mu)
        to = slot * W + step
        tl.store(tokens + to, tl.where(alive, word, -1))
        tl.store(logps + to, tl.where(alive, word_logp, 0.0))
        tl.store(behaviours + to, tl.where(alive, mu, 0.0))
        if step > 0:
            tl.store(path + slot * (W - 1) + step - 1, tl.where(alive, row - 1, -1))
        taken += alive.to(tl.int32)
        row = tl.where(alive & (child >= 0), child + 1, -1)
    tl.store(count + slot, taken)
    tl.store(accepted + slot, taken - 1)


def decide(
    evidence: Sequence[Tensor], tree: Sequence[Tensor], controls: Sequence[Tensor], depth: int, rules: tuple[int, int]
) -> dict[str, Tensor]:
    """See `acceptance.decide`.

    Args:
      evidence: the fields of `acceptance.Evidence`, in order; tree: token, parent, depth, logp, each [B, N].
      controls: rule, tau, accept_top_k, alpha, each [B]; rules: the codes of `exact` and `power`.
    Returns: the fields of `acceptance.Verdict`.
    """
    b, n = tree[0].shape
    device = tree[0].device
    tokens = torch.empty(b, depth + 1, dtype=torch.int32, device=device)
    logps, behaviours = torch.empty(2, b, depth + 1, dtype=torch.float32, device=device)
    count, accepted = torch.empty(2, b, dtype=torch.int32, device=device)
    path = torch.empty(b, depth, dtype=torch.int32, device=device)
    if b:
        _decide[(b,)](
            *(x.contiguous() for x in (*evidence, *tree, *controls)), tokens, logps, behaviours, count, accepted, path,
            n, depth + 1, NODES=max(2, triton.next_power_of_2(n)), EXACT=rules[0], POWER=rules[1],
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    logs = {"target_logp": logps, "behaviour_logp": behaviours}
    return {"tokens": tokens, **logs, "count": count, "accepted": accepted, "path": path}

"""The distribution that is sampled and the draw from it, row by row.

Shapes: n rows, V vocabulary. Log-probs are in nats, fp32; float64 logits keep their precision throughout.
"""

import torch
from torch import Tensor

from nanospec_fn import kernels, rng

HEAD = 1024  # tokens that a CPU orders before it resorts to sorting a whole row; an eighth of the time


def log_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Log-probs of the distribution that is sampled; a row's bits depend on that row alone.

    logits in fp32, divided by the temperature, then the top_k best tokens (ties: the lowest ids), then the smallest
    head of these that holds top_p of their mass (the token that crosses it included), renormalised. A row with
    temperature 0 gives the log-softmax of its raw logits.

    Args:
      logits: [n, V], at least one finite per row.
      temperature, top_k, top_p: [n].
    Returns: [n, V] fp32 (float64 for float64 logits), -inf outside the kept set.
    """
    if kernels.on_device(logits) and not (torch.is_grad_enabled() and logits.requires_grad):
        from nanospec_fn.kernels import head  # needs Triton

        return head.log_probs(logits, temperature, top_k, top_p)
    v = logits.shape[-1]
    x = logits if logits.dtype == torch.float64 else logits.float()
    hot = temperature > 0
    # Relative to the maximum, so that a small temperature cannot overflow.
    x = (x - x.amax(-1, keepdim=True)) / torch.where(hot, temperature, 1).to(x.dtype)[:, None]
    filtered = hot & ((top_k > 0) & (top_k < v) | (top_p < 1))
    if x.is_cuda:
        keep = _kept(x, top_k, top_p) | ~filtered[:, None]
        x = x.masked_fill(~keep, -torch.inf)
    elif bool(filtered.any()):
        rows = filtered.nonzero()[:, 0]
        keep = _kept(x[rows], top_k[rows], top_p[rows])
        x = x.index_copy(0, rows, x[rows].masked_fill(~keep, -torch.inf))
    return x - kernels.log_sum_exp(x)[:, None]


def _kept(x: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """x [n, V], maximum 0 -> [n, V] bool: what top-k and then top-p leave, at least one token."""
    v = x.shape[-1]
    limit = torch.where(top_k > 0, top_k, v).clamp_max(v).long()
    width = v if x.is_cuda else min(v, HEAD)
    ordered, count = _cut(x, width, limit, top_p)
    if width < v and bool(((count == width) | (limit > width) & (limit < v)).any()):
        ordered, count = _cut(x, v, limit, top_p)
    last = ordered.gather(-1, count[:, None] - 1)
    above, tied = x > last, x == last
    room = count[:, None] - above.sum(-1, keepdim=True)
    return above | tied & (tied.cumsum(-1) <= room)


def _cut(x: Tensor, width: int, limit: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The `width` largest values in order, and how many of them stay; right if that is under `width`, or all of V."""
    ordered = x.sort(-1, descending=True).values if width == x.shape[-1] else x.topk(width).values
    # Fixed point: integers add up to the same sum in any order, so no scan's blocking can move the cut.
    mass = _fixed(ordered)
    total_at = mass.cumsum(-1)
    inside = limit <= width
    total = torch.where(inside, total_at.gather(-1, (limit.clamp_max(width) - 1)[:, None])[:, 0], _fixed(x).sum(-1))
    goal = total - ((1 - top_p.to(x.dtype)) * total.to(x.dtype)).long()  # exact to the ulp of what is cut off
    before = total_at - mass
    rank = torch.arange(width, device=x.device)
    stay = (rank < limit[:, None]) & ((before < goal[:, None]) | (top_p >= 1)[:, None])
    return ordered, stay.sum(-1).clamp_min(1)


def _fixed(x: Tensor) -> Tensor:
    return (torch.exp(x) * 2.0**40).long()


def target_tokens(logits: Tensor, logp: Tensor, key: Tensor, temperature: Tensor, position: Tensor) -> Tensor:
    """The coupled draw: the token that plain decoding emits at `position`, whatever was drafted.

    argmax_v(logp_v + gumbel(key, position, v)); with temperature 0 the argmax of the logits. Ties: the lowest id.

    Args:
      logits, logp: [n, V], the target's rows and their `log_probs`.
      key, temperature, position: [n], position being that of the token which the row predicts.
    Returns: [n] int32.
    """
    hot = temperature > 0
    if not logits.is_cuda and not bool(hot.any()):
        return lowest_argmax(logits)
    noise = rng.gumbel(rng.draw_key(key, position, rng.TARGET), logits.shape[-1])
    return lowest_argmax(torch.where(hot[:, None], logp + noise, logits.to(logp.dtype)))


def lowest_argmax(x: Tensor) -> Tensor:
    """x [..., V] -> [...] int32, the lowest id among those at the maximum; argmax promises none in particular."""
    ids = torch.arange(x.shape[-1], dtype=torch.int32, device=x.device)
    return torch.where(x == x.amax(-1, keepdim=True), ids, x.shape[-1] - 1).amin(-1)

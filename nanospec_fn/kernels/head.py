"""What a round reads off whole rows of logits, on a GPU, in Triton: log-probs, the coupled draw, ranks and residuals.

Nothing as wide as the vocabulary is written, and what a slot's request does not ask for (top-k and top-p, ranks, the
draw outside a row's candidates) is skipped on the device, so that one captured graph serves every request.

z = (x - max x) / T; a slot with temperature 0 has T = 1 and takes the argmax. log-prob = z - log sum exp z.

Shapes: B slots, R rows of a slot (row 0 the root, row i + 1 node i), N nodes, V vocabulary.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn import rng
from nanospec_fn.kernels import vocab
from nanospec_fn.kernels.cut import find_cuts, kept, scaled
from nanospec_fn.kernels.noise import draw_key, fold_in, gumbel, uniform
from nanospec_fn.kernels.vocab import best_in, best_of, find_peaks, peak_of, sum_of


class Request(NamedTuple):
    """Of each slot, [B]; see `sampling.Controls`. position: of the token that row 0 predicts."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    key: Tensor
    position: Tensor
    rule: Tensor  # `relaxed` wants the ranks of candidates, `power` the draw outside a row's candidates


class Outcome(NamedTuple):
    """`acceptance.Evidence`: of nodes [B, N], of rows [B, R]."""

    node_logp: Tensor
    node_rank: Tensor
    accept: Tensor
    target: Tensor
    target_logp: Tensor
    rest: Tensor
    rest_logp: Tensor
    rest_mass: Tensor


class _Rows(NamedTuple):
    """Where a row's segments peak, where it is cut, and the log of its sum."""

    peaks: Tensor  # [B * R, segments]
    cuts: Tensor  # [B * R]
    tied_tos: Tensor
    log_total: Tensor


@triton.jit
def _position_of(position, depth, slot, node, N):
    """The position that a row predicts: node -1 is the root."""
    at = tl.load(position + slot).to(tl.int64)
    if node >= 0:
        at += tl.load(depth + slot * N + node)
    return at


@triton.jit
def _draws(
    x, peaks, cuts, tied_tos, temperatures, keys, position, rule, token, parent, depth,
    masses, best, best_id, rest_masses, rest_best, rest_id, R, N, V, SEGMENTS,
    PARTS: tl.constexpr, WIDTH: tl.constexpr, TARGET: tl.constexpr, RESIDUAL: tl.constexpr,
    POWER: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A segment's sum and noisy maximum and, where wanted, those outside the row's candidates."""
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot, at = row // R, row * SEGMENTS + segment
    i = segment * WIDTH + tl.arange(0, WIDTH)
    temperature, key = tl.load(temperatures + slot), tl.load(keys + slot)
    here = _position_of(position, depth, slot, row % R - 1, N)
    z = tl.load(x + row * V + i, mask=i < V, other=-float("inf"))
    z = scaled(z, peak_of(peaks, row, SEGMENTS, PARTS), temperature)
    z = tl.where(kept(z, i, V, tl.load(cuts + row), tl.load(tied_tos + row)), z, -float("inf"))
    tl.store(masses + at, tl.sum(tl.exp(z), 0))
    if temperature > 0:
        top, where = best_in(z + gumbel(draw_key(key, here, TARGET), i), i, 2147483647)
        tl.store(best + at, top)
        tl.store(best_id + at, where)
    if (tl.load(rule + slot) == POWER) | FULL:
        for j in range(N):
            node = slot * N + j
            if (tl.load(depth + node) > 0) & (tl.load(parent + node) + 1 == row % R):
                z = tl.where(i == tl.load(token + node), -float("inf"), z)
        tl.store(rest_masses + at, tl.sum(tl.exp(z), 0))
        top, where = best_in(z + gumbel(draw_key(key, here, RESIDUAL), i), i, 2147483647)
        tl.store(rest_best + at, top)
        tl.store(rest_id + at, where)


@triton.jit
def _logp_of(x, row, token, peak, temperature, cut, tied_to, total, V):
    z = scaled(tl.load(x + row * V + token), peak, temperature)
    return tl.where(kept(z, token, V, cut, tied_to), z, -float("inf")) - total


@triton.jit
def _choose(
    x, peaks, arg, cuts, tied_tos, temperatures, rule, masses, best, best_id, rest_masses, rest_best, rest_id,
    log_total, target, target_logp, rest, rest_logp, rest_mass, R, V, SEGMENTS, PARTS: tl.constexpr,
    POWER: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Put a row's segments together."""
    row = tl.program_id(0).to(tl.int64)
    temperature, cut, tied_to = tl.load(temperatures + row // R), tl.load(cuts + row), tl.load(tied_tos + row)
    peak = peak_of(peaks, row, SEGMENTS, PARTS)
    total = tl.log(sum_of(masses, row, SEGMENTS, PARTS))
    tl.store(log_total + row, total)
    if temperature > 0:
        _, token = best_of(best, best_id, row, SEGMENTS, PARTS)
    else:
        _, token = best_of(peaks, arg, row, SEGMENTS, PARTS)
    token = tl.minimum(token, V - 1)
    logp = _logp_of(x, row, token, peak, temperature, cut, tied_to, total, V)
    tl.store(target + row, token)
    tl.store(target_logp + row, logp)
    if (tl.load(rule + row // R) == POWER) | FULL:
        mass = sum_of(rest_masses, row, SEGMENTS, PARTS)
        _, token = best_of(rest_best, rest_id, row, SEGMENTS, PARTS)
        token = tl.minimum(token, V - 1)
        tl.store(rest + row, token)
        tl.store(rest_logp + row, _logp_of(x, row, token, peak, temperature, cut, tied_to, total, V))
        tl.store(rest_mass + row, tl.where(mass > 0, tl.log(tl.where(mass > 0, mass, 1.0)), -float("inf")) - total)
    else:
        tl.store(rest + row, -1)
        tl.store(rest_logp + row, 0.0)
        tl.store(rest_mass + row, logp)


@triton.jit
def _nodes(
    x, peaks, cuts, tied_tos, temperatures, keys, position, rule, log_total, token, parent, depth,
    logp, rank, accept, R, N, V, SEGMENTS, PARTS: tl.constexpr, WIDTH: tl.constexpr, ACCEPT: tl.constexpr,
    RELAXED: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """A node's log-prob at its parent's row, how many tokens are more probable there, and its acceptance draw."""
    node = tl.program_id(0).to(tl.int64)
    slot, above = node // N, tl.load(parent + node)
    row, known = slot * R + above + 1, tl.load(token + node)
    mine = tl.maximum(known, 0)
    temperature, cut, tied_to = tl.load(temperatures + slot), tl.load(cuts + row), tl.load(tied_tos + row)
    peak, total = peak_of(peaks, row, SEGMENTS, PARTS), tl.load(log_total + row)
    found = _logp_of(x, row, mine, peak, temperature, cut, tied_to, total, V)
    tl.store(logp + node, found)
    at = tl.load(position + slot).to(tl.int64) + tl.load(depth + node) - 1
    tl.store(accept + node, uniform(fold_in(draw_key(tl.load(keys + slot), at, ACCEPT), known), mine * 0))
    ahead = tl.zeros((WIDTH,), tl.int32)
    if (tl.load(rule + slot) == RELAXED) | FULL:
        for start in range(0, V, WIDTH):
            i = start + tl.arange(0, WIDTH)
            z = scaled(tl.load(x + row * V + i, mask=i < V, other=-float("inf")), peak, temperature)
            other = tl.where(kept(z, i, V, cut, tied_to), z, -float("inf")) - total
            ahead += ((i < V) & ((other > found) | ((other == found) & (i < mine)))).to(tl.int32)
    tl.store(rank + node, tl.sum(ahead, 0))


@triton.jit
def _log_probs(
    x, peaks, cuts, tied_tos, temperatures, log_total, out, V, SEGMENTS, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    z = tl.load(x + row * V + i, mask=i < V, other=-float("inf"))
    z = scaled(z, peak_of(peaks, row, SEGMENTS, PARTS), tl.load(temperatures + row))
    z = tl.where(kept(z, i, V, tl.load(cuts + row), tl.load(tied_tos + row)), z, -float("inf"))
    tl.store(out + row * V + i, z - tl.load(log_total + row), mask=i < V)


def log_probs(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """logits [n, V], the others [n] -> `filters.log_probs` [n, V], with the bits that `weigh` gives each token."""
    logits = logits.float().contiguous()
    n, v = logits.shape
    out = torch.empty_like(logits)
    if n:
        none = torch.zeros(n, dtype=torch.int64, device=logits.device)
        tree = torch.empty(n, 0, dtype=torch.int32, device=logits.device)
        request = Request(temperature.contiguous(), top_k, top_p, none, none, none)
        rows, _ = _read(logits, request, (-1, -1), False, tree, tree, tree)
        segments = rows.peaks.shape[1]
        _log_probs[(n, segments)](
            logits, *rows[:3], request.temperature, rows.log_total, out, v, segments,
            WIDTH=vocab.SEGMENT, PARTS=triton.next_power_of_2(segments), num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def weigh(
    logits: Tensor, request: Request, rules: tuple[int, int], full: bool, token: Tensor, parent: Tensor, depth: Tensor
) -> Outcome:
    """Everything that a verdict needs of the target's rows.

    Args:
      logits: [B, R, V] fp32; token, parent, depth: [B, N] int32 of the tree, depth 0 where absent.
      rules: the codes of `relaxed` and `power`; full: gather what either wants for every slot.
    """
    b, r, v = logits.shape
    nodes = token.shape[1]
    request = Request(*(x.contiguous() for x in request))
    token, parent, depth = token.contiguous(), parent.contiguous(), depth.contiguous()
    flat = logits.reshape(b * r, v)
    rows, chosen = _read(flat, request, rules, full, token, parent, depth)
    node_logp, accept = torch.empty(2, b, nodes, dtype=torch.float32, device=logits.device)
    node_rank = torch.empty(b, nodes, dtype=torch.int32, device=logits.device)
    segments = rows.peaks.shape[1]
    if nodes:
        _nodes[(b * nodes,)](
            flat, *rows[:3], request.temperature, request.key, request.position, request.rule, rows.log_total,
            token, parent, depth, node_logp, node_rank, accept, r, nodes, v, segments,
            PARTS=triton.next_power_of_2(segments), WIDTH=vocab.SEGMENT, ACCEPT=rng.ACCEPT,
            RELAXED=rules[0], FULL=full, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return Outcome(node_logp, node_rank, accept, *(x.view(b, r) for x in chosen))


def _read(
    logits: Tensor, request: Request, rules: tuple[int, int], full: bool, token: Tensor, parent: Tensor, depth: Tensor
) -> tuple[_Rows, list[Tensor]]:
    """The part of `weigh` that concerns rows: logits [B * R, V] -> what `_nodes` needs, and `Outcome`'s last five."""
    n, v = logits.shape
    b, nodes = token.shape
    segments = triton.cdiv(v, vocab.SEGMENT)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    peaks, masses, best, rest_masses, rest_best = new(5, n, segments)
    arg, best_id, rest_id = new(3, n, segments, dtype=torch.int32)
    cuts, log_total, target_logp, rest_logp, rest_mass = new(5, n)
    tied_tos, target, rest = new(3, n, dtype=torch.int32)
    wide = {"WIDTH": vocab.SEGMENT, "PARTS": triton.next_power_of_2(segments), "enable_fp_fusion": False}
    temperature, rule = request.temperature, request.rule
    wanted = {"POWER": rules[1], "FULL": full}
    find_peaks[(n, segments)](logits, peaks, arg, v, segments, WIDTH=vocab.SEGMENT, num_warps=4, enable_fp_fusion=False)
    find_cuts[(n,)](
        logits, peaks, temperature, request.top_k, request.top_p, cuts, tied_tos, n // b, v, segments,
        num_warps=8, **wide,
    )  # fmt: skip
    _draws[(n, segments)](
        logits, peaks, cuts, tied_tos, temperature, request.key, request.position, rule, token, parent, depth,
        masses, best, best_id, rest_masses, rest_best, rest_id, n // b, nodes, v, segments,
        TARGET=rng.TARGET, RESIDUAL=rng.RESIDUAL, num_warps=4, **wide, **wanted,
    )  # fmt: skip
    _choose[(n,)](
        logits, peaks, arg, cuts, tied_tos, temperature, rule, masses, best, best_id, rest_masses, rest_best,
        rest_id, log_total, target, target_logp, rest, rest_logp, rest_mass, n // b, v, segments,
        PARTS=wide["PARTS"], num_warps=1, enable_fp_fusion=False, **wanted,
    )  # fmt: skip
    return _Rows(peaks, cuts, tied_tos, log_total), [target, target_logp, rest, rest_logp, rest_mass]

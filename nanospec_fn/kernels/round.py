"""The bookkeeping of a round on a GPU, in Triton, one launch a step: pages, rows and emitted tokens.

Each function here stands in for a pure one of `slots`, `attention` or `pages`, which says what it does. Those that
change the state write into the tensors given to them: the caller copies first unless it owns the state.

Shapes: B slots, C token capacity, M page-table width, R rows of a slot, N nodes, D tree depth, W = D + 1.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _reserve(
    active, done, length, prefill_to, total, held, table, refs, stack, num_free, live, served,
    B, M, AHEAD, S, SLOTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """One program: slots are served in order, SLOTS of them at a time."""
    free = tl.load(num_free)
    wanted, granted = free * 0, free * 0
    lane = tl.arange(0, LANES)
    for first in range(0, B, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        here = slot < B
        runs = (tl.load(active + slot, mask=here, other=0) != 0) & (tl.load(done + slot, mask=here, other=1) == 0)
        runs = runs & (tl.load(length + slot, mask=here, other=0) >= tl.load(prefill_to + slot, mask=here, other=1))
        upto = tl.where(runs, tl.load(total + slot, mask=here, other=0) + AHEAD, 0)
        owned = tl.load(held + slot, mask=here, other=0)
        need = tl.maximum((upto + S - 1) // S - owned, 0)
        ok = (wanted + tl.cumsum(need, 0) <= free) | (need == 0)
        got = tl.where(ok, need, 0)
        start = granted + tl.cumsum(got, 0) - got
        taken = here[:, None] & (lane[None, :] < got[:, None])
        page = tl.load(stack + (free - 1 - start[:, None] - lane[None, :]), mask=taken, other=0)
        count = tl.load(refs + page, mask=taken, other=0)
        tl.debug_barrier()  # every thread has read what is overwritten now
        tl.store(refs + page, count + 1, mask=taken)
        tl.store(table + slot.to(tl.int64)[:, None] * M + owned[:, None] + lane[None, :], page, mask=taken)
        tl.store(held + slot, owned + got, mask=here)
        tl.store(served + slot, ok, mask=here)
        tl.store(live + slot, runs & ok, mask=here)
        wanted += tl.sum(need, 0)
        granted += tl.sum(got, 0)
    tl.debug_barrier()
    tl.store(num_free, free - granted)


def reserve(
    slots: Sequence[Tensor], table: Tensor, held: Tensor, pages: Sequence[Tensor], ahead: int, size: int, width: int
) -> tuple[Tensor, Tensor]:
    """`slots.reserve_round`, in place.

    Args: slots: active, done, length, prefill_to, total, each [B]; table [B, M] and held [B] of the slots, and
      pages: refs, stack, num_free, all updated; width: bound on the pages that one slot may want.
    Returns: live, ok [B] bool.
    """
    b = held.shape[0]
    live, served = torch.empty(2, b, dtype=torch.bool, device=held.device)
    if b:
        _reserve[(1,)](
            *slots, held, table, *pages, live, served, b, table.shape[1], ahead, size,
            SLOTS=min(64, triton.next_power_of_2(b)), LANES=triton.next_power_of_2(width), num_warps=4,
        )  # fmt: skip
    return live, served


@triton.jit
def _newest(tokens, total, unseen, live, token, position, first, last, C, W, SHIFT, LANES: tl.constexpr):
    slot, lane = tl.program_id(0), tl.arange(0, LANES)
    new = tl.load(unseen + slot)
    start = tl.load(total + slot) - new
    count = tl.where(tl.load(live + slot) != 0, new, 0)
    at = tl.minimum(tl.maximum(start + lane, 0), C - 1)
    tl.store(token + slot * W + lane, tl.load(tokens + slot.to(tl.int64) * C + at), mask=lane < W)
    tl.store(position + slot * W + lane, tl.where(lane < count, start - SHIFT + lane, -1), mask=lane < W)
    tl.store(first + slot, start - SHIFT)
    tl.store(last + slot, tl.maximum(count - 1, 0))


def newest(tokens: Tensor, total: Tensor, unseen: Tensor, live: Tensor, width: int, shift: int) -> list[Tensor]:
    """`attention.newest`: tokens [B, C], the others [B] -> token, position [B, width], first, last [B], all int32."""
    b = total.shape[0]
    token, position = torch.empty(2, b, width, dtype=torch.int32, device=total.device)
    first, last = torch.empty(2, b, dtype=torch.int32, device=total.device)
    if b:
        _newest[(b,)](
            tokens, total, unseen, live, token, position, first, last, tokens.shape[1], width, shift,
            LANES=triton.next_power_of_2(width), num_warps=1,
        )  # fmt: skip
    return [token, position, first, last]


@triton.jit
def _verify(
    tokens, length, live, node_token, node_parent, node_depth, token, position, store, path,
    C, N, J, PATHS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """A program per slot; lane 0 the root, lane i + 1 node i."""
    slot, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    here, node = lane < N + 1, slot * N + lane - 1
    base = tl.load(length + slot)
    root = tl.load(tokens + slot * C + tl.minimum(tl.maximum(base, 0), C - 1))
    drafted = tl.load(node_token + node, mask=here & (lane > 0), other=-1)
    depth = tl.load(node_depth + node, mask=here & (lane > 0), other=0)
    seen = (tl.load(live + slot) != 0) & ((lane == 0) | (drafted != -1))
    at = slot * (N + 1) + lane
    tl.store(token + at, tl.where(lane == 0, root, tl.maximum(drafted, 0)), mask=here)
    tl.store(position + at, tl.where(seen, base + depth, -1), mask=here)
    tl.store(store + at, base + lane, mask=here)
    if PATHS:
        tl.store(path + at * J, base + lane * 0, mask=here)
        climb = tl.where(here, lane - 1, -1)
        for back in range(J - 1):
            d = J - 1 - back
            above = tl.maximum(climb, 0)
            on = (climb >= 0) & (tl.load(node_depth + slot * N + above, mask=here, other=0) == d)
            tl.store(path + at * J + d, base + 1 + tl.where(on, climb, 0), mask=here)
            climb = tl.where(on, tl.load(node_parent + slot * N + above, mask=here, other=-1), climb)


def verify(
    tokens: Tensor, length: Tensor, live: Tensor, tree: Sequence[Tensor], depth: int
) -> tuple[Tensor, Tensor, Tensor, Tensor | tuple[()]]:
    """`attention.verify`'s tensors: token, position, store [B, N + 1], path [B, N + 1, depth + 1] or () at depth 0.

    Args: tokens [B, C]; length, live [B]; tree: token, parent, depth, each [B, N].
    """
    b, n = tree[0].shape
    token, position, store = torch.empty(3, b, n + 1, dtype=torch.int32, device=length.device)
    path: Tensor | tuple[()] = ()
    if depth:
        path = torch.empty(b, n + 1, depth + 1, dtype=torch.int32, device=length.device)
    if b:
        _verify[(b,)](
            tokens, length, live, *(x.contiguous() for x in tree), token, position, store,
            path if isinstance(path, Tensor) else token, tokens.shape[1], n, depth + 1,
            PATHS=depth > 0, LANES=triton.next_power_of_2(n + 1), num_warps=1,
        )  # fmt: skip
    return token, position, store, path


@triton.jit
def _emit(
    verdict_token, verdict_target, verdict_behaviour, verdict_count, live, limit, stop_ids, prefill_to,
    tokens, total, length, done, unseen, token, target, behaviour, emitted, accepted, code, left,
    C, W, WIDTH, STOPS, LANES: tl.constexpr, STOP_LANES: tl.constexpr, STOP: tl.constexpr, LENGTH: tl.constexpr,
):  # fmt: skip
    slot, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    stops = tl.arange(0, STOP_LANES)
    ids = tl.load(stop_ids + slot * STOPS + stops, mask=stops < STOPS, other=-1)
    known, end, was = tl.load(total + slot), tl.load(limit + slot), tl.load(done + slot)
    committed, new = tl.load(length + slot), tl.load(unseen + slot)
    given = tl.load(verdict_count + slot)
    t = tl.load(verdict_token + slot * W + lane, mask=lane < W, other=-1)
    count = tl.where(tl.load(live + slot) != 0, given, 0)
    count = tl.maximum(tl.minimum(count, end - known), 0)
    stop = (tl.max((t[:, None] == ids[None, :]).to(tl.int32), 1) > 0) & (t >= 0)
    first = tl.min(tl.where(stop, lane, W), 0)
    stopped = first < count
    count = tl.where(stopped, first + 1, count)
    out, keep = lane < WIDTH, lane < count
    tl.store(token + slot * WIDTH + lane, tl.where(keep, t, -1), mask=out)
    logp = tl.load(verdict_target + slot * W + lane, mask=keep, other=0.0)
    tl.store(target + slot * WIDTH + lane, logp, mask=out)
    logp = tl.load(verdict_behaviour + slot * W + lane, mask=keep, other=0.0)
    tl.store(behaviour + slot * WIDTH + lane, logp, mask=out)
    after = known + count
    ended = tl.where(stopped, STOP, tl.where(after >= end, LENGTH, 0))
    some = count > 0
    committed = tl.where(some, after - 1, committed)
    tl.store(emitted + slot, count)
    tl.store(accepted + slot, tl.minimum(count, given - 1))
    now = tl.where(some, ended, was)
    tl.store(code + slot, now)
    tl.store(left + slot, tl.maximum(tl.load(prefill_to + slot) - committed, 0))
    tl.debug_barrier()  # every thread has read what is overwritten now
    tl.store(tokens + slot * C + known + lane, t, mask=keep)
    tl.store(total + slot, after)
    tl.store(length + slot, committed)
    tl.store(done + slot, now)
    tl.store(unseen + slot, tl.where(some, count, new))


def emit(
    verdict: Sequence[Tensor], live: Tensor, fixed: Sequence[Tensor], changed: Sequence[Tensor], width: int,
    codes: tuple[int, int],
) -> dict[str, Tensor]:  # fmt: skip
    """`slots.append`, in place.

    Args:
      verdict: tokens, target_logp, behaviour_logp [B, W] and count [B] of a verdict; live [B].
      fixed: limit, stop_ids, prefill_to of the slots; changed: their tokens, total, length, done, unseen, updated.
      width: columns of the result; codes: those of a stop and of the limit.
    Returns: the fields of `slots.Emitted`.
    """
    b, w = verdict[0].shape
    device = live.device
    tokens, stop_ids = changed[0], fixed[1]
    token = torch.empty(b, width, dtype=torch.int32, device=device)
    target, behaviour = torch.empty(2, b, width, dtype=torch.float32, device=device)
    count, accepted, done, left = torch.empty(4, b, dtype=torch.int32, device=device)
    if b:
        _emit[(b,)](
            *verdict, live, *fixed, *changed, token, target, behaviour, count, accepted, done, left,
            tokens.shape[1], w, width, stop_ids.shape[1], LANES=triton.next_power_of_2(max(w, width)),
            STOP_LANES=triton.next_power_of_2(stop_ids.shape[1]), STOP=codes[0], LENGTH=codes[1], num_warps=1,
        )  # fmt: skip
    logs = {"target_logp": target, "behaviour_logp": behaviour}
    return {"tokens": token, **logs, "count": count, "accepted": accepted, "done": done, "left": left}

"""`trees.expand` and `trees.path` for a whole batch in one launch each, on a GPU, in Triton: a program per slot.

A tree is (token, parent, depth, logp, score), each [B, N]. Shapes: B slots, N nodes, k nodes per level, D levels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn.kernels.dependent import enter, launch_options


@triton.jit
def _expand(
    old_token, old_parent, old_depth, old_logp, old_score, token, parent, depth, logp, score, new_token, new_logp,
    base, live, row_token, row_position, row_store, row_path, row_above,
    N, LEVEL, M, K, NODES: tl.constexpr, CANDIDATES: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    enter(DEPENDENT)
    slot = tl.program_id(0)
    low = (LEVEL - 1) * K
    lane = tl.arange(0, NODES)  # the other levels: as they were; before the first level there is nothing
    other, at = (lane < N) & ((lane < low) | (lane >= low + K)), slot * N + lane
    was = other & (lane * 0 + LEVEL > 1)
    tl.store(token + at, tl.load(old_token + at, mask=was, other=-1), mask=other)
    tl.store(parent + at, tl.load(old_parent + at, mask=was, other=-1), mask=other)
    tl.store(depth + at, tl.load(old_depth + at, mask=was, other=0), mask=other)
    tl.store(logp + at, tl.load(old_logp + at, mask=was, other=-float("inf")), mask=other)
    tl.store(score + at, tl.load(old_score + at, mask=was, other=-float("inf")), mask=other)

    c = tl.arange(0, CANDIDATES)
    real, row = c < M * K, c // K
    t = tl.load(new_token + slot * M * K + c, mask=real, other=-1).to(tl.int32)
    p = tl.load(new_logp + slot * M * K + c, mask=real, other=-float("inf"))
    above = tl.load(old_score + slot * N + low - K + row, mask=real & (row * 0 + LEVEL > 1), other=0.0)
    s = above + p
    present = real & (t != -1) & (s > -float("inf"))
    s = tl.where(present, s, -float("inf"))
    chain = real & (row == 0)  # the greedy chain's candidates: its best keeps rank 0, absent or not
    best = tl.max(tl.where(chain & present, p, -float("inf")), 0)
    chain = chain & (tl.where(present, p, -float("inf")) == best)
    chain = chain & (t == tl.min(tl.where(chain, t, 2147483647), 0))
    greedy = c == tl.min(tl.where(chain, c, 2147483647), 0)
    rank_by = tl.where(greedy, float("inf"), tl.where(real, s, -float("inf")))
    # Ties: the parent of lower rank, then the lower token id.
    tie = row.to(tl.int64) * 4294967296 + t.to(tl.int64)
    ahead = rank_by[:, None] > rank_by[None, :]
    level = rank_by[:, None] == rank_by[None, :]
    ahead = ahead | (level & (tie[:, None] < tie[None, :]))
    ahead = ahead | (level & (tie[:, None] == tie[None, :]) & (c[:, None] < c[None, :]))
    rank = tl.sum((ahead & real[:, None]).to(tl.int32), 0)
    to, mask = slot * N + low + rank, real & (rank < K)
    tl.store(token + to, tl.where(present, t, -1), mask=mask)
    tl.store(parent + to, tl.where(present & (row * 0 + LEVEL > 1), low - K + row, -1), mask=mask)
    tl.store(depth + to, tl.where(present, LEVEL, 0), mask=mask)
    tl.store(logp + to, tl.where(present, p, -float("inf")), mask=mask)
    tl.store(score + to, s, mask=mask)
    if ROWS:  # the new level's nodes, as the rows of the draft's next pass
        tl.debug_barrier()  # they are read by other threads than those that wrote them
        mine = lane < K
        at, to = slot * N + low + lane, slot * K + lane
        first = tl.load(base + slot)
        name = tl.load(token + at, mask=mine, other=-1)
        origin = tl.load(parent + at, mask=mine, other=-1)
        seen = (tl.load(live + slot) != 0) & (name != -1)
        tl.store(row_token + to, tl.maximum(name, 0), mask=mine)
        tl.store(row_position + to, tl.where(seen, first + LEVEL - 1, -1), mask=mine)
        tl.store(row_store + to, first + low + lane, mask=mine)
        tl.store(row_above + to, tl.maximum(origin - tl.maximum(low - K, 0), 0), mask=mine)
        climb = tl.where(mine, low + lane, -1)
        for back in range(LEVEL):
            d = LEVEL - back
            from_ = slot * N + tl.maximum(climb, 0)
            on = (climb >= 0) & (tl.load(depth + from_) == d)
            tl.store(row_path + to * LEVEL + d - 1, first + tl.where(on, climb, 0), mask=mine)
            climb = tl.where(on, tl.load(parent + from_), climb)


def expand(
    tree: Sequence[Tensor], level: int, token: Tensor, logp: Tensor, base: Tensor | None = None,
    live: Tensor | None = None,
) -> tuple[list[Tensor], list[Tensor]]:  # fmt: skip
    """`trees.expand` for every slot: tree of [B, N], candidates token, logp [B, m, k] -> the tree's five tensors.

    With base, live [B] also the level's nodes as `draft_model.next_level`'s rows: token, position, store [B, k], path
    [B, k, level], and the row of the level above that each continues [B, k], all int32.
    """
    b, n = tree[0].shape
    _, m, k = token.shape
    out = [torch.empty(b, n, dtype=x.dtype, device=x.device) for x in tree]
    old = [x.contiguous() for x in tree] if level > 1 else out
    rows = []
    if base is not None:
        shapes = ((b, k), (b, k), (b, k), (b, k, level), (b, k))
        rows = [torch.empty(shape, dtype=torch.int32, device=base.device) for shape in shapes]
    if b:
        unused = [out[0]] * 7
        _expand[(b,)](
            *old, *out, token.contiguous(), logp.contiguous(), *((base, live, *rows) if rows else unused),
            n, level, m, k, NODES=triton.next_power_of_2(n), CANDIDATES=triton.next_power_of_2(m * k),
            ROWS=bool(rows), num_warps=4, **launch_options(token.device),
        )  # fmt: skip
    return out, rows


@triton.jit
def _paths(parent, depth, out, N, FIRST, COUNT, D, NODES: tl.constexpr):
    slot, lane = tl.program_id(0), tl.arange(0, NODES)
    live = lane < COUNT
    node = tl.where(live, FIRST + lane, -1)
    for back in range(D):
        d = D - back
        at = slot * N + tl.maximum(node, 0)
        here = (node >= 0) & (tl.load(depth + at) == d)
        tl.store(out + (slot * COUNT + lane) * D + d - 1, tl.where(here, node, -1), mask=live)
        node = tl.where(here, tl.load(parent + at), node)


def paths(parent: Tensor, depth: Tensor, first: int, count: int, levels: int) -> Tensor:
    """`trees.path` of nodes first .. first + count - 1 of every slot: parent, depth [B, N] -> [B, count, levels]."""
    b, n = parent.shape
    out = torch.empty(b, count, levels, dtype=torch.int32, device=parent.device)
    if b and count and levels:
        _paths[(b,)](
            parent.contiguous(), depth.contiguous(), out, n, first, count, levels,
            NODES=triton.next_power_of_2(count), num_warps=1,
        )  # fmt: skip
    return out

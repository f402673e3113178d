"""Row-canonical attention over paged KV on a GPU, in Triton: one arithmetic for decode, tree verify and prefill.

A row's keys lie in blocks of BLOCK positions from position 0. Each block gives a share (its top score, the mass of
weights relative to it, the weighted values) that depends on the row and the block alone; shares are folded in order.
A block that is hidden from the row changes no bit. So it does not matter which program computes a share, or whether it
is folded at once (many rows) or stored and folded by another program (few rows, long contexts).

Lengths, page tables and trees are read on the device; nothing is planned on the host.

Shapes: B slots, R rows of a slot, n = B * R, H query heads, K KV heads, G = H / K, D head dim, S page size,
M page-table width, J width of a tree's paths (positions behind the base), NB blocks that a table can hold.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn.kernels import cpu
from nanospec_fn.kernels.dependent import enter, launch_options
from nanospec_fn.kernels.launches import Launch, is_cut, most_rows, pick_launch, pick_own_launch, plain_warps

BLOCK = cpu.KV_BLOCK  # positions; page sizes divide it
MOST = 1024  # programs of a launch that is cut
# Which blocks: all; those that the rows of a slot share; those that each row has for itself.
ALL, SHARED, OWN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _share(q, k, v, visible, scale):
    """One block's share, top, mass [rows], mix [rows, D], of q [rows, D], k, v [BLOCK, D], visible [rows, BLOCK]."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    s = tl.where(visible, s, -float("inf"))
    top = tl.max(s, 1)
    p = tl.exp(s - tl.where(top == -float("inf"), 0.0, top)[:, None]).to(v.dtype)
    mix = tl.dot(p, v, input_precision="ieee")
    # The mass goes through the tensor core too: the order of tl.sum along a row follows from the layout of a tile.
    ones = tl.full((v.shape[0], 16), 1.0, v.dtype)
    mass = tl.max(tl.dot(p, ones, input_precision="ieee"), 1)
    return top, mass, mix


@triton.jit
def _fold(top, mass, mix, top_b, mass_b, mix_b):
    """What is known of a row, and the share of the next block -> what is known then. mix [rows, D]."""
    new = tl.maximum(top, top_b)
    seen = top_b > -float("inf")
    safe = tl.where(new == -float("inf"), 0.0, new)
    a, b = tl.exp(top - safe), tl.exp(top_b - safe)
    mass = tl.where(seen, mass * a + mass_b * b, mass)
    mix = tl.where(seen[:, None], mix * a[:, None] + mix_b * b[:, None], mix)
    return new, mass, mix


@triton.jit
def _finish(mass, mix):
    return tl.where(mass > 0, 1.0, 0.0)[:, None] * (mix / tl.where(mass > 0, mass, 1.0)[:, None])


@triton.jit
def _attend(
    q, pool, out, tops, masses, mixes, arrived, position, base, path, table,
    scale, q_row, pool_page, pool_half, pool_slot, TILES, R, M, S, J, NB, K, D,
    G: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    PART: tl.constexpr, SPLIT: tl.constexpr, FOLD_STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: (B * K * TILES, splits). A tile is ROWS of a slot's R * G query rows, or one row's G for OWN.

    PART: ALL, SHARED or OWN. SPLIT: store every block's share by itself; the last program of a tile to come here folds
    them all, in order, FOLD_STAGES - 1 shares' loads ahead.
    """
    enter(DEPENDENT)
    tile, pair = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    slot, head = pair // K, pair % K
    pages = table + slot.to(tl.int64) * M
    lane = tl.arange(0, ROWS)
    if PART == OWN:
        row, group, live = tile + lane * 0, lane, lane < G
    else:
        at = tile * ROWS + lane
        row, group, live = at // G, at % G, at < R * G
    row = tl.where(live, row, 0)
    seen_to = tl.where(live, tl.load(position + slot * R + row), -1)  # the last position that the row sees
    furthest = tl.max(seen_to, 0)
    stop = (furthest + BLOCK) // BLOCK
    start = 0
    if PART == SHARED:
        stop = min(stop, tl.load(base + slot) // BLOCK)
    if PART == OWN:
        start = tl.load(base + slot) // BLOCK

    d = tl.arange(0, WIDTH)
    query = ((slot * R + row) * K + head).to(tl.int64) * G + group  # of [n * H]
    q_at = q + (slot * R + row).to(tl.int64)[:, None] * q_row + (head * G + group)[:, None] * D + d[None, :]
    q_tile = tl.load(q_at, mask=live[:, None] & (d[None, :] < D), other=0)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    mass = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, WIDTH), tl.float32)
    if PART == OWN and not SPLIT:  # go on from where SHARED stopped
        top = tl.load(tops + query, mask=live, other=-float("inf"))
        mass = tl.load(masses + query, mask=live, other=0)
        mix = tl.load(mixes + query[:, None] * D + d[None, :], mask=live[:, None] & (d[None, :] < D), other=0)

    first, step = start, 1
    if SPLIT:
        first, step = start + tl.program_id(1), tl.num_programs(1)
    for block in range(first, stop, step):
        column = block * BLOCK + tl.arange(0, BLOCK)  # positions
        read = column <= furthest
        place = column
        if PART == OWN:
            ahead = column - tl.load(base + slot)
            entry = path + (slot * R + tile) * J + ahead
            place = tl.where(ahead >= 0, tl.load(entry, mask=read & (ahead >= 0), other=0), column)
        page = tl.load(pages + place // S, mask=read, other=0).to(tl.int64)
        kv = page * pool_page + (place % S).to(tl.int64) * pool_slot + head * D
        kv_at = pool + kv[:, None] + d[None, :]
        kv_mask = read[:, None] & (d[None, :] < D)
        k = tl.load(kv_at, mask=kv_mask, other=0)
        v = tl.load(kv_at + pool_half, mask=kv_mask, other=0)
        top_b, mass_b, mix_b = _share(q_tile, k, v, column[None, :] <= seen_to[:, None], scale)
        if SPLIT:
            tl.store(tops + query * NB + block, top_b, mask=live)
            tl.store(masses + query * NB + block, mass_b, mask=live)
            to = mixes + (query * NB + block)[:, None] * D + d[None, :]
            tl.store(to, mix_b, mask=live[:, None] & (d[None, :] < D))
        else:
            top, mass, mix = _fold(top, mass, mix, top_b, mass_b, mix_b)
    if not SPLIT:
        to = query[:, None] * D + d[None, :]
        mask = live[:, None] & (d[None, :] < D)
        if PART == SHARED:
            tl.store(tops + query, top, mask=live)
            tl.store(masses + query, mass, mask=live)
            tl.store(mixes + to, mix, mask=mask)
        else:
            tl.store(out + to, _finish(mass, mix).to(out.dtype.element_ty), mask=mask)
    elif PART != SHARED:
        tl.debug_barrier()  # this program's shares are stored; the atomic publishes them and brings in the others'
        if tl.atomic_add(arrived + tl.program_id(0), 1, sem="acq_rel") == tl.num_programs(1) - 1:
            for block in tl.range(stop, num_stages=FOLD_STAGES):
                share = query * NB + block
                both = live[:, None] & (d[None, :] < D)
                # Another program on this processor may have left older lines in L1: the acquire above drops them, and
                # what is not copied ahead goes past it.
                top_b = tl.load(tops + share, mask=live, other=-float("inf"), cache_modifier=".cg")
                mass_b = tl.load(masses + share, mask=live, other=0, cache_modifier=".cg")
                mix_b = tl.load(mixes + share[:, None] * D + d[None, :], mask=both, other=0, cache_modifier=".cg")
                top, mass, mix = _fold(top, mass, mix, top_b, mass_b, mix_b)
            to = query[:, None] * D + d[None, :]
            tl.store(out + to, _finish(mass, mix).to(out.dtype.element_ty), mask=live[:, None] & (d[None, :] < D))


def attend(
    pool: Tensor,
    q: Tensor,
    position: Tensor,
    page_table: Tensor,
    base: Tensor | tuple[()] = (),
    path: Tensor | tuple[()] = (),
    split: bool | None = None,
    rows: int | None = None,
    arrived: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every row over the positions up to its own, scaled by D ** -0.5.

    Args:
      pool: [P + 1, 2, S, K, D] with the rows' own KV stored; its last dimension and heads dense.
      q: [n, H, D].
      position: [B, R] int32, the last position each row sees; -1: a dead row, which gives 0.
      page_table: [B, M] int32.
      base, path: of `attention.Rows`, for a tree; path () where storage is position.
      split, rows: how the work is cut, of no consequence for the bits; None: by size.
      arrived: zeros [n, K] int32, used up; None: they are made here.
    Returns: [n, H, D].
    """
    b, r = position.shape
    n, heads, d = q.shape
    size, kv_heads = pool.shape[2], pool.shape[3]
    groups = heads // kv_heads
    tree = isinstance(path, Tensor)
    q = q if q.stride(2) == 1 and q.stride(1) == d else q.contiguous()
    position, page_table = position.contiguous(), page_table.contiguous()
    # What is not there is never read, but a kernel wants a pointer.
    ancestors = path.contiguous() if isinstance(path, Tensor) else position
    first = base.contiguous() if isinstance(path, Tensor) and isinstance(base, Tensor) else position
    out = torch.empty(n, heads, d, dtype=q.dtype, device=q.device)
    if not n:
        return out
    blocks = triton.cdiv(page_table.shape[1] * size, BLOCK)
    pairs = b * kv_heads
    if split is None:
        split = is_cut(pairs, r, groups, tree)
    launch = pick_launch(r * groups, pairs, split, tree, most_rows(q.dtype, d))
    if rows:
        launch = Launch(rows, plain_warps(rows))
    tiles = triton.cdiv(r * groups, launch.rows)
    finishing = pairs * (r if tree else tiles)  # tiles of the launch that writes `out`, a counter each
    per_query = blocks if split else 1
    tops, masses, mixes = _shares(q, per_query) if tree or split else (out, out, out)
    if not split:
        arrived = position  # a pointer that is not used
    elif arrived is None or arrived.numel() < finishing:
        arrived = torch.zeros(finishing, dtype=torch.int32, device=q.device)

    def run(part: int, slot_tiles: int, launch: Launch, splits: int) -> None:
        _attend[(pairs * slot_tiles, splits if split else 1)](
            q, pool, out, tops, masses, mixes, arrived, position, first,
            ancestors, page_table, d**-0.5, q.stride(0), pool.stride(0), pool.stride(1), pool.stride(2),
            slot_tiles, r, page_table.shape[1], size, ancestors.shape[-1], per_query, kv_heads, d,
            G=groups, ROWS=launch.rows, WIDTH=triton.next_power_of_2(d), BLOCK=BLOCK, PART=part, SPLIT=split,
            FOLD_STAGES=launch.fold_stages, num_warps=launch.warps, num_stages=2, enable_fp_fusion=False,
            **launch_options(q.device),
        )  # fmt: skip

    run(SHARED.value if tree else ALL.value, tiles, launch, min(blocks, max(1, MOST // (pairs * tiles))))
    if tree:
        run(OWN.value, r, pick_own_launch(groups, split), triton.cdiv(BLOCK - 1 + ancestors.shape[-1], BLOCK))
    return out


def _shares(q: Tensor, per_query: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where shares of q [n, H, D] are kept: tops and masses [n * H, per_query], mixes [n * H, per_query, D], fp32."""
    n, heads, d = q.shape
    tops = torch.empty(n * heads, per_query, dtype=torch.float32, device=q.device)
    return tops, torch.empty_like(tops), tops.new_empty(n * heads, per_query, d)

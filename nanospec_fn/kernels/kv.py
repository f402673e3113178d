"""Keys and values on their way into paged KV on a GPU, in Triton: stored by a pass's rows, moved by an accepted path.

Shapes: B slots, R rows of a slot, n = B * R, H query heads, K KV heads, D head dim, S page size, P pages, M page-table
width.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn.kernels.dependent import enter, launch_options


@triton.jit
def _store_kv(
    k, v, pool, store, position, table, k_stride, v_stride, pool_page, pool_half,
    R, M, S, KD, WIDTH: tl.constexpr,
):  # fmt: skip
    """Programs: rows. KD: values of a row's keys; a dead row, at position -1, is stored nowhere."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(position + row) >= 0:
        at = tl.load(store + row)
        page = tl.load(table + row // R * M + at // S).to(tl.int64)
        i = tl.arange(0, WIDTH)
        to = pool + page * pool_page + at % S * KD + i
        tl.store(to, tl.load(k + row * k_stride + i, mask=i < KD), mask=i < KD)
        tl.store(to + pool_half, tl.load(v + row * v_stride + i, mask=i < KD), mask=i < KD)


def write(pool: Tensor, k: Tensor, v: Tensor, store: Tensor, position: Tensor, page_table: Tensor) -> None:
    """Write k, v [n, K, D] of live rows to storage positions store [B, R] of the pool [P + 1, 2, S, K, D], in place."""
    n, kv_heads, d = k.shape
    store, position, page_table = store.contiguous(), position.contiguous(), page_table.contiguous()
    k, v = (x if x.stride(2) == 1 and x.stride(1) == d else x.contiguous() for x in (k, v))
    if n:
        _store_kv[(n,)](
            k, v, pool, store, position, page_table, k.stride(0), v.stride(0), pool.stride(0), pool.stride(1),
            store.shape[1], page_table.shape[1], pool.shape[2], kv_heads * d,
            WIDTH=triton.next_power_of_2(kv_heads * d), num_warps=4,
        )  # fmt: skip


@triton.jit
def _turn_and_store(
    qkv, cos, sin, q, arrived, pool, store, position, table, pool_page, pool_half,
    R, M, S, H, K, HALF, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ZERO: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Programs: (rows, blocks of heads). Heads of qkv are the row's queries, keys and values, in this order."""
    enter(DEPENDENT)
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, WIDTH)
    mask = (head[:, None] < H + 2 * K) & (i[None, :] < HALF)
    at = qkv + (row * (H + 2 * K) + head[:, None]) * 2 * HALF + i[None, :]
    a, b = tl.load(at, mask=mask).to(tl.float32), tl.load(at + HALF, mask=mask).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=i < HALF)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF)[None, :]
    turns = head[:, None] < H + K
    low, high = tl.where(turns, a * c - b * s, a), tl.where(turns, b * c + a * s, b)
    low, high = low.to(q.dtype.element_ty), high.to(q.dtype.element_ty)
    to = q + (row * H + head[:, None]) * 2 * HALF + i[None, :]
    queries = mask & (head[:, None] < H)
    tl.store(to, low, mask=queries)
    tl.store(to + HALF, high, mask=queries)
    if tl.load(position + row) >= 0:
        place = tl.load(store + row)
        page = tl.load(table + row // R * M + place // S).to(tl.int64)
        beyond = head - H  # of keys, then values
        of = page * pool_page + beyond // K * pool_half + (place % S * K + beyond % K) * 2 * HALF
        kv = mask & (head[:, None] >= H)
        tl.store(pool + of[:, None] + i[None, :], low, mask=kv)
        tl.store(pool + of[:, None] + i[None, :] + HALF, high, mask=kv)
    if tl.program_id(1) == 0:
        lane = tl.arange(0, ZERO)
        tl.store(arrived + row * K + lane, lane * 0, mask=lane < K)


def turn_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, pool: Tensor, store: Tensor, position: Tensor, page_table: Tensor
) -> tuple[Tensor, Tensor]:
    """`rows.rope` of queries and keys, and `write`, in one launch and with their bits.

    Args: qkv: [n, H + 2K, D] dense; cos, sin: [n, D/2] fp32; the others as for `write`.
    Returns: q [n, H, D], and zeros [n, K] int32 for `attend`'s `arrived`.
    """
    n, heads, d = qkv.shape
    kv_heads = pool.shape[3]
    qkv, store, position, page_table = (x.contiguous() for x in (qkv, store, position, page_table))
    q = torch.empty(n, heads - 2 * kv_heads, d, dtype=qkv.dtype, device=qkv.device)
    arrived = torch.empty(n, kv_heads, dtype=torch.int32, device=qkv.device)
    if n:
        block = min(8, triton.next_power_of_2(heads))
        _turn_and_store[(n, triton.cdiv(heads, block))](
            qkv, cos, sin, q, arrived, pool, store, position, page_table, pool.stride(0), pool.stride(1),
            store.shape[1], page_table.shape[1], pool.shape[2], q.shape[1], kv_heads, d // 2,
            WIDTH=triton.next_power_of_2(d // 2), BLOCK=block, ZERO=triton.next_power_of_2(kv_heads),
            num_warps=2, enable_fp_fusion=False, **launch_options(qkv.device),
        )  # fmt: skip
    return q, arrived


@triton.jit
def _commit_kv(
    pool, table, length, path, live, layer, pool_page, pool_half,
    B, D, M, S, KD, WIDTH: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    """Programs: (layers * B, halves, columns). All rows of a column block are read before the first is written."""
    slot, lane = (tl.program_id(0) % B).to(tl.int64), tl.arange(0, WIDTH)
    col = tl.program_id(2) * COLS + tl.arange(0, COLS)
    node = tl.load(path + slot * D + lane, mask=lane < D, other=-1)
    node = tl.where(tl.load(live + slot) != 0, node, -1)
    mask = node >= 0
    first = tl.load(length + slot) + 1
    old, new = first + tl.maximum(node, 0), first + lane
    from_page = tl.load(table + slot * M + old // S, mask=mask, other=0).to(tl.int64)
    to_page = tl.load(table + slot * M + new // S, mask=mask, other=0).to(tl.int64)
    both = mask[:, None] & (col[None, :] < KD)
    half = pool + (tl.program_id(0) // B).to(tl.int64) * layer + tl.program_id(1).to(tl.int64) * pool_half
    x = tl.load(half + (from_page * pool_page + old % S * KD)[:, None] + col[None, :], mask=both)
    tl.debug_barrier()
    tl.store(half + (to_page * pool_page + new % S * KD)[:, None] + col[None, :], x, mask=both)


def commit(pools: Sequence[Tensor], page_table: Tensor, length: Tensor, path: Tensor, live: Tensor) -> None:
    """See `pages.commit`, in place. Pools at equal distances, as `pages.init_pools` makes them, take one launch."""
    b, depth = path.shape
    _, _, size, kv_heads, d = pools[0].shape
    # A kernel takes no list of pointers, but layers that lie a constant number of elements apart are the first one's
    # pointer and that number. Whether they are one allocation does not matter: only the pools' own places are reached.
    places = [pool.data_ptr() // pool.element_size() for pool in pools]
    gaps = {after - before for before, after in itertools.pairwise(places)}
    groups = [(pools[0], len(pools), gaps.pop() if gaps else 0)] if len(gaps) <= 1 else [(x, 1, 0) for x in pools]
    if b and depth:
        for pool, layers, gap in groups:
            _commit_kv[(layers * b, 2, triton.cdiv(kv_heads * d, 256))](
                pool, page_table.contiguous(), length, path.contiguous(), live, gap, pool.stride(0), pool.stride(1),
                b, depth, page_table.shape[1], size, kv_heads * d,
                WIDTH=triton.next_power_of_2(depth), COLS=256, num_warps=4,
            )  # fmt: skip

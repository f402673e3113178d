"""The page pool: a device-side allocator and the reads and writes of paged KV.

A pool layer is one tensor [P + 1, 2, S, K, D] (page, key or value, offset, KV head, head dim). Target and draft have
pools of their own and share one allocator: page p of a slot means page p in each of them. Page 0 is the sink:
padding rows write there, and it is never read.

Shapes: B slots, M page-table width, P usable pages, S page size.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nanospec_fn import kernels
from nanospec_fn.struct import put, put_, replace, state

SINK = 0
NONE = -1
Write = Callable[[Tensor, tuple[Tensor, ...], Tensor], Tensor]  # struct.put or struct.put_


@state
class Pages:
    """Which pages are free, and how many page-table entries hold each of the others."""

    refs: Tensor  # [P + 1] int32, references; the sink's stays 0
    stack: Tensor  # [P + 1] int32, page ids; the first num_free are the free ones, the last entry is scratch
    num_free: Tensor  # [] int32


def init(num_pages: int, device: torch.device | str = "cpu") -> Pages:
    """All of `num_pages` usable pages free; page 1 is handed out first."""
    ids = torch.arange(num_pages, -1, -1, dtype=torch.int32, device=device)
    return Pages(
        refs=torch.zeros(num_pages + 1, dtype=torch.int32, device=device),
        stack=ids,
        num_free=torch.tensor(num_pages, dtype=torch.int32, device=device),
    )


def init_pools(
    layers: int,
    num_pages: int,
    page_size: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> tuple[Tensor, ...]:
    """A pool for each layer, side by side in memory, so that one launch can reach all of them."""
    shape = (layers, num_pages + 1, 2, page_size, kv_heads, head_dim)
    return torch.zeros(shape, dtype=dtype, device=device).unbind(0)


def alloc(pages: Pages, need: Tensor, width: int) -> tuple[Pages, Tensor, Tensor]:
    """Reserve pages for every slot, all or nothing per slot, in slot order.

    Args:
      need: [B] int32, pages wanted; 0 is a no-op.
      width: columns of the result, at least need's maximum.
    Returns:
      pages: need[b] fewer free pages per served slot.
      page_id: [B, width] int32, padded with NONE.
      ok: [B] bool; False leaves that slot unserved. Slots after a refused one may be refused with it.
    Errors: none on the device; the host must read `ok`.
    Invariant: free + distinct owned == P. Property: properties/test_pages.py
    """
    ok = (need.cumsum(0) <= pages.num_free) | (need == 0)
    granted = torch.where(ok, need, 0)
    first = granted.cumsum(0) - granted
    lane = torch.arange(width, dtype=torch.int32, device=need.device)
    taken = lane < granted[:, None]
    index = torch.where(taken, pages.num_free - 1 - first[:, None] - lane, 0)
    page_id = torch.where(taken, pages.stack[index], NONE)
    refs = _count(pages.refs, page_id, 1)
    num_free = pages.num_free - granted.sum(dtype=torch.int32)
    return replace(pages, refs=refs, num_free=num_free), page_id, ok


def share(pages: Pages, page_id: Tensor) -> Pages:
    """One more reference for each of `page_id` int32; NONE and SINK entries are skipped."""
    return replace(pages, refs=_count(pages.refs, page_id, 1))


def free(pages: Pages, page_id: Tensor) -> Pages:
    """Drop a reference for each of `page_id` int32; pages without any go back to the stack.

    NONE and SINK entries are skipped.
    """
    refs = _count(pages.refs, page_id, -1)
    released = (pages.refs > 0) & (refs == 0)
    rank = released.cumsum(0, dtype=torch.int32) - 1
    scratch = pages.stack.shape[0] - 1
    index = torch.where(released, pages.num_free + rank, scratch)
    ids = torch.arange(len(refs), dtype=torch.int32, device=refs.device)
    stack = put(pages.stack, (index,), torch.where(released, ids, SINK))
    return replace(pages, refs=refs, stack=stack, num_free=pages.num_free + released.sum(dtype=torch.int32))


def _count(refs: Tensor, page_id: Tensor, change: int) -> Tensor:
    live = page_id.flatten() > SINK
    return refs.index_add(0, torch.where(live, page_id.flatten(), SINK), live.to(torch.int32) * change)


def locate(page_table: Tensor, position: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Page and offset of storage positions.

    Args:
      page_table: [B, M] int32, SINK where nothing is reserved.
      position: [B, R]; negative or past the table: the sink.
    Returns: page, offset, each [B, R] int64.
    """
    column = position.clamp_min(0).long() // page_size
    inside = (position >= 0) & (column < page_table.shape[1])
    page = page_table.gather(1, column.clamp_max(page_table.shape[1] - 1))
    return torch.where(inside, page, SINK).long(), position.clamp_min(0).long() % page_size


def write(pool: Tensor, page: Tensor, offset: Tensor, k: Tensor, v: Tensor, put: Write) -> Tensor:
    """Store keys and values.

    Args: page, offset [B, R] of `locate`; k, v [B * R, K, D]; `put` is struct.put, or struct.put_ under donation.
    Returns: the pool [P + 1, 2, S, K, D] with those rows written.
    """
    kv = torch.stack((k, v), dim=1)
    half = torch.arange(2, device=pool.device)
    return put(pool, (page.flatten()[:, None], half, offset.flatten()[:, None]), kv)


def read(pool: Tensor, page: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Gather keys and values of `locate`'s page, offset [...] -> k, v [..., K, D]."""
    return pool[page, 0, offset], pool[page, 1, offset]


def move(pool: Tensor, page_table: Tensor, source: Tensor, dest: Tensor, page_size: int, put: Write) -> Tensor:
    """Copy rows inside each slot: storage positions source [B, R] -> dest [B, R]; a negative pair does nothing."""
    page, offset = locate(page_table, torch.where(dest < 0, NONE, source), page_size)
    k, v = read(pool, page, offset)
    page, offset = locate(page_table, torch.where(source < 0, NONE, dest), page_size)
    return write(pool, page, offset, k.flatten(0, 1), v.flatten(0, 1), put)


def commit(
    pools: Sequence[Tensor],
    page_table: Tensor,
    length: Tensor,
    path: Tensor,
    live: Tensor,
    page_size: int,
    put: Write,
) -> tuple[Tensor, ...]:
    """Move KV from where a tree kept it to where it belongs, in every layer's pool.

    Args: length [B]: the root's position, node i's KV is at length + 1 + i; path [B, D]: the accepted node of each
      depth, -1 past the last; live [B]: False leaves a slot alone.
    """
    if pools and kernels.on_device(pools[0]):
        from nanospec_fn.kernels import kv  # needs Triton

        pools = tuple(pools) if put is put_ else tuple(pool.clone() for pool in pools)
        kv.commit(pools, page_table, length, path, live)
        return pools
    first = length[:, None] + 1
    path = torch.where(live[:, None], path, NONE)
    source = torch.where(path < 0, NONE, first + path)
    dest = torch.where(path < 0, NONE, first + torch.arange(path.shape[1], dtype=torch.int32, device=path.device))
    return tuple(move(pool, page_table, source, dest, page_size, put) for pool in pools)


def copy_pages(pools: Sequence[Tensor], source: Tensor, dest: Tensor, put: Write) -> tuple[Tensor, ...]:
    """Copy pages source [n] to pages dest [n] in every layer's pool; SINK to SINK is the no-op."""
    source, dest = source.long(), dest.long()
    return tuple(put(pool, (dest,), pool[source]) for pool in pools)


def check(pages: Pages, page_table: Tensor) -> str:
    """Promise G4 (docs/promises.md), checked on the host: "" or what is wrong. For tests, never inside a step."""
    table, num_free = page_table.flatten().tolist(), int(pages.num_free)
    refs, stack = pages.refs.tolist(), pages.stack.tolist()[:num_free]
    held = {p: table.count(p) for p in set(table) - {SINK}}
    if len(set(stack)) != num_free or SINK in stack:
        return f"the free stack holds a page twice, or the sink: {stack}"
    wrong = {p: (refs[p], held.get(p, 0)) for p in range(len(refs)) if refs[p] != held.get(p, 0)}
    if wrong:
        return f"references differ from page-table entries, as page: (references, entries): {wrong}"
    if num_free + len(held) != len(refs) - 1:
        return f"{num_free} free + {len(held)} owned pages are not the pool's {len(refs) - 1}"
    return ""

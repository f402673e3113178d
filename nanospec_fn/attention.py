"""Attention over paged KV, as interchangeable backends of one shape.

A backend is a hashable value with two methods: `plan(rows, page_table, heads, kv_heads)`, made once a pass, and
`layer(plan, pool, qkv, cos, sin, put)`, which rotates the rows' queries and keys, stores keys and values in one layer's
pool, and attends.

Storage and logic differ only in a draft tree: there, row r keeps its KV at storage position `store`, while its keys
in order are the committed prefix and then its ancestors by depth. Element j of a row's sequence is always position j,
so a tree row, a chain row, a decode row and a prefill row at one position do the same arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from nanospec_fn import kernels, pages, slots, trees
from nanospec_fn.kernels import cpu
from nanospec_fn.model import AttendLayer, Config, group_heads, rotate, ungroup_heads
from nanospec_fn.pages import Write
from nanospec_fn.slots import Slots
from nanospec_fn.struct import put_, state, static
from nanospec_fn.trees import Tree

DEAD = -1


@state
class Rows:
    """What one pass runs over: R rows for each of B slots."""

    token: Tensor  # [B, R] int32, in range even where dead
    position: Tensor  # [B, R] int32, the last position that the row sees (its own); DEAD: padding
    store: Tensor  # [B, R] int32, storage position of its KV; any value where dead
    base: Tensor  # [B] int32, positions below are read where they stand
    path: Tensor | tuple[()]  # [B, R, J] int32, storage position of position base + j; () where storage is position
    span: int = static(default=0)  # of a tree: storage positions from base on that hold its rows so far


def chain(token: Tensor, first: Tensor, count: Tensor) -> Rows:
    """Rows that stand one after another: token [B, R], from position first [B]; the first count [B] are live."""
    lane = torch.arange(token.shape[1], dtype=torch.int32, device=token.device)
    position = torch.where(lane < count[:, None], first[:, None] + lane, DEAD)
    return Rows(token=token, position=position, store=position, base=first, path=())


def newest(s: Slots, live: Tensor, width: int, shift: int) -> tuple[Rows, Tensor]:
    """The tokens that the draft has not seen as rows [B, width], `shift` positions early, and the last live row [B]."""
    if kernels.on_device(s.total):
        from nanospec_fn.kernels import round  # needs Triton

        token, position, first, last = round.newest(s.tokens, s.total, s.unseen, live, width, shift)
        return Rows(token=token, position=position, store=position, base=first, path=()), last
    unseen, first = torch.where(live, s.unseen, 0), s.total - s.unseen
    lane = torch.arange(width, dtype=torch.int32, device=live.device)
    token = slots.tokens_at(s, first[:, None] + lane)
    return chain(token, first - shift, unseen), (unseen - 1).clamp_min(0)


def verify(s: Slots, tree: Tree, live: Tensor, depth: int) -> Rows:
    """The pending token, as the root, and a tree's nodes; node i keeps its KV at length + 1 + i.

    Args: depth: of a tree whose nodes need their ancestors named; 0 for a chain, whose nodes stand where they belong.
    """
    path: Tensor | tuple[()] = ()
    if kernels.on_device(s.total):
        from nanospec_fn.kernels import round  # needs Triton

        nodes = (tree.token, tree.parent, tree.depth)
        token, position, store, path = round.verify(s.tokens, s.length, live, nodes, depth)
        return Rows(token=token, position=position, store=store, base=s.length, path=path, span=token.shape[1])
    root = slots.tokens_at(s, s.length[:, None])
    level = torch.cat((torch.zeros_like(root), tree.depth), dim=1)
    present = torch.cat((torch.ones_like(root, dtype=torch.bool), tree.token != Tree.NONE), dim=1)
    lane = torch.arange(level.shape[1], dtype=torch.int32, device=level.device)
    if depth:
        above = trees.paths_all(tree, 0, tree.token.shape[1], depth)
        above = torch.nn.functional.pad(above, (0, 0, 1, 0), value=-1)  # the root has none
        first = s.length[:, None, None]
        path = torch.cat((first.expand(-1, above.shape[1], 1), first + 1 + above.clamp_min(0)), dim=2)
    return Rows(
        token=torch.cat((root, tree.token.clamp_min(0)), dim=1),
        position=torch.where(live[:, None] & present, s.length[:, None] + level, DEAD),
        store=s.length[:, None] + lane,
        base=s.length,
        path=path,
        span=level.shape[1],
    )


class Attend(Protocol):
    """A backend. Both methods are pure but for what `put` does to the pool."""

    def plan(self, rows: Rows, page_table: Tensor, heads: int, kv_heads: int) -> Any:
        """Whatever the layers of this pass share; page_table [B, M] int32."""

    def layer(
        self, plan: Any, pool: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, put: Write
    ) -> tuple[Tensor, Tensor]:
        """qkv [n, H + 2K, D], cos, sin [n, D/2], n = B * R -> the pool with rotated k, and v, stored; [n, H, D]."""


@state
class Plan:
    """Index tensors of one pass of `Sdpa`."""

    page: Tensor  # [B, R] where each row's KV goes
    offset: Tensor  # [B, R]
    parts: tuple["Part", ...]


@state
class Part:
    """Keys of a pass: [B, T] that a slot's rows share, or [B, R, T] of each row by itself."""

    page: Tensor
    offset: Tensor
    read: Tensor  # bool [..., 1, 1], whether any row sees it; what no row may see can hold anything, NaN too
    hidden: Tensor  # bool, which keys each row may not see, in the form of kernels.hide


@dataclass(frozen=True)
class Sdpa:
    """Blockwise softmax attention in plain torch, on any device; the oracle. Row-canonical on a CPU."""

    page_size: int
    bmm: str = "whole"  # of `model.Config`

    def plan(self, rows: Rows, page_table: Tensor, heads: int, kv_heads: int) -> Plan:
        width = page_table.shape[1] * self.page_size
        if not rows.position.is_cuda:  # a shape that depends on data is free here, and a trap inside a CUDA graph
            width = min(width, int(rows.position.max()) + 1)
        page, offset = pages.locate(page_table, torch.where(rows.position == DEAD, DEAD, rows.store), self.page_size)
        if isinstance(rows.path, Tensor):
            start = rows.base // cpu.KV_BLOCK * cpu.KV_BLOCK
            found = [self._prefix(rows, page_table, start, width), self._tails(rows, rows.path, page_table, start)]
        else:
            found = [self._prefix(rows, page_table, None, width)]
        parts = tuple(
            Part(page, offset, read[..., None, None], cpu.hide(mask, kv_heads, heads // kv_heads))
            for page, offset, read, mask in found
        )
        return Plan(page=page, offset=offset, parts=parts)

    def _prefix(self, rows: Rows, page_table: Tensor, start: Tensor | None, width: int) -> tuple[Tensor, ...]:
        """Keys that a slot's rows share, by position: [B, T], up to `start` [B] where the tails begin."""
        column = torch.arange(_whole_blocks(width), device=page_table.device)
        mask = column <= rows.position[:, :, None]
        if start is not None:
            mask = mask & (column < start[:, None, None])
        read = mask.any(1)
        return *self._locate(page_table, column.expand(read.shape), read), read, mask

    def _tails(self, rows: Rows, path: Tensor, page_table: Tensor, start: Tensor) -> tuple[Tensor, ...]:
        """Keys of each row by itself, from the block that holds position `base`: [B, R, T]."""
        j = path.shape[2]
        position = start[:, None] + torch.arange(_whole_blocks(cpu.KV_BLOCK - 1 + j), device=start.device)  # [B, T]
        depth = (position - rows.base[:, None])[:, None].expand(-1, path.shape[1], -1)  # [B, R, T]
        ancestor = path.gather(2, depth.clamp(0, j - 1).long())
        storage = torch.where(depth < 0, position[:, None], ancestor)
        read = position[:, None] <= rows.position[:, :, None]
        b, r, t = read.shape
        page, offset = self._locate(page_table, storage.reshape(b, -1), read.reshape(b, -1))
        return page.view(b, r, t), offset.view(b, r, t), read, read

    def _locate(self, page_table: Tensor, position: Tensor, read: Tensor) -> tuple[Tensor, Tensor]:
        return pages.locate(page_table, torch.where(read, position, DEAD), self.page_size)

    def layer(
        self, plan: Plan, pool: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, put: Write
    ) -> tuple[Tensor, Tensor]:
        b, r = plan.page.shape
        kv_heads, d = pool.shape[3:]
        q, k, v = rotate(qkv, cos, sin, kv_heads)
        pool = pages.write(pool, plan.page, plan.offset, k, v, put)
        q = group_heads(q.reshape(b, r, -1, d), kv_heads)
        parts = []
        for part in plan.parts:
            keys, values = pages.read(pool, part.page, part.offset)  # [B, T, K, D], or [B, R, T, K, D]
            parts.append((_by_head(keys), _by_head(torch.where(part.read, values, 0)), part.hidden))
        return pool, ungroup_heads(cpu.attention(q, parts, d**-0.5, self.bmm), b, kv_heads, r)


def _by_head(x: Tensor) -> Tensor:
    """[B, T, K, D] -> [B * K, T, D], or [B, R, T, K, D] -> [B * K * R, T, D]."""
    return x.movedim(-2, 1).reshape(-1, x.shape[-3], x.shape[-1])


def _whole_blocks(n: int) -> int:
    return max(1, -(-n // cpu.KV_BLOCK)) * cpu.KV_BLOCK


def through(
    attend: Attend, cfg: Config, rows: Rows, page_table: Tensor, pools: Sequence[Tensor], put: Write
) -> tuple[list[Tensor], AttendLayer]:
    """A pass's attention, layer by layer, and the list that holds the pools as the layers leave them."""
    plan, out = attend.plan(rows, page_table, cfg.num_heads, cfg.num_kv_heads), list(pools)

    def layer(i: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        out[i], mixed = attend.layer(plan, out[i], qkv, cos, sin, put)
        return mixed

    return out, layer


@dataclass(frozen=True)
class Canonical:
    """The Triton kernels on CUDA: row-canonical, planned on the device alone. See kernels/attend.py."""

    page_size: int

    def plan(self, rows: Rows, page_table: Tensor, heads: int, kv_heads: int) -> tuple[Rows, Tensor]:
        return rows, page_table

    def layer(
        self, plan: tuple[Rows, Tensor], pool: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, put: Write
    ) -> tuple[Tensor, Tensor]:
        from nanospec_fn.kernels import attend, kv  # needs Triton

        rows, page_table = plan
        pool = pool if put is put_ else pool.clone()
        q, arrived = kv.turn_and_write(qkv, cos, sin, pool, rows.store, rows.position, page_table)
        return pool, attend.attend(pool, q, rows.position, page_table, rows.base, rows.path, arrived=arrived)

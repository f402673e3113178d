"""Batch slots: what the device knows of each running request.

A slot is empty, prefilling (length < prefill_to), running (length == total - 1) or done. `total` counts the known
tokens, prompt and emitted; `length` the positions whose KV is committed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import kernels, pages, sampling
from nanospec_fn.acceptance import Verdict
from nanospec_fn.pages import Write
from nanospec_fn.struct import put, put_, replace, state

RUNNING, STOP, LENGTH = 0, 1, 2  # done codes
MAX_STOP_IDS = 32


@state
class Slots:
    """Per-slot state; B slots, C token capacity, M page-table width."""

    active: Tensor  # [B] bool, holds a request
    done: Tensor  # [B] int32, RUNNING, STOP or LENGTH
    tokens: Tensor  # [B, C + 1] int32, by position; the last column takes the writes of padding
    total: Tensor  # [B] int32, tokens known
    length: Tensor  # [B] int32, positions committed
    prefill_to: Tensor  # [B] int32, positions that prefill covers
    silent: Tensor  # [B] bool, a recompute: prefill emits nothing, the pending token is already there
    limit: Tensor  # [B] int32, total at which the request ends
    unseen: Tensor  # [B] int32, newest tokens that the draft has not been run on
    page_table: Tensor  # [B, M] int32, SINK where nothing is reserved
    num_pages: Tensor  # [B] int32
    stop_ids: Tensor  # [B, MAX_STOP_IDS] int32, padded -1
    controls: sampling.Controls


STEPPED = ("done", "tokens", "total", "length", "unseen", "page_table", "num_pages")  # all that a step changes
CLEARED = ("active", "done", "total", "length", "prefill_to", "unseen", "page_table", "num_pages")  # of who leaves


def init(num_slots: int, capacity: int, table_width: int, device: torch.device | str = "cpu") -> Slots:
    """Every slot empty."""

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

    return Slots(
        active=zeros(dtype=torch.bool),
        done=zeros(),
        tokens=zeros(capacity + 1),
        total=zeros(),
        length=zeros(),
        prefill_to=zeros(),
        silent=zeros(dtype=torch.bool),
        limit=zeros(),
        unseen=zeros(),
        page_table=zeros(table_width),
        num_pages=zeros(),
        stop_ids=zeros(MAX_STOP_IDS) - 1,
        controls=sampling.controls([sampling.Sampling()] * num_slots, device),
    )


@dataclass(frozen=True)
class End:
    """Where a request ends."""

    limit: int  # total of its tokens, prompt included
    stop_ids: tuple[int, ...]  # after one of these


def column(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A host list, or a list of lists, on the device; on CUDA without waiting for it."""
    host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


def newcomers(
    coming: Sequence[tuple[Sequence[int], int, sampling.Sampling]], ends: Sequence[End], like: Slots
) -> Slots:
    """Rows [b] of requests that have just come, without pages.

    Args: coming: tokens (the prompt and the newest ones of an earlier stay), how many of them are of an earlier stay,
      and how the request is sampled; like: what they will be rows of.
    """
    device = like.total.device
    total = [len(tokens) for tokens, _, _ in coming]
    again = [emitted > 0 for _, emitted, _ in coming]
    longest = max(total)
    padded = [[*tokens] + [0] * (longest - len(tokens)) for tokens, _, _ in coming]
    stop_ids = [[*end.stop_ids] + [-1] * (MAX_STOP_IDS - len(end.stop_ids)) for end in ends]

    def ints(values: Sequence[Any]) -> Tensor:
        return column(values, torch.int32, device)

    tokens = torch.nn.functional.pad(ints(padded), (0, like.tokens.shape[1] - longest))
    silent = column(again, torch.bool, device)
    none = torch.zeros_like(tokens[:, 0])
    return Slots(
        active=torch.ones_like(silent),
        done=none,
        tokens=tokens,
        total=ints(total),
        length=none,
        prefill_to=ints([n - 1 if a else n for n, a in zip(total, again, strict=True)]),
        silent=silent,
        limit=ints([end.limit for end in ends]),
        unseen=none,
        page_table=none[:, None].expand(-1, like.page_table.shape[1]),
        num_pages=none,
        stop_ids=ints(stop_ids),
        controls=sampling.controls([request for _, _, request in coming], device),
    )


def put_all(slots: Slots, slot: Tensor, rows: Slots, put: Write = put) -> Slots:
    """Slots with every field of `rows` [b] in the rows of `slot` [b] (distinct)."""
    placed: Slots = pytree.tree_map(lambda whole, new: put(whole, (slot,), new), slots, rows)
    return placed


def evict(slots: Slots, slot: Tensor, put: Write = put) -> tuple[Slots, Tensor]:
    """Empty the slots of `slot` [b]. Returns the page ids [b, M] int32 that they held, SINK where none."""
    held = slots.page_table[slot]
    emptied = {}
    for name in CLEARED:
        field = getattr(slots, name)
        emptied[name] = put(field, (slot,), torch.zeros_like(field[: len(slot)]))
    return replace(slots, **emptied), held


def take(slots: Slots, slot: Tensor | None) -> Slots:
    """The rows of `slot` [b] (distinct), or all of them for None."""
    return slots if slot is None else pytree.tree_map(lambda x: x[slot], slots)


def put_back(slots: Slots, slot: Tensor | None, taken: Slots, put: Write = put) -> Slots:
    """The inverse of `take`, after a step."""
    if slot is None:
        return taken
    return replace(slots, **{name: put(getattr(slots, name), (slot,), getattr(taken, name)) for name in STEPPED})


def running(slots: Slots) -> Tensor:
    """[B] bool: the prompt is done and the request is not."""
    return slots.active & (slots.done == RUNNING) & (slots.length >= slots.prefill_to)


def prefilling(slots: Slots) -> Tensor:
    """[B] bool: some of the prompt is left."""
    return slots.active & (slots.length < slots.prefill_to)


def reserve(
    free: pages.Pages, slots: Slots, upto: Tensor, page_size: int, width: int
) -> tuple[pages.Pages, Slots, Tensor]:
    """Own pages for storage positions below upto [B], all or nothing per slot.

    Args: width: bound on the pages that one slot may want; upto: 0 wants nothing.
    Returns: pages, slots, ok [B] bool.
    """
    need = ((upto + page_size - 1) // page_size - slots.num_pages).clamp_min(0)
    free, page_id, ok = pages.alloc(free, need, width)
    table, count = slots.page_table, torch.where(ok, need, 0)
    lane = torch.arange(table.shape[1], dtype=torch.int32, device=table.device) - slots.num_pages[:, None]
    new = page_id.gather(1, lane.clamp(0, width - 1).long())
    table = torch.where((lane >= 0) & (lane < count[:, None]), new, table)
    return free, replace(slots, page_table=table, num_pages=slots.num_pages + count), ok


def reserve_round(
    free: pages.Pages, slots: Slots, ahead: int, page_size: int, put: Write = put
) -> tuple[pages.Pages, Slots, Tensor, Tensor]:
    """`reserve` for every running slot, `ahead` storage positions past its known tokens.

    Returns: pages, slots, live and ok [B] bool; live: a running slot that has its pages.
    """
    width = ahead // page_size + 2
    if not kernels.on_device(slots.total):
        live = running(slots)
        free, slots, ok = reserve(free, slots, torch.where(live, slots.total + ahead, 0), page_size, width)
        return free, slots, live & ok, ok
    from nanospec_fn.kernels import round  # needs Triton

    held = _owned((slots.page_table, slots.num_pages, free.refs, free.num_free), put)
    table, num_pages, refs, num_free = held
    read = (slots.active, slots.done, slots.length, slots.prefill_to, slots.total)
    live, ok = round.reserve(read, table, num_pages, (refs, free.stack, num_free), ahead, page_size, width)
    return (
        replace(free, refs=refs, num_free=num_free),
        replace(slots, page_table=table, num_pages=num_pages),
        live,
        ok,
    )


def _owned(tensors: tuple[Tensor, ...], put: Write) -> tuple[Tensor, ...]:
    """The tensors themselves for a step that owns its state, else copies."""
    return tensors if put is put_ else tuple(x.clone() for x in tensors)


def tokens_at(slots: Slots, position: Tensor) -> Tensor:
    """tokens [B, R] int32 at position [B, R]; positions out of range give some token in range."""
    return slots.tokens.gather(1, position.clamp(0, slots.tokens.shape[1] - 1).long())


def emit(slots: Slots, tokens: Tensor, count: Tensor) -> tuple[Slots, Tensor]:
    """Append up to count [B] of tokens [B, W], ending at the first stop token or at the limit.

    Returns: slots with total, length, done and unseen advanced; and how many were emitted, [B] int32.
    """
    lane = torch.arange(tokens.shape[1], dtype=torch.int32, device=tokens.device)
    count = torch.minimum(count, slots.limit - slots.total).clamp_min(0)
    stop = (tokens[:, :, None] == slots.stop_ids[:, None, :]).any(-1) & (tokens >= 0)
    first_stop = torch.where(stop, lane, tokens.shape[1]).amin(1)
    stopped = first_stop < count
    count = torch.where(stopped, first_stop + 1, count).to(torch.int32)
    scratch = slots.tokens.shape[1] - 1
    place = torch.where(lane < count[:, None], slots.total[:, None] + lane, scratch).long()
    total = slots.total + count
    ended = torch.where(stopped, STOP, torch.where(total >= slots.limit, LENGTH, RUNNING)).to(torch.int32)
    emitted = count > 0
    return (
        replace(
            slots,
            tokens=slots.tokens.scatter(1, place, tokens.to(torch.int32)),
            total=total,
            length=torch.where(emitted, total - 1, slots.length),
            done=torch.where(emitted, ended, slots.done),
            unseen=torch.where(emitted, count, slots.unseen),
        ),
        count,
    )


@state
class Emitted:
    """What a round emitted, padded with -1 (log-probs with 0); W the columns that were asked for."""

    tokens: Tensor  # [B, W] int32
    target_logp: Tensor  # [B, W]
    behaviour_logp: Tensor  # [B, W]
    count: Tensor  # [B] int32
    accepted: Tensor  # [B] int32, drafted tokens among them
    done: Tensor  # [B] int32, RUNNING, STOP or LENGTH
    left: Tensor  # [B] int32, prompt tokens still to prefill


def append(slots: Slots, verdict: Verdict, live: Tensor, width: int, put: Write = put) -> tuple[Slots, Emitted]:
    """`emit` a verdict's tokens where live [B], and say what was emitted in `width` columns, at least the verdict's."""
    v = verdict
    if kernels.on_device(v.target_logp):
        from nanospec_fn.kernels import round  # needs Triton

        names = ("tokens", "total", "length", "done", "unseen")
        changed = _owned(tuple(getattr(slots, name) for name in names), put)
        given = (v.tokens, v.target_logp, v.behaviour_logp, v.count)
        fixed = (slots.limit, slots.stop_ids, slots.prefill_to)
        out = round.emit(given, live, fixed, changed, width, (STOP, LENGTH))
        return replace(slots, **dict(zip(names, changed, strict=True))), Emitted(**out)
    slots, count = emit(slots, v.tokens, torch.where(live, v.count, 0))
    lane = torch.arange(width, device=count.device)

    def trim(x: Tensor, filler: float) -> Tensor:
        return torch.where(lane < count[:, None], torch.nn.functional.pad(x, (0, width - x.shape[1])), filler)

    return slots, Emitted(
        tokens=trim(v.tokens, -1),
        target_logp=trim(v.target_logp, 0.0),
        behaviour_logp=trim(v.behaviour_logp, 0.0),
        count=count,
        accepted=torch.minimum(count, v.accepted),
        done=slots.done.clone(),  # a later step that owns the slots overwrites theirs
        left=(slots.prefill_to - slots.length).clamp_min(0),
    )

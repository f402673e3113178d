"""How requests come and go, many at once: pure functions over the whole state, a few launches for all of them.

Shapes: B slots, b requests that come or go, M page-table width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import pages, schedule, slots
from nanospec_fn.pages import SINK, Write
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import State
from nanospec_fn.struct import replace


@dataclass(frozen=True)
class Admission:
    """A request and the slot it is put into."""

    slot: int  # an empty one
    tokens: Sequence[int]  # the prompt, followed by the `emitted` tokens of an earlier stay
    sampling: Sampling
    emitted: int = 0  # nothing is emitted for these again
    share: int | None = None  # a slot whose prompt is the same and prefilled; its KV is taken over

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.tokens) - self.emitted


def check(state: State, coming: Sequence[Admission]) -> None:
    """Refuse what the device knows better. Waits for it: a batch comes when all that was issued has been read.

    Errors: ValueError for a slot that holds a request, and for one to share with that lacks the prompt's KV.
    """
    s, device = state.slots, state.slots.total.device
    held = s.active[slots.column([a.slot for a in coming], torch.int64, device)].tolist()
    for one, occupied in zip(coming, held, strict=True):
        if occupied:
            raise ValueError(f"slot {one.slot} holds a request; evict it first")
    sharing = [a for a in coming if a.share is not None]
    if not sharing:
        return
    donor, prompt = (
        slots.column(values, torch.int64, device)
        for values in ([a.share for a in sharing], [a.prompt for a in sharing])
    )
    longest = max(a.prompt for a in sharing)
    asked = slots.column([[*a.tokens[: a.prompt]] + [0] * (longest - a.prompt) for a in sharing], torch.int32, device)
    beyond = torch.arange(longest, device=device) >= prompt[:, None]
    alike = ((asked == s.tokens[donor, :longest]) | beyond).all(1)
    for one, fits in zip(sharing, (alike & s.active[donor] & (s.length[donor] >= prompt - 1)).tolist(), strict=True):
        if not fits:
            raise ValueError(f"share: slot {one.share} does not hold the KV of this prompt of {one.prompt} tokens")


def insert(state: State, coming: Sequence[Admission], ends: Sequence[slots.End], page_size: int, put: Write) -> State:
    """Put requests into empty slots; `prefill` then works on them.

    Args: coming: distinct slots, donors not among them; ends: where each request ends.
    """
    device = state.slots.total.device
    rows = slots.newcomers([(a.tokens, a.emitted, a.sampling) for a in coming], ends, state.slots)
    slot = slots.column([a.slot for a in coming], torch.int64, device)
    state = replace(state, slots=slots.put_all(state.slots, slot, rows, put))
    sharing = [a for a in coming if a.share is not None]
    if not sharing:
        return state
    taker, donor, tokens = (
        slots.column(values, torch.int64, device)
        for values in (
            [a.slot for a in sharing],
            [a.share for a in sharing],
            [schedule.shared_tokens(a.prompt) for a in sharing],
        )
    )
    return _share(state, taker, donor, tokens, page_size, put)


def _share(state: State, slot: Tensor, donor: Tensor, tokens: Tensor, page_size: int, put: Write) -> State:
    """Take over the KV of the donors' first `tokens` positions: whole pages by reference, the rest as a copy.

    Args: slot, donor, tokens: [b] int64.
    """
    s = state.slots
    whole, rest = tokens // page_size, tokens % page_size
    held = s.page_table[donor]
    column = torch.arange(held.shape[1], device=held.device)
    table = torch.where(column < whole[:, None], held, SINK)
    free = pages.share(state.pages, table)
    # The last page is about to be written, by both: copy it now, or recompute its tokens if no page is left.
    free, page_id, ok = pages.alloc(free, (rest > 0).to(torch.int32), 1)
    copied = ok & (rest > 0)
    last = held.gather(1, whole.clamp_max(held.shape[1] - 1)[:, None])[:, 0]
    source, dest = torch.where(copied, last, SINK), torch.where(copied, page_id[:, 0], SINK)
    table = torch.where(column == whole[:, None], dest[:, None], table)
    s = replace(
        s,
        page_table=put(s.page_table, (slot,), table),
        num_pages=put(s.num_pages, (slot,), whole + copied),
        length=put(s.length, (slot,), torch.where(copied, tokens, whole * page_size)),
    )
    return State(
        pages=free,
        pools=pages.copy_pages(state.pools, source, dest, put),
        slots=s,
        draft=replace(state.draft, pools=pages.copy_pages(state.draft.pools, source, dest, put)),
    )


def evict(state: State, going: Sequence[int], put: Write) -> State:
    """Empty slots and drop their references to pages."""
    s, held = slots.evict(state.slots, slots.column(going, torch.int64, state.slots.total.device), put)
    return replace(state, slots=s, pages=pages.free(state.pages, held))

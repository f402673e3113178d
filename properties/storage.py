"""What may be read and written where, by page and offset: masks [P + 1, S] over a pool [P + 1, 2, S, K, D].

Each pair is (the target's, the draft's).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import pages, struct
from nanospec_fn.step import State


@dataclass(frozen=True)
class Bytes:
    """A copy of both pools."""

    pools: tuple[list[Tensor], list[Tensor]]

    @classmethod
    def of(cls, state: State) -> "Bytes":
        return cls(([pool.clone() for pool in state.pools], [pool.clone() for pool in state.draft.pools]))

    def written(self, state: State, owner: int, allowed: Tensor) -> list[list[int]]:
        """The (page, offset) whose bytes differ in the state's pools, outside `allowed` and the sink."""
        after = (state.pools, state.draft.pools)[owner]
        allowed = allowed.clone()
        allowed[pages.SINK] = True
        differs = torch.zeros_like(allowed)
        for old, new in zip(self.pools[owner], after, strict=True):
            differs |= (old.view(torch.int32) != new.view(torch.int32)).flatten(3).any(-1).any(1)
        return (differs & ~allowed).nonzero().tolist()


def readable(state: State, shift: int) -> tuple[list[int], list[int]]:
    """Per slot, how many positions hold KV that may be read.

    Args: shift: how far behind the target's position the draft keeps a token's KV.
    """
    s = state.slots
    running = (s.length >= s.prefill_to).tolist()
    target, unseen, total = s.length.tolist(), s.unseen.tolist(), s.total.tolist()
    own = [total[b] - unseen[b] - shift if running[b] else target[b] - min(shift, unseen[b]) for b in range(len(total))]
    return target, [max(0, n) for n in own]


def free(state: State, page_size: int) -> Tensor:
    """Pages that nobody holds."""
    return (state.pages.refs == 0)[:, None].expand(-1, page_size).clone()


def past(state: State, page_size: int, valid: Sequence[int], taking_part: Sequence[int]) -> Tensor:
    """What a step for these slots may write: positions from valid[slot] on, in pages that the slot alone holds."""
    mask = torch.zeros(len(state.pages.refs), page_size, dtype=torch.bool)
    for slot in taking_part:
        row = state.slots.page_table[slot, : state.slots.num_pages[slot]].long()
        mask[row] |= torch.arange(len(row) * page_size).view(-1, page_size) >= valid[slot]
    return mask & (state.pages.refs == 1)[:, None]


def poison(state: State, page_size: int, shift: int) -> State:
    """NaN in every free page, the sink and the tails that hold nothing yet, of both pools."""
    everyone = range(len(state.slots.active))
    new = []
    for valid, pools in zip(readable(state, shift), (state.pools, state.draft.pools), strict=True):
        empty = free(state, page_size) | past(state, page_size, valid, everyone)
        new.append(tuple(pool.masked_fill(empty[:, None, :, None, None], torch.nan) for pool in pools))
    return struct.replace(state, pools=new[0], draft=struct.replace(state.draft, pools=new[1]))

"""Batches of rollouts for a head: which sequences, in which order, padded, and the target's view of all of them.

Everything is a function of its arguments, a seed among them, so that a run that goes on from step n sees what one that
never stopped sees. Shapes: B sequences, T tokens, F tapped width, E hidden.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

import nanospec_fn as ns
from rl import eagle_loss
from rl.eagle_loss import Seen
from rl.rollouts import Rollouts

WIDTH = 64  # batches are padded to a multiple of this
POOL = 16  # batches that are sorted by length together


def split(n: int, held_out: int, seed: int) -> tuple[list[int], list[int]]:
    """Indices to train on, and indices held out: at most a tenth."""
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    held_out = min(held_out, n // 10)
    return order[held_out:], order[:held_out]


def batches(lengths: Sequence[int], size: int, seed: int, epoch: int) -> list[list[int]]:
    """An epoch's batches of `size` positions in `lengths`, of like length so that little is padding."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order = torch.randperm(len(lengths), generator=generator).tolist()
    size = min(size, len(order))
    order = order[: len(order) // size * size]
    made: list[list[int]] = []
    for start in range(0, len(order), size * POOL):
        near = sorted(order[start : start + size * POOL], key=lambda i: (lengths[i], i))
        made += [near[i : i + size] for i in range(0, len(near), size)]
    return [made[i] for i in torch.randperm(len(made), generator=generator).tolist()]


def collate(data: Rollouts, members: Sequence[int], max_len: int, device: torch.device) -> tuple[Tensor, ...]:
    """tokens [B, T] int64 padded on the right with 0, length [B], prompt [B]."""
    sequences = [torch.from_numpy(data.sequence(i)[:max_len]).long() for i in members]
    width = -(-max(map(len, sequences)) // WIDTH) * WIDTH
    tokens = torch.stack([torch.nn.functional.pad(s, (0, width - len(s))) for s in sequences])
    length = torch.tensor([len(s) for s in sequences])
    return tokens.to(device), length.to(device), torch.from_numpy(data.prompt[list(members)]).long().to(device)


def most_frequent(data: Rollouts, members: Sequence[int], vocab_size: int, size: int) -> Tensor:
    """[min(size, vocab_size)] int64, ascending: the ids that responses use most; ties and the rest by id."""
    count = torch.zeros(vocab_size, dtype=torch.int64)
    for i in members:
        response = torch.from_numpy(data.sequence(i)[data.prompt[i] :]).long()
        count += response.bincount(minlength=vocab_size)
    return count.sort(descending=True, stable=True).indices[:size].sort().values


def observe_all(
    target: ns.Model, taps: tuple[int, ...], data: Rollouts, members: Sequence[int], batch: int, max_len: int
) -> tuple[Seen, dict[int, int]]:
    """The target's view of all members' tokens, one after another [N, ...], and where each member starts.

    Takes (F + E) * N numbers of memory on the target's device, and spares a pass of the target at every step.
    """
    ordered = sorted(members, key=lambda i: (len(data.sequence(i)), i))
    total = sum(min(len(data.sequence(i)), max_len) for i in members)
    kept: list[Tensor] = []  # made once the first batch says of which width and type: parts joined would be there twice
    start, at = {}, 0
    for first in range(0, len(ordered), batch):
        chosen = ordered[first : first + batch]
        tokens, length, _ = collate(data, chosen, max_len, target.params.embed.device)
        seen = eagle_loss.observe(target, taps, tokens)
        real = torch.arange(tokens.shape[1], device=length.device) < length[:, None]
        views = (seen.taps, seen.x, seen.best)
        kept = kept or [x.new_empty(total, *x.shape[2:]) for x in views]
        for column, x in zip(kept, views, strict=True):
            column[at : at + int(length.sum())] = x[real]
        for i in chosen:
            start[i] = at
            at += min(len(data.sequence(i)), max_len)
    return Seen(*kept), start


def recall(seen: Seen, start: Sequence[int], tokens: Tensor) -> Seen:
    """The kept view of a batch tokens [B, T]; padding may hold any row."""
    first = torch.tensor(start, device=tokens.device)[:, None]
    index = (first + torch.arange(tokens.shape[1], device=tokens.device)).clamp_max(len(seen.best) - 1)
    return Seen(taps=seen.taps[index], x=seen.x[index], best=seen.best[index])

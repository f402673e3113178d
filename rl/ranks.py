"""Several processes as one run: who this is, what the others have, and an end with a name where one of them died.

`torchrun --nproc-per-node N -m rl.grpo ...` starts them. Objects go through Gloo, tensors through NCCL on CUDA. Rank 0
writes the files; every rank holds the same weights and makes the same update.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from nanospec_fn import weights
from rl.run_files import RunError

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # that a rank waits for the others: their rollouts may be longer than its own
MISSING = re.compile(r"Ranks? ([0-9, ]*[0-9]) failed to pass")  # monitored_barrier's words
GRACE = timedelta(seconds=10)  # to find out who is dead once a collective has failed


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run."""

    rank: int = 0
    size: int = 1
    patience: timedelta = PATIENCE
    talk: Any = None  # the Gloo group that objects go through

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's part of `count` things."""
        return range(self.rank, count, self.size)


def world_size(environment: Mapping[str, str] = os.environ) -> int:
    """The processes that torchrun started, 1 without it."""
    return int(environment.get("WORLD_SIZE", "1"))


def device_of(name: str, environment: Mapping[str, str] = os.environ) -> str:
    """--device on this rank: "cuda" and "auto" mean a GPU for each process of a machine."""
    if world_size(environment) > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{environment['LOCAL_RANK']}"
    return name


def start(name: str, patience: timedelta = PATIENCE) -> Ranks:
    """Join the processes that torchrun started; alone without it. Args: name: --device."""
    size = world_size()
    if size == 1:
        return Ranks()
    device = weights.pick_device(device_of(name))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    return Ranks(dist.get_rank(), size, patience, dist.new_group(backend="gloo", timeout=patience))


def stop(ranks: Ranks) -> None:
    """Leave the others, at the end."""
    if ranks.size > 1:
        dist.destroy_process_group()


def gather(ranks: Ranks, thing: T) -> list[T]:
    """Every rank's thing, by rank; on the CPU.

    Errors: RunError naming the ranks that do not answer.
    """
    if ranks.size == 1:
        return [thing]
    meet(ranks)
    found: list[Any] = [None] * ranks.size
    try:
        dist.all_gather_object(found, thing, group=ranks.talk)
    except RuntimeError as error:
        raise lost(ranks, error) from error
    return found


def add_(ranks: Ranks, tree: Any) -> None:
    """Add up every leaf over the ranks, in place.

    Errors: RunError naming the ranks that do not answer.
    """
    if ranks.size == 1:
        return
    meet(ranks)
    try:
        for leaf in pytree.tree_leaves(tree):
            dist.all_reduce(leaf)
    except RuntimeError as error:
        raise lost(ranks, error) from error


def meet(ranks: Ranks, patience: timedelta | None = None) -> None:
    """Wait until every rank is here. Errors: RunError naming those that do not come."""
    try:
        dist.monitored_barrier(ranks.talk, timeout=patience or ranks.patience, wait_all_ranks=True)
    except RuntimeError as error:
        raise RunError(f"rank {ranks.rank} of {ranks.size}: {missing(ranks, error)}") from error


def missing(ranks: Ranks, error: RuntimeError) -> str:
    """Who did not come to a barrier: by its error, or else by whose connection is closed."""
    named = MISSING.search(str(error))
    who = named[1] if named else ", ".join(str(other) for other in range(ranks.size) if is_closed(ranks, other))
    return f"rank {who} died or does not answer" if who else first_line(error)


def is_closed(ranks: Ranks, other: int) -> bool:
    """Whether another rank's connection is gone; one that is only busy does not take in a second what is sent to it."""
    if other == ranks.rank:
        return False
    try:
        sent = dist.isend(torch.zeros(1), other, group=ranks.talk)
        if sent is not None:  # as for a rank of the group it never is
            sent.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return "Timed out" not in str(error)
    return False


def lost(ranks: Ranks, error: RuntimeError) -> RunError:
    """The error of a collective that failed, with the name of who is missing if that can be found out."""
    try:
        meet(ranks, GRACE)
    except RunError as named:
        return named
    return RunError(f"rank {ranks.rank} of {ranks.size}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """What an error says, without the traces that torch adds."""
    return str(error).strip().split("\n")[0]

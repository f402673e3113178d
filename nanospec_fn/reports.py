"""What a step did, on its way to the host: packed on the device, brought over in one copy, read as updates.

On CUDA the copy is only issued: it is read when the next step already runs.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, repeat
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import schedule, slots, trace
from nanospec_fn.pages import Write
from nanospec_fn.step import Info
from nanospec_fn.struct import put

REASONS = {slots.STOP: "stop", slots.LENGTH: "length"}
WIDE, NARROW = ("tokens", "target_logp", "behaviour_logp"), ("count", "accepted", "done", "ok", "left")


class Update(NamedTuple):
    """What one step did for one request; lists have one entry per new token."""

    request: int  # its index among the call's
    tokens: list[int]
    target_logp: list[float]  # nats
    behaviour_logp: list[float]  # nats
    origin: list[int]  # 0: the target's own token; d: a draft node at depth d
    accepted: int | None  # drafted tokens that were emitted; None: the prefill's token, which belongs to no round
    finish_reason: str | None
    evidence: tuple[trace.Nodes, trace.Rows] | None  # of an engine that records
    step: int  # of this call
    milliseconds: float  # of the step


@dataclass(frozen=True)
class Report:
    """The results of one step that has been issued."""

    step: int  # of this call
    rows: Sequence[int]  # the slot of each row
    requests: Mapping[int, int]  # the request in each slot that takes part
    prefill: bool
    bucket: int  # rows
    variant: int  # of a round: which of the engine's shapes
    table: Tensor  # [b, 3 W + 5] int32 on the host, see `pack`; there once `clock` has been read, until its lane's next
    evidence: Any  # tree and evidence, on the host likewise; () of an engine that does not record
    clock: Callable[[], float]  # waits for the step to end; milliseconds that it took


def packed(step: Callable[..., Any], record: bool) -> Callable[..., Any]:
    """A step `(params, state, slot, size)` whose info comes as `pack`'s table, and as what a trace needs.

    `size` is what the step is specialised to: a prefill's chunk, a round's tree, how far behind `decode` finds a draft.
    """

    def run(params: Any, state: Any, slot: Tensor | None, size: Any, put: Write = put) -> Any:
        state, info = step(params, state, slot, size, put=put)
        return state, pack(info), (info.tree, info.evidence) if record else ()

    return run


def pack(info: Info) -> Tensor:
    """All that the host reads of every step: [b, 3 W + 5] int32, log-probs by their bits, columns WIDE and NARROW."""
    columns = [getattr(info, name).view(torch.int32) for name in WIDE]
    columns.append(torch.stack([getattr(info, name).to(torch.int32) for name in NARROW], dim=1))
    return torch.cat(columns, dim=1)


class HostLane:
    """`CudaLane` where a step is done, its results at the host, when it has been issued."""

    def start(self) -> None:
        self._begun = time.perf_counter()

    def bring(self, table: Tensor) -> Tensor:
        return table

    def clock(self) -> float:
        return (time.perf_counter() - self._begun) * 1e3


class CudaLane:
    """What a step is timed by and its table comes to the host by. Free for another step once it has been read.

    To make events and pinned memory for every round anew would take the host a tenth of its time.
    """

    def __init__(self, device: torch.device, size: int):
        """Args: size: int32 numbers of the largest table."""
        self._memory = torch.empty(size, dtype=torch.int32, pin_memory=True)
        self._tables: dict[torch.Size, Tensor] = {}  # views of the memory
        self._first, self._last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._device, self._stream = device, torch.cuda.current_stream(device)

    def start(self) -> None:
        """The step is about to be issued."""
        self._stream = torch.cuda.current_stream(self._device)
        self._first.record(self._stream)

    def bring(self, table: Tensor) -> Tensor:
        """The step has been issued, with this table [b, n]: the same at the host, not there before `clock` was read."""
        here = self._tables.get(table.shape)
        if here is None:
            here = self._tables[table.shape] = self._memory[: table.numel()].view(table.shape)
        here.copy_(table, non_blocking=True)
        self._last.record(self._stream)
        return here

    def clock(self) -> float:
        """Wait for the step to end: milliseconds that it took."""
        self._last.synchronize()
        return self._first.elapsed_time(self._last)


def lanes(device: torch.device, rows: int, width: int) -> Iterator[HostLane | CudaLane]:
    """Lanes to be taken in turn: a step may be issued before the one before it has been read, and no earlier.

    Args: rows, width: of the largest step, see `pack`.
    """
    size = rows * (len(WIDE) * width + len(NARROW))
    return cycle([CudaLane(device, size) if device.type == "cuda" else HostLane() for _ in range(2)])


def to_host(tree: Any) -> Any:
    """Tensors on their way to the host: on CUDA into pinned memory, without waiting."""
    return pytree.tree_map(lambda x: x.to("cpu", non_blocking=True), tree)


def unpack(table: Tensor) -> tuple[list[list[int]], list[int], list[float], list[float]]:
    """A table on the host: NARROW's columns, and the emitted tokens with their log-probs, rows one after the other."""
    every = table.numpy()  # small steps in numpy take a third of the time
    width = (every.shape[1] - len(NARROW)) // len(WIDE)
    narrow = every[:, len(WIDE) * width :].T.tolist()
    emitted = np.arange(width) < every[:, len(WIDE) * width, None]
    tokens, *logps = (every[:, i * width : (i + 1) * width][emitted] for i in range(len(WIDE)))
    return narrow, tokens.tolist(), *(part.view(np.float32).tolist() for part in logps)


@dataclass(frozen=True)
class Landed:
    """A report that has been read."""

    # For the caller; made one by one, since thousands at once keep the garbage collector busy.
    updates: Iterator[Update]
    events: schedule.Events  # for the policy
    accepted: list[int]  # of a round, for each request that goes on: drafted tokens that were right
    milliseconds: float


def read(report: Report) -> Landed:
    """Wait for a step and read what it did."""
    milliseconds = report.clock()
    narrow, tokens, target_logp, behaviour_logp = unpack(report.table)
    prefilled, emitted, refused, finished, going = [], [], [], [], []
    requests = [report.requests.get(slot) for slot in report.rows]
    for index, count, accepted, done, ok, left in zip(requests, *narrow, strict=True):
        if index is None:
            continue
        if not ok:
            refused.append(index)
        if report.prefill:
            prefilled.append((index, left))
        if count:
            emitted.append((index, count))
            if done in REASONS:
                finished.append(index)
            elif not report.prefill:
                going.append(accepted)
    events = schedule.Events((), tuple(prefilled), tuple(emitted), tuple(refused), tuple(finished))
    updates = _updates(report, milliseconds, requests, narrow, tokens, target_logp, behaviour_logp)
    return Landed(updates, events, going, milliseconds)


def _updates(
    report: Report,
    milliseconds: float,
    requests: list[int | None],
    narrow: list[list[int]],
    tokens: list[int],
    target_logp: list[float],
    behaviour_logp: list[float],
) -> Iterator[Update]:
    evidence = trace.to_host(*report.evidence) if report.evidence else repeat(None, len(requests))
    depths = [*range(1, report.table.shape[1])]  # more than any tree has; a slice takes less than a range for each row
    end = 0
    for index, count, accepted, done, judged in zip(requests, *narrow[:3], evidence, strict=True):
        begin, end = end, end + count
        if index is None or not count:
            continue
        yield Update(
            index,
            tokens[begin:end],
            target_logp[begin:end],
            behaviour_logp[begin:end],
            depths[:accepted] + [0] * (count - accepted),
            None if report.prefill else accepted,
            REASONS.get(done),
            judged,
            report.step,
            milliseconds,
        )

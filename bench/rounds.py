"""Time one kind of round: many requests of one length, captured where there is a GPU, and one eager round in phases."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import nanospec_fn as ns
from bench import phases
from nanospec_fn import struct

WARM_UP, PROFILED = 2, 2  # rounds


@dataclass(frozen=True)
class Timing:
    """What one kind of round took at one batch size."""

    round_ms: float  # the median
    emitted: float  # tokens for each slot and round; the prompts mean nothing, so it tells little of acceptance
    context: int  # tokens of a slot halfway through
    phases: dict[str, float]  # ms of eager rounds, see phases.PHASES: without the gaps between them
    beyond_gib: float | None  # the most memory at once beside weights and KV pools, in captured steps; None on a CPU


def most_tokens(spec: ns.Speculation | None, context: int, repeats: int) -> int:
    """How long a request of `measure` may get."""
    return context + (WARM_UP + repeats + 1 + PROFILED) * (1 + (spec.depth if spec else 0)) + 1


@torch.no_grad()
def measure(
    model: ns.Model,
    draft: ns.Draft | None,
    spec: ns.Speculation | None,
    slots: int,
    context: int,
    repeats: int,
    attend: str = "auto",
) -> Timing:
    """Time `repeats` rounds over `slots` requests whose prompts have `context` tokens; plain ones without a draft.

    Errors: ValueError where a request outgrows the model's context, or its KV the device.
    """
    most = most_tokens(spec, context, repeats)
    if most > model.cfg.max_context:
        raise ValueError(
            f"context: {context} tokens and {repeats} rounds need {most}, there are {model.cfg.max_context}"
        )
    config = ns.EngineConfig(max_slots=slots, max_context=most, attend=attend, prefill_chunk=max(16, 4096 // slots))
    program = ns.build(model, draft=draft, engine=config, speculation=spec)
    params = ns.Params(target=model.params, draft=draft.params if draft else ())
    device = model.params.embed.device
    before = held(device)
    state = fill(program, params, context)
    step = ns.capture(program.speculate if draft else program.decode, donate=("state",))
    for _ in range(WARM_UP):
        state, info = step(params, state)
    clock, counts = Clock(device), []
    for _ in range(repeats):
        state, info = clock.time(step, params, state)
        counts.append(info.count)
    emitted = float(torch.stack(counts).float().mean())
    middle = context + round(emitted * (WARM_UP + repeats / 2))
    ms, more = statistics.median(clock.milliseconds()), beyond(before, state, device)
    return Timing(ms, emitted, middle, profile(program, params, state), more)


def held(device: torch.device) -> int:
    """Bytes that are allocated; a new measurement of the most at once begins. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def beyond(before: int, state: ns.State, device: torch.device) -> float | None:
    """GiB that were allocated at once since `held`, beside what was held then and the state's KV pools; None on a CPU.

    Memory of CUDA graphs counts.
    """
    if device.type != "cuda":
        return None
    pools = sum(pool.nbytes for pool in (*state.pools, *state.draft.pools))
    return (torch.cuda.max_memory_allocated(device) - before - pools) / 2**30


def admitted(program: ns.Program, context: int) -> ns.State:
    """Every slot with a prompt of so many tokens, none of them read yet."""
    vocab = min(4096, program.static.cfg.vocab_size)
    request = ns.Sampling(max_tokens=program.capacity - context, ignore_eos=True)
    coming = [
        ns.Admission(slot, [(slot * 7 + i * 13) % vocab for i in range(context)], request)
        for slot in range(program.max_slots)
    ]
    return program.insert_all(program.init(), coming)


def fill(program: ns.Program, params: ns.Params, context: int) -> ns.State:
    """Every slot with a request whose prompt is prefilled."""
    state = admitted(program, context)
    prefill = ns.capture(program.prefill, donate=("state",))
    left = 1
    while left:
        state, info = prefill(params, state)
        left = int(info.left.sum())
    return state


def profile(program: ns.Program, params: ns.Params, state: ns.State) -> dict[str, float]:
    """Milliseconds of each phase: the mean of PROFILED eager rounds that continue from `state`, which is used up."""
    static = program.static
    static = dataclasses.replace(
        static, method=phases.mark_draft(static.method), attend=phases.mark_attention(static.attend)
    )
    program = dataclasses.replace(program, static=static)
    step = program.speculate if static.speculation.depth else program.decode
    state, _ = step(params, state, put=struct.put_)  # compiles what the captured round did not need
    found = []
    for _ in range(PROFILED):
        events, (state, _) = phases.trace(partial(step, params, state, put=struct.put_), params.target.embed.device)
        found.append(phases.attribute(events))
    return {name: statistics.fmean(each[name] for each in found) for name in phases.PHASES}


class Clock:
    """Times calls without waiting for any of them on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda, self.marks = device.type == "cuda", list[tuple[Any, Any]]()

    def time(self, call: Callable[..., Any], *args: Any) -> Any:
        """The call's result."""
        start = self.now()
        result = call(*args)
        self.marks.append((start, self.now()))
        return result

    def now(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """What each call took."""
        if not self.cuda:
            return [1e3 * (end - start) for start, end in self.marks]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in self.marks]


def read_ceiling(device: torch.device, size: int | None = None, repeats: int = 10) -> float:
    """Bytes a second that this device reads at best, by reductions over a buffer that no cache holds.

    Args: size: of the buffer, in bytes; None: 4 GiB on CUDA, else 256 MiB.
    """
    size = (4 << 30 if device.type == "cuda" else 256 << 20) if size is None else size
    buffer = torch.zeros(size // (1 << 18), 1 << 16, device=device)  # rows of 256 KiB
    best = 0.0
    for reduce in (lambda: buffer.sum(), lambda: buffer.sum(1), lambda: buffer.amax(1), lambda: torch.norm(buffer)):
        clock = Clock(device)
        reduce()
        for _ in range(repeats):
            clock.time(reduce)
        best = max(best, buffer.numel() * buffer.element_size() / statistics.median(clock.milliseconds()) * 1e3)
    return best

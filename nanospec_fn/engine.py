"""A prepared engine and the host loop over it: policy is schedule.py's, arithmetic is step.py's, this connects them."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import schedule, slots, trace
from nanospec_fn.capture import capture, donate
from nanospec_fn.draft import Draft, Speculation
from nanospec_fn.model import Model
from nanospec_fn.program import EngineConfig, build
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import Info, Params

REASONS = {slots.STOP: "stop", slots.LENGTH: "length"}


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and how to complete it."""

    tokens: Sequence[int]
    sampling: Sampling


@dataclass(frozen=True)
class Update:
    """What one step did for one request; lists have one entry per new token."""

    index: int
    tokens: list[int]
    target_logp: list[float]  # nats
    behaviour_logp: list[float]  # nats
    origin: list[int]  # 0: the target's own token; d: a draft node at depth d
    accepted: int | None  # drafted tokens that were emitted; None: the prefill's token, which belongs to no round
    finish_reason: str | None
    evidence: tuple[trace.Nodes, trace.Rows] | None = None  # of an engine that records
    step: int = 0  # of this call
    milliseconds: float = 0.0  # of the step


class Engine:
    """A program, its state and its captured steps, kept between calls. Not for use by two threads at once."""

    def __init__(
        self,
        model: Model,
        draft: Draft | None,
        config: EngineConfig | None,
        speculation: Speculation | None,
        record: bool = False,
    ):
        self.model, self.draft = model, draft
        self.program = build(model, draft=draft, engine=config, speculation=speculation, record=record)
        self.params = Params(target=model.params, draft=draft.params if draft else ())
        wrap = donate if config is not None and config.capture == "off" else capture
        self.prefill = wrap(self.program.prefill)
        self.round = wrap(self.program.speculate if draft else self.program.decode)
        self.insert = donate(self.program.insert)
        self.evict = donate(self.program.evict)
        self.clear = donate(self.program.clear)
        self.serving = False
        self.state = self.program.init()
        self._buffers = pytree.tree_flatten(self.state)

    def check_idle(self) -> None:
        """Errors: ValueError while another call is being served."""
        if self.serving:
            raise ValueError("engine still serves another call: finish or close its stream first, or prepare another")

    def reset(self) -> None:
        """Drop whatever runs. The buffers stay, so that captured graphs stay valid."""
        # An interrupted step may have consumed self.state in part; its tensors are still these.
        leaves, spec = self._buffers
        self.state = self.clear(pytree.tree_unflatten(leaves, spec))

    def run(self, taking_part: Sequence[int], bucket: int, chunk: int) -> tuple[list[int], Info]:
        """One prefill step (chunk > 0) or round for these slots: the slot of each of the info's rows, and the info.

        The batch is padded to `bucket` with slots that have nothing to do in such a step.
        """
        others = [slot for slot in range(self.program.max_slots) if slot not in taking_part]
        rows = sorted([*taking_part, *others[: bucket - len(taking_part)]])
        slot = None
        if len(rows) < self.program.max_slots:
            slot = torch.tensor(rows, device=self.program.pool.device)
        if chunk:
            self.state, info = self.prefill(self.params, self.state, slot, chunk)
        else:
            self.state, info = self.round(self.params, self.state, slot)
        return rows, info


def prepare(
    model: Model,
    draft: Draft | None = None,
    engine: EngineConfig | None = None,
    speculation: Speculation | None = None,
    record: bool = False,
) -> Engine:
    """An engine to pass to `generate` or `stream` again and again: its pool and graphs are made once.

    Args: record: gather what a trace needs.
    Errors: ValueError naming the parameter that is out of range or cannot be combined.
    """
    return Engine(model, draft, engine, speculation, record)


def trace_header(engine: Engine, requests: Sequence[Request], prompt: Sequence[int], file: trace.File) -> trace.Header:
    """The first line of a trace. Args: prompt: each request's index among the prompts of its call."""
    program, draft = engine.program, engine.draft
    static, pool = program.static, program.pool
    recorded = []
    for index, request in zip(prompt, requests, strict=True):
        limit, stop_ids = program.ends(len(request.tokens), request.sampling)
        recorded.append(trace.Request(index, len(request.tokens), limit, sorted({*stop_ids}), request.sampling))
    sizes: dict[str, int | str] = {
        "max_slots": program.max_slots,
        "num_pages": pool.num_pages,
        "page_size": pool.page_size,
    }
    attend, dtype = type(static.attend).__name__, str(pool.dtype).removeprefix("torch.")
    return trace.Header(
        format=trace.FORMAT,
        version=trace.VERSION,
        model=engine.model.name,
        config=trace.fingerprint(static.cfg),
        draft=draft.method.name if draft else None,
        speculation=static.speculation if draft else None,
        engine=sizes
        | {"prefill_chunk": static.prefill_chunk, "attend": attend, "dtype": dtype}
        | trace.arithmetic(pool.device),
        policy_version=file.policy_version,
        draft_version=file.draft_version,
        requests=recorded,
    )


def serve(engine: Engine, requests: Sequence[Request]) -> Iterator[Update]:
    """Run requests to their end, yielding what each step did. Leaves the engine empty, however it is left.

    Errors: ValueError for an engine whose last call is not done.
    """
    engine.check_idle()
    program = engine.program
    config = schedule.Config(program.max_slots, program.static.prefill_chunk)
    first: dict[tuple[int, ...], int] = {}
    group = [first.setdefault(tuple(r.tokens), i) for i, r in enumerate(requests)]
    arrived = [schedule.Request(i, len(r.tokens), group[i]) for i, r in enumerate(requests)]
    emitted: list[list[int]] = [[] for _ in requests]
    host, events = schedule.HostState(), schedule.Events(arrived=tuple(arrived))
    step = 0
    engine.serving = True
    try:
        while True:
            host, plan = schedule.plan(config, host, events)
            for slot in plan.evict:
                engine.state = engine.evict(engine.state, slot)
            for new in plan.insert:
                tokens = [*requests[new.request].tokens, *emitted[new.request]]
                engine.state = engine.insert(
                    engine.state, new.slot, tokens, requests[new.request].sampling, new.emitted, new.share
                )
            taking_part = plan.prefill or plan.round
            if not taking_part:
                return
            started = time.perf_counter()
            rows, info = engine.run(taking_part, plan.bucket, plan.chunk)
            updates, events = _read(host, taking_part, rows, info, bool(plan.prefill), program.static.record)
            milliseconds = (time.perf_counter() - started) * 1e3
            for update in updates:
                emitted[update.index] += update.tokens
                yield replace(update, step=step, milliseconds=milliseconds)
            step += 1
    finally:
        engine.serving = False
        if not host.idle:  # left early: by an error, ctrl-C, or a caller that stopped listening
            engine.reset()


def _to_host(info: Info) -> dict[str, list[Any]]:
    """What the loop reads of every step, in one copy."""
    wide, narrow = ("tokens", "target_logp", "behaviour_logp"), ("count", "accepted", "done", "ok", "left")
    columns: list[Tensor] = [getattr(info, name).view(torch.int32) for name in wide]
    columns.append(torch.stack([getattr(info, name).to(torch.int32) for name in narrow], dim=1))
    *parts, rest = torch.cat(columns, dim=1).cpu().split([x.shape[1] for x in columns], dim=1)
    read = {name: part.view(getattr(info, name).dtype).tolist() for name, part in zip(wide, parts, strict=True)}
    return read | dict(zip(narrow, rest.t().tolist(), strict=True))


def _read(
    host: schedule.HostState, taking_part: Sequence[int], rows: list[int], info: Info, prefill: bool, record: bool
) -> tuple[list[Update], schedule.Events]:
    """Bring a step's info to the host: updates for the caller, events for the policy."""
    read = _to_host(info)
    evidence: Sequence[tuple[trace.Nodes, trace.Rows] | None] = [None] * len(rows)
    if record:
        evidence = trace.to_host(info.tree, info.evidence)
    running = {r.slot: r for r in host.running}
    updates, prefilled, emitted, refused, finished = [], [], [], [], []
    for i, slot in enumerate(rows):
        if slot not in taking_part:
            continue
        index, count, accepted = running[slot].request.index, read["count"][i], read["accepted"][i]
        if not read["ok"][i]:
            refused.append(index)
            continue
        if prefill:
            prefilled.append((index, read["left"][i]))
        if not count:
            continue
        reason = REASONS.get(read["done"][i])
        emitted.append((index, count))
        if reason:
            finished.append(index)
        updates.append(
            Update(
                index=index,
                tokens=read["tokens"][i][:count],
                target_logp=read["target_logp"][i][:count],
                behaviour_logp=read["behaviour_logp"][i][:count],
                origin=[d + 1 if d < accepted else 0 for d in range(count)],
                accepted=None if prefill else accepted,
                finish_reason=reason,
                evidence=evidence[i],
            )
        )
    return updates, schedule.Events(
        prefilled=tuple(prefilled), emitted=tuple(emitted), refused=tuple(refused), finished=tuple(finished)
    )

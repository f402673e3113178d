"""A prepared engine and the host loop over it: policy is schedule.py's, arithmetic is step.py's, this connects them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from nanospec_fn import schedule, slots
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


class Engine:
    """A program, its state and its captured steps, kept between calls. Not for use by two threads at once."""

    def __init__(self, model: Model, draft: Draft | None, config: EngineConfig | None, speculation: Speculation | None):
        self.model, self.draft = model, draft
        self.program = build(model, draft=draft, engine=config, speculation=speculation)
        self.params = Params(target=model.params, draft=draft.params if draft else ())
        wrap = donate if config is not None and config.capture == "off" else capture
        self.prefill = wrap(self.program.prefill)
        self.round = wrap(self.program.speculate if draft else self.program.decode)
        self.insert = donate(self.program.insert)
        self.evict = donate(self.program.evict)
        self.reset()

    def reset(self) -> None:
        """Drop whatever runs: a fresh state."""
        self.state = self.program.init()

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
) -> Engine:
    """An engine to pass to `generate` or `stream` again and again: its pool and graphs are made once.

    Errors: ValueError naming the parameter that is out of range or cannot be combined.
    """
    return Engine(model, draft, engine, speculation)


def serve(engine: Engine, requests: Sequence[Request]) -> Iterator[Update]:
    """Run requests to their end, yielding what each step did. Leaves the engine empty, however it is left."""
    program = engine.program
    config = schedule.Config(program.max_slots, program.page_size, program.static.prefill_chunk)
    first: dict[tuple[int, ...], int] = {}
    group = [first.setdefault(tuple(r.tokens), i) for i, r in enumerate(requests)]
    arrived = [schedule.Request(i, len(r.tokens), group[i]) for i, r in enumerate(requests)]
    emitted: list[list[int]] = [[] for _ in requests]
    host, events = schedule.HostState(), schedule.Events(arrived=tuple(arrived))
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
            rows, info = engine.run(taking_part, plan.bucket, plan.chunk)
            updates, events = _read(host, taking_part, rows, info, prefill=bool(plan.prefill))
            for update in updates:
                emitted[update.index] += update.tokens
                yield update
    finally:
        if not host.idle:  # left early: by an error, ctrl-C, or a caller that stopped listening
            engine.reset()


def _read(
    host: schedule.HostState, taking_part: Sequence[int], rows: list[int], info: Info, prefill: bool
) -> tuple[list[Update], schedule.Events]:
    """Bring a step's info to the host: updates for the caller, events for the policy."""
    read = {name: getattr(info, name).tolist() for name in ("tokens", "target_logp", "behaviour_logp", "count")}
    read |= {name: getattr(info, name).tolist() for name in ("accepted", "done", "ok", "left")}
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
            prefilled.append((index, running[slot].left - max(read["left"][i], 0)))
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
            )
        )
    return updates, schedule.Events(
        prefilled=tuple(prefilled), emitted=tuple(emitted), refused=tuple(refused), finished=tuple(finished)
    )

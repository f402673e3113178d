"""Who runs where and which step comes next: pure host policy, `(HostState, Events) -> (HostState, Plan)`.

The driver (engine.py) executes a plan in this order: evict, insert, then the prefill chunk or the round. It tells what
happened in the `Events` of a later call. A driver that reads results one step behind tells what it expects of a prefill
(`expected`), and the truth later. Where a plan evicts or inserts it drops the plan, reads all that it has issued, and
plans again from the same state: who comes or goes is decided on facts alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

MIN_CHUNK = 8  # a shorter prefill chunk costs as much as this one, and each size is one more captured graph


@dataclass(frozen=True)
class Config:
    """What bounds a step."""

    max_slots: int
    prefill_chunk: int = 512  # most prompt tokens per slot and step
    prefill_rows: int = 2**30  # most of all slots, padding counted; a slot gets MIN_CHUNK whatever this says


@dataclass(frozen=True)
class Request:
    """What the policy knows of a request."""

    index: int  # the driver's name for it
    length: int  # prompt tokens
    group: int  # equal for equal prompts, whose KV is shared
    age: int = -1  # rank of the first admission, lower is older; -1: never admitted


@dataclass(frozen=True)
class Running:
    """A request in a slot."""

    request: Request
    slot: int
    left: int  # tokens still to prefill; 0: it takes part in rounds


@dataclass(frozen=True)
class HostState:
    """Every live request, and what the policy remembers between two plans."""

    queue: tuple[Request, ...] = ()  # preempted ones by age, then the never admitted in order of arrival
    running: tuple[Running, ...] = ()  # oldest first
    emitted: Mapping[int, int] = field(
        default_factory=dict
    )  # tokens by request, recomputed after a preemption; 0: absent
    admitted: int = 0  # first admissions so far: the next age
    hold: bool = False  # a preemption found the pool full and no request has left since: admit nobody
    prefilled: bool = False  # the last step was a prefill chunk, so a round is next

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self.queue and not self.running


@dataclass(frozen=True)
class Events:
    """What happened since the last plan, by request index. Requests that have left are ignored."""

    arrived: tuple[Request, ...] = ()
    prefilled: tuple[tuple[int, int], ...] = ()  # (request, tokens still to prefill); of several the last one counts
    emitted: tuple[tuple[int, int], ...] = ()  # (request, new tokens), the prefill's own token counted; they add up
    refused: tuple[int, ...] = ()  # the step's page allocation failed: the request paused
    finished: tuple[int, ...] = ()

    def then(self, later: "Events") -> "Events":
        """Both, in this order."""
        return Events(
            self.arrived + later.arrived,
            self.prefilled + later.prefilled,
            self.emitted + later.emitted,
            self.refused + later.refused,
            self.finished + later.finished,
        )


@dataclass(frozen=True)
class Insert:
    """One admission. The driver inserts the prompt followed by the `emitted` tokens that it has of the request."""

    request: int
    slot: int
    share: int | None  # a slot that holds the whole prompt's KV: take over `shared_tokens(length)` of it
    emitted: int  # > 0: a recompute, which emits nothing again


@dataclass(frozen=True)
class Plan:
    """What to do next; at most one of `prefill` and `round` names slots."""

    evict: tuple[int, ...] = ()  # slots
    insert: tuple[Insert, ...] = ()
    prefill: tuple[int, ...] = ()  # slots with prompt left
    chunk: int = 0  # tokens per slot of the prefill step
    round: tuple[int, ...] = ()  # slots that decode or speculate
    bucket: int = 0  # slots that the step is padded to


def bucket(n: int, most: int) -> int:
    """The smallest power of two >= n, but no more than `most`: the size that a captured step is padded to."""
    return min(1 << max(n - 1, 0).bit_length(), most)


def shared_tokens(length: int) -> int:
    """Tokens of an equal prompt whose KV is taken over: all but the last.

    The draft's KV at the last prompt position depends on the first sampled token.
    """
    return length - 1


def plan(config: Config, state: HostState, events: Events) -> tuple[HostState, Plan]:
    """Take in what happened and decide the next step.

    Admission is first in, first out; an equal prompt waits, with a slot reserved, until the first of its group holds
    the prompt's KV. Prefill chunks and rounds alternate while both have work. When pages run out the youngest request
    is preempted and nobody is admitted until one has left: the oldest always makes progress.

    Args:
      config: static.
      state: the previous state.
      events: what happened since; arrivals carry distinct, new indices.
    Returns:
      state: the next state.
      plan: what to do; nothing at all only if no request is left.
    Errors: RuntimeError where a request alone in the pool was refused: it should not have been submitted.
    Property: properties/test_schedule.py
    """
    state, freed = _take_in(state, events)
    refused = []
    if events.refused:  # seldom: not looked for in every round of a large batch
        refused = [r.request.index for r in state.running if r.request.index in events.refused]
    preempted: tuple[int, ...] = ()
    insert: tuple[Insert, ...] = ()
    if refused and not freed:  # pages just freed are tried first
        state, preempted = _preempt(state, refused)
    elif not refused and not (state.hold and state.running):
        state, insert = _admit(config, state)
    prompts = tuple(r for r in state.running if r.left)
    ready = tuple(r.slot for r in state.running if not r.left)
    evict = freed + preempted
    if prompts and not (ready and state.prefilled):
        slots = tuple(r.slot for r in prompts)
        size = bucket(len(slots), config.max_slots)
        chunk = bucket(max(MIN_CHUNK, *(r.left for r in prompts)), config.prefill_chunk)
        chunk = min(chunk, max(MIN_CHUNK, config.prefill_rows // size))
        return replace(state, prefilled=True), Plan(evict, insert, prefill=slots, chunk=chunk, bucket=size)
    size = bucket(len(ready), config.max_slots) if ready else 0
    state = replace(state, prefilled=False) if state.prefilled else state
    return state, Plan(evict, insert, round=ready, bucket=size)


def expected(state: HostState, known: Events, plan: Plan) -> Events:
    """What a prefill step that has not been read yet will have done, unless it is refused pages.

    Args: state: from after the plan; known: events of earlier steps that the state has not been told.
    """
    left = {r.request.index: r.left for r in state.running} | dict(known.prefilled)
    taking_part = {*plan.prefill}
    chunks = ((r.request.index, plan.chunk) for r in state.running if r.slot in taking_part)
    return Events(prefilled=tuple((index, max(0, left[index] - chunk)) for index, chunk in chunks))


def _take_in(state: HostState, events: Events) -> tuple[HostState, tuple[int, ...]]:
    """Update the books; the slots of requests that left are free."""
    left, gone = dict(events.prefilled), set(events.finished)
    emitted = {**state.emitted}
    for index, new in events.emitted:
        emitted[index] = emitted.get(index, 0) + new
    for index in gone:
        emitted.pop(index, None)
    queue, running = state.queue + events.arrived, state.running
    freed: tuple[int, ...] = ()
    if gone:
        queue = tuple(r for r in queue if r.index not in gone)
        freed = tuple(r.slot for r in running if r.request.index in gone)
        running = tuple(r for r in running if r.request.index not in gone)
    if left:
        running = tuple(replace(r, left=left[r.request.index]) if r.request.index in left else r for r in running)
    return replace(state, queue=queue, running=running, emitted=emitted, hold=state.hold and not freed), freed


def _preempt(state: HostState, refused: list[int]) -> tuple[HostState, tuple[int, ...]]:
    """Send the youngest back to the queue, in front of all who were admitted later or never."""
    if len(state.running) == 1:
        raise RuntimeError(f"request {refused[0]} is alone in the pool and was still refused pages")
    *running, youngest = state.running
    older = tuple(r for r in state.queue if 0 <= r.age < youngest.request.age)
    queue = (*older, youngest.request, *state.queue[len(older) :])
    return replace(state, queue=queue, running=tuple(running), hold=True), (youngest.slot,)


def _admit(config: Config, state: HostState) -> tuple[HostState, tuple[Insert, ...]]:
    """Fill free slots from the front of the queue. Who waits for its group's prefill keeps a slot reserved."""
    if not state.queue:
        return replace(state, hold=False) if state.hold else state, ()
    taken = {r.slot for r in state.running}
    free = [slot for slot in range(config.max_slots) if slot not in taken]
    running, waiting, insert, admitted = list(state.running), [], [], state.admitted
    for request in state.queue[: len(free)]:
        group = [r for r in running if r.request.group == request.group]
        donor = next((r.slot for r in group if not r.left), None)
        if group and donor is None:
            waiting.append(request)
            continue
        slot = free.pop(0)
        emitted = state.emitted.get(request.index, 0)
        insert.append(Insert(request.index, slot, donor, emitted))
        if request.age < 0:
            request, admitted = replace(request, age=admitted), admitted + 1
        # The last emitted token is the pending one: it has no KV yet.
        left = request.length + max(emitted - 1, 0)
        if donor is not None:
            left -= shared_tokens(request.length)  # more, if no page was left for a copy of the last page: see Events
        running.append(Running(request, slot, left))
    running.sort(key=lambda r: r.request.age)
    queue = (*waiting, *state.queue[len(insert) + len(waiting) :])
    state = replace(state, queue=queue, running=tuple(running), admitted=admitted)
    return replace(state, hold=False), tuple(insert)

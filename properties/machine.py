"""Drive a `Program` by any schedule and hold every promise against it after every step.

`Machine` knows nothing of how the engine works but where State keeps what. What it checks has names, which the planted
bugs refer to: tokens, log-probs, finish, progress, acceptance, tree, storage, bystanders, pages, purity, donation.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import pages, slots, struct
from nanospec_fn.capture import capture, donate
from nanospec_fn.draft import Draft, Speculation
from nanospec_fn.program import EngineConfig, Program, build
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import Info, Params, State
from properties import reference, storage
from properties.reference import Answer, Scripted
from properties.storage import Bytes

MODES = ("pure", "donated", "captured")
REASONS = {slots.STOP: "stop", slots.LENGTH: "length"}
WRAP: dict[str, Callable[..., Any]] = {"pure": lambda step: step, "donated": donate, "captured": capture}


@dataclass(frozen=True)
class Setup:
    """An engine to be tested."""

    page_size: int
    max_slots: int
    num_pages: int
    draft: Draft | None
    speculation: Speculation | None
    mode: str = "pure"

    def build(self, alone: bool = False) -> Program:
        """The engine, or the same one with a single slot and room for everything."""
        config = EngineConfig(self.max_slots, self.num_pages, self.page_size, capture="off")
        if alone:
            config = EngineConfig(1, 16, 16, capture="off")
        return build(reference.target(), self.draft, config, self.speculation)

    @property
    def params(self) -> Params:
        return Params(reference.target().params, self.draft.params if self.draft else ())


@dataclass(eq=False)
class Job:
    """One request and what has come of it."""

    prompt: tuple[int, ...]
    request: Sampling
    name: int
    age: int = -1  # order of first admission
    slot: int | None = None
    tokens: list[int] = field(default_factory=list)
    target_logp: list[float] = field(default_factory=list)
    behaviour_logp: list[float] = field(default_factory=list)
    reason: str | None = None
    answer: Answer | None = None  # what it has to become


class Machine:
    """An engine, its requests, and the checks. `seen` counts what the schedules reached."""

    def __init__(self, setup: Setup, seen: Counter[str]):
        self.setup, self.seen = setup, seen
        self.program, self.params = setup.build(), setup.params
        self.state = self.program.init()
        wrap = WRAP[setup.mode]
        self.steps = {name: wrap(getattr(self.program, name)) for name in ("prefill", "decode", "speculate")}
        self.inner = WRAP["pure" if setup.mode == "pure" else "donated"]  # insert and evict are never captured
        self.shift = getattr(self.program.static.method, "shift", 0)
        self.jobs: list[Job] = []
        self.waiting: list[Job] = []
        draft = type(setup.draft.method).__name__ if setup.draft else "no draft"
        self.log: list[str] = [
            f"{setup.mode}, {setup.max_slots} slots, {setup.num_pages} pages of {setup.page_size}, {draft}, "
            f"{setup.speculation}"
        ]
        self.failed, self.calls, self.ages, self.arrivals = False, 0, 0, 0

    def check(self, fine: bool, name: str, what: str = "") -> None:
        if not fine:
            self.failed = True  # what follows would only hide the cause
            raise AssertionError(f"{name}: {what}\n  " + "\n  ".join(self.log))

    # Which request sits where

    def at(self, slot: int) -> Job | None:
        return next((job for job in self.jobs if job.slot == slot), None)

    def seated(self) -> list[Job]:
        """The requests in slots, oldest first."""
        return sorted((job for job in self.jobs if job.slot is not None), key=lambda job: job.age)

    def seats(self) -> list[int]:
        return [slot for slot in range(self.setup.max_slots) if self.at(slot) is None]

    def in_phase(self, phase: Any) -> list[Job]:
        """Those for which slots.running or slots.prefilling holds."""
        flags = phase(self.state.slots).tolist()
        return [job for job in self.seated() if flags[job.slot or 0]]

    # What the schedule may do

    def arrive(self, prompt: tuple[int, ...], request: Sampling) -> None:
        """Refused if it can never fit, else in line. The capacity may cap its tokens."""
        if self.program.misfit(len(prompt)):
            return
        most = self.program.capacity - len(prompt)
        request = replace(request, max_tokens=min(request.max_tokens, most))
        job = Job(prompt, request, name=self.arrivals)
        self.arrivals += 1
        self.log.append(f"#{job.name}: {len(prompt)} tokens, {_short(request)}")
        self.jobs.append(job)
        self.waiting.append(job)

    def admit(self, job: Job, slot: int, donor: Job | None = None) -> None:
        before, was_free = Bytes.of(self.state), storage.free(self.state, self.setup.page_size)
        insert = self.inner(self.program.insert)
        job.slot = slot
        if job.age < 0:
            job.age, self.ages = self.ages, self.ages + 1
        self.waiting.remove(job)
        self.state = insert(
            self.state,
            slot,
            [*job.prompt, *job.tokens],
            job.request,
            len(job.tokens),
            donor.slot if donor else None,
        )
        held = int(self.state.slots.num_pages[slot])
        whole = (len(job.prompt) - 1) // self.setup.page_size
        self.seen["shared pages"] += min(held, whole)
        self.seen["copy-on-writes"] += held > whole
        self.seen["recomputes"] += bool(job.tokens)
        self.log.append(f"admit #{job.name} to slot {slot}" + (f", sharing with #{donor.name}" if donor else ""))
        self._check_storage(before, was_free, was_free)
        self._check_pages()

    def donors(self, job: Job) -> list[Job]:
        left = (self.state.slots.prefill_to - self.state.slots.length).tolist()
        return [other for other in self.seated() if other.prompt == job.prompt and left[other.slot or 0] <= 0]

    def evict(self, job: Job) -> None:
        before, nothing = Bytes.of(self.state), storage.free(self.state, self.setup.page_size) & False
        self.state = self.inner(self.program.evict)(self.state, job.slot)
        job.slot = None
        self._check_storage(before, nothing, nothing)
        self._check_pages()

    def abort(self, job: Job) -> None:
        self.seen["aborts"] += 1
        self.log.append(f"abort #{job.name}")
        self.evict(job) if job.slot is not None else self.waiting.remove(job)
        self.jobs.remove(job)

    def preempt(self, job: Job) -> None:
        self.seen["preemptions"] += 1
        self.log.append(f"preempt #{job.name}")
        self.evict(job)
        self.waiting.append(job)

    def clear(self) -> bool:
        """Evict what has finished."""
        done = [job for job in self.seated() if job.reason]
        for job in done:
            self.evict(job)
            self.jobs.remove(job)
        return bool(done)

    def prefill(self, among: Sequence[int] | None, chunk: int) -> None:
        self._step("prefill", among, chunk)

    def decode(self, among: Sequence[int] | None) -> None:
        self._step("decode", among)

    def speculate(self, among: Sequence[int] | None, fresh: bool = False) -> None:
        """fresh: also compare each tree with that of an engine that meets the same tokens for the first time."""
        running = self.in_phase(slots.running)
        prefix = {job.name: len(job.tokens) for job in running}
        trees = {job.name: self._fresh_tree(job) for job in running} if fresh and self.setup.draft else {}
        rows, info = self._step("speculate" if self.setup.draft else "decode", among)
        for i, slot in enumerate(rows):
            job = self.at(slot)
            if job and job.name in trees and info.ok[i] and len(job.tokens) > prefix[job.name]:
                tree = pytree.tree_map(lambda x, i=i: x[i : i + 1], info.tree)
                expected = trees[job.name]
                self.check(struct.bytes_equal(tree, expected), "tree", f"#{job.name} drafted {tree}, fresh: {expected}")
                self.seen["fresh trees"] += 1

    def drain(self) -> None:
        """Serve whatever has begun to its end by a plain schedule; then nothing is held."""
        if self.failed:
            return
        for job in [job for job in self.waiting if job.age < 0]:
            self.waiting.remove(job)
            self.jobs.remove(job)
        blocked = False
        for _ in range(2000):
            blocked = not self.clear() and blocked
            free = self.seats()
            if self.waiting and free and not blocked:
                self.admit(min(self.waiting, key=lambda job: job.name), free[0])
            elif not self.jobs:
                break
            else:
                preempted = self.seen["preemptions"]
                if self.in_phase(slots.prefilling):
                    self.prefill(None, 64)
                else:
                    self.speculate(None)
                blocked = blocked or self.seen["preemptions"] > preempted
        self.check(not self.jobs, "progress", "requests never end")
        self.check(int(self.state.pages.num_free) == self.setup.num_pages, "pages", "not all are free at the end")

    # A step and its checks

    def _step(self, name: str, among: Sequence[int] | None, *chunk: int) -> tuple[list[int], Info]:
        rows = list(range(self.setup.max_slots)) if among is None else list(among)
        slot = None if among is None else torch.tensor(rows)
        phase = slots.prefilling if name == "prefill" else slots.running
        expected = [job for job in self.in_phase(phase) if job.slot in rows]
        s, before = self.state.slots, Bytes.of(self.state)
        total, left = s.total.tolist(), (s.prefill_to - s.length).clamp_min(0).tolist()
        carried = _clone(_carried(self.state))
        valid = storage.readable(self.state, self.shift)
        info = self._call(name, slot, *chunk)
        acted = [job for i, s in enumerate(rows) for job in expected if job.slot == s and info.ok[i]]
        what = " ".join(f"#{job.name}+{int(info.count[rows.index(job.slot or 0)])}" for job in acted)
        self.log.append(f"{name} {'all' if among is None else rows} {'by ' + str(chunk[0]) if chunk else ''}: {what}")
        seats = [job.slot for job in acted if job.slot is not None]
        self._check_storage(before, *(storage.past(self.state, self.setup.page_size, v, seats) for v in valid))
        self._check_pages()
        self._check_bystanders(carried, seats)
        for i, seat in enumerate(rows):
            job = self.at(seat)
            if job is None or job not in acted:
                self.check(int(info.count[i]) == 0, "tokens", f"slot {seat} has no part in the step and emitted")
                continue
            self._read(job, i, info, name, total[seat])
            if chunk:
                wanted = max(0, left[seat] - chunk[0])
                self.check(
                    int(info.left[i]) == wanted, "progress", f"#{job.name} has {info.left[i]} left, not {wanted}"
                )
            else:
                self.check(int(info.count[i]) > 0, "progress", f"#{job.name} emitted nothing")
        refused = [job for job in expected if job not in acted]
        if refused:
            self.seen["refusals"] += len(refused)
            self.log.append(f"refused: {' '.join(f'#{job.name}' for job in refused)}")
            holding = [job for job in self.seated() if int(self.state.slots.num_pages[job.slot or 0])]
            # A lone request always fits, so someone else holds pages; finished ones make room first.
            if not self.clear():
                self.check(len(self.seated()) > 1, "progress", "a request alone in the pool was refused")
                self.preempt(holding[-1])
        return rows, info

    def _call(self, name: str, *args: Any) -> Info:
        """One step in this machine's mode; every third time also as a pure one, for the same bytes."""
        self.calls += 1
        given = self.state
        if self.setup.mode == "pure" or self.calls % 3:
            self.state, info = self.steps[name](self.params, given, *args)
            return info
        copy = _clone(given)
        pure, pure_info = _clone(getattr(self.program, name)(self.params, given, *args))  # what it shares is given away
        self.check(struct.bytes_equal(given, copy), "purity", f"a pure {name} changed its argument")
        self.state, info = self.steps[name](self.params, given, *args)
        self.check(
            struct.bytes_equal(_live(self.state), _live(pure)), "purity", f"{self.setup.mode} {name} differs from pure"
        )
        self.check(struct.bytes_equal(info, pure_info), "purity", f"{self.setup.mode} {name}'s info differs from pure")
        self.check(_consumed(given), "donation", f"the state given to {name} can still be read")
        self.seen["pure and donated"] += 1
        return info

    def _read(self, job: Job, i: int, info: Info, name: str, total: int) -> None:
        """Take a row's tokens, and compare all that the request has with what it has to become."""
        count, accepted, done = int(info.count[i]), int(info.accepted[i]), int(info.done[i])
        for mine, rows in (
            (job.tokens, info.tokens),
            (job.target_logp, info.target_logp),
            (job.behaviour_logp, info.behaviour_logp),
        ):
            mine += rows[i, :count].tolist()
        self.check(bool((info.tokens[i, count:] == -1).all()), "tokens", "the padding is not -1")
        job.answer = job.answer or self._answer(job)
        want, n = job.answer, len(job.tokens)
        self.check(job.tokens == want.tokens[:n], "tokens", f"#{job.name} emitted {job.tokens}, expected {want.tokens}")
        for kind in ("target_logp", "behaviour_logp"):
            got, right = getattr(job, kind), getattr(want, kind)[:n]
            self.check(got == right, "log-probs", f"#{job.name} {kind} {got}, expected {right}")
        job.reason = REASONS.get(done)
        ended = want.reason if n == len(want.tokens) else None
        self.check(job.reason == ended, "finish", f"#{job.name} is {job.reason}, expected {ended}")
        if name != "speculate":
            return
        spec = self.program.static.speculation
        cut = count == accepted  # the verdict had at least one token more
        self.seen["stops inside a block"] += cut and job.reason == "stop"
        self.seen["caps inside a block"] += cut and job.reason == "length"
        self.seen["full acceptances"] += accepted == spec.depth and count == spec.depth + 1
        self.seen["pruned trees"] += spec.nodes < spec.top_k * spec.depth
        self.seen["rejections"] += accepted < min(count, spec.depth)
        self.seen["lossy rounds"] += job.request.rule != "exact"
        method = self.program.static.method
        if isinstance(method, Scripted) and job.request.rule == "exact" and spec.nodes == spec.top_k * spec.depth:
            right = min(count, max(0, method.right(total, spec.depth)))
            self.check(accepted == right, "acceptance", f"#{job.name} accepted {accepted} of {right} right tokens")

    def _answer(self, job: Job) -> Answer:
        """By recomputing the whole sequence; under a lossy rule, the same engine alone on an idle pool (G1b)."""
        if job.request.rule == "exact":
            return reference.reference(reference.target(), job.prompt, job.request)
        program, params = self.setup.build(alone=True), self.params
        state = program.insert(program.init(), 0, list(job.prompt), job.request)
        state, info = program.prefill(params, state)
        out: list[list[float]] = [[], [], []]
        while True:
            for mine, rows in zip(out, (info.tokens, info.target_logp, info.behaviour_logp), strict=True):
                mine += rows[0, : info.count[0]].tolist()
            if int(info.done[0]) in REASONS:
                return Answer([int(t) for t in out[0]], out[1], out[2], REASONS[int(info.done[0])])
            state, info = program.speculate(params, state)

    def _fresh_tree(self, job: Job) -> Any:
        program = self.setup.build(alone=True)
        tokens = [*job.prompt, *job.tokens]
        state = program.insert(program.init(), 0, tokens, job.request, emitted=len(job.tokens))
        state, _ = program.prefill(self.params, state)
        return program.speculate(self.params, state)[1].tree

    def plant_nan(self) -> None:
        """Wherever nothing is kept: what follows must not change."""
        self.seen["NaN plantings"] += 1
        self.log.append("plant NaN")
        self.state = storage.poison(self.state, self.setup.page_size, self.shift)

    def _check_storage(self, before: Bytes, *allowed: Tensor) -> None:
        """All bytes but those of the masks for target and draft are what they were."""
        for owner, name in enumerate(("target", "draft")):
            wrong = before.written(self.state, owner, allowed[owner])
            self.check(not wrong, "storage", f"the {name}'s KV at (page, offset) {wrong} was written")

    def _check_bystanders(self, before: Any, acted: list[int]) -> None:
        """Empty, waiting, refused and left-out slots carry on with every byte that they had."""
        others = [slot for slot in range(self.setup.max_slots) if slot not in acted]
        for name, old, new in zip(
            struct.leaf_names(before), *map(pytree.tree_leaves, (before, _carried(self.state))), strict=True
        ):
            same = struct.bytes_equal(old[others], new[others])
            self.check(same, "bystanders", f"{name} of slots {others}: {old[others]} became {new[others]}")

    def _check_pages(self) -> None:
        wrong = pages.check(self.state.pages, self.state.slots.page_table)
        self.check(not wrong, "pages", wrong)


def _clone(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def _short(value: Any) -> str:
    """A dataclass by the fields that differ from their defaults."""
    changed = [f for f in dataclasses.fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(f'{f.name}={getattr(value, f.name)!r}' for f in changed)})"


def _carried(state: State) -> Any:
    """All that a slot carries, a row each; the tokens without their scratch column."""
    return struct.replace(state.slots, tokens=state.slots.tokens[:, :-1]), state.draft.feature


def _live(state: State) -> Any:
    """The state without its scratch: the sink, scratch columns and scratch entries."""
    return (
        [pool[1:] for pool in (*state.pools, *state.draft.pools)],
        struct.replace(state.pages, stack=state.pages.stack[:-1]),
        _carried(state),
    )


def _consumed(state: State) -> bool:
    try:
        state.slots  # noqa: B018
    except struct.DonatedError:
        return True
    return False

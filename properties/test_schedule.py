"""Properties of the host policy, run against a simulated device: a page pool, prefill progress, random refusals.

`Device` obeys plans literally and checks that each is possible; it knows nothing of how the policy decides.
"""

from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanospec_fn import schedule
from nanospec_fn.schedule import Config, Events, HostState, Insert, Request


@dataclass
class Job:
    """The truth about one request on the simulated device."""

    prompt: int
    want: int  # tokens after which it finishes
    group: int
    tokens: int = 0
    left: int = -1  # -1: in no slot
    admissions: int = 0
    waits: int = 0  # steps that it has sat in its slot and taken no part in


@dataclass
class Device:
    """Executes plans; `slots` maps a slot to a request."""

    config: Config
    jobs: list[Job]
    slots: dict[int, int] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # requests in order of first admission
    evicted: list[int] = field(default_factory=list)
    shared: int = 0

    def execute(self, plan: schedule.Plan) -> tuple[list[int], list[int]]:
        """Evict and insert as told; the requests of the prefill step and of the round."""
        for slot in plan.evict:
            index = self.slots.pop(slot)  # KeyError: a slot that is empty was evicted
            self.jobs[index].left = -1
            self.evicted.append(index)
        for insert in plan.insert:
            self.insert(insert)
        assert len(set(self.slots.values())) == len(self.slots), "one request in two slots"
        assert not (plan.prefill and plan.round)
        step = plan.prefill or plan.round
        assert len(set(step)) == len(step)
        if step:
            assert len(step) <= plan.bucket <= self.config.max_slots
        return [self.slots[s] for s in plan.prefill], [self.slots[s] for s in plan.round]

    def insert(self, insert: Insert) -> None:
        job = self.jobs[insert.request]
        assert 0 <= insert.slot < self.config.max_slots
        assert insert.slot not in self.slots, "two requests in one slot"
        assert insert.emitted == job.tokens, "a recompute with other tokens than those emitted"
        job.left = job.prompt + max(job.tokens - 1, 0)
        if insert.share is not None:
            donor = self.jobs[self.slots[insert.share]]  # KeyError: the donor is gone
            assert donor.group == job.group, "pages of another prompt"
            assert donor.left == 0, "the donor's prompt is not there yet"
            job.left -= job.prompt - 1
            self.shared += 1
        if job.admissions == 0:
            self.first.append(insert.request)
        job.admissions, job.waits = job.admissions + 1, 0
        self.slots[insert.slot] = insert.request


def simulate(data: st.DataObject, config: Config, jobs: list[Job], refuse: bool, abort: bool, late: bool) -> Device:
    """Run to the end with random arrivals, aborts, acceptance and refusals; check every plan on the way."""
    device, state, events = Device(config, jobs), HostState(), Events()
    unborn = [Request(i, job.prompt, job.group) for i, job in enumerate(jobs)]
    gone: set[int] = set()
    # Every token and chunk may be refused to each younger request, and every eviction costs one recompute.
    work = sum(job.want + -(-job.prompt // config.prefill_chunk) + 2 for job in jobs)
    bound = 8 * work * (len(jobs) + 1)
    for _ in range(bound):
        count = data.draw(st.integers(0, len(unborn))) if late and unborn else len(unborn)
        arrived, unborn = tuple(unborn[:count]), unborn[count:]
        ended: tuple[int, ...] = ()
        live = [r.request.index for r in state.running] + [r.index for r in (*state.queue, *arrived)]
        if abort and live and data.draw(st.integers(0, 9)) == 0:
            ended = (data.draw(st.sampled_from(live)),)
        before = state
        events = replace(events, arrived=arrived, finished=events.finished + ended)
        gone |= {*events.finished}
        state, plan = schedule.plan(config, before, events)
        check_preemption(before, events, plan)
        prefilling, rounding = device.execute(plan)
        born = set(range(len(jobs) - len(unborn)))
        known = [r.request.index for r in state.running] + [r.index for r in state.queue]
        assert sorted(known) == sorted(born - gone), "a request was lost or doubled"
        assert {r.slot: r.request.index for r in state.running} == device.slots
        assert {r.request.index: r.left for r in state.running} == {i: jobs[i].left for i in device.slots.values()}
        if state.idle and not unborn:
            assert plan.round == plan.prefill == ()
            return device
        assert plan.round or plan.prefill or not known, "requests are left and nothing happens"
        check_step(config, device, plan, prefilling, rounding)
        events = happen(data, device, plan, prefilling, rounding, refuse)
    raise AssertionError(f"not done after {bound} plans")


def check_preemption(before: HostState, events: Events, plan: schedule.Plan) -> None:
    """The only requests evicted before their end are the youngest, one a plan, and only upon a refusal."""
    left = [r for r in before.running if r.request.index not in events.finished]
    extra = set(plan.evict) - {r.slot for r in before.running if r not in left}
    if extra:
        assert events.refused
        assert extra == {max(left, key=lambda r: r.request.age).slot}


def check_step(config: Config, device: Device, plan: schedule.Plan, prefilling: list[int], rounding: list[int]) -> None:
    """Everyone who can take part does, and neither kind of step starves the other."""
    jobs, inside = device.jobs, list(device.slots.values())
    if prefilling:
        assert sorted(prefilling) == sorted(i for i in inside if jobs[i].left)
        longest = max(jobs[i].left for i in prefilling)
        assert plan.chunk >= min(longest, config.prefill_chunk)
        assert plan.chunk <= config.prefill_chunk
        assert plan.chunk < 2 * max(longest, schedule.MIN_CHUNK)
    elif rounding:
        assert sorted(rounding) == sorted(i for i in inside if not jobs[i].left)
    for index in inside:
        jobs[index].waits = 0 if index in prefilling + rounding else jobs[index].waits + 1
        assert jobs[index].waits <= 1, "starved by the other kind of step"


def happen(
    data: st.DataObject, device: Device, plan: schedule.Plan, prefilling: list[int], rounding: list[int], refuse: bool
) -> Events:
    """What the device reports of one step: the oldest always gets its pages."""
    jobs, order = device.jobs, device.first
    oldest = min(device.slots.values(), key=order.index, default=-1)
    prefilled, emitted, refused, finished = [], [], [], []
    for index in prefilling + rounding:
        job = jobs[index]
        if refuse and index != oldest and data.draw(st.integers(0, 3)) == 0:
            refused.append(index)
            continue
        if job.left:
            step = min(job.left, plan.chunk)
            job.left -= step
            prefilled.append((index, job.left))
            if job.left or job.tokens:
                continue  # a recompute emits nothing
            new = 1
        else:
            new = min(data.draw(st.integers(1, 6)), job.want - job.tokens)
        job.tokens += new
        emitted.append((index, new))
        if job.tokens == job.want:
            finished.append(index)
    return Events((), tuple(prefilled), tuple(emitted), tuple(refused), tuple(finished))


configs = st.builds(
    Config,
    max_slots=st.integers(1, 6),
    prefill_chunk=st.sampled_from([8, 12, 32]),
)
jobs_of = (
    st.lists(
        st.builds(Job, prompt=st.integers(1, 40), want=st.integers(1, 12), group=st.integers(0, 3)),
        min_size=1,
        max_size=8,
    )
    .map(lambda jobs: [Job(7 * job.group + 5, job.want, job.group) if job.group else job for job in jobs])
    .map(lambda jobs: [Job(j.prompt, j.want, j.group or 100 + i) for i, j in enumerate(jobs)])
)  # group 0: each its own; the others: equal prompts, so equal lengths


@given(st.data(), configs, jobs_of, st.booleans(), st.booleans(), st.booleans())
def test_every_request_leaves_whole(data, config, jobs, refuse, abort, late):
    """Bugs: two requests in a slot; one lost at a preemption; a livelock of preemption and admission (no hold);
    decode starved by prompts or the reverse; a donor whose prompt is not there; a stale emitted count."""
    device = simulate(data, config, jobs, refuse, abort, late)
    assert device.slots == {}
    if not abort:
        assert all(job.tokens == job.want for job in jobs)
        assert sorted(device.first) == list(range(len(jobs)))


@given(st.data(), configs, jobs_of, st.booleans())
def test_first_in_first_out(data, config, jobs, late):
    """Bug: a request overtakes an earlier one that waits for no donor (here: all prompts differ)."""
    alone = [Job(job.prompt, job.want, group) for group, job in enumerate(jobs)]
    device = simulate(data, config, alone, False, False, late)
    assert device.first == list(range(len(jobs)))
    assert all(job.admissions == 1 for job in alone)


@given(st.data(), configs, jobs_of)
def test_preempted_return_by_age(data, config, jobs):
    """Bug: the queue's front is in order of eviction and not of age, so the youngest returns first."""
    device, state, events = Device(config, jobs), HostState(), Events()
    events = Events(arrived=tuple(Request(i, job.prompt, job.group) for i, job in enumerate(jobs)))
    for _ in range(40):
        state, plan = schedule.plan(config, state, events)
        ages = [r.age for r in state.queue]
        seen = [a for a in ages if a >= 0]
        assert ages == seen + [-1] * (len(ages) - len(seen))
        assert seen == sorted(seen)
        prefilling, rounding = device.execute(plan)
        events = happen(data, device, plan, prefilling, rounding, True)


def steps(config: Config, state: HostState, *events: Events) -> tuple[HostState, schedule.Plan]:
    for event in events:
        state, plan = schedule.plan(config, state, event)
    return state, plan


def test_group_waits_and_shares():
    """Bugs: the group's prompts prefilled four times; a slot reserved for a mate handed to a later request."""
    config = Config(max_slots=4, prefill_chunk=16)
    arrived = (*(Request(i, 21, group=0) for i in range(3)), Request(3, 5, group=1), Request(4, 5, group=2))
    state, plan = steps(config, HostState(), Events(arrived))
    assert plan.insert == (Insert(0, 0, None, 0), Insert(3, 1, None, 0))  # 1 and 2 hold two slots: 4 gets none
    assert (plan.prefill, plan.chunk, plan.bucket) == ((0, 1), 16, 2)
    state, plan = steps(config, state, Events(prefilled=((0, 5), (3, 0)), emitted=((3, 1),)))
    assert (plan.insert, plan.round) == ((), (1,))  # the donor lacks five tokens; the other decodes meanwhile
    state, plan = steps(config, state, Events(emitted=((3, 1),)))
    assert (plan.prefill, plan.chunk) == ((0,), 8)
    state, plan = steps(config, state, Events(prefilled=((0, 0),), emitted=((0, 1),)))
    assert plan.insert == (Insert(1, 2, 0, 0), Insert(2, 3, 0, 0))
    state, plan = steps(config, state, Events(emitted=((0, 1), (3, 1))))
    assert (plan.prefill, plan.chunk, plan.bucket) == ((2, 3), 8, 2)  # one token each: 20 of 21 are shared
    assert [r.left for r in state.running] == [0, 0, 1, 1]


def test_next_of_group_becomes_donor():
    """Bug: the group waits for ever for a donor that left during its prefill."""
    config = Config(max_slots=2)
    state, _ = steps(config, HostState(), Events(tuple(Request(i, 700, group=0) for i in range(2))))
    state, plan = steps(config, state, Events(prefilled=((0, 188),), finished=(0,)))
    assert plan.evict == (0,)
    assert plan.insert == (Insert(1, 0, None, 0),)


def test_a_share_without_its_copy_goes_on():
    """Bug: no page was left to copy the donor's last page into, and the tokens of that page are never recomputed."""
    config = Config(max_slots=2)
    state, _ = steps(config, HostState(), Events(tuple(Request(i, 20, group=0) for i in range(2))))
    state, plan = steps(config, state, Events(prefilled=((0, 0),), emitted=((0, 1),)))
    assert plan.insert == (Insert(1, 1, 0, 0),)
    assert (plan.prefill, plan.round) == ((), (0,))
    state, plan = steps(config, state, Events(emitted=((0, 1),)))
    assert (plan.prefill, plan.chunk) == ((1,), 8)
    state, plan = steps(config, state, Events(prefilled=((1, 12),)), Events(emitted=((0, 1),)))
    assert (plan.prefill, plan.chunk) == ((1,), 16)


def test_preempted_waits_until_someone_leaves():
    """Bug: the evicted request is admitted again at once and takes the pages that the oldest was refused."""
    config = Config(max_slots=2)
    state, _ = steps(config, HostState(), Events(tuple(Request(i, 5, group=i) for i in range(2))))
    both = Events(prefilled=((0, 0), (1, 0)), emitted=((0, 1), (1, 1)))
    state, plan = steps(config, state, both, Events(emitted=((1, 3),), refused=(0,)))
    assert (plan.evict, plan.insert, plan.round) == ((1,), (), (0,))
    state, plan = steps(config, state, Events(emitted=((0, 2),)))
    assert (plan.insert, plan.round) == ((), (0,))
    state, plan = steps(config, state, Events(emitted=((0, 1),), finished=(0,)))
    assert (plan.evict, plan.insert) == ((0,), (Insert(1, 0, None, emitted=4),))
    assert state.running[0].left == 8  # the fourth token is pending and has no KV


def test_requeued_behind_an_older_preempted():
    """Bug: a request preempted later goes to the very front, ahead of an older one that waits for its donor."""
    first, second, third, fresh = (Request(i, 5, group=i, age=age) for i, age in enumerate((0, 1, 2, -1)))
    running = (schedule.Running(first, 0, 0), schedule.Running(third, 1, 0))
    state = HostState(queue=(second, fresh), running=running, admitted=3)
    state, _ = steps(Config(max_slots=2), state, Events(refused=(0,)))
    assert [r.index for r in state.queue] == [1, 2, 3]


def test_tokens_read_after_the_eviction_count():
    """Bug: a driver one step behind reads the evicted request's last tokens after the plan, and they are lost."""
    config = Config(max_slots=2)
    state, _ = steps(config, HostState(), Events(tuple(Request(i, 5, group=i) for i in range(2))))
    both = Events(prefilled=((0, 0), (1, 0)), emitted=((0, 1), (1, 1)))
    state, _ = steps(config, state, both, Events(refused=(0,)), Events(emitted=((1, 3), (0, 1))))
    _, plan = steps(config, state, Events(finished=(0,)))
    assert plan.insert == (Insert(1, 0, None, emitted=4),)


def test_freed_pages_are_tried_before_a_preemption():
    """Bug: a request is recomputed although the refused one fits into what has just been freed."""
    config = Config(max_slots=3)
    state, _ = steps(config, HostState(), Events(tuple(Request(i, 5, group=i) for i in range(3))))
    _, plan = steps(config, state, Events(prefilled=((0, 0), (1, 0)), emitted=((1, 1),), refused=(2,), finished=(0,)))
    assert plan.evict == (0,)


def test_refused_alone_is_an_error():
    """Bug: a request that can never fit is retried for ever (C04)."""
    state, _ = steps(Config(max_slots=2), HostState(), Events((Request(7, 5, group=0),)))
    with pytest.raises(RuntimeError, match="request 7 is alone"):
        schedule.plan(Config(max_slots=2), state, Events(refused=(7,)))


def test_nothing_to_do():
    """Bug: an empty batch is a stub that the next arrival trips over (C05)."""
    state, plan = schedule.plan(Config(max_slots=2), HostState(), Events())
    assert plan == schedule.Plan()
    assert state.idle
    state, plan = schedule.plan(Config(max_slots=2), state, Events((Request(0, 3, group=0),)))
    state, plan = schedule.plan(Config(max_slots=2), state, Events(emitted=((0, 1),), finished=(0,)))
    assert plan == schedule.Plan(evict=(0,))
    assert state.idle


@pytest.mark.parametrize(
    ("n", "most", "size"), [(1, 8, 1), (2, 8, 2), (3, 8, 4), (5, 6, 6), (8, 8, 8), (9, 100, 16), (600, 512, 512)]
)
def test_bucket(n, most, size):
    assert schedule.bucket(n, most) == size


@pytest.mark.parametrize(("length", "shared"), [(1, 0), (4, 3), (21, 20)])
def test_shared_tokens(length, shared):
    """Bug: the last token's KV is shared although the draft's there differs by request."""
    assert schedule.shared_tokens(length) == shared


@pytest.mark.parametrize(("rows", "chunk"), [(2**30, 128), (512, 128), (511, 127), (64, 16), (32, 8), (1, 8)])
def test_a_prefill_has_a_budget_of_rows(rows, chunk):
    """Bug: a chunk of 512 tokens for each of 512 slots takes more memory than the device has."""
    config = Config(max_slots=8, prefill_chunk=128, prefill_rows=rows)
    _, plan = steps(config, HostState(), Events(tuple(Request(i, 200, group=i) for i in range(3))))
    assert (plan.bucket, plan.chunk) == (4, chunk)


def test_what_a_driver_expects_is_corrected():
    """Bugs: a second prefill step for a prompt that the first one completes; a guess that outlives the facts."""
    config = Config(max_slots=2, prefill_chunk=16)
    state, plan = steps(config, HostState(), Events(tuple(Request(i, n, group=i) for i, n in enumerate((40, 9)))))
    guess = schedule.expected(state, Events(), plan)
    assert guess == Events(prefilled=((0, 24), (1, 0)))
    later, following = schedule.plan(config, state, guess)
    assert following.round == (1,)
    # The first step's facts arrive while the round runs: the second prompt was refused its pages.
    facts = Events(prefilled=((0, 24), (1, 9)), refused=(1,))
    _, again = schedule.plan(config, state, guess.then(facts))
    assert again.evict == (1,)
    later, following = schedule.plan(config, later, Events(prefilled=((0, 24),), emitted=((1, 2),)))
    assert following.prefill == (0,)
    assert schedule.expected(later, Events(prefilled=((0, 20),)), following) == Events(prefilled=((0, 4),))


def test_tokens_of_two_steps_add_up():
    """Bug: of two steps that are told of at once only the last one's tokens count."""
    state, _ = steps(Config(max_slots=2), HostState(), Events(tuple(Request(i, 5, group=i) for i in range(2))))
    both = Events(prefilled=((0, 0), (1, 0)), emitted=((0, 1), (1, 1)))
    told = both.then(Events(emitted=((1, 3),))).then(Events(emitted=((1, 2),), refused=(0,)))
    state, _ = steps(Config(max_slots=2), state, told)
    _, plan = steps(Config(max_slots=2), state, Events(finished=(0,)))
    assert plan.insert == (Insert(1, 0, None, emitted=6),)

"""Many requests come and go at once: the same as one after the other, in launches that do not grow with them."""

import dataclasses

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nanospec_fn as ns
from nanospec_fn import pages
from tests.scripted import TREE, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
START, REQUEST = prompt(11, 4), ns.Sampling(max_tokens=9, temperature=1.0, seed=3)
PARAMS = ns.Params(target=target().params, draft=target().params)


class Counted(TorchDispatchMode):
    """How many operators run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operators += 1
        return func(*args, **(kwargs or {}))


def program(num_pages: int = 60, max_slots: int = 8) -> ns.Program:
    config = ns.EngineConfig(max_slots=max_slots, num_pages=num_pages, page_size=4, prefill_chunk=16)
    return ns.build(target(), ns.load_draft("frozen", target()), config, TREE)


def with_donors(engine: ns.Program) -> ns.State:
    """Slot 0 holds START, slot 3 a shorter prompt; both are prefilled."""
    state = engine.insert_all(engine.init(), [ns.Admission(0, START, REQUEST), ns.Admission(3, prompt(6, 5), REQUEST)])
    return engine.prefill(PARAMS, state)[0]


def seeded(seed: int) -> ns.Sampling:
    return dataclasses.replace(REQUEST, seed=seed, stop_ids=(seed,), ignore_eos=seed % 2 == 0)


COMING = (
    ns.Admission(5, START, seeded(1), share=0),
    ns.Admission(1, prompt(7, 8), seeded(2)),
    ns.Admission(2, [*START, 17, 30, 2], seeded(3), emitted=3),
    ns.Admission(7, START, seeded(4), share=0),
    ns.Admission(4, prompt(6, 5), seeded(5), share=3),
)


def finish(engine: ns.Program, state: ns.State) -> dict[int, tuple[list[int], int]]:
    """Every slot's tokens and done code at the end."""
    for _ in range(2):
        state, _ = engine.prefill(PARAMS, state)
    for _ in range(10):
        state, _ = engine.speculate(PARAMS, state)
    assert pages.check(state.pages, state.slots.page_table) == ""
    return {
        slot: (state.slots.tokens[slot, : int(state.slots.total[slot])].tolist(), int(state.slots.done[slot]))
        for slot in range(engine.max_slots)
        if state.slots.active[slot]
    }


@pytest.mark.parametrize("num_pages", [60, 9, 8], ids=["roomy", "as many as copies", "one too few"])
def test_at_once_is_one_after_the_other(num_pages):
    """Bugs: rows of one request in another's slot; a shared page counted once for two takers; a copy without a page."""
    engine = program()
    start = with_donors(engine)
    spare = torch.tensor(num_pages - 5 - 1)  # the donors hold five
    start = dataclasses.replace(start, pages=dataclasses.replace(start.pages, num_free=spare.to(torch.int32)))
    one_by_one = start
    for a in COMING:
        one_by_one = engine.insert(one_by_one, a.slot, list(a.tokens), a.sampling, a.emitted, a.share)
    at_once = engine.insert_all(start, COMING)
    for name in ("active", "done", "tokens", "total", "length", "prefill_to", "silent", "limit", "stop_ids"):
        assert torch.equal(getattr(at_once.slots, name), getattr(one_by_one.slots, name)), name
    assert torch.equal(at_once.slots.num_pages, one_by_one.slots.num_pages)
    assert torch.equal(at_once.pages.refs.sort().values, one_by_one.pages.refs.sort().values)
    assert torch.equal(at_once.pages.num_free, one_by_one.pages.num_free)
    copied = {60: 3, 9: 3, 8: 2}[num_pages]
    assert int(start.pages.num_free - at_once.pages.num_free) == copied


def test_requests_that_came_at_once_are_served_alike():
    engine = program()
    one_by_one = start = with_donors(engine)
    for a in COMING:
        one_by_one = engine.insert(one_by_one, a.slot, list(a.tokens), a.sampling, a.emitted, a.share)
    served = finish(engine, engine.insert_all(start, COMING))
    assert served == finish(engine, one_by_one)
    assert sorted(served) == [0, 1, 2, 3, 4, 5, 7]


def test_slots_that_share_pages_leave_at_once():
    """Bugs: a page that two of them held handed out twice, or never again."""
    engine = program()
    state = engine.insert_all(with_donors(engine), COMING)
    state, _ = engine.prefill(PARAMS, state)
    before = int(state.pages.num_free)
    state = engine.evict_all(state, [5, 0, 7])
    assert pages.check(state.pages, state.slots.page_table) == ""
    assert int(state.pages.num_free) - before == 2 + 3  # START's two whole pages once, and each one's last page
    state = engine.evict_all(state, [1, 2, 3, 4])
    assert int(state.pages.num_free) == 60
    assert not state.slots.active.any()


def test_operators_do_not_grow_with_the_requests():
    """The bug: launches for each request, which at an RL step's 512 take longer than its rounds."""
    engine = program(num_pages=400, max_slots=40)
    counts = []
    for n in (2, 30):
        state = with_donors(engine)
        coming = [ns.Admission(4 + i, START, seeded(i), share=0) for i in range(n)]
        with Counted() as counted:
            state = engine.insert_all(state, coming)
            engine.evict_all(state, [a.slot for a in coming])
        counts.append(counted.operators)
    assert counts[0] == counts[1]


def test_refusals():
    engine = program()
    state = with_donors(engine)
    with pytest.raises(ValueError, match="slot 1 is given twice"):
        engine.insert_all(state, [ns.Admission(1, START, REQUEST), ns.Admission(1, START, REQUEST)])
    with pytest.raises(ValueError, match="slot 0 is given twice"):
        engine.evict_all(state, [0, 0])
    with pytest.raises(ValueError, match="slot 3 holds a request"):
        engine.insert_all(state, [ns.Admission(1, START, REQUEST), ns.Admission(3, START, REQUEST)])


WRONG = {
    "negative": (-1, START, "share must be an integer from 0 to 7, got -1"),
    "past the end": (8, START, "share must be"),
    "no integer": (True, START, "share must be"),
    "empty": (2, START, "slot 2 does not hold the KV of this prompt of 11 tokens"),
    "itself": (1, START, "slot 1 does not hold"),
    "of the same batch": (5, START, "slot 5 does not hold"),
    "not prefilled": (6, START, "slot 6 does not hold"),
    "another prompt": (0, prompt(11, 5), "slot 0 does not hold"),
    "a shorter prompt": (3, [*prompt(6, 5), 9, 9], "slot 3 does not hold the KV of this prompt of 8 tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_kv_that_is_not_there_is_not_shared(name):
    """Bug: another request's KV taken over, which no check of pages would see, and which gives other tokens."""
    engine = program()
    state = engine.insert(with_donors(engine), 6, START, REQUEST)
    share, tokens, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        engine.insert_all(state, [ns.Admission(5, START, REQUEST), ns.Admission(1, tokens, REQUEST, share=share)])


@pytest.mark.parametrize(
    "emitted, said", [(9, "all of its 9"), (True, "emitted must"), (0.5, "emitted must"), (None, "emitted must")]
)
def test_a_request_with_nothing_left_to_do_is_refused(emitted, said):
    """Bug: it holds its slot for good, or tokens are written past the slot's row."""
    engine = program()
    with pytest.raises(ValueError, match=said):
        engine.insert(engine.init(), 0, [*START, *[7] * 9], REQUEST, emitted)
    small = ns.build(target(), None, ns.EngineConfig(max_slots=2, num_pages=20, page_size=4, max_context=20))
    with pytest.raises(ValueError, match="has all of its 9"):
        small.insert(small.init(), 0, [*START, *[7] * 30], ns.Sampling(max_tokens=100), 30)


def test_nobody_comes_and_nobody_goes():
    engine = program()
    state = with_donors(engine)
    assert engine.insert_all(state, []) is state
    assert not engine.evict_all(state, []).slots.active.ne(state.slots.active).any()
    with pytest.raises(ValueError, match="must be of class Admission, got None"):
        engine.insert_all(state, [None])


@pytest.mark.parametrize("chunk", [0, -1, True, 1.0, "1"])
def test_chunk_is_checked(chunk):
    engine = program()
    with pytest.raises(ValueError, match="chunk must be a positive integer"):
        engine.prefill(PARAMS, engine.init(), None, chunk)


SHAPES = (ns.Speculation(0, 2), ns.Speculation(True, 2), ns.Speculation(2, 3, 2), ns.Speculation(2, 3, 99), "x")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_rounds_shape_is_checked(shape):
    engine = program()
    with pytest.raises(ValueError, match=r"top_k must|num_nodes is|shape must"):
        engine.speculate(PARAMS, engine.init(), None, shape)

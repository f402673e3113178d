"""Donation and capture: the same bytes in the same storage, and no old state read by mistake."""

import dataclasses
import gc
import inspect
import sys
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import struct
from nanospec_fn.capture import donate, warm_up
from nanospec_fn.draft_model import Eagle3
from tests import tiny
from tests.scripted import CHAIN, TREE, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")


@struct.state
class Pair:
    """A state of two tensors and a static."""

    a: Tensor
    b: Tensor
    size: int = struct.static(default=1)


@struct.state
class Outer:
    """A nested state."""

    pair: Pair
    more: tuple[Tensor, ...]


def pair(a: float = 1.0, b: float = 2.0, size: int = 1) -> Pair:
    return Pair(torch.full((2,), a), torch.full((2,), b), size)


def addresses(state: Any) -> list[int]:
    return [leaf.data_ptr() for leaf in pytree.tree_leaves(state)]


def copied(state: Any) -> Any:
    return pytree.tree_map(lambda x: x.clone(), state)


DRAFTS = ("none", "ngram", "frozen", "eagle")


@pytest.fixture(scope="module", params=DRAFTS)
def drafted(request) -> tuple[ns.Model, ns.Draft | None]:
    if request.param != "eagle":
        return target(), ns.load_draft(request.param, target())
    model = tiny.model("smollm2-135m", eos_token_id=None)
    cfg, params, _ = tiny.head(tiny.config("smollm2-135m"), model)
    return model, ns.Draft(Eagle3(cfg), params)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("wrap", [donate, ns.capture], ids=["donate", "capture"])
def test_donated_equals_pure_in_the_same_storage(drafted, shape, wrap):
    """insert, share, prefill, speculate, decode and evict, by bytes after every step; no leaf of the state ever moves.

    Catches an in-place write that is read before it is due, and a leaf that is rebound, which a graph would not see.
    """
    model, draft = drafted
    config = ns.EngineConfig(max_slots=3, num_pages=40, page_size=4, prefill_chunk=4)
    program = ns.build(model, draft, config, shape if draft else None)
    params = ns.Params(target=model.params, draft=draft.params if draft else ())
    insert, evict = donate(program.insert), donate(program.evict)
    prefill, speculate, decode = wrap(program.prefill), wrap(program.speculate), wrap(program.decode)
    pure, owned = program.init(), program.init()
    home = addresses(owned)
    first, other = prompt(6, 1), prompt(9, 2)
    rows = torch.tensor([0, 2])
    info: Any = ()

    def both(step: Callable[..., Any], fast: Callable[..., Any], *args: Any) -> None:
        nonlocal pure, owned, info
        before = copied(pure)
        result, fast_result = step(*args[:1], pure, *args[1:]), fast(*args[:1], owned, *args[1:])
        assert struct.bytes_equal(pure, before), "a pure step wrote into its argument"
        assert struct.bytes_equal(result, fast_result)
        pure, info = result
        owned, _ = fast_result
        assert addresses(owned) == home

    def admin(step: Callable[..., Any], fast: Callable[..., Any], *args: Any) -> None:
        nonlocal pure, owned
        before = copied(pure)
        result, owned = step(pure, *args), fast(owned, *args)
        assert struct.bytes_equal(pure, before), "a pure step wrote into its argument"
        pure = result
        assert struct.bytes_equal(pure, owned)
        assert addresses(owned) == home

    sampling = ns.Sampling(max_tokens=30, temperature=1.0, seed=3)
    admin(program.insert, insert, 0, first, sampling)
    admin(program.insert, insert, 1, other, ns.Sampling(max_tokens=30))
    for _ in range(3):
        both(program.prefill, prefill, params)
    admin(program.insert, insert, 2, first, sampling, 0, 0)
    both(program.prefill, prefill, params, rows, 8)
    both(program.speculate, speculate, params)
    both(program.decode, decode, params, rows)
    both(program.speculate, speculate, params, rows)
    assert info.count.all()
    admin(program.evict, evict, 0)
    both(program.speculate, speculate, params)
    assert int(info.count[0]) == 0


def test_stale_use_names_the_field():
    program = ns.build(target())
    state = program.init()
    fast = ns.capture(program.decode, donate=("state",))
    new, _ = fast(ns.Params(target=target().params, draft=()), state)
    with pytest.raises(ns.DonatedError, match=r"State.slots was read after its state had been donated"):
        program.evict(state, 0)
    with pytest.raises(ns.DonatedError, match=r"State.pages "):
        _ = state.pages
    with pytest.raises(ns.DonatedError):
        fast(ns.Params(target=target().params, draft=()), state)
    fast(ns.Params(target=target().params, draft=()), new)


def test_nested_states_are_consumed_and_tensors_are_not():
    outer = Outer(pair(), (torch.ones(2),))
    inner, tensor = outer.pair, outer.more[0]
    struct.consume(outer)
    with pytest.raises(ns.DonatedError, match=r"Outer.pair "):
        _ = outer.pair
    with pytest.raises(ns.DonatedError, match=r"Pair.a "):
        _ = inner.a
    with pytest.raises(ns.DonatedError, match=r"Pair.size "):
        _ = inner.size
    assert tensor.tolist() == [1, 1]
    with pytest.raises(AttributeError, match="'Pair' object has no attribute 'nothing'"):
        _ = pair().nothing


def test_a_state_is_made_anew_in_other_wrappers():
    """Bugs: an old wrapper that can still be read, at any depth; a tensor copied; a static or a tuple's class lost."""

    class Two(NamedTuple):
        first: Pair
        second: int

    outer = Outer(pair(), (torch.ones(2),))
    given = (Two(pair(), 7), outer, 3)
    old, leaves = [outer, outer.pair, given[0].first], pytree.tree_leaves(given)
    fresh = struct.renew(given)
    assert type(fresh[0]) is Two
    assert (fresh[0].second, fresh[2], fresh[1].pair.size) == (7, 3, pair().size)
    assert all(a is b for a, b in zip(pytree.tree_leaves(fresh), leaves, strict=True))
    assert not any(map(struct.is_live, old))


def test_arguments_without_tensors_are_keys_by_name_type_and_value():
    """Bug: one argument's program is run for another's, or that of 1 for True."""

    def step(params: Any, state: Pair, one: Any = 0, two: Any = 0, put: Any = struct.put) -> tuple[Pair, Any]:
        return state, (repr(one), repr(two))

    fast, state = ns.capture(step), pair()
    values = (0, 1, True, 1.0, None, "1", CHAIN, TREE)
    cases = [{name: value} for name in ("one", "two") for value in values]
    for _ in range(2):
        for case in cases:
            state, told = fast((), state, **case)
            assert told == tuple(repr(case.get(name, 0)) for name in ("one", "two"))
        assert fast.captures == len(cases)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a state may have as a static, and what it may not lose."""

    k: int = 3


@struct.state
class Odd:
    """A state of what is neither a tensor nor a state."""

    found: Any
    sizes: Sizes = struct.static()
    shape: torch.Size = struct.static(default=torch.Size([2, 3]))


@dataclasses.dataclass(frozen=True)
class Users:
    """A state that is not `struct.state`'s."""

    a: Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.a))


pytree.register_dataclass(Users)


def test_a_state_of_what_is_no_tensor_is_refused():
    """Bug: a graph replays with the number that it was captured with."""

    def step(params: Any, state: Any, put: Any = struct.put) -> Any:
        return struct.replace(state, found=state.found + 1)

    with pytest.raises(ValueError, match=r"\.found of a donated state is 5: what is no tensor must be a static field"):
        ns.capture(step)((), Odd(5, Sizes()))


def test_what_a_state_holds_keeps_its_class(replayed):
    """Bugs: a named result, a size or a class of one's own made anew as something else; a static emptied with its
    state, in the caller's hands and in the key of the capture.
    """
    sizes, best = Sizes(7), torch.ones(2, 3).max(1)
    state = Odd((best, Users(torch.ones(4))), sizes)
    for _ in range(2):
        state, _ = replayed(pair(), state)
        assert (state.sizes.k, state.shape.numel()) == (7, 6)
        assert state.found[0].values is best.values
        assert state.found[1].rows == 4
    struct.consume(state)
    assert sizes == Sizes(7)
    assert replayed.captures == 1


def test_captures_are_counted_and_explained():
    """A second call captures nothing; a changed shape, dtype or static does, and `why` names what changed."""

    def step(params: Tensor, state: Pair, slot: Tensor | None = None, put: Any = struct.put) -> tuple[Pair, Tensor]:
        return struct.replace(state, a=state.a + params), state.b.sum()

    fast = ns.capture(step)
    params, state = torch.ones(2), pair()
    assert fast.captures == 0
    for _ in range(3):
        state, _ = fast(params, state)
        assert fast.captures == 1
    assert state.a.tolist() == [4, 4]
    assert fast.why(params, state) == ""

    slot = torch.tensor([0, 1])
    assert fast.why(params, state, slot).startswith("slot")
    state, _ = fast(params, state, slot)
    assert fast.captures == 2
    assert fast.why(params, state, torch.tensor([1, 0])) == ""
    assert fast.why(params, state, torch.tensor([0])).startswith("slot: ")
    assert "Size([2])" in fast.why(params, state, torch.tensor([0]))
    assert fast.why(params, pair(size=2), slot).startswith("state")
    assert "structure" in fast.why(params, pair(size=2), slot)
    assert fast.why(params, Pair(torch.ones(3), torch.ones(2)), slot).startswith("state.a: ")
    assert fast.why(params, Pair(torch.ones(2), torch.ones(2, dtype=torch.float64)), slot).startswith("state.b: ")
    assert fast.captures == 2  # asking captures nothing

    fast(params, pair(size=2), slot)
    assert fast.captures == 3  # statics are part of the key
    fast(params, state, slot)
    fast(params, pair())
    assert fast.captures == 3


def test_an_engine_captures_each_shape_once():
    engine = ns.prepare(target(), None, ns.EngineConfig(max_slots=4, num_pages=40, page_size=4, prefill_chunk=8))
    counts = []
    for _ in range(3):
        ns.generate(target(), [prompt(6, 1), prompt(6, 2), prompt(17, 3)], ns.Sampling(max_tokens=5), engine=engine)
        counts.append((engine.prefill.captures, engine.round.captures))
    assert counts[0] == counts[1] == counts[2]
    assert 0 < counts[0][1] <= 3  # buckets of 1, 2 and 4


def test_unknown_donate_names_and_steps_without_put():
    program = ns.build(target())
    for wrap in (donate, ns.capture):
        with pytest.raises(ValueError, match="donate names 'stat', which is not an argument of decode"):
            wrap(program.decode, donate=("stat",))
        with pytest.raises(ValueError, match=r"lambda.* takes no `put`"):
            wrap(lambda params, state: state, donate=("state",))


def test_swapped_leaves_do_not_alias():
    """A step that returns its leaves in other places; catches a copy that overwrites what is yet to be copied."""

    def swap(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=state.b, b=state.a)

    def spread(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, b=state.a)

    for wrap in (donate, ns.capture):
        state = pair(1, 2)
        home = addresses(state)
        state = wrap(swap)((), state)
        assert (state.a.tolist(), state.b.tolist()) == ([2, 2], [1, 1])
        state = wrap(spread)((), state)
        assert (state.a.tolist(), state.b.tolist()) == ([2, 2], [2, 2])
        assert addresses(state) == home
        state.a.add_(1)
        assert state.b.tolist() == [2, 2]


def test_overlapping_views_come_back_whole():
    """A leaf that comes back as a view of another, which does not begin where that one does."""

    def shift(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=state.a.flip(0), b=state.a[1:])

    def transpose(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=state.a.t())

    for wrap in (donate, ns.capture):
        new = wrap(shift)((), Pair(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([4.0, 5.0])))
        assert (new.a.tolist(), new.b.tolist()) == ([3, 2, 1], [2, 3])
        new = wrap(transpose)((), Pair(torch.tensor([[1, 2], [3, 4]]), torch.zeros(1)))
        assert new.a.tolist() == [[1, 3], [2, 4]]


def test_two_donated_states_may_trade_leaves():
    def trade(left: Pair, right: Pair, put: Any = struct.put) -> tuple[Pair, Pair]:
        return struct.replace(left, a=right.a), struct.replace(right, a=left.a)

    for wrap in (donate, ns.capture):
        given = pair(1), pair(2)
        home = addresses(given)
        left, right = wrap(trade, donate=("left", "right"))(*given)
        assert (left.a.tolist(), right.a.tolist()) == ([2, 2], [1, 1])
        assert addresses((left, right)) == home


def test_a_step_must_return_what_it_was_given():
    def grow(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=torch.ones(3))

    def double(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=state.a.double())

    def other(params: Any, state: Pair, put: Any = struct.put) -> Tensor:
        return state.a

    for wrap in (donate, ns.capture):
        with pytest.raises(ValueError, match=r"\.a was donated as torch.float32 .*\[2\].* came back as .*\[3\]"):
            wrap(grow)((), pair())
        with pytest.raises(ValueError, match=r"came back as torch.float64"):
            wrap(double)((), pair())
        with pytest.raises(ValueError, match="the step returned"):
            wrap(other)((), pair())


def test_put_copies_and_put_in_place_does_not():
    dest, index, value = torch.zeros(4, dtype=torch.float64), (torch.tensor([1, 3]),), torch.tensor([5, 6])
    new = struct.put(dest, index, value)
    assert (dest.tolist(), new.tolist()) == ([0, 0, 0, 0], [0, 5, 0, 6])
    same = struct.put_(dest, index, value)
    assert same is dest
    assert struct.bytes_equal(same, new)


def test_bytes_equal_is_about_bytes_and_structure():
    nan = torch.tensor([float("nan"), 0.0])
    assert struct.bytes_equal(nan, nan.clone())
    assert not struct.bytes_equal(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not struct.bytes_equal(torch.tensor([1]), torch.tensor([1], dtype=torch.int32))
    assert not struct.bytes_equal(torch.ones(2), torch.ones(2, 1))
    assert not struct.bytes_equal((torch.ones(2),), [torch.ones(2)])
    assert struct.bytes_equal(pair(), pair())
    assert not struct.bytes_equal(pair(), pair(size=2))
    assert not struct.bytes_equal(pair(), pair(b=2.5))
    assert struct.bytes_equal(torch.arange(6).view(2, 3).t(), torch.arange(6).view(2, 3).t().contiguous())
    assert struct.bytes_equal(torch.tensor([], dtype=torch.bool), torch.tensor([], dtype=torch.bool))
    assert struct.bytes_equal(1, 1)
    assert not struct.bytes_equal(1, True)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_warm_up_leaves_the_state_as_it_was(drafted, shape):
    """The first run of a step, which compiles and is undone, is one that nobody can tell of afterwards.

    Bugs: a copy of the pools for the warm-up, twice the memory; a part of the state that the warm-up changed and that
    is not restored; a step that reads in a pool what it did not write first.
    """
    model, draft = drafted
    program = ns.build(model, draft, ns.EngineConfig(3, 40, page_size=4, prefill_chunk=4), shape if draft else None)
    params = ns.Params(target=model.params, draft=draft.params if draft else ())
    state = program.init()
    for slot, length in ((0, 6), (2, 9)):
        state = program.insert(state, slot, prompt(length, slot), ns.Sampling(max_tokens=30, temperature=slot / 2))
    rows = torch.tensor([0, 2])
    calls: list[tuple[Any, ...]] = [(program.prefill,)] * 3 + [(program.speculate,), (program.decode, rows)]
    for step, *rest in [*calls, (program.speculate, rows)]:
        arguments = dict(zip(inspect.signature(step).parameters, (params, state, *rest), strict=False))
        before = copied(struct.lasting(state))
        pools = addresses((state.pools, state.draft.pools))
        expected, told = step(params, copied(state), *rest)
        warm_up(step, arguments, ("state",))
        assert struct.bytes_equal(struct.lasting(state), before)
        state, info = donate(step)(params, state, *rest)
        assert struct.bytes_equal(info, told)
        assert struct.bytes_equal(struct.lasting(state), struct.lasting(expected))
        assert addresses((state.pools, state.draft.pools)) == pools
        for pool, pure in zip(
            (*state.pools, *state.draft.pools), (*expected.pools, *expected.draft.pools), strict=True
        ):
            assert struct.bytes_equal(pool[1:], pure[1:])  # the sink apart


def test_what_a_warm_up_copies():
    """All of a state but its pools; of any other pytree, everything."""
    program = ns.build(target(), ns.load_draft("frozen", target()), ns.EngineConfig(2, 9), TREE)
    state = program.init()
    lasting = {x.data_ptr() for x in struct.lasting((state, [torch.ones(1)])) if x.numel()}
    pools = {x.data_ptr() for x in (*state.pools, *state.draft.pools)}
    every = {x.data_ptr() for x in pytree.tree_leaves(state) if x.numel()}
    assert len(pools) == 4
    assert every - lasting == pools
    assert len(lasting) == len(every - pools) + 1
    outer = Outer(pair(), (torch.ones(2),))
    assert addresses(struct.lasting(outer)) == addresses(outer)


def test_a_warm_up_undoes_a_step_that_reads_what_it_wrote():
    """A toy step that counts in place: a capture of it must count once a call."""

    def count(params: Any, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=put(state.a, (torch.tensor([0]),), state.a[:1] + 1))

    state = pair(1)
    warm_up(count, {"params": (), "state": state}, ("state",))
    assert state.a.tolist() == [1, 1]


def test_other_storage_is_seen_in_the_same_arguments():
    """Bug: parameters that were met before are not looked at again, and a graph replays the old weights (C17)."""

    def step(params: Pair, state: Pair, put: Any = struct.put) -> Pair:
        return struct.replace(state, a=state.a + params.a)

    fast, params = ns.capture(step), pair(1)
    state = fast(params, pair(0.0))
    known = fast._known[params][1]
    fast(params, state)
    assert fast._known[params][1] is known
    params.a.data = torch.tensor([5.0, 5.0])
    assert fast(params, pair(0.0)).a.tolist() == [5, 5]
    assert fast._known[params][1].place[0] == params.a.data_ptr()


def test_why_tells_of_an_argument_that_is_missing():
    def step(params: Pair, state: Pair, more: Any = None, put: Any = struct.put) -> Pair:
        return state

    fast = ns.capture(step)
    fast(pair(), pair(), 1)
    assert fast.why(pair(), pair(), 1) == ""
    assert fast.why(pair(), pair(), True) == "more: (<class 'int'>, 1) -> (<class 'bool'>, True)"
    assert fast.why(pair(), pair()) == "more: not given"


class Replay:
    """In place of a CUDA graph, which there is none of here: a step that changes nothing."""

    many = True

    def __call__(self, seen: Any) -> list[str]:
        return ["info"]


@pytest.fixture
def replayed(monkeypatch) -> Any:
    """A step that returns its state as it is, "captured"."""
    module = sys.modules["nanospec_fn.capture"]
    monkeypatch.setattr(module, "_Graph", Replay)
    monkeypatch.setattr(module.Captured, "_capture", lambda self, bound: Replay())

    def step(params: Any, state: Any, other: Any = None, put: Any = struct.put) -> tuple[Any, str]:
        return state, "info"

    return ns.capture(step)


def test_a_state_that_was_handed_out_is_known_when_it_comes_back(replayed, monkeypatch):
    """Bugs: the host flattens and hashes state and weights in every round; other storage in a known state unseen."""
    flattened, flatten = [], pytree.tree_flatten
    monkeypatch.setattr(pytree, "tree_flatten", lambda tree, *a: flattened.append(tree) or flatten(tree, *a))
    params, first = pair(1), pair(2)
    home = first.a
    second, info = replayed(params, first)
    assert info == "info"
    assert second.a is home
    with pytest.raises(ns.DonatedError):
        first.a  # noqa: B018
    flattened.clear()
    third, _ = replayed(params, second)
    assert (flattened, replayed.captures) == ([], 1)
    third.a.data = torch.zeros(4)[::2]
    fourth, _ = replayed(params, third)
    assert flattened == [third], "looked at again"
    assert fourth.a is home


def test_a_known_state_lives_no_longer_for_it(replayed):
    """Bug: a dropped state's pools stay, and the next one needs as much again."""
    state, _ = replayed(pair(), pair())
    gone = weakref.ref(state.b)
    del state
    gc.collect()
    assert gone() is None


def test_containers_that_change_are_looked_at_every_time(replayed):
    """Bug: a dict that was handed out is put back as it was then."""
    state, _ = replayed(pair(), {"a": torch.zeros(2)})
    state["a"] = new = torch.ones(2)
    assert replayed(pair(), state)[0]["a"] is new


def test_no_state_is_consumed_beside_one_that_was(replayed):
    """Bug: a refused call takes the good state with it."""
    two = ns.capture(replayed._step, donate=("state", "other"))
    good, bad, _ = two(pair(), pair(), pair())
    struct.consume(bad)
    with pytest.raises(ns.DonatedError):
        two(pair(), good, bad)
    assert good.a.tolist() == [1, 1]


def test_arguments_are_bound_by_place_only_where_put_is_last():
    """Bug: a step whose `put` stands before another argument is captured with `put` in that one's place."""

    def step(params, state, put=struct.put, k=1):
        return state * k

    fast = ns.capture(step)
    assert fast((), torch.ones(2), k=3).tolist() == [3, 3]
    assert fast.why((), torch.ones(2), struct.put).startswith("put: ")

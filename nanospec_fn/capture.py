"""`capture(step, donate=...)`: run a pure step with its state updated in place, as one CUDA graph where there is one.

A step is `step(params, state, *tensors, put=struct.put) -> (state, info)` or `-> state`. With donation it is called
with `put=struct.put_`, and whatever it returns is copied into the buffers of the state that it was given; the caller
gets a fresh wrapper over those buffers, and the old one is consumed (reads raise `DonatedError`). On a CPU that is
all; on CUDA the same call is captured once per key and replayed.
"""

import inspect
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import struct


def donate(step: Callable[..., Any], donate: Sequence[str] = ("state",)) -> Callable[..., Any]:
    """`step` run eagerly on donated arguments: same result, same buffers, the old wrappers consumed.

    Args: donate: names of the arguments given away. Their structure must be that of the results, in order.
    Errors: ValueError for a name that is not an argument of the step.
    """
    signature = _signature(step, donate)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        given = [bound.arguments[name] for name in donate]
        result = _reuse(given, step(*args, **kwargs, put=struct.put_))
        for state in given:
            struct.consume(state)
        return result

    return call


def _signature(step: Callable[..., Any], donate: Sequence[str]) -> inspect.Signature:
    if not callable(step):
        raise ValueError(f"step must be a function, got {step!r}")
    signature = inspect.signature(step)
    unknown = [name for name in donate if name not in signature.parameters]
    if unknown:
        raise ValueError(f"donate names {unknown[0]!r}, which is not an argument of {getattr(step, '__name__', step)}")
    if "put" not in signature.parameters:
        raise ValueError(f"{getattr(step, '__name__', step)} takes no `put`, so it cannot update its state in place")
    return signature


def _reuse(given: list[Any], result: Any) -> Any:
    """Copy the returned states into the buffers of the given ones; returns `result` with those buffers in it."""
    results = _results(result)
    old_leaves, old_spec = pytree.tree_flatten(given)
    new_leaves, new_spec = pytree.tree_flatten(results[: len(given)])
    if old_spec != new_spec:
        raise ValueError(f"the step returned {new_spec} for a donated {old_spec}")
    for n, leaves in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            name = struct.leaf_names(given)[n]
            raise ValueError(f"{name} of a donated state is {leaves[0]!r}: what is no tensor must be a static field")
    storages = {leaf.untyped_storage().data_ptr() for leaf in old_leaves}
    # A leaf that moved to another place would be overwritten before it is read: copy it out first.
    new_leaves = [
        y.clone() if y.untyped_storage().data_ptr() in storages and not _in_place(x, y) else y
        for x, y in zip(old_leaves, new_leaves, strict=True)
    ]
    for n, (x, y) in enumerate(zip(old_leaves, new_leaves, strict=True)):
        if x.shape != y.shape or x.dtype != y.dtype:
            name = struct.leaf_names(given)[n]
            raise ValueError(f"{name} was donated as {x.dtype} {x.shape} and came back as {y.dtype} {y.shape}")
        if not _in_place(x, y):
            x.copy_(y)
    results[: len(given)] = pytree.tree_unflatten(old_leaves, old_spec)
    return tuple(results) if isinstance(result, tuple) else results[0]


def _results(result: Any) -> list[Any]:
    """What a step returned, as a list: a state alone, or a tuple that begins with the states."""
    return list(result) if isinstance(result, tuple) else [result]


def _in_place(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


class Captured:
    """A captured step; call it like the step.

    Attributes: captures: how many distinct keys were captured (on a CPU: met) so far.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        donated: Sequence[str],
        pinned: Sequence[str],
        pool: Any = None,
        lend: bool = False,
    ):
        self._step, self._lend, self._pool = step, lend, pool
        self._donate, self._pinned = tuple(donated), tuple(pinned)
        self._signature = _signature(step, donated)
        kinds = {name: one.kind for name, one in self._signature.parameters.items() if name != "put"}
        ordinary = all(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds.values())
        self._names = (*kinds,) if ordinary and [*self._signature.parameters][-1] == "put" else ()
        self._graphs: dict[tuple[int, ...], _Graph | Callable[..., Any]] = {}
        self._numbers: dict[tuple[str, _Part], int] = {}  # of the arguments' parts of keys: quicker to hash
        self._plain: dict[tuple[str, type, Any], _Seen] = {}  # arguments that hold no tensors, by name, type and value
        self._last: dict[str, _Part] = {}  # the arguments' parts of the newest capture
        # What comes again as it is, the weights and a state that was handed out: to flatten them and hash their parts
        # at every call would take longer than a graph's launch. Nothing lives longer for being known.
        self._known: weakref.WeakKeyDictionary[Any, tuple[str, _Seen]] = weakref.WeakKeyDictionary()

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self._by_name(args, kwargs)
        seen = {name: self._see(name, value) for name, value in given.items()}
        key = tuple(one.number for one in seen.values())
        if key not in self._graphs:
            self._graphs[key] = self._capture(given)
            self._last = {name: one.part for name, one in seen.items()}
        run = self._graphs[key]
        if not isinstance(run, _Graph):
            return run(*args, **kwargs)
        others = run(seen)
        states = [self._hand_over(name, given[name], seen[name]) for name in self._donate]
        return (*states, *others) if run.many else states[0]

    def why(self, *args: Any, **kwargs: Any) -> str:
        """What about these arguments differs from the newest capture, or "" if they would replay it."""
        given = self._by_name(args, kwargs)
        for name, value in given.items():
            spec, leaves = self._part(name, *pytree.tree_flatten(value))
            old_spec, old_leaves = self._last.get(name, (None, ()))
            if spec != old_spec:
                return f"{name}: another structure, {old_spec} -> {spec}"
            for path, old, new in zip(struct.leaf_names(value), old_leaves, leaves, strict=True):
                if old != new:
                    return f"{name}{path}: {old} -> {new}"
        return next((f"{name}: not given" for name in self._last if name not in given), "")

    def _by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        if not kwargs and self._names and len(args) == len(self._names):  # a sixth of the time of `bind`
            return dict(zip(self._names, args, strict=True))
        return self._signature.bind(*args, **kwargs).arguments

    def _see(self, name: str, value: Any) -> "_Seen":
        comes_again = name in self._pinned or name in self._donate
        known = self._known.get(value) if comes_again and _lasting(value) else None
        if known and known[0] == name and struct.is_live(value) and known[1].place == _places(known[1].tensors):
            return known[1]
        if pytree.tree_is_leaf(value) and not isinstance(value, Tensor):
            plain = name, type(value), value
            if plain not in self._plain:
                self._plain[plain] = self._flatten(name, value)
            return self._plain[plain]
        seen = self._flatten(name, value)
        if name in self._pinned and _lasting(value) and _fixed(value):
            self._known[value] = name, seen
        return seen

    def _flatten(self, name: str, value: Any) -> "_Seen":
        leaves, spec = pytree.tree_flatten(value)
        part = self._part(name, leaves, spec)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        number = self._numbers.setdefault((name, part), len(self._numbers))
        return _Seen(leaves, tensors, _places(tensors), part, number)

    def _part(self, name: str, leaves: list[Any], spec: Any) -> "_Part":
        # A graph replays addresses: pinned arguments and donated states are bound by them, other tensors copied in.
        bound = name in self._donate or name in self._pinned
        return spec, tuple(_leaf_key(leaf, bound) for leaf in leaves)

    def _hand_over(self, name: str, given: Any, seen: "_Seen") -> Any:
        """A fresh wrapper over a state's tensors, known when it comes back; the old one is consumed."""
        if not _lasting(given) or not (given in self._known or _fixed(given)):
            struct.consume(given)
            return pytree.tree_unflatten(seen.leaves, seen.part[0])
        self._known.pop(given, None)
        fresh = struct.renew(given)  # one walk: a third of the time
        self._known[fresh] = name, seen
        return fresh

    def _capture(self, given: dict[str, Any]) -> "_Graph | Callable[..., Any]":
        leaves = pytree.tree_leaves(dict(given))
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            return donate(self._step, self._donate)
        self._pool = self._pool or shared_pool()
        return _Graph(self._step, self._donate, self._pinned, given, self._pool, self._lend)


# Structure with statics, and what a graph binds of every leaf.
_Part = tuple[Any, tuple[Any, ...]]


@dataclass(frozen=True, eq=False)
class _Seen:
    """A flattened argument of a call."""

    leaves: list[Any]
    tensors: list[Tensor]  # those of the leaves that are
    place: list[Any]  # of the tensors, by which a swapped `.data` shows
    part: _Part  # of the key
    number: int  # of the part, among those met


def _places(tensors: Sequence[Tensor]) -> list[Any]:
    return [*map(Tensor.data_ptr, tensors), *map(Tensor.stride, tensors)]


def _lasting(value: Any) -> bool:
    """Whether a value can be known by itself, for as long as it lives."""
    return hasattr(value, "__weakref__") and type(value).__eq__ is object.__eq__


def _fixed(value: Any) -> bool:
    """Whether a pytree keeps its leaves, and `struct.renew` makes it anew: states and tuples of such."""
    if struct.is_state(value):
        return all(map(_fixed, struct.children(value)))
    return all(map(_fixed, value)) if struct.is_plain_tuple(value) else pytree.tree_is_leaf(value)


def shared_pool() -> Any:
    """Memory for the graphs of several captured steps that run one after the other."""
    return torch.cuda.graph_pool_handle()


def warm_up(step: Callable[..., Any], arguments: dict[str, Any], donated: Sequence[str]) -> None:
    """Run a step once, in place, for what its first run compiles and allocates; the states hold what they held.

    Fields of `struct.rewritten` are not copied, so there bytes that no step reads before it writes them may differ.
    """
    leaves = struct.lasting([arguments[name] for name in donated])
    saved = [leaf.clone() for leaf in leaves]
    step(**arguments, put=struct.put_)
    for leaf, old in zip(leaves, saved, strict=True):
        leaf.copy_(old)


class _Graph:
    """One CUDA graph of one key. It holds addresses, and keeps neither weights nor states alive.

    Attributes: many: whether the step returns a tuple, and not a state alone.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        donated: tuple[str, ...],
        pinned: tuple[str, ...],
        given: dict[str, Any],
        pool: Any,
        lend: bool,
    ):
        self._lend = lend
        copied = {n: pytree.tree_map(_clone, value) for n, value in given.items() if n not in donated + pinned}
        self._copied = [
            (name, n, leaf)
            for name, value in copied.items()
            for n, leaf in enumerate(pytree.tree_leaves(value))
            if isinstance(leaf, Tensor)
        ]
        arguments = given | copied
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            warm_up(step, arguments, donated)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):  # records, and runs nothing
            result = _reuse([arguments[name] for name in donated], step(**arguments, put=struct.put_))
        self.many, self._others = isinstance(result, tuple), _results(result)[len(donated) :]

    def __call__(self, seen: dict[str, _Seen]) -> list[Any]:
        """Replay on these arguments: the results beside the states, which are where they were."""
        for name, n, static in self._copied:
            static.copy_(seen[name].leaves[n], non_blocking=True)
        self._graph.replay()
        # Results other than the state live in the graphs' memory, which the next replay overwrites.
        return self._others if self._lend else [pytree.tree_map(_clone, r) for r in self._others]


def _leaf_key(leaf: Any, bound: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf), leaf
    place = (leaf.data_ptr(), leaf.stride()) if bound and leaf.is_cuda else ()
    return leaf.dtype, leaf.shape, leaf.device, place


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def capture(
    step: Callable[..., Any],
    donate: Sequence[str] = ("state",),
    pinned: Sequence[str] = ("params",),
    pool: Any = None,
    lend: bool = False,
) -> Captured:
    """`step` with donated arguments, captured as a CUDA graph per (structure with statics, shapes, dtypes, devices).

    Pinned arguments and donated states are bound by address: an update of a weight in place is seen by the next
    replay, other storage captures anew and is counted in `.captures`; `.why(...)` names the argument that changed.

    Args:
      step: `step(params, state, *tensors, put=...)`.
      donate: names of the arguments given away.
      pinned: names of the arguments, where the step has them, whose storage is the same from call to call.
      pool: what `shared_pool` returned: the memory of the graphs, shared with other steps; None: a pool of its own.
      lend: results beside the states are not copied, and hold until the next call of a step with this pool.
    Returns: a callable with the step's signature.
    Errors: ValueError for a name that is not an argument; DonatedError when a donated state is used again.
    """
    return Captured(step, donate, pinned, pool, lend)

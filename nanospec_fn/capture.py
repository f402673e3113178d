"""`capture(step, donate=...)`: run a pure step with its state updated in place, as one CUDA graph where there is one.

A step is `step(params, state, *tensors, put=struct.put) -> (state, info)` or `-> state`. With donation it is called
with `put=struct.put_`, and whatever it returns is copied into the buffers of the state that it was given; the caller
gets a fresh wrapper over those buffers, and the old one is consumed (reads raise `DonatedError`). On a CPU that is
all; on CUDA the same call is captured once per key and replayed.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import struct


def donate(step: Callable[..., Any], donate: Sequence[str] = ("state",)) -> Callable[..., Any]:
    """`step` run eagerly on donated arguments: same result, same buffers, the old wrappers consumed.

    Args: donate: names of the arguments given away. Their structure must be that of the results, in order.
    Errors: ValueError for a name that is no argument of the step.
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
    signature = inspect.signature(step)
    unknown = [name for name in donate if name not in signature.parameters]
    if unknown:
        raise ValueError(f"donate names {unknown[0]!r}, which is no argument of {getattr(step, '__name__', step)}")
    if "put" not in signature.parameters:
        raise ValueError(f"{getattr(step, '__name__', step)} takes no `put`, so it cannot update its state in place")
    return signature


def _reuse(given: list[Any], result: Any) -> Any:
    """Copy the returned states into the buffers of the given ones; returns `result` with those buffers in it."""
    alone = not (isinstance(result, tuple) and not hasattr(result, "_fields"))
    results = [result] if alone else list(result)
    old_leaves, old_spec = pytree.tree_flatten(given)
    new_leaves, new_spec = pytree.tree_flatten(results[: len(given)])
    if old_spec != new_spec:
        raise ValueError(f"the step returned {new_spec} for a donated {old_spec}")
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
    return results[0] if alone else tuple(results)


def _in_place(x: Tensor, y: Tensor) -> bool:
    return x.data_ptr() == y.data_ptr() and x.stride() == y.stride()


class Captured:
    """A captured step; call it like the step.

    Attributes: captures: how many distinct keys were captured (on a CPU: met) so far.
    """

    def __init__(self, step: Callable[..., Any], donated: Sequence[str]):
        self._step = step
        self._donate = tuple(donated)
        self._signature = _signature(step, donated)
        self._graphs: dict[Any, Callable[[inspect.BoundArguments], Any]] = {}
        self._last: dict[str, Any] = {}  # the arguments' parts of the newest key
        self._params: tuple[Any, Any] = (None, None)  # the newest params and their part: immutable, so made once

    @property
    def captures(self) -> int:
        return len(self._graphs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        bound = self._signature.bind(*args, **kwargs)
        parts = {name: self._part(name, value) for name, value in bound.arguments.items()}
        key = tuple(parts.items())
        if key not in self._graphs:
            self._graphs[key] = self._capture(bound)
            self._last = parts
        return self._graphs[key](bound)

    def why(self, *args: Any, **kwargs: Any) -> str:
        """What about these arguments differs from the newest capture, or "" if they would replay it."""
        bound = self._signature.bind(*args, **kwargs)
        for name, value in bound.arguments.items():
            spec, leaves = self._part(name, value)
            old_spec, old_leaves = self._last.get(name, (None, ()))
            if spec != old_spec:
                return f"{name}: another structure, {old_spec} -> {spec}"
            for path, old, new in zip(struct.leaf_names(value), old_leaves, leaves, strict=True):
                if old != new:
                    return f"{name}{path}: {old} -> {new}"
        return ""

    def _part(self, name: str, value: Any) -> tuple[Any, tuple[Any, ...]]:
        """An argument's part of the key: structure with statics, and what a graph binds of every leaf."""
        if name == "params" and value is self._params[0]:
            return self._params[1]
        leaves, spec = pytree.tree_flatten(value)
        # A graph replays addresses: params and donated states are bound by them, other tensors are copied in.
        pinned = name in self._donate or name == "params"
        part = spec, tuple(_leaf_key(leaf, pinned) for leaf in leaves)
        if name == "params":
            self._params = value, part
        return part

    def _capture(self, bound: inspect.BoundArguments) -> Callable[[inspect.BoundArguments], Any]:
        leaves = pytree.tree_leaves(dict(bound.arguments))
        if not any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in leaves):
            run = donate(self._step, self._donate)
            return lambda bound: run(*bound.args, **bound.kwargs)
        return _Graph(self._step, self._donate, bound)


class _Graph:
    """One CUDA graph of one key."""

    def __init__(self, step: Callable[..., Any], donated: tuple[str, ...], bound: inspect.BoundArguments):
        self._donate = donated
        self._static = {
            name: value if name in donated or name == "params" else pytree.tree_map(_clone, value)
            for name, value in bound.arguments.items()
        }
        given = [self._static[name] for name in donated]
        backup = [leaf.clone() for leaf in pytree.tree_leaves(given)]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # the warm-up compiles kernels; its effect on the state is undone below
            step(**self._static, put=struct.put_)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = _reuse(given, step(**self._static, put=struct.put_))
        for leaf, saved in zip(pytree.tree_leaves(given), backup, strict=True):
            leaf.copy_(saved)

    def __call__(self, bound: inspect.BoundArguments) -> Any:
        for name, value in bound.arguments.items():
            if name in self._donate:
                struct.consume(value)
            elif name != "params":
                for static, leaf in zip(pytree.tree_leaves(self._static[name]), pytree.tree_leaves(value), strict=True):
                    if isinstance(leaf, Tensor):
                        static.copy_(leaf, non_blocking=True)
        self._graph.replay()
        n = len(self._donate)
        if not isinstance(self._result, tuple):
            return _rewrap(self._result)
        # Results other than the state live in the graph's memory and are overwritten by the next replay.
        kept = [pytree.tree_map(_clone, r) if i >= n else _rewrap(r) for i, r in enumerate(self._result)]
        return tuple(kept)


def _leaf_key(leaf: Any, pinned: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.dtype, leaf.shape, leaf.device, leaf.data_ptr() if pinned and leaf.is_cuda else 0


def _clone(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _rewrap(state: Any) -> Any:
    leaves, spec = pytree.tree_flatten(state)
    return pytree.tree_unflatten(leaves, spec)


def capture(step: Callable[..., Any], donate: Sequence[str] = ("state",)) -> Captured:
    """`step` with donated arguments, captured as a CUDA graph per (structure with statics, shapes, dtypes, devices).

    Params and donated states are bound by address: an update of a weight in place is seen by the next replay, other
    storage captures anew and is counted in `.captures`; `.why(...)` names the argument that changed.

    Args: step: `step(params, state, *tensors, put=...)`; donate: names of the arguments given away.
    Returns: a callable with the step's signature.
    Errors: ValueError for a name that is no argument; DonatedError when a donated state is used again.
    """
    return Captured(step, donate)

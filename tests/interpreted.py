"""Whole rounds through the Triton kernels on a CPU, and the launches that they would take on a device."""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from triton.runtime.interpreter import GridExecutor, interpreter_builder

import nanospec_fn as ns
from nanospec_fn import kernels

# They allocate or look at memory without a kernel; views are told by their schema.
FREE = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "detach", "alias"}
FREE |= {"lift_fresh", "is_same_size", "_reshape_alias", "_local_scalar_dense"}


@contextmanager
def on_device() -> Iterator[None]:
    """Every tensor but float64 ones is served by the Triton kernels, which run in Triton's interpreter."""
    before = kernels.on_device
    kernels.on_device = lambda x: x.dtype != torch.float64
    try:
        yield
    finally:
        kernels.on_device = before


def canonical(model: ns.Model) -> ns.Model:
    """A model whose products are the Triton kernels'."""
    return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, gemm="canonical"))


class Launches(TorchDispatchMode):
    """Counts, by name, the torch operations and Triton kernels that each would be a launch on a device.

    An operator without its own kernel that dispatches to several (index_put clones first) counts as its parts do here.
    """

    def __init__(self) -> None:
        super().__init__()
        self.torch: Counter[str] = Counter()
        self.triton: Counter[str] = Counter()
        self._inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        if not self._inside and not view and name not in FREE:
            self.torch[name] += 1
        return func(*args, **(kwargs or {}))

    @contextmanager
    def one(self, name: str) -> Iterator[None]:
        """Count what runs inside as one launch."""
        self.triton[name] += 1
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def __enter__(self) -> "Launches":
        run = self._restore = GridExecutor.__call__

        def counted(grid: Any, *args: Any, **kwargs: Any) -> Any:
            with self.one(grid.fn.__name__):
                return run(grid, *args, **kwargs)

        GridExecutor.__call__ = counted
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        GridExecutor.__call__ = self._restore
        return super().__exit__(*error)


@contextmanager
def one_launch(name: str) -> Iterator[None]:
    """What runs inside is one launch by name, where launches are counted."""
    counting = [mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Launches)]
    with counting[-1].one(name) if counting else nullcontext():
        yield


@contextmanager
def recorded() -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """The name and grid of every launch, none of which runs; tensors may be on the meta device."""
    before, seen = GridExecutor.__call__, []
    GridExecutor.__call__ = lambda grid, *args, **kwargs: seen.append((grid.fn.__name__, grid.grid))
    try:
        yield seen
    finally:
        GridExecutor.__call__ = before


@contextmanager
def last_programs(count: int) -> Iterator[None]:
    """Of each launch only the last `count` programs along x run, with the indices that they have in the whole grid."""
    run, index, size = GridExecutor.__call__, interpreter_builder.set_grid_idx, interpreter_builder.set_grid_dim

    def some(grid: Any, *args: Any, **kwargs: Any) -> Any:
        whole = (*grid.grid, 1, 1)[:3]
        first = max(0, whole[0] - count)
        grid.grid = (whole[0] - first, *whole[1:])
        interpreter_builder.set_grid_dim = lambda *_: size(*whole)
        interpreter_builder.set_grid_idx = lambda x, y, z: index(x + first, y, z)
        return run(grid, *args, **kwargs)

    GridExecutor.__call__ = some
    try:
        yield
    finally:
        GridExecutor.__call__ = run
        interpreter_builder.set_grid_idx, interpreter_builder.set_grid_dim = index, size

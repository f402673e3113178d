"""Immutable engine state: frozen dataclasses of tensors that are torch pytrees.

A `@state` class carries tensors, tuples of tensors and other states as children;
fields made with `static()` are hashable and travel in the pytree's context, so
that they take part in `tree_structure` equality (and thus in capture keys).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")


class DonatedError(RuntimeError):
    """A state was read after a step with donation had consumed it."""


def static(**kwargs: Any) -> Any:
    """A field of a `@state` class that is hashable and not a tensor."""
    return dataclasses.field(metadata={"static": True}, **kwargs)


def rewritten(**kwargs: Any) -> Any:
    """A field of tensors in which every step writes a place before it reads what it wrote there.

    So a step may run twice from the same other fields: `capture` warms up on such tensors without a copy of them.
    """
    return dataclasses.field(metadata={"rewritten": True}, **kwargs)


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(static, rewritten))
def state(cls: type[T]) -> type[T]:
    """Make `cls` a frozen, slotted dataclass and register it as a pytree node."""
    cls = dataclasses.dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    children = tuple(f.name for f in fields if not f.metadata.get("static"))
    statics = tuple(f.name for f in fields if f.metadata.get("static"))

    # Called only when the slot is empty, so a live state pays nothing for the check.
    def missing(self: Any, name: str) -> Any:
        if name in children or name in statics:
            raise DonatedError(
                f"{cls.__name__}.{name} was read after its state had been donated to a step; "
                "use the state that the step returned"
            )
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    cls.__getattr__ = missing  # type: ignore[attr-defined]

    def flatten(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(obj, n) for n in children], tuple(getattr(obj, n) for n in statics)

    def flatten_with_keys(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values, context = flatten(obj)
        return [(pytree.GetAttrKey(n), v) for n, v in zip(children, values, strict=True)], context

    def unflatten(values: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(children, values, strict=True)), **dict(zip(statics, context, strict=True)))

    pytree.register_pytree_node(cls, flatten, unflatten, flatten_with_keys_fn=flatten_with_keys)
    return cls


def replace(obj: T, **changes: Any) -> T:
    """A copy of a state with some fields changed; the others are shared, not copied."""
    return dataclasses.replace(obj, **changes)  # type: ignore[type-var]


def lasting(tree: Any) -> list[Tensor]:
    """The tensors of a pytree but for those in `rewritten` fields."""
    found: list[Tensor] = []
    for leaf in pytree.tree_leaves(tree, is_leaf=dataclasses.is_dataclass):
        if dataclasses.is_dataclass(leaf):
            skip = ("static", "rewritten")
            fields = [f.name for f in dataclasses.fields(leaf) if not any(f.metadata.get(kind) for kind in skip)]
            found += lasting([getattr(leaf, name) for name in fields])
        elif isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def consume(obj: Any) -> None:
    """Empty a donated state, nested ones too: any later read raises `DonatedError`."""
    if isinstance(obj, tuple | list):
        for item in obj:
            consume(item)
    elif names := _field_names(obj.__class__):
        for name in names:
            consume(getattr(obj, name))
            object.__delattr__(obj, name)


def renew(obj: Any) -> Any:
    """A state that is consumed, as by `consume`, and made anew over the same tensors and statics: its next wrappers.

    Args: obj: frozen dataclasses and tuples, at any depth.
    """
    if isinstance(obj, tuple):
        items = [item if isinstance(item, Tensor) else renew(item) for item in obj]
        return type(obj)(*items) if hasattr(obj, "_fields") else tuple(items)
    names = _field_names(obj.__class__)
    if not names:
        return obj
    fresh = object.__new__(obj.__class__)
    for name in names:
        value = getattr(obj, name)
        object.__setattr__(fresh, name, value if isinstance(value, Tensor) else renew(value))
        object.__delattr__(obj, name)
    return fresh


@functools.cache
def _field_names(cls: type) -> tuple[str, ...]:
    """Of a dataclass; () for any other type."""
    return tuple(f.name for f in dataclasses.fields(cls)) if dataclasses.is_dataclass(cls) else ()


def is_live(obj: Any) -> bool:
    """Whether a state has not been consumed."""
    try:
        for name in _field_names(obj.__class__)[:1]:
            getattr(obj, name)
    except DonatedError:
        return False
    return True


def put(dest: Tensor, index: tuple[Tensor, ...], value: Tensor) -> Tensor:
    """`dest` with `dest[index] = value`, as a new tensor."""
    return dest.index_put(index, value.to(dest.dtype))


def put_(dest: Tensor, index: tuple[Tensor, ...], value: Tensor) -> Tensor:
    """`put` into `dest` itself: the write primitive of a step that owns its state."""
    return dest.index_put_(index, value.to(dest.dtype))


def bytes_equal(a: Any, b: Any) -> bool:
    """Whether two pytrees agree in structure, dtypes, shapes and every byte (so NaN equals itself).

    For tests, never inside a step: it waits for the device.
    """
    leaves_a, spec_a = pytree.tree_flatten(a)
    leaves_b, spec_b = pytree.tree_flatten(b)
    return spec_a == spec_b and all(_same_bytes(x, y) for x, y in zip(leaves_a, leaves_b, strict=True))


def _same_bytes(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return type(a) is type(b) and a == b
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))


def leaf_names(tree: Any) -> Sequence[str]:
    """The path of every leaf, in flattening order, as it is written in Python."""
    return [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]

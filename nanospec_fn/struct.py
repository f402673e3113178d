"""Immutable engine state: frozen dataclasses of tensors that are torch pytrees.

A `@state` class carries tensors, tuples of tensors and other states as children;
fields made with `static()` are hashable and travel in the pytree's context, so
that they take part in `tree_structure` equality (and thus in capture keys).
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from typing import Any, TypeVar, dataclass_transform

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

T = TypeVar("T")
MARK = "__nanospec_state__"  # of a `@state` class


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
    setattr(cls, MARK, True)
    made: Any = cls
    names, statics = _field_names(made)

    # Called only when the slot is empty, so a live state pays nothing for the check.
    def missing(self: Any, name: str) -> Any:
        if name in names or name in statics:
            raise DonatedError(
                f"{cls.__name__}.{name} was read after its state had been donated to a step; "
                "use the state that the step returned"
            )
        raise AttributeError(f"{cls.__name__!r} object has no attribute {name!r}")

    cls.__getattr__ = missing  # type: ignore[attr-defined]

    def flatten(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return children(obj), tuple(getattr(obj, n) for n in statics)

    def flatten_with_keys(obj: Any) -> tuple[list[Any], tuple[Any, ...]]:
        values, context = flatten(obj)
        return [(pytree.GetAttrKey(n), v) for n, v in zip(names, values, strict=True)], context

    def unflatten(values: Any, context: tuple[Any, ...]) -> Any:
        return cls(**dict(zip(names, values, strict=True)), **dict(zip(statics, context, strict=True)))

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
    """Empty a donated state, nested ones too: any later read raises `DonatedError`. Statics are only let go."""
    if isinstance(obj, tuple | list):
        for item in obj:
            consume(item)
    elif not pytree.tree_is_leaf(obj):
        names, statics = _field_names(obj.__class__)
        for name in names:
            consume(getattr(obj, name))
        for name in (*names, *statics):
            object.__delattr__(obj, name)


def is_state(value: Any) -> bool:
    """Whether a value is of a `@state` class."""
    return MARK in vars(type(value))


def is_plain_tuple(value: Any) -> bool:
    """Whether a value is a tuple or a named one, and not of another class of tuples."""
    return type(value) is tuple or (isinstance(value, tuple) and hasattr(value, "_fields"))


def children(state: Any) -> list[Any]:
    """The values of a state's fields but for statics."""
    return [getattr(state, name) for name in _field_names(state.__class__)[0]]


def renew(obj: Any) -> Any:
    """A state that is consumed, as by `consume`, and made anew over the same tensors and statics: its next wrappers.

    Args: obj: of `@state` classes, plain and named tuples, at any depth; whatever else it holds is shared.
    """
    if is_state(obj):
        names, statics = _field_names(obj.__class__)
        fresh = object.__new__(obj.__class__)
        for name in names:
            value = getattr(obj, name)
            object.__setattr__(fresh, name, value if isinstance(value, Tensor) else renew(value))
            object.__delattr__(obj, name)
        for name in statics:
            object.__setattr__(fresh, name, getattr(obj, name))
            object.__delattr__(obj, name)
        return fresh
    if is_plain_tuple(obj):
        items = [item if isinstance(item, Tensor) else renew(item) for item in obj]
        if all(map(operator.is_, items, obj)):
            return obj
        return tuple(items) if type(obj) is tuple else type(obj)(*items)
    return obj


@functools.cache
def _field_names(cls: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of a dataclass, children and statics; none for any other type."""
    fields = dataclasses.fields(cls) if dataclasses.is_dataclass(cls) else ()
    statics = tuple(f.name for f in fields if f.metadata.get("static"))
    return tuple(f.name for f in fields if f.name not in statics), statics


def is_live(obj: Any) -> bool:
    """Whether a state has not been consumed."""
    try:
        names, statics = _field_names(obj.__class__)
        if names or statics:
            getattr(obj, (names or statics)[0])
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

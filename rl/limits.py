"""What the fields of a trainer's config may hold. Every check raises a ValueError that begins with the field's name."""

import re
import types
import typing
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

MOST = 2**31 - 1


def check(
    config: Any,
    names: Mapping[str, Collection[str]],
    whole: Mapping[str, int],
    real: Mapping[str, tuple[float, float, bool]],
) -> None:
    """What each field alone shows to be wrong, and a model without a name."""
    check_types(config)
    check_names(config, names)
    check_whole(config, whole)
    check_real(config, real)
    if not config.model:
        raise ValueError("model is empty")


def check_types(config: Any) -> None:
    """Every field of a dataclass holds what its annotation says; True is no number, an int does for a float."""
    for name, kind in typing.get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not fits(value, kind):
            raise ValueError(f"{name} must be of type {getattr(kind, '__name__', kind)}, got {value!r}")


def fits(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotation's type: a class, a union, or a tuple of any length."""
    if isinstance(kind, types.UnionType):
        return any(fits(value, one) for one in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(fits(one, typing.get_args(kind)[0]) for one in value)
    if kind in (int, float):
        return isinstance(value, int | kind) and not isinstance(value, bool)
    return isinstance(value, kind)


def check_names(config: Any, known: Mapping[str, Collection[str]]) -> None:
    """Args: known: field -> its values."""
    for name, names in known.items():
        if getattr(config, name) not in names:
            raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(config, name)!r}")


def check_whole(config: Any, least: Mapping[str, int]) -> None:
    """Args: least: field -> the least integer that it may hold. None, where it is a field's value, passes."""
    for name, low in least.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= MOST:
            raise ValueError(f"{name} must be an integer from {low} to {MOST}, got {value!r}")


def check_real(config: Any, ranges: Mapping[str, tuple[float, float, bool]]) -> None:
    """Args: ranges: field -> as of `arguments.real`: the ends, and whether the lower one is a value too."""
    for name, (low, high, low_too) in ranges.items():
        value = getattr(config, name)
        if not (low < value <= high or (low_too and value == low)):  # refuses nan too
            least = f"at least {low:g}" if low_too else f"above {low:g}"
            raise ValueError(f"{name} must be a number {least} and at most {high:g}, got {value!r}")


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raise a ValueError that tells of other names again under the config's names for them."""
    try:
        yield
    except ValueError as error:
        text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], str(error))
        raise ValueError(text) from None

"""Strict JSON lines: frozen dataclasses that are read back as they were, and records for logs and reports.

What is read back has the types that the dataclass's fields are annotated with. Fields are numbers, strings, lists,
tuples, dataclasses, dicts of plain values, and any of these or None. Reading a float gives back the bits that were
written; minus infinity is null, and what else is not finite is refused.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

import torch

LARGEST = torch.finfo(torch.float32).max


def dump(record: Any) -> str:
    """A dataclass as one line. Errors: ValueError for a number that is neither finite nor minus infinity."""
    return json.dumps(_plain(record), allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and value == -math.inf else value


def to_line(record: Mapping[str, Any]) -> str:
    """A record for people and their scripts, in ASCII for any terminal's encoding, without the line's end.

    numpy's and torch's scalars and arrays are taken too; a number that is not finite becomes null.
    """
    return json.dumps(_finite(record), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if hasattr(value, "tolist"):  # numpy's and torch's
        return _finite(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def load(line: bytes, where: str) -> Any:
    """A line as JSON. Errors: ValueError that begins with `where`."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        return json.loads(line, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: {error}") from None


def parse(kind: Any, raw: Any, where: str) -> Any:
    """JSON as a value of an annotated type. Errors: ValueError that begins with `where` and names the field."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        kinds = [k for k in args if k is not types.NoneType]
        if raw is None and len(kinds) < len(args):
            return None
        kind = next((k for k in kinds if type(raw) is k), kinds[0])
        return parse(kind, raw, where)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        fields = {f.name: f.type for f in dataclasses.fields(kind)}
        if not isinstance(raw, dict) or raw.keys() != fields.keys():
            keys = raw.keys() ^ fields.keys() if isinstance(raw, dict) else {"an object"}
            raise ValueError(f"{where}: {kind.__name__} has missing or unknown keys: {', '.join(sorted(keys))}")
        return kind(**{name: parse(type_, raw[name], f"{where}: {name}") for name, type_ in fields.items()})
    if origin in (list, tuple) and isinstance(raw, list):
        return origin(parse(args[0], item, where) for item in raw)
    if origin is dict and isinstance(raw, dict):
        return {key: parse(args[1], item, where) for key, item in raw.items()}
    if kind is float and raw is None:
        return -math.inf
    if kind is float and type(raw) in (int, float):
        if not abs(raw) <= LARGEST:  # JSON reads 1e400 as plus infinity
            raise ValueError(f"{where}: {raw!r} is not a finite number of fp32")
        return float(raw)
    if type(raw) is not kind:
        raise ValueError(f"{where}: {raw!r} is not of type {getattr(kind, '__name__', kind)}")
    return raw

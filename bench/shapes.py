"""Shapes to embed a small Llama in: which there are, whether it fits, and the config and layers of the wide model.

wide.py makes the weights.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from nanospec_fn import checkpoint, config, files, kernels, model

C = TypeVar("C", bound=model.Config)


@dataclass(frozen=True)
class Shape:
    """What a forward pass costs."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int = 32000  # of the public EAGLE-3 heads


SHAPES = {
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128, 128256),
    "1b-class": Shape(2048, 5632, 32, 16, 4, 128, 65536),  # no public model: deep enough for SmolLM2's 30 layers
}


def find_shape(like: str) -> Shape:
    """A shape by name, or that of a config.json (or of the folder that holds one).

    Errors: ValueError or FileNotFoundError naming what is wrong.
    """
    if like in SHAPES:
        return SHAPES[like]
    path = Path(like).expanduser()
    path = path / "config.json" if files.is_folder(path) else path
    if path.suffix != ".json":
        raise ValueError(f"like must be one of {', '.join(SHAPES)}, or a config.json, got {files.short(repr(like))}")
    cfg = config.parse(checkpoint.read_json(path), path)
    sizes = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(Shape) if hasattr(cfg, f.name)}
    return Shape(**sizes, draft_vocab_size=min(Shape.draft_vocab_size, cfg.vocab_size // 4))


def check(small: model.Config, shape: Shape, what: str = "the model") -> None:
    """Errors: ValueError naming the first size in which the small model does not fit the shape."""
    for name, spare in (("hidden_size", 1), ("intermediate_size", 0), ("num_kv_heads", 0), ("vocab_size", 0)):
        if getattr(small, name) + spare > getattr(shape, name):
            more = " and one channel more" if spare else ""
            raise ValueError(
                f"{name}: {what} has {getattr(small, name)}{more}, which does not fit {getattr(shape, name)}"
            )
    group, wide_group = small.num_heads // small.num_kv_heads, shape.num_heads // shape.num_kv_heads
    if group > wide_group:
        raise ValueError(f"num_heads: {what} has {group} to a KV head, the shape {wide_group}")
    if shape.head_dim % small.head_dim:
        raise ValueError(f"head_dim: {shape.head_dim} is not a multiple of the {small.head_dim} of {what}")


def constant(cfg: model.Config) -> float:
    """The constant channel's value c, a power of two with c^2 at most 1/64 of e * eps."""
    bound, c = cfg.hidden_size * cfg.rms_eps / 64, 1.0
    while c * c > bound:
        c /= 2
    return c


def wide_config(cfg: C, shape: Shape, c: float, device: torch.device, dtype: torch.dtype) -> C:
    """The wide model's config. (S + c^2) / E + eps' = (e / E) * (S / e + eps), S the live channels' sum of squares.

    Errors: ValueError where the constant channel outweighs eps.
    """
    eps = (cfg.hidden_size * cfg.rms_eps - c * c) / shape.hidden_size
    if eps <= 0:
        raise ValueError(f"rms_norm_eps {cfg.rms_eps} is too small beside a constant channel of {c}")
    sizes = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape) if f.name != "draft_vocab_size"}
    gemm, bmm = kernels.pick_gemm(device, dtype), kernels.pick_bmm(device, dtype)
    return dataclasses.replace(cfg, **sizes, rms_eps=eps, tied=False, gemm=gemm, bmm=bmm)


def layer_order(layers: int, wide_layers: int) -> tuple[int | None, ...]:
    """Which small layer each wide one is, None for an added identity.

    Added ones stand before the small model's default taps, so that the wide model's default taps see the same streams.
    """
    middle, late = layers // 2, max(layers - 3, layers // 2)
    first = min(wide_layers // 2 - middle, wide_layers - layers)
    before = {middle: first}
    before[late] = before.get(late, 0) + wide_layers - layers - first
    order: list[int | None] = []
    for i in range(layers):
        order += [None] * before.get(i, 0) + [i]
    return tuple(order)

"""AdamW as a pure (init, update) pair over a pytree of fp32 weights, with a learning-rate schedule and clipping."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import struct


@struct.state
class AdamState:
    """What AdamW carries."""

    mean: Any  # like the weights: the running mean of the gradients
    square: Any  # like the weights: the running mean of their squares
    count: Tensor  # [] int64, updates made


class Optimizer(NamedTuple):
    """init(params) -> state; update(grads, state, params) -> params, state, gradient norm [] before clipping."""

    init: Callable[[Any], AdamState]
    update: Callable[[Any, AdamState, Any], tuple[Any, AdamState, Tensor]]


def warmup_cosine(peak: float, steps: int, warmup: int, floor: float = 0.02) -> Callable[[Tensor], Tensor]:
    """count [] -> learning rate []: linear to `peak` over `warmup` updates, a cosine to floor * peak at `steps`."""

    def schedule(count: Tensor) -> Tensor:
        t = count.double()
        done = ((t - warmup) / max(1, steps - warmup)).clamp(0, 1)
        fall = floor + (1 - floor) * (1 + torch.cos(math.pi * done)) / 2
        return peak * torch.minimum((t + 1) / max(1, warmup), fall)

    return schedule


def adamw(
    schedule: Callable[[Tensor], Tensor],
    decay: float = 0.0,
    clip: float = 1.0,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
) -> Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on gradients clipped to the norm `clip`.

    Args: schedule: updates made so far -> learning rate; decay: of matrices, vectors are left alone.
    """
    b1, b2 = betas

    def init(params: Any) -> AdamState:
        zeros = pytree.tree_map(torch.zeros_like, params)
        count = torch.zeros((), dtype=torch.int64, device=pytree.tree_leaves(params)[0].device)
        return AdamState(mean=zeros, square=pytree.tree_map(torch.zeros_like, params), count=count)

    def update(grads: Any, adam: AdamState, params: Any) -> tuple[Any, AdamState, Tensor]:
        norm = torch.stack([g.double().square().sum() for g in pytree.tree_leaves(grads)]).sum().sqrt()
        scale = (clip / norm.clamp_min(clip)).float()
        grads = pytree.tree_map(lambda g: g * scale, grads)
        mean = pytree.tree_map(lambda m, g: b1 * m + (1 - b1) * g, adam.mean, grads)
        square = pytree.tree_map(lambda v, g: b2 * v + (1 - b2) * g.square(), adam.square, grads)
        count = adam.count + 1
        rate = schedule(adam.count)
        unbias1, unbias2 = 1 - b1 ** count.double(), 1 - b2 ** count.double()
        step = (rate / unbias1).float()

        def move(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            shrunk = p * (1 - rate.float() * decay) if p.dim() > 1 and decay else p
            return shrunk - step * m / ((v / unbias2.float()).sqrt() + eps)

        return pytree.tree_map(move, params, mean, square), AdamState(mean=mean, square=square, count=count), norm

    return Optimizer(init, update)

"""The Triton kernels as differentiable functions: forward is the kernel, backward the library's.

Shapes as in cpu.py, whose functions these stand in for.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from nanospec_fn.kernels import attend, gemm, rows, vocab


class _Kernel(torch.autograd.Function):
    """A kernel, and the torch function of the same tensors whose gradient is its own.

    All tensors are arguments, the last `constants` of them without a gradient: what a kernel closed over would reach
    it as the wrapper of a function transform, which has no memory to read.
    """

    @staticmethod
    def forward(
        kernel: Callable[..., Tensor], reference: Callable[..., Tensor], constants: int, *inputs: Tensor
    ) -> Tensor:
        return kernel(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.reference, ctx.constants = inputs[1:3]
        ctx.save_for_backward(*inputs[3:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        n = len(ctx.saved_tensors) - ctx.constants
        fixed = ctx.saved_tensors[n:]
        pull = torch.func.vjp(lambda *inputs: ctx.reference(*inputs, *fixed), *ctx.saved_tensors[:n])[1]
        return None, None, None, *pull(grad), *([None] * ctx.constants)


class _Angles(torch.autograd.Function):
    """`rows.angles`, which nothing is differentiated through."""

    @staticmethod
    def forward(position: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
        return rows.angles(position, freq)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[None, None]:
        return None, None


class _Linear(torch.autograd.Function):
    """`_Kernel` for a product, without computing it a second time."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, dtype: torch.dtype | None) -> Tensor:
        return gemm.linear(x, w, dtype=dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, w = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ w, grad.t() @ x, None


def _run(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor, constants: int = 0
) -> Tensor:
    return _Kernel.apply(kernel, reference, constants, *inputs) if torch.is_grad_enabled() else kernel(*inputs)


def linear(x: Tensor, w: Tensor, residual: Tensor | None, dtype: torch.dtype | None) -> Tensor:
    """See `kernels.linear`. The residual is fused where nothing is differentiated; its rounding is the same."""
    if not torch.is_grad_enabled():
        return gemm.linear(x, w, residual, dtype)
    y = _Linear.apply(x, w, dtype)
    return y if residual is None else residual + y


def linear_silu_mul(x: Tensor, w: Tensor) -> Tensor:
    """See `kernels.linear_silu_mul`. Fused where nothing is differentiated."""
    if not torch.is_grad_enabled():
        return gemm.linear(x, w, gated=True)
    return silu_mul(_Linear.apply(x, w, None))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    def reference(x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)

    return _run(partial(rows.rms_norm, eps=eps), reference, x, weight)


def silu_mul(gate_up: Tensor) -> Tensor:
    def reference(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    return _run(rows.silu_mul, reference, gate_up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, dim=-1)
        c, s = cos[:, None], sin[:, None]
        return torch.cat((a * c - b * s, b * c + a * s), dim=-1).to(x.dtype)

    return _run(rows.rope, reference, x, cos, sin, constants=2)


def angles(position: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    return _Angles.apply(position, freq) if torch.is_grad_enabled() else rows.angles(position, freq)


def log_sum_exp(x: Tensor) -> Tensor:
    return _run(vocab.log_sum_exp, partial(torch.logsumexp, dim=-1), x)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, b: int) -> Tensor:
    """Attention of b whole sequences: q [b * T, H, D], k, v [b * T, K, D] -> [b * T, H, D]; `attend.attend`'s bits."""

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, (b, -1)).transpose(1, 2) for x in (q, k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(0, 1)

    return _run(partial(_causal, b=b), reference, q, k, v)


def _causal(q: Tensor, k: Tensor, v: Tensor, b: int) -> Tensor:
    t, size = len(q) // b, attend.BLOCK
    pages = -(-t // size)
    k, v = (functional.pad(x.unflatten(0, (b, t)), (0, 0, 0, 0, 0, pages * size - t)) for x in (k, v))
    # A pool [P, 2, S, K, D] in all but the order in memory; page i is the i-th `size` positions.
    pool = torch.stack((k, v)).view(2, b * pages, size, *k.shape[2:]).transpose(0, 1)
    table = torch.arange(b * pages, dtype=torch.int32, device=q.device).view(b, pages)
    position = torch.arange(t, dtype=torch.int32, device=q.device).repeat(b, 1)
    return attend.attend(pool, q, position, table)

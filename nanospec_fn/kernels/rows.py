"""Row-wise functions on a GPU, in Triton: one program per row, its block fixed by the row's width alone.

Fused multiply-add is off in all of them: whether a compiler contracts a * b + c may differ between two kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm(x, weight, out, E, eps, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    wide = tl.load(x + row * E + i, mask=i < E, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    y = (wide * scale).to(out.dtype.element_ty).to(tl.float32) * tl.load(weight + i, mask=i < E, other=0).to(tl.float32)
    tl.store(out + row * E + i, y.to(out.dtype.element_ty), mask=i < E)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, E] normalised per row in fp32, rounded, times weight [E]."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    n, e = x.shape
    width = triton.next_power_of_2(e)
    if n:
        _rms_norm[(n,)](
            x, weight, out, e, eps, WIDTH=width, num_warps=min(16, max(1, width // 512)), enable_fp_fusion=False
        )
    return out


@triton.jit
def _silu_mul(gate_up, out, size, WIDTH: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(gate_up + row * 2 * size + i, mask=i < size, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * size + size + i, mask=i < size, other=0).to(tl.float32)
    act = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * size + i, (act * up).to(out.dtype.element_ty), mask=i < size)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2I] -> silu(gate), rounded, * up: [n, I]."""
    gate_up = gate_up.contiguous()
    n, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, width, dtype=gate_up.dtype, device=gate_up.device)
    if n:
        grid = (triton.cdiv(width, 1024), n)
        _silu_mul[grid](gate_up, out, width, WIDTH=1024, num_warps=4, enable_fp_fusion=False)
    return out


@triton.jit
def _rope(
    x,
    cos,
    sin,
    out,
    row_stride,
    head_stride,
    HALF,
    HEADS,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, WIDTH)
    mask = (head[:, None] < HEADS) & (i[None, :] < HALF)
    at = x + row * row_stride + head[:, None] * head_stride + i[None, :]
    a, b = tl.load(at, mask=mask).to(tl.float32), tl.load(at + HALF, mask=mask).to(tl.float32)
    c = tl.load(cos + row * HALF + i, mask=i < HALF)[None, :]
    s = tl.load(sin + row * HALF + i, mask=i < HALF)[None, :]
    to = out + (row * HEADS + head[:, None]) * 2 * HALF + i[None, :]
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=mask)
    tl.store(to + HALF, (b * c + a * s).to(out.dtype.element_ty), mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, D] (last dimension dense) by cos, sin [n, D/2] fp32, in fp32; pair i is (i, i + D/2)."""
    n, heads, d = x.shape
    x = x if x.stride(2) == 1 else x.contiguous()
    out = torch.empty(n, heads, d, dtype=x.dtype, device=x.device)
    if n:
        width = triton.next_power_of_2(d // 2)
        block = min(8, triton.next_power_of_2(heads))
        _rope[(n, triton.cdiv(heads, block))](
            x, cos.contiguous(), sin.contiguous(), out, x.stride(0), x.stride(1), d // 2, heads,
            WIDTH=width, BLOCK=block, num_warps=2, enable_fp_fusion=False,
        )  # fmt: skip
    return out

"""Row-wise functions on a GPU, in Triton: one program per row, its block fixed by the row's width alone.

Fused multiply-add is off in all of them: whether a compiler contracts a * b + c may differ between two kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDE = 4096  # elements of a row that a program holds at once


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
def _silu_mul(gate_up, out, I, WIDTH: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    gate = tl.load(gate_up + row * 2 * I + i, mask=i < I, other=0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * I + I + i, mask=i < I, other=0).to(tl.float32)
    act = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * I + i, (act * up).to(out.dtype.element_ty), mask=i < I)


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
def _rope(x, cos, sin, out, row_stride, head_stride, HALF, HEADS, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
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


@triton.jit
def _log_sum_exp(x, out, V, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    top = tl.full((WIDTH,), -float("inf"), tl.float32)
    for start in range(0, V, WIDTH):
        top = tl.maximum(top, tl.load(x + row * V + start + i, mask=start + i < V, other=-float("inf")))
    peak = tl.max(top, 0)
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, V, WIDTH):
        total += tl.exp(tl.load(x + row * V + start + i, mask=start + i < V, other=-float("inf")) - safe)
    tl.store(out + row, safe + tl.log(tl.sum(total, 0)))


def log_sum_exp(x: Tensor) -> Tensor:
    """x [n, V] fp32 -> [n], -inf for a row of nothing else."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    if x.shape[0]:
        _log_sum_exp[(x.shape[0],)](
            x.contiguous(), out, x.shape[1], WIDTH=WIDE, num_warps=8, enable_fp_fusion=False
        )
    return out

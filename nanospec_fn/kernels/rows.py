"""Row-wise functions on a GPU, in Triton: one program per row, its block fixed by the row's width alone.

Fused multiply-add is off in all of them: whether a compiler contracts a * b + c may differ between two kernels.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn.kernels.dependent import enter, launch_options


@triton.jit
def _normed(x, weight, E, eps, dtype: tl.constexpr, WIDTH: tl.constexpr):
    """The row at x, normalised in fp32, rounded, times weight."""
    i = tl.arange(0, WIDTH)
    wide = tl.load(x + i, mask=i < E, other=0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / E + eps)
    y = (wide * scale).to(dtype).to(tl.float32) * tl.load(weight + i, mask=i < E, other=0).to(tl.float32)
    return y.to(dtype)


@triton.jit
def _rms_norm(x, weight, out, E, eps, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    y = _normed(x + row * E, weight, E, eps, out.dtype.element_ty, WIDTH)
    tl.store(out + row * E + i, y, mask=i < E)


def _norm_launch(e: int, device: torch.device) -> dict[str, Any]:
    width = triton.next_power_of_2(e)
    warps = min(16, max(1, width // 512))
    return {"WIDTH": width, "num_warps": warps, "enable_fp_fusion": False, **launch_options(device)}


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, E] normalised per row in fp32, rounded, times weight [E]."""
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    n, e = x.shape
    if n:
        _rms_norm[(n,)](x, weight, out, e, eps, **_norm_launch(e, x.device))
    return out


@triton.jit
def _embed_beside(table, token, table_weight, x, x_weight, out, E, eps, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    to = out + (row * 2 + tl.program_id(1)) * E + i
    if tl.program_id(1) == 0:
        at = table + tl.load(token + row).to(tl.int64) * E
        tl.store(to, _normed(at, table_weight, E, eps, out.dtype.element_ty, WIDTH), mask=i < E)
    else:
        tl.store(to, _normed(x + row * E, x_weight, E, eps, out.dtype.element_ty, WIDTH), mask=i < E)


def embed_beside(table: Tensor, token: Tensor, table_weight: Tensor, x: Tensor, x_weight: Tensor, eps: float) -> Tensor:
    """See `kernels.embed_beside`: the halves have `rms_norm`'s bits."""
    x = x.contiguous()
    n, e = x.shape
    out = torch.empty(n, 2 * e, dtype=x.dtype, device=x.device)
    if n:
        launch = _norm_launch(e, x.device)
        _embed_beside[(n, 2)](table, token.contiguous(), table_weight, x, x_weight, out, e, eps, **launch)
    return out


@triton.jit
def _silu_mul(gate_up, out, size, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
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
        _silu_mul[(n, triton.cdiv(width, 1024))](gate_up, out, width, WIDTH=1024, num_warps=4, enable_fp_fusion=False)
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
    at = x + row * row_stride + head[:, None].to(tl.int64) * head_stride + i[None, :]
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
def _angles(position, freq, cos, sin, HALF, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    enter(DEPENDENT)
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    phase = tl.load(position + row).to(tl.float32) * tl.load(freq + i, mask=i < HALF, other=0)
    tl.store(cos + row * HALF + i, tl.cos(phase), mask=i < HALF)
    tl.store(sin + row * HALF + i, tl.sin(phase), mask=i < HALF)


def angles(position: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [n, D/2] fp32 of position [n] times freq [D/2] fp32."""
    n, half = len(position), len(freq)
    cos, sin = torch.empty(2, n, half, dtype=torch.float32, device=position.device)
    if n:
        _angles[(n,)](
            position.contiguous(), freq, cos, sin, half,
            WIDTH=triton.next_power_of_2(half), num_warps=1, enable_fp_fusion=False, **launch_options(position.device),
        )  # fmt: skip
    return cos, sin


@triton.jit
def _rows_at(x, row, out, R, M, F, WIDTH: tl.constexpr, DEPENDENT: tl.constexpr):
    enter(DEPENDENT)
    at, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source = at // M * R + tl.load(row + at)
    tl.store(out + at * F + i, tl.load(x + source * F + i, mask=i < F), mask=i < F)


def rows_at(x: Tensor, row: Tensor) -> Tensor:
    """x [B, R, F], row [B, m] -> [B, m, F]."""
    x, row = x.contiguous(), row.contiguous()
    b, r, f = x.shape
    m = row.shape[1]
    out = torch.empty(b, m, f, dtype=x.dtype, device=x.device)
    if out.numel():
        launch = {"WIDTH": 1024, "num_warps": 4, **launch_options(x.device)}
        _rows_at[(b * m, triton.cdiv(f, 1024))](x, row, out, r, m, f, **launch)
    return out


@triton.jit
def _keep_path(x, path, live, old, out, R, D, W, F, WIDTH: tl.constexpr):
    at, i = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    slot, w = at // W, at % W + i * 0
    if tl.load(live + slot):
        node = tl.load(path + slot * D + w - 1, mask=(w > 0) & (w <= D), other=-1)
        value = tl.load(x + (slot * R + node + 1) * F + i, mask=(i < F) & (w <= D), other=0)
    else:
        value = tl.load(old + at * F + i, mask=i < F)
    tl.store(out + at * F + i, value, mask=i < F)


def keep_path(x: Tensor, path: Tensor, live: Tensor, old: Tensor) -> Tensor:
    """See `draft.observe`: x [B, R, F] at the root and along path [B, D], old [B, W, F] where not live [B]."""
    out = torch.empty_like(old, memory_format=torch.contiguous_format)
    b, w, f = old.shape
    if old.numel():
        _keep_path[(b * w, triton.cdiv(f, 1024))](
            x.contiguous(), path.contiguous(), live, old.contiguous(), out, x.shape[1], path.shape[1], w, f,
            WIDTH=1024, num_warps=4,
        )  # fmt: skip
    return out

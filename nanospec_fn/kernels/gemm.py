"""Row-canonical matrix product on a GPU, in Triton.

K is walked from 0 in order, one fp32 accumulator per output, no split; the sum is rounded once. The tensor core adds 16
products at a time whatever the tile, so a row's bits depend neither on the tile's shape nor on which operand is the
wide one (measured: docs/performance.md, tests/gpu/test_kernels.py). So the launch below is free to follow n.

Shapes: n rows, K / N inner and outer width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    """A launch's shape: rows, columns and depth of a program's tile, and how it runs."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int


@triton.jit
def _store(out, residual, acc, at, mask, ADD: tl.constexpr):
    y = acc.to(out.dtype.element_ty)
    if ADD:  # rounded before it is added, as an unfused sum would be
        y = (y.to(tl.float32) + tl.load(residual + at, mask=mask, other=0).to(tl.float32)).to(y.dtype)
    tl.store(out + at, y, mask=mask)


@triton.jit(do_not_specialize=["n"])  # a lone row would get another, slower kernel
def _few_rows(
    x, w, out, residual, n, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out^T = w @ x^T: the weights are the wide operand, so that few rows waste little of an instruction."""
    row_tiles = tl.cdiv(n, ROWS)  # neighbours share a tile of the weights
    col = tl.program_id(0) // row_tiles * COLS + tl.arange(0, COLS)
    row = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, DEPTH)
    w_at = w + (col % N).to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + row[None, :] * K + k[:, None]
    here = row[None, :] < n  # masked and not wrapped: a lone row read 16 times by every program is a hot spot
    acc = tl.zeros((COLS, ROWS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN:
            a, b = tl.load(w_at), tl.load(x_at, mask=here, other=0)
        else:
            a = tl.load(w_at, mask=k[None, :] < K - start, other=0)
            b = tl.load(x_at, mask=here & (k[:, None] < K - start), other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        w_at += DEPTH
        x_at += DEPTH
    at = row[None, :] * N + col[:, None]
    _store(out, residual, acc, at, (row[None, :] < n) & (col[:, None] < N), ADD)


@triton.jit(do_not_specialize=["n"])
def _many_rows(
    x, w, out, residual, n, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """out = x @ w^T in square-ish tiles; programs run in groups of 8 row tiles, so that both operands stay in L2."""
    row_tiles, col_tiles = tl.cdiv(n, ROWS), tl.cdiv(N, COLS)
    group = tl.program_id(0) // (8 * col_tiles)
    size = min(row_tiles - group * 8, 8)
    within = tl.program_id(0) % (8 * col_tiles)
    row = ((group * 8 + within % size) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    col = within // size * COLS + tl.arange(0, COLS)
    k = tl.arange(0, DEPTH)
    x_at = x + (row % n)[:, None] * K + k[None, :]
    w_at = w + (col % N).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        if EVEN:
            a, b = tl.load(x_at), tl.load(w_at)
        else:
            a = tl.load(x_at, mask=k[None, :] < K - start, other=0)
            b = tl.load(w_at, mask=k[:, None] < K - start, other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    at = row[:, None] * N + col[None, :]
    _store(out, residual, acc, at, (row[:, None] < n) & (col[None, :] < N), ADD)


def pick_tile(n: int, outer: int) -> Tile:
    """The launch for x [n, K] @ w [outer, K]^T; of no consequence for the bits.

    Source: swept on an H200 over the shapes of Llama-3.1-8B (docs/performance.md).
    """
    narrow, many = outer <= 4096, outer >= 16384
    if n > 256:
        return Tile(128, 256, 64, 8, 3)
    if n > 64:
        return Tile(64, 128, 64, 4, 5) if narrow else Tile(128, 128, 64, 4, 4)
    if n > 32 and many:
        return Tile(64, 128, 64, 8, 5)
    rows = 16 if n <= 16 else 32 if n <= 32 or narrow else 64
    return Tile(rows, 64, 128, 4, 4 if many else 5)


def linear(
    x: Tensor, w: Tensor, residual: Tensor | None = None, dtype: torch.dtype | None = None, tile: Tile | None = None
) -> Tensor:
    """x [n, K] @ w [N, K]^T (+ residual [n, N], added after the product is rounded) -> [n, N] in `dtype`, or x's.

    A tile of 64 rows or fewer runs with the weights as the wide operand.
    """
    n, inner = x.shape
    outer = w.shape[0]
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty(n, outer, dtype=dtype or x.dtype, device=x.device)
    if not n:
        return out
    tile = tile or pick_tile(n, outer)
    if x.dtype == torch.float32:  # twice the bytes, and no tensor core: small tiles
        tile = Tile(16, 32, 32, 4, 2) if n <= 64 else Tile(64, 64, 32, 4, 2)
    kernel = _few_rows if tile.rows <= 64 and x.dtype != torch.float32 else _many_rows
    grid = (triton.cdiv(n, tile.rows) * triton.cdiv(outer, tile.cols),)
    kernel[grid](
        x, w, out, out if residual is None else residual.contiguous(), n, outer, inner,
        ROWS=tile.rows, COLS=tile.cols, DEPTH=tile.depth, EVEN=inner % tile.depth == 0, ADD=residual is not None,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out

"""Row-canonical matrix product on a GPU, in Triton.

K is walked from 0 in order, one fp32 accumulator per output, no split; the sum is rounded once. The tensor core adds 16
products at a time whatever the tile, so a row's bits depend neither on the tile's shape nor on which operand is the
wide one (measured: docs/performance.md, tests/gpu/test_linear.py). So the launch below is free to follow n.

Shapes: n rows, K / N inner and outer width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nanospec_fn.kernels.dependent import launch_options, release, wait
from nanospec_fn.kernels.launches import Tile, pick_tile


@triton.jit
def _column(tile, N, COLS: tl.constexpr, PAIR: tl.constexpr):
    """The rows of w that a tile of the result needs; with PAIR gate and up in turn, each of N."""
    lane = tl.arange(0, COLS)
    if PAIR:
        return (tile * (COLS // 2) + lane // 2) % N + lane % 2 * N
    return (tile * COLS + lane) % N


@triton.jit
def _store(out, residual, acc, row, n, col, N, ADD: tl.constexpr, PAIR: tl.constexpr):
    """acc [rows, cols], or with PAIR [rows, cols, 2] of gate and up, -> out."""
    dtype = out.dtype.element_ty
    if PAIR:  # rounded where an unfused `rows.silu_mul` would
        gate, up = tl.split(acc)
        gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
        y = ((gate / (1 + tl.exp(-gate))).to(dtype).to(tl.float32) * up).to(dtype)
    else:
        y = acc.to(dtype)
    at = row[:, None] * N + col[None, :]
    mask = (row[:, None] < n) & (col[None, :] < N)
    if ADD:  # rounded before it is added, as an unfused sum would be
        y = (y.to(tl.float32) + tl.load(residual + at, mask=mask, other=0).to(tl.float32)).to(dtype)
    tl.store(out + at, y, mask=mask)


@triton.jit(do_not_specialize=["n"])  # a lone row would get another, slower kernel
def _few_rows(
    x, w, out, residual, n, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr,
    PAIR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out^T = w @ x^T: the weights are the wide operand, so that few rows waste little of an instruction."""
    row_tiles = tl.cdiv(n, ROWS)  # neighbours share a tile of the weights
    col_tile = tl.program_id(0) // row_tiles
    row = (tl.program_id(0) % row_tiles * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, DEPTH)
    w_at = w + _column(col_tile, N, COLS, PAIR).to(tl.int64)[:, None] * K + k[None, :]
    x_at = x + row[None, :] * K + k[:, None]
    here = row[None, :] < n  # masked and not wrapped: a lone row read 16 times by every program is a hot spot
    acc = tl.zeros((COLS, ROWS), dtype=tl.float32)
    wait(DEPENDENT)
    for start in range(0, K, DEPTH):
        if EVEN:
            a, b = tl.load(w_at), tl.load(x_at, mask=here, other=0)
        else:
            a = tl.load(w_at, mask=k[None, :] < K - start, other=0)
            b = tl.load(x_at, mask=here & (k[:, None] < K - start), other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        w_at += DEPTH
        x_at += DEPTH
    release(DEPENDENT)
    if PAIR:
        pairs = tl.permute(tl.reshape(acc, (COLS // 2, 2, ROWS)), (2, 0, 1))
        _store(out, residual, pairs, row, n, col_tile * (COLS // 2) + tl.arange(0, COLS // 2), N, ADD, PAIR)
    else:
        _store(out, residual, tl.trans(acc), row, n, col_tile * COLS + tl.arange(0, COLS), N, ADD, PAIR)


@triton.jit
def _place(tile, row_tiles, col_tiles):
    """Row and column tile of a place in the order of work: groups of 8 row tiles, for both operands to stay in L2."""
    group = tile // (8 * col_tiles)
    size = min(row_tiles - group * 8, 8)
    within = tile % (8 * col_tiles)
    return group * 8 + within % size, within // size


@triton.jit
def _store_wide(
    out, residual, acc, first, col_tile, n, N,
    ROWS: tl.constexpr, COLS: tl.constexpr, ADD: tl.constexpr, PAIR: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, COLS], or with PAIR [ROWS, COLS / 2, 2], -> out; first: the row of out that acc[0] is."""
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    WIDTH: tl.constexpr = COLS // 2 if PAIR else COLS
    _store(out, residual, acc, row, n, col_tile * WIDTH + tl.arange(0, WIDTH), N, ADD, PAIR)


@triton.jit(do_not_specialize=["n"])
def _many_rows(
    x, w, out, residual, n, N, K,
    ROWS: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr,
    PAIR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = x @ w^T in square-ish tiles."""
    row_tile, col_tile = _place(tl.program_id(0), tl.cdiv(n, ROWS), tl.cdiv(N, COLS // 2 if PAIR else COLS))
    row = (row_tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    k = tl.arange(0, DEPTH)
    x_at = x + (row % n)[:, None] * K + k[None, :]
    w_at = w + _column(col_tile, N, COLS, PAIR).to(tl.int64)[None, :] * K + k[:, None]
    acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
    wait(DEPENDENT)
    for start in range(0, K, DEPTH):
        if EVEN:
            a, b = tl.load(x_at), tl.load(w_at)
        else:
            a = tl.load(x_at, mask=k[None, :] < K - start, other=0)
            b = tl.load(w_at, mask=k[:, None] < K - start, other=0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        x_at += DEPTH
        w_at += DEPTH
    release(DEPENDENT)
    if PAIR:
        acc = tl.reshape(acc, (ROWS, COLS // 2, 2))
    _store_wide(out, residual, acc, row_tile * ROWS, col_tile, n, N, ROWS, COLS, ADD, PAIR)


@triton.jit
def _pairs(acc, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS], gate's columns before up's -> [ROWS, COLS / 2, 2]."""
    return tl.permute(tl.reshape(acc, (ROWS, 2, COLS // 2)), (0, 2, 1))


@triton.jit(do_not_specialize=["n"])
def _many_rows_copied(
    x, x_more, w, out, residual, n, N, K,
    ROWS: tl.constexpr, MORE: tl.constexpr, COLS: tl.constexpr, DEPTH: tl.constexpr, OVERLAP: tl.constexpr,
    ADD: tl.constexpr, PAIR: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """`_many_rows` with both operands behind descriptors, for the copy engine; programs take tiles one after another.

    x, x_more: descriptors of [n, K], tiles [ROWS, DEPTH] and [MORE, DEPTH], the second not used where MORE is 0;
    w: of [N, K], tiles [COLS, DEPTH], or with PAIR of [2, N, K], tiles [2, COLS / 2, DEPTH]. What is past an edge reads
    as zero, which adds nothing. A tile has ROWS + MORE rows, in a dot each.
    """
    row_tiles, col_tiles = tl.cdiv(n, ROWS + MORE), tl.cdiv(N, COLS // 2 if PAIR else COLS)
    wait(DEPENDENT)
    for tile in tl.range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0), flatten=OVERLAP):
        row_tile, col_tile = _place(tile, row_tiles, col_tiles)
        first = row_tile * (ROWS + MORE)
        acc = tl.zeros((ROWS, COLS), dtype=tl.float32)
        if MORE:
            acc_more = tl.zeros((MORE, COLS), dtype=tl.float32)
        for start in range(0, K, DEPTH):
            if PAIR:
                b = tl.reshape(w.load([0, col_tile * (COLS // 2), start]), (COLS, DEPTH))
            else:
                b = w.load([col_tile * COLS, start])
            acc = tl.dot(x.load([first, start]), tl.trans(b), acc, input_precision="ieee")
            if MORE:
                acc_more = tl.dot(x_more.load([first + ROWS, start]), tl.trans(b), acc_more, input_precision="ieee")
        if PAIR:
            acc = _pairs(acc, ROWS, COLS)
        _store_wide(out, residual, acc, first, col_tile, n, N, ROWS, COLS, ADD, PAIR)
        if MORE:
            if PAIR:
                acc_more = _pairs(acc_more, MORE, COLS)
            _store_wide(out, residual, acc_more, first + ROWS, col_tile, n, N, MORE, COLS, ADD, PAIR)
    release(DEPENDENT)


def linear(
    x: Tensor,
    w: Tensor,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
    tile: Tile | None = None,
    gated: bool = False,
) -> Tensor:
    """x [n, K] @ w [N, K]^T (+ residual [n, N], added after the product is rounded) -> [n, N] in `dtype`, or x's.

    Args:
      dtype: of the result; None: x's.
      tile: None: `pick_tile`'s. "tma" needs K to be a multiple of 16 bytes, else threads copy and `more` does not
        count. `overlap` holds for results of 2 bytes: wider ones leave no room for the next tile's operands.
      gated: `rows.silu_mul` of the product, with its bits: w [2N, K] gives [n, N].
    """
    n, inner = x.shape
    outer = w.shape[0] // 2 if gated else w.shape[0]
    x, w = x.contiguous(), w.contiguous()
    out = torch.empty(n, outer, dtype=dtype or x.dtype, device=x.device)
    if not n:
        return out
    tile = tile or pick_tile(n, w.shape[0], inner, x.dtype)
    copied = tile.copies == "tma" and inner * x.element_size() % 16 == 0
    more = tile.more if copied else 0
    tiles = triton.cdiv(n, tile.rows + more) * triton.cdiv(outer, tile.cols // 2 if gated else tile.cols)
    result = (out, out if residual is None else residual.contiguous(), n, outer, inner)
    launch = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False, **launch_options(x.device)}
    shape = {"ROWS": tile.rows, "COLS": tile.cols, "DEPTH": tile.depth, "ADD": residual is not None, "PAIR": gated}
    if copied:
        x_tiles = TensorDescriptor.from_tensor(x, [tile.rows, tile.depth])
        x_more = TensorDescriptor.from_tensor(x, [more, tile.depth]) if more else x_tiles
        w_shape = [2, tile.cols // 2, tile.depth] if gated else [tile.cols, tile.depth]
        w_tiles = TensorDescriptor.from_tensor(w.view(2, outer, inner) if gated else w, w_shape)
        grid = (min(tiles, tile.programs or tiles),)
        overlap = tile.overlap and out.element_size() == 2
        _many_rows_copied[grid](x_tiles, x_more, w_tiles, *result, MORE=more, OVERLAP=overlap, **shape, **launch)
        return out
    kernel = _few_rows if tile.rows <= 64 and x.dtype != torch.float32 else _many_rows
    kernel[(tiles,)](x, w, *result, EVEN=inner % tile.depth == 0, **shape, **launch)
    return out

"""Reductions over rows as wide as a vocabulary, on a GPU, in Triton.

A row is cut into segments of SEGMENT ids, a program each; the segments' sums are added in order. Ties at a maximum go
to the lowest id. Shapes: n rows, V vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from nanospec_fn.kernels.dependent import enter, launch_options

SEGMENT = 4096  # vocabulary ids of a program
TOP = 16384  # ids that `top` looks at at once


@triton.jit
def peak_of(peaks, row, SEGMENTS, PARTS: tl.constexpr):
    i = tl.arange(0, PARTS)
    return tl.max(tl.load(peaks + row * SEGMENTS + i, mask=i < SEGMENTS, other=-float("inf")), 0)


@triton.jit
def sum_of(masses, row, SEGMENTS, PARTS: tl.constexpr):
    """The segments' sums in order: one after another, as the order of tl.sum follows from a layout."""
    total = 0.0
    for i in range(SEGMENTS):
        total += tl.load(masses + row * SEGMENTS + i)
    return total


@triton.jit
def best_in(value, index, OTHER: tl.constexpr):
    """The largest value and the lowest index that has it."""
    top = tl.max(value, 0)
    return top, tl.min(tl.where(value == top, index, OTHER), 0)


@triton.jit
def best_of(values, ids, row, SEGMENTS, PARTS: tl.constexpr):
    i = tl.arange(0, PARTS)
    value = tl.load(values + row * SEGMENTS + i, mask=i < SEGMENTS, other=-float("inf"))
    index = tl.load(ids + row * SEGMENTS + i, mask=i < SEGMENTS, other=2147483647)
    return best_in(value, index, 2147483647)


@triton.jit
def find_peaks(x, peaks, arg, V, SEGMENTS, WIDTH: tl.constexpr):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = segment * WIDTH + tl.arange(0, WIDTH)
    top, at = best_in(tl.load(x + row * V + i, mask=i < V, other=-float("inf")), i, 2147483647)
    tl.store(peaks + row * SEGMENTS + segment, top)
    tl.store(arg + row * SEGMENTS + segment, at)


@triton.jit
def _masses(x, peaks, masses, V, SEGMENTS, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    row, segment = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = segment * WIDTH + tl.arange(0, WIDTH)
    peak = peak_of(peaks, row, SEGMENTS, PARTS)
    z = tl.load(x + row * V + i, mask=i < V, other=-float("inf")) - tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(masses + row * SEGMENTS + segment, tl.sum(tl.exp(z), 0))


@triton.jit
def _logs(peaks, masses, out, SEGMENTS, PARTS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak, mass = peak_of(peaks, row, SEGMENTS, PARTS), sum_of(masses, row, SEGMENTS, PARTS)
    tl.store(out + row, tl.where(mass > 0, peak + tl.log(tl.where(mass > 0, mass, 1.0)), peak))


def log_sum_exp(x: Tensor) -> Tensor:
    """x [n, V] fp32 -> [n], -inf for a row of nothing else."""
    x = x.contiguous()
    n, v = x.shape
    out = torch.empty(n, dtype=torch.float32, device=x.device)
    segments = triton.cdiv(v, SEGMENT)
    parts = triton.next_power_of_2(segments)
    peaks, masses = x.new_empty(2, n, segments)
    arg = torch.empty(n, segments, dtype=torch.int32, device=x.device)
    if n:
        find_peaks[(n, segments)](x, peaks, arg, v, segments, WIDTH=SEGMENT, num_warps=4, enable_fp_fusion=False)
        _masses[(n, segments)](
            x, peaks, masses, v, segments, PARTS=parts, WIDTH=SEGMENT, num_warps=4, enable_fp_fusion=False
        )
        _logs[(n,)](peaks, masses, out, segments, PARTS=parts, num_warps=1, enable_fp_fusion=False)
    return out


@triton.jit
def _top(x, names, values, ids, V, K, WIDTH: tl.constexpr, NAMED: tl.constexpr, DEPENDENT: tl.constexpr):
    enter(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, WIDTH)
    best = tl.full((WIDTH,), -float("inf"), tl.float32)
    for start in range(0, V, WIDTH):
        best = tl.maximum(best, tl.load(x + row * V + start + i, mask=start + i < V, other=-float("inf")))
    peak = tl.max(best, 0)
    total = tl.zeros((WIDTH,), tl.float32)
    for start in range(0, V, WIDTH):
        total += tl.exp(tl.load(x + row * V + start + i, mask=start + i < V, other=-float("inf")) - peak)
    log_total = tl.log(tl.sum(total, 0))
    value, token = float("inf"), -1
    for k in range(K):
        # The best of those behind the last one found.
        top, at = tl.full((), -float("inf"), tl.float32), 2147483647
        for start in range(0, V, WIDTH):
            j = start + i
            z = tl.load(x + row * V + j, mask=j < V, other=-float("inf"))
            behind = (j < V) & ((z < value) | ((z == value) & (j > token)))
            here, where = best_in(tl.where(behind, z, -float("inf")), tl.where(behind, j, 2147483647), 2147483647)
            better = (here > top) | ((here == top) & (where < at))
            top, at = tl.where(better, here, top), tl.where(better, where, at)
        value, token = top, at
        tl.store(values + row * K + k, value - peak - log_total)
        if NAMED:
            tl.store(ids + row * K + k, tl.load(names + token))
        else:
            tl.store(ids + row * K + k, token)


def top(x: Tensor, k: int, names: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row: x [n, V] fp32 logits -> log-probs [n, k], ids [n, k] int64.

    Args: names: [V] int64, what to return for each id; None: the id.
    """
    x = x.contiguous()
    n, v = x.shape
    values = torch.empty(n, k, dtype=torch.float32, device=x.device)
    ids = torch.empty(n, k, dtype=torch.int64, device=x.device)
    if n:
        width = min(TOP, triton.next_power_of_2(v))
        _top[(n,)](
            x, ids if names is None else names, values, ids, v, k, WIDTH=width, NAMED=names is not None,
            num_warps=max(1, width // 512), enable_fp_fusion=False, **launch_options(x.device),
        )  # fmt: skip
    return values, ids

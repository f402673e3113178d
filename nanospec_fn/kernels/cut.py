"""Where top-k and top-p cut a row of logits, on a GPU, in Triton; rows without either cost nothing.

z = (x - max x) / T; a row with temperature 0 has T = 1. Shapes: n rows, V vocabulary.
"""

import triton
import triton.language as tl

from nanospec_fn.kernels.vocab import peak_of


@triton.jit
def scaled(x, peak, temperature):
    return tl.div_rn(x - peak, tl.where(temperature > 0, temperature, 1.0))


@triton.jit
def kept(z, i, V, cut, tied_to):
    return (i < V) & ((z > cut) | ((z == cut) & (i <= tied_to)))


@triton.jit
def _ordered(z):
    """fp32 -> int32 of the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(order):
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def _above(x, peak, temperature, cut, V, WIDTH: tl.constexpr):
    """How many values are above `cut`, and their mass in units of 2^-40: integers add up alike in any order."""
    count = tl.zeros((WIDTH,), tl.int32)
    mass = tl.zeros((WIDTH,), tl.int64)
    for start in range(0, V, WIDTH):
        i = start + tl.arange(0, WIDTH)
        z = scaled(tl.load(x + i, mask=i < V, other=-float("inf")), peak, temperature)
        above = (i < V) & (z > cut)
        count += above.to(tl.int32)
        mass += tl.where(above, (tl.exp(z) * 1099511627776.0).to(tl.int64), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def find_cuts(
    x, peaks, temperatures, top_ks, top_ps, cuts, tied_tos, R, V, SEGMENTS, PARTS: tl.constexpr, WIDTH: tl.constexpr
):
    """Where top-k and then top-p cut a row: what is above `cut` stays, and of its ties those up to an id."""
    row = tl.program_id(0).to(tl.int64)
    slot = row // R
    temperature, top_k, top_p = tl.load(temperatures + slot), tl.load(top_ks + slot), tl.load(top_ps + slot)
    by_count = (top_k > 0) & (top_k < V)
    if (temperature > 0) & (by_count | (top_p < 1)):
        peak = peak_of(peaks, row, SEGMENTS, PARTS)
        x += row * V
        limit = tl.where(by_count, top_k, V)
        # The lowest cut above which there are fewer than `limit` values: the limit-th largest value.
        low, high = _ordered(tl.full((), -float("inf"), tl.float32)) - 1, _ordered(tl.zeros((), tl.float32))
        while high - low.to(tl.int64) > 1:
            middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
            count, _ = _above(x, peak, temperature, _value(middle), V, WIDTH)
            if count < limit:
                high = middle
            else:
                low = middle
        cut = _value(high)
        count, mass = _above(x, peak, temperature, cut, V, WIDTH)
        room = limit - count
        if top_p < 1:
            unit = (tl.exp(cut) * 1099511627776.0).to(tl.int64)
            total = mass + room * unit
            goal = total - ((1 - top_p) * total.to(tl.float32)).to(tl.int64)
            low = high - 1
            high = _ordered(tl.zeros((), tl.float32))
            # The lowest cut above which there is less mass than `goal`.
            while high - low.to(tl.int64) > 1:
                middle = ((low.to(tl.int64) + high) >> 1).to(tl.int32)
                _, mass = _above(x, peak, temperature, _value(middle), V, WIDTH)
                if mass < goal:
                    high = middle
                else:
                    low = middle
            lower = _value(high)
            count, mass = _above(x, peak, temperature, lower, V, WIDTH)
            unit = tl.maximum((tl.exp(lower) * 1099511627776.0).to(tl.int64), 1)
            crossing = ((goal - mass + unit - 1) // unit).to(tl.int32)
            room = tl.where(lower > cut, crossing, tl.minimum(crossing, room))
            cut = lower
        # The ties' lowest ids stay: walk the row until there is no room.
        tied_to = -1
        for start in range(0, V, WIDTH):
            i = start + tl.arange(0, WIDTH)
            z = scaled(tl.load(x + i, mask=i < V, other=-float("inf")), peak, temperature)
            tied = ((i < V) & (z == cut)).to(tl.int32)
            rank = tl.cumsum(tied, 0)
            tied_to = tl.maximum(tied_to, tl.max(tl.where((tied > 0) & (rank <= room), i, -1), 0))
            room -= tl.sum(tied, 0)
        tl.store(cuts + row, cut)
        tl.store(tied_tos + row, tied_to)
    else:
        tl.store(cuts + row, -float("inf"))
        tl.store(tied_tos + row, V)

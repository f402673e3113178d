"""Named draws inside a Triton kernel: `rng`'s integers, bit for bit, through the device's own logarithm."""

import triton
import triton.language as tl


@triton.jit
def _mix64(x):
    x = (x ^ (x >> 27)) * 0x3C79AC492BA7B653
    x = (x ^ (x >> 33)) * 0x1C69B3F74AC4AE35
    return x ^ (x >> 27)


@triton.jit
def fold_in(key, data):
    """`rng.fold_in`. key uint64, data int32 or int64."""
    return _mix64((key ^ data.to(tl.int64).to(tl.uint64, bitcast=True)) + 0x9E3779B97F4A7C15)


@triton.jit
def draw_key(key, position, PURPOSE: tl.constexpr):
    """`rng.draw_key`. key int64, position int32 or int64 -> uint64."""
    return fold_in(fold_in(key.to(tl.uint64, bitcast=True), position), position * 0 + PURPOSE)


@triton.jit
def _mix32(x):
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def uniform(key, index):
    """The uniform under `rng.gumbel_at`; at index 0 `rng.uniform`. key uint64, index int32, any shapes -> fp32."""
    low, high = key.to(tl.uint32), (key >> 32).to(tl.uint32)
    bits = _mix32(_mix32(index.to(tl.uint32) ^ low) + high).to(tl.int32, bitcast=True)
    return tl.minimum((bits.to(tl.int64) * 2 + 4294967297).to(tl.float32) * 1.1641532182693481e-10, 0.9999999403953552)


@triton.jit
def gumbel(key, index):
    """`rng.gumbel_at`. Arguments as for `uniform`."""
    u = uniform(key, index)
    # -log1p(-u): 1 - u has lost the small u, of which the upper tail is made
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return -tl.log(tl.where(u < 0.02, series, -tl.log(tl.where(u < 0.02, 0.5, 1 - u))))

"""Counter-based randomness: a draw is a pure function of (key, position, purpose, index).

A key is an int64 tensor of any shape, 64 mixed bits per element. Everything is integer tensor arithmetic that wraps, so
the bits are the same on every device and in every batch; only `gumbel`'s two logarithms are the device's own.
"""

import torch
from torch import Tensor

# Purposes: which of a position's draws is meant.
TARGET = 0  # the coupled draw of the target's token, one Gumbel variable per vocabulary id
ACCEPT = 1  # the acceptance test of a draft token, one uniform per candidate's target id
RESIDUAL = 2  # the token after all candidates were rejected, one Gumbel variable per vocabulary id

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)  # 2^64 / golden ratio, as a signed word: no small input is a fixed point
LARGEST = 1 - 2.0**-24  # the largest fp32 below 1


def key(seed: Tensor) -> Tensor:
    """seed [...] int64, a request's seed -> its key [...] int64."""
    return _mix64(seed + GOLDEN)


def fold_in(key: Tensor, data: Tensor | int) -> Tensor:
    """A key that differs for every `data` (int64 or narrower, broadcast against key): a bijection for a fixed key."""
    return _mix64((key ^ data) + GOLDEN)


def draw_key(key: Tensor, position: Tensor, purpose: int) -> Tensor:
    """The key of one named draw. key, position [...]: the request's key, the emitted token's absolute position."""
    return fold_in(fold_in(key, position), purpose)


def uniform(key: Tensor) -> Tensor:
    """key [...] -> fp32 in (0, 1): (b + 1/2) / 2^32 for 32 random bits b, rounded to fp32.

    The 2^-25 of all draws that would round to 1 give 1 - 2^-24 instead; the smallest value is 2^-33.
    """
    return _uniform(_bits32(key, torch.zeros_like(key)))


def gumbel_at(key: Tensor, index: Tensor) -> Tensor:
    """Standard Gumbel variables, fp32, of each key at an index (below 2^32, broadcast against key).

    g = -log(-log1p(-u)): the upper tail is made of the smallest u, where fp32 is densest, so that g reaches 22.9 and
    wide rows have no ties at their maximum; g >= -2.82 as u < 1.
    """
    return _uniform(_bits32(key, index)).neg_().log1p_().neg_().log_().neg_()


def gumbel(key: Tensor, n: int) -> Tensor:
    """key [...] -> [..., n] fp32: `gumbel_at` for the indices 0..n-1."""
    return gumbel_at(key[..., None], torch.arange(n, dtype=torch.int32, device=key.device))


def _mix64(x: Tensor) -> Tensor:
    """Pelle Evensen's `moremur` finalizer: full avalanche also for inputs that are small counters."""
    x = (x ^ _shift(x, 27, 64)) * 0x3C79AC492BA7B653
    x = (x ^ _shift(x, 33, 64)) * 0x1C69B3F74AC4AE35
    return x ^ _shift(x, 27, 64)


def _bits32(key: Tensor, index: Tensor) -> Tensor:
    """32 random bits as int32, broadcast over key and index.

    Two rounds, each with one half of the key: after the first alone, two keys with close low halves would give the
    same row in another order. 32-bit words, as 64-bit products cost four times as much over [rows, vocabulary].
    """
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    return _mix32(_mix32(index.to(torch.int32) ^ low).add_(high))


def _mix32(x: Tensor) -> Tensor:
    """Chris Wellons' `lowbias32`; the second multiplier is 0x846CA68B as a signed word."""
    x = x ^ _shift(x, 16, 32)  # from here on a tensor of our own
    x *= 0x7FEB352D
    x ^= _shift(x, 15, 32)
    x *= 0x846CA68B - (1 << 32)
    x ^= _shift(x, 16, 32)
    return x


def _shift(x: Tensor, n: int, width: int) -> Tensor:
    """Logical right shift; torch's is arithmetic on signed words."""
    return (x >> n).bitwise_and_((1 << (width - n)) - 1)


def _uniform(bits: Tensor) -> Tensor:
    # b = bits + 2^31. The odd integer 2b + 1 is rounded once, by its conversion; scaling by 2^-33 is exact.
    return bits.long().mul_(2).add_(2**32 + 1).float().mul_(2.0**-33).clamp_max_(LARGEST)

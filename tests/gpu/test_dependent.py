"""Kernels that start before the one in front of them has ended still read what it wrote."""

import pytest
import torch
from torch import Tensor

from nanospec_fn.kernels import attend, gemm, kv, rows
from tests.gpu.compare import same_bits
from tests.gpu.shapes import noise
from tests.gpu.timing import graph

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]
HEADS, KV_HEADS, WIDTH, PAGE, LAYERS = 32, 8, 128, 16, 8


class Layer:
    """What a decoder layer launches, in its order, `between` called after every launch."""

    def __init__(self, n: int, length: int, inner: int = 4096) -> None:
        pages = length // PAGE
        self.table = torch.arange(1, n * pages + 1, dtype=torch.int32, device="cuda").view(n, pages)
        self.at = torch.full((n, 1), length - 1, dtype=torch.int32, device="cuda")
        self.norm = noise(inner, seed=1)
        self.qkv, self.out = noise((HEADS + 2 * KV_HEADS) * WIDTH, inner, seed=2), noise(inner, inner, seed=3)
        self.gate_up, self.down = noise(2 * inner, inner, seed=4), noise(inner, inner, seed=5)
        self.pools = [noise(n * pages + 1, 2, PAGE, KV_HEADS, WIDTH, seed=6 + i) for i in range(LAYERS)]
        self.turn = rows.angles(self.at.flatten(), noise(WIDTH // 2, seed=7).float())

    def __call__(self, x: Tensor, between=lambda: None) -> Tensor:
        for pool in self.pools:
            h = rows.rms_norm(x, self.norm, 1e-5)
            between()
            qkv = gemm.linear(h, self.qkv).view(len(x), -1, WIDTH)
            between()
            q, arrived = kv.turn_and_write(qkv, *self.turn, pool, self.at, self.at, self.table)
            between()
            mixed = attend.attend(pool, q, self.at, self.table, arrived=arrived).flatten(1)
            between()
            x = gemm.linear(mixed, self.out, x)
            between()
            h = rows.rms_norm(x, self.norm, 1e-5)
            between()
            h = gemm.linear(h, self.gate_up, gated=True)
            between()
            x = gemm.linear(h, self.down, x)
            between()
            x = rows.rms_norm(x, self.norm, 1e-5)  # keeps the random stream in range
            between()
        return x


@pytest.mark.parametrize("n", [1, 8, 48, 96, 200])
def test_a_chain_of_launches_waits_for_what_it_reads(n):
    """Bugs: a load in front of the wait; a kernel launched as dependent that does not wait."""
    layer, x, results = Layer(n, 256), noise(n, 4096, seed=8), []
    want = layer(x, torch.cuda.synchronize)
    replay = graph(lambda: results.append(layer(x)))
    for _ in range(50):
        replay()
        assert same_bits(results[-1], want)

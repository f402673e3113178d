"""Products on a GPU: right by float64, and a row's bits depend on that row alone.

"Beside" is any number of other rows; every launch shape must give the same bits, as the launch follows the row count.
"""

import pytest
import torch

from nanospec_fn.kernels import gemm, gpu, launches, rows
from tests.gpu.compare import relative_error, same_bits
from tests.gpu.shapes import GEMMS, noise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

COUNTS = (*range(1, 71), 96, 127, 128, 129, 168, 192, 193, 256, 384, 512, 672, 1000, 1025)
ODD = {"smollm2-qkv": (960, 576), "smollm2-down": (576, 1536), "smollm2-head": (49152, 576), "odd": (97, 72)}
TILES = (
    gemm.Tile(8, 64, 128, 4, 3),
    gemm.Tile(16, 16, 512, 2, 3),
    gemm.Tile(16, 64, 64, 4, 4),
    gemm.Tile(16, 128, 32, 8, 3),
    gemm.Tile(32, 32, 128, 4, 3),
    gemm.Tile(64, 64, 64, 4, 3),
    gemm.Tile(128, 64, 32, 4, 3),
    gemm.Tile(128, 128, 64, 8, 3),
    gemm.Tile(128, 256, 64, 8, 3),
    gemm.Tile(128, 128, 64, 4, 4, "tma"),
    *launches.COPIED,
)


@pytest.mark.parametrize("name", [*GEMMS, *ODD])
def test_linear_rows_stand_alone(name):
    """Bugs: a split of K, or another instruction's order, for some row count; a masked tail of K that is not exact."""
    outer, inner = (GEMMS | ODD)[name]
    w, x = noise(outer, inner, seed=1, scale=inner**-0.5), noise(4096, inner)
    whole = gemm.linear(x, w)
    some = torch.randint(0, 4096, (64,), generator=torch.Generator().manual_seed(0)).cuda()
    assert relative_error(whole[some], x[some].double() @ w.double().t()) < 3e-3
    for n in COUNTS:
        first = (n * 37) % 1000
        assert same_bits(gemm.linear(x[first : first + n], w), whole[first : first + n]), f"{n} rows"
    for tile in TILES:
        assert same_bits(gemm.linear(x[5:76], w, tile=tile), whole[5:76]), tile


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_linear_other_dtypes_stand_alone(dtype):
    w, x = noise(200, 136, seed=1, dtype=dtype), noise(300, 136, dtype=dtype)
    whole = gemm.linear(x, w)
    assert relative_error(whole, x.double() @ w.double().t()) < 1e-3
    for n in (1, 2, 7, 16, 33, 64, 65, 128, 129):
        assert same_bits(gemm.linear(x[3 : 3 + n], w), whole[3 : 3 + n]), n


def test_linear_fused_residual_rounds_as_the_sum_does():
    """Bug: the residual added before the product is rounded, so that fused and unfused rows differ."""
    x, w, residual = noise(150, 576), noise(320, 576, seed=1), noise(150, 320, seed=2)
    for n in (1, 20, 64, 150):
        fused = gemm.linear(x[:n], w, residual[:n].contiguous())
        assert same_bits(fused, residual[:n] + gemm.linear(x[:n], w))


@pytest.mark.parametrize("tile", launches.COPIED, ids=str)
def test_linear_tiles_fit_the_device_whatever_they_end_with(tile):
    """Bug: a tile whose end, a residual or a result of 4 bytes, needs shared memory that its operands still hold."""
    x, w, residual = noise(700, 576), noise(1600, 576, seed=1), noise(700, 1600, seed=2)
    want, wide = (gemm.linear(x, w, dtype=dtype, tile=TILES[0]) for dtype in (x.dtype, torch.float32))
    assert same_bits(gemm.linear(x, w, tile=tile), want)
    assert same_bits(gemm.linear(x, w, residual, tile=tile), residual + want)
    assert same_bits(gemm.linear(x, w, dtype=torch.float32, tile=tile), wide)


@pytest.mark.parametrize("outer, inner", [(14336, 4096), (1536, 576), (360, 72)])
def test_linear_gated_has_the_bits_of_its_parts(outer, inner):
    """Bugs: gate and up of different columns paired; rounded once where two launches round twice."""
    w, x = noise(2 * outer, inner, seed=1, scale=inner**-0.5), noise(700, inner)
    want = rows.silu_mul(gemm.linear(x, w))
    for n in (1, 6, 21, 64, 65, 168, 672):
        assert same_bits(gemm.linear(x[:n], w, gated=True), want[:n]), n
    for tile in TILES[1:]:
        assert same_bits(gemm.linear(x[:200], w, tile=tile, gated=True), want[:200]), tile


def test_gradients_are_the_librarys():
    x, w, weight = noise(9, 64), noise(96, 64, seed=1), noise(64, seed=2)

    def loss(linear, norm, act, x, w, weight):
        return act(linear(norm(x, weight), w)).float().square().sum()

    with torch.enable_grad():
        leaves = [t.clone().requires_grad_() for t in (x, w, weight)]
        mine = loss(
            lambda x, w: gpu.linear(x, w, None, None), lambda x, g: gpu.rms_norm(x, g, 1e-5), gpu.silu_mul, *leaves
        )
        got = torch.autograd.grad(mine, leaves)
        wide = [t.double().requires_grad_() for t in (x, w, weight)]
        theirs = loss(
            torch.nn.functional.linear,
            lambda x, g: torch.nn.functional.rms_norm(x, (64,), g, 1e-5),
            lambda h: torch.nn.functional.silu(h[:, :48]) * h[:, 48:],
            *wide,
        )
        want = torch.autograd.grad(theirs, wide)
    for a, b in zip(got, want, strict=True):
        assert relative_error(a, b) < 3e-2

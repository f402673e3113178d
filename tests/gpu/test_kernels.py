"""The Triton kernels on a GPU: right by float64, and a row's bits depend on that row alone.

"Beside" is any number of other rows; every launch shape must give the same bits, as the launch follows the row count.
"""

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from nanospec_fn.kernels import attend, gemm, gpu, rows, vocab
from tests.gpu.shapes import GEMMS, noise
from tests.oracle_attention import Case, paged_case, reference_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

COUNTS = (*range(1, 71), 96, 127, 128, 129, 256, 1000)
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
    gemm.Tile(128, 256, 64, 8, 3, "tma", 132),
)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def relative_error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


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


@pytest.mark.parametrize("outer, inner", [(14336, 4096), (1536, 576), (360, 72)])
def test_linear_gated_has_the_bits_of_its_parts(outer, inner):
    """Bugs: gate and up of different columns paired; rounded once where two launches round twice."""
    w, x = noise(2 * outer, inner, seed=1, scale=inner**-0.5), noise(700, inner)
    want = rows.silu_mul(gemm.linear(x, w))
    for n in (1, 6, 21, 64, 65, 168, 672):
        assert same_bits(gemm.linear(x[:n], w, gated=True), want[:n]), n
    for tile in TILES[1:]:
        assert same_bits(gemm.linear(x[:200], w, tile=tile, gated=True), want[:200]), tile


def test_rows_joined_have_the_bits_of_their_parts():
    table, x, mine, theirs = noise(500, 4096), noise(70, 4096, seed=1), noise(4096, seed=2), noise(4096, seed=3)
    token = torch.randint(0, 500, (70,), device="cuda", dtype=torch.int32)
    want = torch.cat((rows.rms_norm(table[token], mine, 1e-5), rows.rms_norm(x, theirs, 1e-5)), dim=1)
    assert same_bits(rows.embed_beside(table, token, mine, x, theirs, 1e-5), want)
    position = torch.arange(0, 70000, 1000, device="cuda", dtype=torch.int32)
    freq = (1 / 500000 ** (torch.arange(0, 128, 2).double() / 128)).float().cuda()
    cos, sin = rows.angles(position, freq)
    phase = (position.float()[:, None] * freq).double()
    assert float((cos.double() - phase.cos()).abs().max()) < 1e-6
    assert float((sin.double() - phase.sin()).abs().max()) < 1e-6
    assert same_bits(rows.angles(position[9:12], freq)[0], cos[9:12])

    qkv, size = noise(70, 48, 128), 16
    at = torch.arange(70, dtype=torch.int32, device="cuda")[None]
    seen = torch.where(at % 7 == 3, -1, at)
    pages = torch.randperm(5, device="cuda").to(torch.int32)[None] + 1
    turned = rows.rope(qkv[:, :40], cos, sin)
    pools = [torch.full((6, 2, size, 8, 128), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    attend.store_kv(pools[0], turned[:, 32:], qkv[:, 40:], at, seen, pages)
    q, arrived = attend.turn_and_store(qkv, cos, sin, pools[1], at, seen, pages)
    assert same_bits(q, turned[:, :32].contiguous())
    assert same_bits(*pools)
    assert not arrived.any()


def test_the_last_program_of_a_tile_folds_every_share():
    """Bug: shares folded before another program's stores are seen; a counter that is not back at zero for a replay."""
    b, length, size = 3, 3000, 16
    pages = -(-length // size)
    pool = noise(b * pages + 1, 2, size, 8, 128)
    table = torch.randperm(b * pages, device="cuda").to(torch.int32).view(b, pages) + 1
    position = torch.tensor([[2999], [1500], [63]], dtype=torch.int32, device="cuda")
    q = noise(b, 32, 128, seed=5)
    want = attend.attend(pool, q, position, table, split=False)
    for _ in range(300):
        arrived = torch.zeros(b, 8, dtype=torch.int32, device="cuda")
        assert same_bits(attend.attend(pool, q, position, table, split=True, arrived=arrived), want)


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


@pytest.mark.parametrize("e", [72, 576, 4096, 8192])
def test_row_functions_stand_alone(e):
    x, weight = noise(1000, e), 1 + noise(e, seed=1, scale=0.1)
    wide = x.double()
    norm = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)) * weight.double()
    gate, up = x.double().chunk(2, dim=-1)
    for function, want, limit in (
        (lambda x: rows.rms_norm(x, weight, 1e-5), norm, 6e-3),
        (rows.silu_mul, gate * gate.sigmoid() * up, 6e-3),
        (lambda x: vocab.log_sum_exp(x.float())[:, None], torch.logsumexp(wide, -1)[:, None], 1e-6),
    ):
        whole = function(x)
        assert relative_error(whole, want) < limit
        for n in (1, 2, 3, 8, 33, 70):
            assert same_bits(function(x[7 : 7 + n]), whole[7 : 7 + n])


def test_rope_stands_alone_and_matches():
    x = noise(300, 48, 128)
    phase = torch.rand(300, 64, device="cuda") * 2000
    whole = rows.rope(x[:, :40], phase.cos(), phase.sin())
    a, b = x[:, :40].double().chunk(2, dim=-1)
    c, s = phase.double().cos()[:, None], phase.double().sin()[:, None]
    assert relative_error(whole, torch.cat((a * c - b * s, b * c + a * s), -1)) < 3e-3
    for n in (1, 2, 9, 64):
        part = rows.rope(x[n : 2 * n, :40], phase[n : 2 * n].cos(), phase[n : 2 * n].sin())
        assert same_bits(part, whole[n : 2 * n])


CASES = (
    Case(((3,), (130,), (700,)), 16, 32, 8, 128),
    Case((tuple(range(600, 606)), (62, 63, 64, -1, -1, -1), (-1,) * 6), 16, 32, 8, 128),
    Case((tuple(range(200)),), 64, 9, 3, 64),
    Case((tuple(range(300)), tuple(range(300))), 8, 8, 1, 64),
    Case(((5, 6, 6, 7, 7, 7), (62, 63, 63, 64, 64, 65)), 1, 32, 8, 128, tree=True),
    Case(((511, 512, 512, 513, 513, -1), (128, 129, 129, 130, 130, 131)), 32, 6, 2, 32, tree=True),
)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_attention_matches_float64_however_it_is_cut(case, dtype):
    """Bugs: a wrong page, ancestor or bound; unseen cells (poisoned) read; a fold whose bits follow from the launch."""
    paged = paged_case(case, dtype, "cuda")
    pool = paged.pool.clone()
    attend.store_kv(pool, paged.k, paged.v, paged.store, paged.position, paged.page_table)
    assert pool[0].isnan().all()
    want = reference_attention(paged)

    def run(**cut):
        return attend.attend(pool, paged.q, paged.position, paged.page_table, paged.base, paged.path, **cut)

    got = run()
    assert relative_error(got.cpu(), want) < (8e-3 if dtype == torch.bfloat16 else 1e-5)
    assert not got[(paged.position < 0).flatten()].any()
    for split in (False, True):
        for size in (16, 32, 64, 128) if dtype == torch.bfloat16 else (16, 32):
            assert same_bits(run(split=split, rows=size), got), (split, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads, d", [(32, 8, 128), (9, 3, 64), (4, 4, 32)])
def test_attention_rows_of_any_pass_equal_prefill(heads, kv_heads, d, dtype):
    """The promise: decode, chain, tree and chunk rows at a position have the bits of one whole prefill."""
    t, size = 700, 16
    q, k, v = (
        noise(t, heads, d, dtype=dtype),
        noise(t, kv_heads, d, seed=1, dtype=dtype),
        noise(t, kv_heads, d, seed=2, dtype=dtype),
    )
    whole = gpu.causal_attention(q, k, v, 1)
    table = (torch.randperm(60, generator=torch.Generator().manual_seed(0)) + 1).to(torch.int32).cuda()[None]
    pool = torch.full((61, 2, size, kv_heads, d), float("nan"), dtype=dtype, device="cuda")
    at = torch.arange(t, dtype=torch.int32, device="cuda")
    attend.store_kv(pool, k, v, at[None], at[None], table)
    for first in (0, 1, 62, 63, 64, 127, 128, 200, 513, 639, 640, 690):
        for n in (1, 2, 5, 6, 9):
            position = at[None, first : first + n]
            got = attend.attend(pool, q[first : first + n], position, table)
            assert same_bits(got, whole[first : first + n]), ("chain", first, n)
    assert same_bits(attend.attend(pool, q[100:356], at[None, 100:356], table), whole[100:356])
    # A tree whose rows are the positions first .. first + 5, twice, its KV in another order.
    for first in (0, 60, 63, 64, 128, 500, 637):
        position = at[None, first : first + 6].repeat(1, 2)
        store = first + torch.tensor([[0, 3, 1, 7, 5, 9, 2, 4, 6, 8, 10, 11]], dtype=torch.int32, device="cuda")
        path = torch.stack([store[0, :6], store[0, 6:]])[:, None].expand(-1, 6, -1).reshape(1, 12, 6)
        own = torch.arange(first, first + 6).repeat(2)
        tree_pool = pool.clone()
        hole = at[None, first : first + 40]
        attend.store_kv(
            tree_pool,
            k.new_full((40, kv_heads, d), float("nan")),
            v.new_full((40, kv_heads, d), float("nan")),
            hole,
            hole,
            table,
        )
        attend.store_kv(tree_pool, k[own], v[own], store, position, table)
        base = torch.tensor([first], dtype=torch.int32, device="cuda")
        for split in (False, True, None):
            got = attend.attend(tree_pool, q[own], position, table, base, path, split=split)
            assert same_bits(got, whole[own]), ("tree", first, split)

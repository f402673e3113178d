"""The Triton kernels' logic on a CPU, under Triton's interpreter: tiny sizes, small integers where bits are compared.

Bits on a GPU are tests/gpu/'s subject; here it is masks, tails, page tables, trees and segment bounds.
"""

import pytest
import torch
from torch import Tensor

from tests import needs
from tests.oracle_attention import Case, paged_case, reference_attention

if reason := needs.no_interpreter():
    pytest.skip(reason, allow_module_level=True)

import nanospec_fn as ns
from nanospec_fn import acceptance, filters, pages, sampling, struct, trees
from nanospec_fn.kernels import attend, gemm, gpu, head, kv, launches, rows, tree, vocab
from tests.gpu import tiles
from tests.gpu.shapes import GEMMS


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


TILES = (
    gemm.Tile(16, 16, 16, 1, 1),
    gemm.Tile(32, 16, 32, 1, 1),
    gemm.Tile(128, 16, 16, 1, 1),
    gemm.Tile(128, 16, 16, 1, 1, "tma"),
    gemm.Tile(16, 16, 16, 1, 1, "tma", 2),  # fewer programs than tiles
    gemm.Tile(8, 16, 16, 1, 1, "tma", 2, more=4, overlap=True),
)


@pytest.mark.parametrize("n", [1, 5, 17, 33])
@pytest.mark.parametrize("inner, outer", [(32, 48), (40, 33)])
def test_linear_both_kernels_equal_the_exact_product(n, inner, outer):
    """Bugs: a tail of n, N or K that is dropped or read past; the residual added to the wrong element."""
    x, w, residual = integers(n, inner), integers(outer, inner, seed=1), integers(n, outer, seed=2)
    exact = (x.double() @ w.double().t()).to(x.dtype)
    for tile in TILES:
        assert torch.equal(gemm.linear(x, w, tile=tile), exact), tile
        assert torch.equal(gemm.linear(x, w, residual, tile=tile), exact + residual), tile
    assert torch.equal(gemm.linear(x, w, dtype=torch.float32, tile=tile), exact.float())


@pytest.mark.parametrize("n", [1, 19])
@pytest.mark.parametrize("inner, outer", [(32, 24), (40, 21)])
def test_linear_gated_pairs_gate_and_up(n, inner, outer):
    """Bugs: gate paired with another column's up; a tail of columns that reads the other half."""
    x, w = integers(n, inner) / 4, integers(2 * outer, inner, seed=1) / 8
    want = rows.silu_mul((x.double() @ w.double().t()).to(x.dtype))
    for tile in TILES:
        assert torch.equal(gemm.linear(x, w, tile=tile, gated=True), want), tile


def test_the_sweep_tries_what_is_picked():
    """Bug: tiles that are picked and never measured."""
    for n in tiles.ROWS:
        for outer, inner in GEMMS.values():
            assert launches.pick_tile(n, outer, inner, torch.bfloat16) in tiles.candidates(n)


def test_linear_many_row_tiles_cover_every_row():
    """Bug: the grouped order of tiles skips or repeats one where the last group is short."""
    x, w = integers(9 * 128 + 1, 16), integers(40, 16, seed=1)
    got = gemm.linear(x, w, tile=gemm.Tile(128, 16, 16, 1, 1))
    assert torch.equal(got, (x.double() @ w.double().t()).to(x.dtype))


@pytest.mark.parametrize("n, width", [(1, 8), (3, 72), (2, 1056)])
def test_rows_match_float64(n, width):
    noise = torch.randn(n, 2 * width, generator=torch.Generator().manual_seed(0))
    x, weight = noise[:, :width].contiguous(), noise[0, width:].contiguous()
    wide = x.double()
    norm = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    torch.testing.assert_close(rows.rms_norm(x, weight, 1e-5).double(), norm, rtol=1e-5, atol=1e-6)
    gate, up = noise.double().chunk(2, dim=-1)
    torch.testing.assert_close(rows.silu_mul(noise).double(), gate.sigmoid() * gate * up, rtol=1e-5, atol=1e-6)
    lse = torch.logsumexp(noise.double(), -1)
    torch.testing.assert_close(vocab.log_sum_exp(noise).double(), lse, rtol=1e-6, atol=1e-6)
    assert vocab.log_sum_exp(torch.full((1, 5), -torch.inf)).tolist() == [-torch.inf]


@pytest.mark.parametrize("heads, d", [(3, 16), (9, 24)])
def test_rope_reads_a_strided_slice(heads, d):
    """Bug: strides of q and k inside the fused projection ignored."""
    whole = torch.randn(5, heads + 2, d, generator=torch.Generator().manual_seed(0))
    phase = torch.rand(5, d // 2)
    a, b = whole[:, 1 : heads + 1].double().chunk(2, dim=-1)
    c, s = phase.double().cos()[:, None], phase.double().sin()[:, None]
    want = torch.cat((a * c - b * s, b * c + a * s), -1)
    got = rows.rope(whole[:, 1 : heads + 1], phase.cos(), phase.sin())
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


CASES = (
    Case(positions=((3,), (130,)), page_size=16),  # decode
    Case(
        positions=((60, 61, 62, 63, 64, 65), (0, 1, 2, -1, -1, -1), (-1,) * 6), page_size=4
    ),  # chain over a block's edge
    Case(positions=(tuple(range(70)),), page_size=64, heads=2, kv_heads=2),  # prefill
    Case(positions=((5, 6, 6, 7, 7, 7), (62, 63, 63, 64, 64, 65)), page_size=1, tree=True),
    Case(
        positions=((127, 128, 128, 129, 129, -1), (128, 129, 129, 130, 130, 131)), page_size=32, tree=True, head_dim=24
    ),
)


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_attention_matches_float64_and_reads_nothing_else(case, split):
    """Bugs: a wrong page or ancestor; a block dropped at a bound; what no row may see (poisoned here) read."""
    paged = paged_case(case, torch.float32)
    pool = paged.pool.clone()
    kv.write(pool, paged.k, paged.v, paged.store, paged.position, paged.page_table)
    assert pool[0].isnan().all(), "the sink was written"
    beside = torch.nn.functional.pad(paged.q, (0, 0, 0, 3))[:, : case.heads]  # a slice of the fused projection
    got = attend.attend(pool, beside, paged.position, paged.page_table, paged.base, paged.path, split=split)
    torch.testing.assert_close(got.double(), reference_attention(paged), rtol=1e-4, atol=1e-5)
    assert not got[(paged.position < 0).flatten()].any()


def test_attention_of_whole_sequences():
    """Bug: the pool view over (k, v) mixes sequences, halves or heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2 * 67, h, 16, generator=generator) for h in (4, 2, 2))
    by_batch = (x.double().unflatten(0, (2, 67)).transpose(1, 2) for x in (q, k, v))
    want = torch.nn.functional.scaled_dot_product_attention(*by_batch, is_causal=True, enable_gqa=True)
    got = gpu.causal_attention(q, k, v, 2)
    torch.testing.assert_close(got.double(), want.transpose(1, 2).flatten(0, 1), rtol=1e-4, atol=1e-5)
    with torch.enable_grad():
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        grads = torch.autograd.grad(gpu.causal_attention(q, k, v, 2).square().sum(), (q, k, v))
        want = torch.nn.functional.scaled_dot_product_attention(
            *(x.unflatten(0, (2, 67)).transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
        )
        wanted = torch.autograd.grad(want.square().sum(), (q, k, v))
    for got, right in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, right, rtol=1e-3, atol=1e-4)


REQUESTS = (
    ns.Sampling(),
    ns.Sampling(temperature=1.0, seed=1),
    ns.Sampling(temperature=0.7, seed=2, top_k=5),
    ns.Sampling(temperature=1.0, seed=3, top_p=0.8),
    ns.Sampling(temperature=1.3, seed=4, top_k=9, top_p=0.5),
    ns.Sampling(temperature=1.0, seed=5, rule="power", alpha=0.5, top_p=0.9),
    ns.Sampling(temperature=1.0, seed=6, rule="relaxed", tau=0.1, accept_top_k=3),
)


@pytest.mark.parametrize("coarse", [False, True], ids=["distinct", "ties"])
def test_weigh_agrees_with_the_cpus(coarse, monkeypatch):
    """Bugs: a segment's sum or best lost; a cut's ties; a candidate left in the residual; draws unlike the CPU's."""
    monkeypatch.setattr(vocab, "SEGMENT", 32)
    generator = torch.Generator().manual_seed(0)
    b, v = len(REQUESTS), 60
    logits = torch.randn(b, 4, v, generator=generator) * 2
    if coarse:
        logits = logits.round()
    token = torch.randint(0, v, (b, 3), generator=generator).to(torch.int32)
    token[2, 1:] = -1
    parent = torch.tensor([[-1, -1, 0]] * b, dtype=torch.int32)
    parent[2, 1:] = -1
    depth = torch.where(token < 0, 0, torch.tensor([1, 1, 2])).to(torch.int32)
    logp = torch.where(token < 0, -torch.inf, -1.0)
    drafted = trees.Tree(token=token, parent=parent, depth=depth, logp=logp, score=logp)
    controls = sampling.controls(REQUESTS)
    position = torch.arange(b) + 7
    want = acceptance.weigh(logits, drafted, controls, position, full=True)
    got = acceptance.weigh_on_device(logits, drafted, controls, position, full=True)
    present = depth > 0
    for name in ("target", "rest"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("target_logp", "rest_logp", "rest_mass"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-4, atol=1e-5, msg=name)
    torch.testing.assert_close(got.node_logp[present], want.node_logp[present], rtol=1e-4, atol=1e-5)
    assert torch.equal(got.node_rank[present], want.node_rank[present])
    assert torch.equal(got.accept[present], want.accept[present]), "the same uniforms"
    columns = (controls.temperature, controls.top_k, controls.top_p)
    whole = head.log_probs(logits[:, 0], *columns)
    assert torch.equal(whole.gather(1, got.target[:, :1].long()), got.target_logp[:, :1])
    torch.testing.assert_close(whole, filters.log_probs(logits[:, 0], *columns), rtol=1e-4, atol=1e-5)


def test_top_prefers_the_lowest_id():
    """Bug: ties broken by the order of a reduction, so that a tree depends on the batch."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)).mul(2).round()
    got_logp, got = vocab.top(logits, 6)
    order = torch.sort(logits, dim=-1, descending=True, stable=True)
    assert torch.equal(got, order.indices[:, :6])
    torch.testing.assert_close(got_logp, torch.log_softmax(logits, -1).gather(1, got), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k, levels", [(1, 3), (3, 3), (4, 2), (8, 2)])
def test_tree_kernels_agree_with_one_slots_logic(k, levels):
    """Bugs: another order among ties, or a greedy chain that is lost or goes on after its end."""
    generator = torch.Generator().manual_seed(k)
    b = 6
    got = want = trees.init_all(b, k * levels)
    for level in range(1, levels + 1):
        m = 1 if level == 1 else k
        token = torch.rand(b, m, 2 * k, generator=generator).argsort(-1)[..., :k]
        logp = -torch.randint(1, 4, token.shape, generator=generator).float()  # many ties
        absent = torch.rand(token.shape, generator=generator) < 0.3
        token, logp = torch.where(absent, -1, token), torch.where(absent, -torch.inf, logp)
        old = [got.token, got.parent, got.depth, got.logp, got.score]
        got = trees.Tree(*tree.expand(old, level, token, logp)[0])
        want = trees.expand_all(want, level, token, logp)
        assert struct.bytes_equal(got, want), level
    for first, count in ((0, k * levels), (k * (levels - 1), k)):
        assert torch.equal(
            tree.paths(got.parent, got.depth, first, count, levels), trees.paths_all(want, first, count, levels)
        )


def test_commit_reads_every_row_before_it_writes_one():
    """Bug: a row that is both source and destination overwritten first; a slot that sits out moved; a layer missed."""
    generator = torch.Generator().manual_seed(0)
    pools = torch.randn(3, 9, 2, 4, 2, 16, generator=generator).unbind(0)
    apart = tuple(x.clone() for x in pools)
    table = torch.tensor([[3, 7, 1, 0], [2, 8, 5, 6], [4, 0, 0, 0]], dtype=torch.int32)
    length = torch.tensor([3, 7, 1], dtype=torch.int32)
    path = torch.tensor([[1, 3, 2], [1, -1, -1], [1, 0, -1]], dtype=torch.int32)
    live = torch.tensor([True, True, False])
    want = pages.commit(pools, table, length, path, live, 4, struct.put)
    for given in (pools, apart):
        kv.commit(given, table, length, path, live)
        for got, right in zip(given, want, strict=True):
            assert torch.equal(got[1:], right[1:])

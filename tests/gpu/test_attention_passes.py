"""Attention on a GPU: a row has the bits of one whole prefill in whatever pass it runs."""

import pytest
import torch

from nanospec_fn.kernels import attend, gpu, kv
from tests.gpu.compare import same_bits
from tests.gpu.shapes import noise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    "heads, kv_heads, d, dtype", [(32, 8, 128, BF16), (9, 3, 64, BF16), (4, 4, 32, BF16), (9, 3, 64, FP32)]
)
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
    kv.write(pool, k, v, at[None], at[None], table)
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
        kv.write(
            tree_pool,
            k.new_full((40, kv_heads, d), float("nan")),
            v.new_full((40, kv_heads, d), float("nan")),
            hole,
            hole,
            table,
        )
        kv.write(tree_pool, k[own], v[own], store, position, table)
        base = torch.tensor([first], dtype=torch.int32, device="cuda")
        for split in (False, True, None):
            got = attend.attend(tree_pool, q[own], position, table, base, path, split=split)
            assert same_bits(got, whole[own]), ("tree", first, split)

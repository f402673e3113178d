"""Sizes past CUDA's bounds on a grid and past 2^31 elements, on a GPU; tests/test_triton_sizes.py has every kernel."""

import pytest
import torch

from nanospec_fn.kernels import attend, kv, rows
from tests.gpu.compare import same_bits
from tests.gpu.shapes import noise

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]


def test_more_rows_than_a_grid_has_along_y():
    x = noise(70000, 2 * 72)
    assert same_bits(rows.silu_mul(x)[-5:], rows.silu_mul(x[-5:]))


@pytest.mark.parametrize("split", [None, True])
def test_more_slots_and_heads_than_a_grid_has_along_y(split):
    """4096 slots whose 32 heads have keys of their own: 131072 programs."""
    b, heads, d = 4096, 32, 64
    pool, q = noise(41, 2, 16, heads, d), noise(b, heads, d, seed=1)
    table = (torch.arange(b * 8, dtype=torch.int32, device="cuda") * 7 % 40 + 1).view(b, 8)
    position = (torch.arange(b, dtype=torch.int32, device="cuda") * 13 % 128)[:, None]
    whole = attend.attend(pool, q, position, table, split=split)
    for first in (0, 2047, b - 3):
        some = slice(first, first + 3)
        assert same_bits(whole[some], attend.attend(pool, q[some], position[some], table[some]))


def test_pages_past_two_to_the_31_elements():
    """The last pages of a pool of 65600 in Llama-3.1-8B's shape, against the same pages in a small one."""
    pages = 65600
    far = torch.zeros(pages, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    near = torch.zeros(20, 2, 16, 8, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.randperm(20, device="cuda").to(torch.int32)[None]
    at = torch.arange(300, dtype=torch.int32, device="cuda")[None]
    q, k, v = noise(300, 32, 128), noise(300, 8, 128, seed=1), noise(300, 8, 128, seed=2)
    found = []
    for pool, names in ((far, table + pages - 20), (near, table)):
        kv.write(pool, k, v, at, at, names)
        out = attend.attend(pool, q, at, names)
        path, live = torch.tensor([[3, 5]], dtype=torch.int32, device="cuda"), torch.ones(1, dtype=torch.bool).cuda()
        kv.commit([pool], names, torch.tensor([200], dtype=torch.int32, device="cuda"), path, live)
        found.append((out, pool[-20:].clone()))
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))
    assert not far[:100].any()

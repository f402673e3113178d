"""Attention on a GPU: right by float64, and every launch shape gives the same bits."""

import pytest
import torch

from nanospec_fn.kernels import attend, kv
from tests.gpu.compare import relative_error, same_bits
from tests.gpu.shapes import noise
from tests.oracle_attention import Case, paged_case, reference_attention

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

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
    kv.write(pool, paged.k, paged.v, paged.store, paged.position, paged.page_table)
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

"""The FlashInfer backend without the library: what that is told of pages, lengths and trees, read as it reads it."""

import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import needs

if reason := needs.no_interpreter():
    pytest.skip(reason, allow_module_level=True)

from nanospec_fn import flashinfer
from nanospec_fn.attention import Rows
from nanospec_fn.struct import put
from tests.oracle_attention import Case, Paged, paged_case, reference_attention

CASES = (
    Case(positions=((3,), (130,), (-1,)), page_size=16),  # decode
    Case(positions=((60, 61, 62, 63, 64, 65), (0, 1, 2, -1, -1, -1), (-1,) * 6), page_size=4),  # the end of a prompt
    Case(positions=((5, 6, 6, 7, 7, 7), (62, 63, 63, 64, 64, 65)), page_size=1, tree=True),
    Case(positions=((127, 128, 128, 129, 129, -1), (128, 129, 129, 130, 130, 131)), page_size=32, tree=True),
)


def library(index: flashinfer.Index, pool: Tensor, q: Tensor, scale: float) -> Tensor:
    """Paged attention by the library's rules: lengths from the pages, a slot's rows at its end."""
    out, groups = torch.full_like(q, torch.nan), q.shape[1] // pool.shape[3]
    for slot in range(len(index.last_page_len)):
        start, stop = index.pages_before[slot : slot + 2].tolist()
        length = (stop - start - 1) * pool.shape[2] + int(index.last_page_len[slot])
        k, v = (
            pool[index.page[start:stop].long()].transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, 2)
        )
        for i in range(index.query):
            row, prefix = slot * index.query + i, length - index.query
            if isinstance(index.mask, Tensor):
                bits = [int(index.mask[row, d >> 5]) >> (d & 31) & 1 for d in range(length - prefix)]
                seen = torch.tensor([True] * prefix + [bool(bit) for bit in bits])
            else:
                seen = torch.arange(length) <= prefix + i
            if seen.any():
                p = torch.softmax(torch.einsum("hd,thd->ht", q[row], k[seen]) * scale, dim=-1)
                out[row] = torch.einsum("ht,thd->hd", p, v[seen])
    return out


class Library:
    """Stands in for the library's wrapper."""

    def __init__(self, index: flashinfer.Index):
        self.index = index

    def run(self, q: Tensor, pool: Tensor, *mask: Any, out: Tensor) -> Tensor:
        return out.copy_(library(self.index, pool, q, q.shape[2] ** -0.5))


def attend(backend: flashinfer.FlashInfer, paged: Paged, span: int) -> Tensor:
    rows = Rows(
        token=paged.position, position=paged.position, store=paged.store, base=paged.base, path=paged.path, span=span
    )
    plan = backend.plan(rows, paged.page_table, paged.case.heads, paged.case.kv_heads)
    shape = (paged.case.heads, paged.case.kv_heads, paged.case.head_dim)
    plan[2].wrappers.setdefault(shape, Library(plan[2].index))
    # What no row may see is finite here: the library multiplies it by zero.
    pool = paged.pool.nan_to_num(100.0)
    return backend.layer(plan, pool, *unturned(paged.q, paged.k, paged.v), put)[1]


def unturned(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A layer's qkv, cos and sin whose queries and keys are these."""
    cos = torch.ones(len(q), q.shape[2] // 2)
    return torch.cat((q, k, v), dim=1), cos, torch.zeros_like(cos)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_it_attends_as_float64_does(case):
    """Bugs: a length off by one; a page of the slot before; a bit of the wrong ancestor; a dead row that is not 0."""
    paged = paged_case(case, torch.float32)
    got = attend(flashinfer.FlashInfer(case.page_size), paged, paged.position.shape[1])
    torch.testing.assert_close(got.double(), reference_attention(paged), rtol=1e-4, atol=1e-5)


def test_a_level_of_a_tree_sees_the_levels_above():
    """Bug: the tree's positions counted from the level's own rows, so that the levels above are all seen."""
    whole = paged_case(CASES[3], torch.float32)
    want = reference_attention(whole)
    backend = flashinfer.FlashInfer(CASES[3].page_size)
    span, last = whole.position.shape[1], slice(3, 6)  # the last three rows; the three above are in the pool by now
    attend(backend, whole, span)
    pool = whole.pool.nan_to_num(100.0)
    from nanospec_fn.kernels import kv

    kv.write(pool, whole.k, whole.v, whole.store, whole.position, whole.page_table)
    rows = Rows(
        token=whole.position[:, last], position=whole.position[:, last], store=whole.store[:, last], base=whole.base,
        path=whole.path[:, last], span=span,
    )  # fmt: skip
    part = torch.arange(len(whole.q)).view(2, -1)[:, last].flatten()
    plan = backend.plan(rows, whole.page_table, 4, 2)
    plan[2].wrappers[4, 2, 16] = Library(plan[2].index)
    got = backend.layer(plan, pool, *unturned(whole.q[part], whole.k[part], whole.v[part]), put)[1]
    torch.testing.assert_close(got.double(), want[part], rtol=1e-4, atol=1e-5)


def test_a_shapes_buffers_stay_where_a_captured_graph_reads_them():
    """Bug: new tensors for a later pass of the same shape, which a graph would never see."""
    backend = flashinfer.FlashInfer(16)
    first, second = paged_case(CASES[0], torch.float32), paged_case(CASES[0], torch.float32)
    moved = second.position + (second.position >= 0).int() * 3
    a = backend.plan(Rows(*(first.position,) * 3, first.base, ()), first.page_table, 4, 2)[2]
    where = [x.data_ptr() for x in flashinfer.buffers(a.index)]
    lengths = a.index.last_page_len.tolist()
    b = backend.plan(Rows(*(moved,) * 3, second.base, ()), second.page_table, 4, 2)[2]
    assert b is a
    assert [x.data_ptr() for x in flashinfer.buffers(b.index)] == where
    assert b.index.last_page_len.tolist() == [lengths[0] + 3, lengths[1] + 3, lengths[2]]


def test_it_says_why_it_cannot_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", None)  # as where it is not installed
    with pytest.raises(ValueError, match=r"flashinfer.*CUDA"):
        flashinfer.check(torch.bfloat16, torch.device("cpu"))
    with pytest.raises(ValueError, match=r"flashinfer.*bf16.*float32"):
        flashinfer.check(torch.float32, torch.device("cuda"))
    with pytest.raises(ValueError, match=r"flashinfer-python.*nanospec-fn\[gpu\]"):
        flashinfer.check(torch.bfloat16, torch.device("cuda"))

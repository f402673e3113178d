"""FlashInfer as the attention backend: the library to compare with, within a tolerance, never called identical.

Its kernels want a plan made on the host. Here one is made for each shape of a pass, for the longest sequence that the
page table can hold and without a KV split, so that only device buffers (pages, lengths, tree masks) change from pass to
pass and a captured round stays valid. A shape is planned on its first pass: `capture` runs a step once before it
captures it. The plans live in the backend value that `program.build` makes, and nowhere else.

A chain's rows stand one after another, so that the library's causal mask serves them. A tree's rows see their prefix
and, of the positions that the tree takes up, those whose bit is set in a word or more of their own.

Shapes: B slots, R rows of a slot, n = B * R, M page-table width, S page size, J path length.
Source: flashinfer 0.7.4; its stock mask is indexed by query and key length, so it would have to be planned each round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanospec_fn.attention import DEAD, Rows
from nanospec_fn.pages import Write
from nanospec_fn.struct import put_

WORKSPACE = 2**27  # bytes that the library asks for, shared by all plans of a backend
TREE_MASK = r"""
struct TreeMaskAttention : AttentionVariantBase {
  static constexpr bool use_softmax = true;
  uint32_t qo_len, kv_len, window_left;
  int32_t q_base, prefix;
  float sm_scale_log2;
  template <typename Params>
  __device__ __host__ TreeMaskAttention(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    q_base = params.q_indptr[batch_idx];
    prefix = int32_t(kv_len) - int32_t(qo_len);
    sm_scale_log2 = params.sm_scale * math::log2e;
  }
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const int32_t d = int32_t(kv_idx) - prefix;
    if (d < 0) return true;
    const uint32_t q_local = qo_idx < qo_len ? qo_idx : qo_len - 1;
    const int32_t words = int32_t(params.tree_words);
    const uint32_t w = params.tree_mask[(q_base + int32_t(q_local)) * words + (d >> 5)];
    return bool((w >> (d & 31)) & 1u);
  })
};
"""


def check(dtype: torch.dtype, device: torch.device) -> None:
    """Errors: ValueError where this backend cannot run, saying why."""
    if device.type != "cuda":
        raise ValueError(f"attend='flashinfer' needs a model on CUDA, this one is on {device}")
    if dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"attend='flashinfer' needs a model in bf16 or fp16, this one is in {dtype}")
    try:
        import flashinfer  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"attend='flashinfer' needs flashinfer-python (pip install 'nanospec-fn[gpu]'): {error}"
        ) from None


@dataclass(frozen=True)
class Index:
    """What the library reads of one pass, on the device."""

    query: int  # rows that it is given for each slot, R or, for a level of a tree, all rows up to this level
    pages_before: Tensor  # [B + 1] int32, of the slots before
    page: Tensor  # [B * M' + 1] int32, the slots' pages one after another; the last one is scratch
    last_page_len: Tensor  # [B] int32
    mask: Tensor | tuple[()]  # [B * query, words] int32, a tree's; () for a chain


def index(rows: Rows, page_table: Tensor, page_size: int) -> Index:
    """A pass's pages, lengths and mask, without waiting for the device. Past the table stands the sink."""
    r, lane = rows.position.shape[1], torch.arange(rows.position.shape[1], device=page_table.device)
    live = rows.position != DEAD
    any_live = live.any(1)
    tree = isinstance(rows.path, Tensor)
    query = max(r, rows.span) if tree else r
    # Where the library's last `query` positions begin: a tree's base, or the position of a chain's first row.
    first = rows.base if tree else torch.where(live, rows.position - lane, -query).amax(1)
    length = torch.where(any_live, first, 0) + query
    width = page_table.shape[1] + -(-query // page_size)
    table = torch.nn.functional.pad(page_table, (0, width - page_table.shape[1]))
    count = (length + page_size - 1) // page_size
    before = torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)
    column = torch.arange(width, device=page_table.device)
    scratch = table.numel()
    to = torch.where(column < count[:, None], before[:-1, None] + column, scratch)
    page = torch.zeros(scratch + 1, dtype=torch.int32, device=page_table.device).scatter(
        0, to.flatten(), table.flatten()
    )
    mask = tree_mask(rows, rows.path, query) if isinstance(rows.path, Tensor) else ()
    return Index(query, before, page, (length - (count - 1) * page_size).to(torch.int32), mask)


def tree_mask(rows: Rows, path: Tensor, query: int) -> Tensor:
    """Which of the `query` positions from `base` on each row sees, a bit each: [B * query, words] int32.

    The rows come last among a slot's `query` rows; those before them see only what is before the tree.
    """
    b, r, j = path.shape
    words = -(-query // 32)
    seen = rows.base[:, None, None] + torch.arange(j, device=path.device) <= rows.position[:, :, None]
    place = torch.where(seen, path - rows.base[:, None, None], words * 32).long()
    bits = torch.zeros(b, r, words * 32 + 1, dtype=torch.int64, device=path.device).scatter(2, place, 1)
    weight = torch.arange(32, device=path.device)
    packed = (bits[:, :, :-1].view(b, r, words, 32) << weight).sum(-1)
    return torch.nn.functional.pad(packed, (0, 0, query - r, 0)).to(torch.int32).flatten(0, 1)


@dataclass
class Planned:
    """The buffers of one shape of pass, which its captured graphs read, and the library's wrappers over them."""

    index: Index
    wrappers: dict[tuple[int, int, int], Any] = field(default_factory=dict)  # by query heads, KV heads, head dim


@dataclass(eq=False)
class FlashInfer:
    """An `attention.Attend`, and the one that is not a value: equal to itself alone.

    It keeps, by shape of pass, the library's plans and the buffers that captured graphs read.
    """

    page_size: int
    planned: dict[tuple[Any, ...], Planned] = field(default_factory=dict, repr=False)
    workspace: list[Tensor] = field(default_factory=list, repr=False)  # one, made on first use

    def plan(self, rows: Rows, page_table: Tensor, heads: int, kv_heads: int) -> tuple[Rows, Tensor, Planned]:
        """See `attention.Attend`. The pass's lengths and pages are copied into the buffers of its shape."""
        new = index(rows, page_table, self.page_size)
        tree = isinstance(new.mask, Tensor)
        key = (*rows.position.shape, new.query, page_table.shape[1], tree, page_table.device)
        if key not in self.planned:
            self.planned[key] = Planned(new)
        planned = self.planned[key]
        for old, value in zip(buffers(planned.index), buffers(new), strict=True):
            if old is not value:
                old.copy_(value)
        return rows, page_table, planned

    def layer(
        self, plan: tuple[Rows, Tensor, Planned], pool: Tensor, qkv: Tensor, cos: Tensor, sin: Tensor, put: Write
    ) -> tuple[Tensor, Tensor]:
        from nanospec_fn.kernels import kv  # needs Triton

        rows, page_table, planned = plan
        pool = pool if put is put_ else pool.clone()
        q, _ = kv.turn_and_write(qkv, cos, sin, pool, rows.store, rows.position, page_table)
        shape = (q.shape[1], pool.shape[3], q.shape[2])
        if shape not in planned.wrappers:
            planned.wrappers[shape] = self._wrap(planned.index, shape, q.dtype)
        return pool, run(planned.wrappers[shape], planned.index, rows, pool, q)

    def _wrap(self, index: Index, shape: tuple[int, int, int], dtype: torch.dtype) -> Any:
        """A wrapper planned for the longest sequences that fit; the buffers keep what is in them."""
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        device, b, tree = index.page.device, len(index.last_page_len), isinstance(index.mask, Tensor)
        if not self.workspace:
            self.workspace.append(torch.empty(WORKSPACE, dtype=torch.uint8, device=device))
        queries = torch.arange(b + 1, dtype=torch.int32) * index.query
        pages = torch.arange(b + 1, dtype=torch.int32) * ((len(index.page) - 1) // b)
        kept = [x.clone() for x in buffers(index)]
        variant = {"jit_args": tree_variant(shape[2], dtype), "variant_owns_mask": True} if tree else {}
        wrapper = BatchPrefillWithPagedKVCacheWrapper(
            self.workspace[0],
            "NHD",
            use_cuda_graph=True,
            qo_indptr_buf=queries.to(device),
            paged_kv_indptr_buf=index.pages_before,
            paged_kv_indices_buf=index.page,
            paged_kv_last_page_len_buf=index.last_page_len,
            backend="fa2",
            **variant,
        )
        wrapper.plan(
            queries,
            pages,
            torch.zeros(len(index.page) - 1, dtype=torch.int32),
            torch.full((b,), self.page_size, dtype=torch.int32),
            *shape,
            self.page_size,
            causal=not tree,
            sm_scale=shape[2] ** -0.5,
            q_data_type=dtype,
            kv_data_type=dtype,
            non_blocking=False,
            disable_split_kv=True,
            uniform_q_len=index.query,
        )
        for buffer, saved in zip(buffers(index), kept, strict=True):
            buffer.copy_(saved)
        return wrapper


def buffers(index: Index) -> Sequence[Tensor]:
    return (
        index.pages_before,
        index.page,
        index.last_page_len,
        *([index.mask] if isinstance(index.mask, Tensor) else []),
    )


def tree_variant(head_dim: int, dtype: torch.dtype) -> list[Any]:
    """The library's description of attention under TREE_MASK; compiled at first use where it is not prebuilt."""
    name = "bf16" if dtype == torch.bfloat16 else "fp16"
    tensors, scalars = (["tree_mask"], ["uint32_t"]), (["tree_words", "sm_scale"], ["int64_t", "double"])
    types = [dtype, dtype, dtype, torch.int32]
    dims = [head_dim, head_dim]
    return [f"fa2_tree_mask_{name}_hd{head_dim}", *types, *dims, *tensors, *scalars, "TreeMaskAttention", TREE_MASK]


def run(wrapper: Any, index: Index, rows: Rows, pool: Tensor, q: Tensor) -> Tensor:
    """q [n, H, D] -> [n, H, D]; 0 for a dead row."""
    b, r = rows.position.shape
    short = index.query - r
    if short:  # a level of a tree: rows that nobody reads stand for the levels above it
        q = torch.nn.functional.pad(q.unflatten(0, (b, r)), (0, 0, 0, 0, short, 0)).flatten(0, 1)
    q = q.contiguous()
    mask: tuple[Any, ...] = ()
    if isinstance(index.mask, Tensor):
        mask = (index.mask.view(torch.uint32), index.mask.shape[1], q.shape[2] ** -0.5)
    out = wrapper.run(q, pool, *mask, out=torch.empty_like(q))
    if short:
        out = out.unflatten(0, (b, index.query))[:, short:].flatten(0, 1)
    return out.masked_fill((rows.position == DEAD).flatten()[:, None, None], 0)

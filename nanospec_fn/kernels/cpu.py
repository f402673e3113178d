"""Row-canonical arithmetic on a CPU: a row's bits depend on that row alone.

What the library's CPU kernels guarantee is little (docs/numerics.md has the measurements), so each function here
states what it leans on. The whole set is tested for invariance over row counts, and `pick_gemm` and `pick_bmm` test
the parts that differ between processors before they are used.

Shapes: n rows, K/N the inner and outer width of a matrix.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

ROW_BLOCK = 4  # fewer rows than this take other kernels (gemv) with other bits
LANES = 64  # fp32 values of a CPU's widest vectors, unrolled loops included
KV_BLOCK = 64  # positions per block of a sum over keys, here and in attend.py; page sizes divide it
GEMMS = ("onednn", "blocked", "library")  # how `linear` multiplies
BMMS = ("whole", "tiles", "ordered")  # how `attention` multiplies, the fastest first


def pick_gemm(dtype: torch.dtype = torch.float32) -> str:
    """Name the fastest GEMM of this machine that is row-invariant in a short test.

    Returns: "onednn" or "blocked".
    Errors: RuntimeError if neither holds here.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(72, 1536, generator=generator).to(dtype)
    weights = [torch.randn(n, k, generator=generator).to(dtype) for n, k in ((576, 1536), (200, 96), (2048, 64))]
    for gemm in ("onednn", "blocked"):
        if gemm == "onednn" and not _has_onednn(dtype):
            continue
        if all(_row_invariant(x[:, : w.shape[1]].contiguous(), w, gemm) for w in weights):
            return gemm
    raise RuntimeError(
        "no row-invariant matrix product on this CPU, so results would depend on the batch; see docs/numerics.md"
    )


def _row_invariant(x: Tensor, w: Tensor, gemm: str) -> bool:
    whole = linear(x, w, gemm)
    return all(torch.equal(linear(x[5 : 5 + n], w, gemm), whole[5 : 5 + n]) for n in (1, 2, 3, 4, 7, 8, 21, 64))


def _has_onednn(dtype: torch.dtype) -> bool:
    try:
        _onednn(torch.ones(ROW_BLOCK, 8, dtype=dtype), torch.ones(8, 8, dtype=dtype))
    except (AttributeError, RuntimeError, NotImplementedError):
        return False
    return True


def _onednn(x: Tensor, w: Tensor) -> Tensor:
    # The operator that TorchInductor emits for a linear layer. Unlike F.linear, which goes to MKL's sgemm, oneDNN
    # walks K in one order for every row count from 2 on, reads the plain weight and is 2x faster at few rows.
    return torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")


def linear(x: Tensor, w: Tensor, gemm: str) -> Tensor:
    """x [n, K] @ w [N, K]^T -> [n, N]. `gemm`: "onednn", "blocked", or "library" (F.linear: no promise on bits)."""
    if gemm == "library":
        return torch.nn.functional.linear(x, w)
    if torch.is_grad_enabled():
        return _Linear.apply(x, w, gemm)
    return _product(x, w, gemm)  # autograd.Function costs as much as a small product


def _product(x: Tensor, w: Tensor, gemm: str) -> Tensor:
    n = x.shape[0]
    padded = pad_rows(x, ROW_BLOCK)
    if gemm == "onednn":
        return _onednn(padded, w)[:n]
    blocks = [w @ block.t() for block in padded.split(ROW_BLOCK)]
    return torch.cat(blocks, dim=1).t()[:n].contiguous()


class _Linear(torch.autograd.Function):
    """The canonical product with the library's backward, usable under torch.func."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, gemm: str) -> Tensor:
        return _product(x, w, gemm)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return grad @ w, grad.t() @ x, None


def pad_rows(x: Tensor, multiple: int) -> Tensor:
    """Zero rows appended until the first dimension is a positive multiple of `multiple`."""
    short = -x.shape[0] % multiple if x.shape[0] else multiple
    return torch.nn.functional.pad(x, (0, 0, 0, short)).contiguous() if short else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, E] normalised per row in fp32, or in float64 if it is that, times weight [E].

    At least ROW_BLOCK rows go in, as a lone row sums in another order when it is wide.
    """
    n = x.shape[0]
    wide = pad_rows(x, ROW_BLOCK).to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * (wide * scale).to(x.dtype))[:n]


def log_softmax(x: Tensor) -> Tensor:
    """x [n, V] -> [n, V]."""
    return torch.log_softmax(pad_rows(x, ROW_BLOCK), dim=-1)[: x.shape[0]]


def top(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row: logits x [n, V] -> log-probs [n, k], ids [n, k] int64."""
    logp, token = log_softmax(x).topk(k, dim=-1)
    return logp, token


def log_sum_exp(x: Tensor) -> Tensor:
    """x [n, V] -> [n], -inf for a row of nothing else."""
    n = x.shape[0]
    top = x.amax(-1)
    top = top.masked_fill(top == -torch.inf, 0)
    weights = torch.exp(x - top[:, None])
    # Not log_softmax, which adds in few running sums: at 128k tokens beside a peak it is off by 7e-5 nats. The sum of
    # a lone wide row is split among threads to other bits, so rows are added up to where that does not happen.
    if n < ROW_BLOCK:
        weights = pad_rows(weights, ROW_BLOCK)
    return top + torch.log(weights.sum(-1))[:n]


def _whole(x: Tensor) -> Tensor:
    """x [..., N] with N padded to whole vectors: what is left over of the last one takes scalar code, to other bits."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % LANES))


def exp(x: Tensor) -> Tensor:
    """exp of x [B, N]; a row's bits depend on that row alone, as those of the three functions below."""
    return _whole(x).exp()[..., : x.shape[-1]]


def log_add_exp(a: Tensor, b: Tensor) -> Tensor:
    """log(exp(a) + exp(b)) of a, b [B, N]."""
    return torch.logaddexp(_whole(a), _whole(b))[..., : a.shape[-1]]


def log_one_minus_exp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) of x [B, N], x <= 0."""
    whole = _whole(x)
    near = whole > -math.log(2)
    return torch.where(near, torch.log(-torch.expm1(whole)), torch.log1p(-whole.exp()))[..., : x.shape[-1]]


def log_sum_exp_few(x: Tensor) -> Tensor:
    """x [B, N, T] -> [B, N] over few terms, a tree's; `log_sum_exp` is for rows of a vocabulary."""
    n, t = x.shape[-2:]
    return torch.logsumexp(torch.nn.functional.pad(x, (0, -t % LANES, 0, -n % LANES), value=-torch.inf), -1)[..., :n]


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2I] -> silu(gate) * up [n, I]. Through exp: F.silu's vector and scalar paths differ in bits."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate / (1 + torch.exp(-gate)) * up


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, D] by cos, sin [n, D/2]; pair i is (i, i + D/2), as in Hugging Face checkpoints."""
    half = x.shape[-1] // 2
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def pick_bmm(dtype: torch.dtype = torch.float32) -> str:
    """Name the fastest way for `attention` to multiply that is row-invariant on this machine in a short test.

    Returns: "whole", all rows of a group at once; "tiles", ROW_BLOCK rows at a time, so that every product has one
    shape; "ordered", one term after another, in which no library decides on an order (20 to 50 times the time).
    Errors: RuntimeError if none holds here.
    """
    for bmm in BMMS:
        if all(_attends_invariantly(bmm, d, dtype) for d in (64, 128)):
            return bmm
    raise RuntimeError(
        "no row-invariant attention on this CPU, so results would depend on the batch; see docs/numerics.md"
    )


def _attends_invariantly(bmm: str, d: int, dtype: torch.dtype) -> bool:
    """Whether a few rows have the bits that they have among many, over shared keys and each over a copy of them."""
    generator = torch.Generator().manual_seed(0)
    many, keys = 80, 4 * KV_BLOCK
    q, k, v = (torch.randn(1, n, d, generator=generator).to(dtype) for n in (many, keys, keys))
    hidden = hide((torch.arange(keys) < 60 + 2 * torch.arange(many)[:, None])[None], 1, 1)

    def attend(first: int, n: int, copies: int) -> Tensor:
        part = (k.expand(copies, -1, -1), v.expand(copies, -1, -1), hidden[:, :, first : first + n])
        return attention(q[:, first : first + n], [part], d**-0.5, bmm)

    whole = attend(0, many, 1)
    some = ((1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (13, 1), (31, 1), (64, 1), (3, 3), (12, 12))
    return all(torch.equal(attend(5, n, copies), whole[:, 5 : 5 + n]) for n, copies in some)


def attention(q: Tensor, parts: Sequence[tuple[Tensor, Tensor, Tensor]], scale: float, bmm: str) -> Tensor:
    """Softmax attention whose sums run over blocks of KV_BLOCK positions in order, block by block.

    A block that is hidden from a row adds exactly zero to that row, so neither padding nor the length of the
    neighbours changes its bits. The maximum needs no order.

    Args:
      q: [n, M, D], rows of n groups.
      parts: (k [n * f, T, D], v [n * f, T, D], hidden [n, T / KV_BLOCK, M, KV_BLOCK]) in order of position. With f = 1
        a group's rows share their keys; otherwise f divides M and each M / f consecutive rows have their own. v must
        be finite where no row sees it.
      scale: multiplies the scores.
      bmm: of `pick_bmm`.
    Returns: [n, M, D]; 0 for a row that sees nothing.
    """
    n, m, d = q.shape
    scores = [
        (_merge_rows(_scores(q.reshape(k.shape[0], -1, d), k, bmm), n) * scale).masked_fill(hidden, -torch.inf)
        for k, _, hidden in parts
    ]
    tops = [s.amax(dim=(1, 3)) for s in scores]
    top = tops[0] if len(tops) == 1 else torch.stack(tops).amax(0)
    top = top.detach().clamp_min(torch.finfo(q.dtype).min)[:, None, :, None]  # -inf - -inf is NaN
    total, out = q.new_zeros(n, m, 1), torch.zeros_like(q)
    for s, (_, v, _) in zip(scores, parts, strict=True):
        p = torch.exp(s - top)
        mass, mixed = p.sum(-1, keepdim=True), _merge_rows(_mix(_split_rows(p, v.shape[0]), v, bmm), n)
        for j in range(p.shape[1]):
            total = total + mass[:, j]
            out = out + mixed[:, j]
    return out / total.clamp_min(torch.finfo(q.dtype).tiny)


def hide(mask: Tensor, kv_heads: int, groups: int) -> Tensor:
    """mask [B, R, T], which rows see which positions -> `attention`'s hidden [B * K, T / KV_BLOCK, R * G, KV_BLOCK]."""
    b, r, t = mask.shape
    hidden = ~mask.view(b, r, t // KV_BLOCK, KV_BLOCK).transpose(1, 2).repeat_interleave(groups, 2)
    return hidden[:, None].expand(-1, kv_heads, -1, -1, -1).reshape(b * kv_heads, -1, r * groups, KV_BLOCK)


def _scores(q: Tensor, k: Tensor, bmm: str) -> Tensor:
    """q [g, m, D], k [g, T, D] -> [g, T / KV_BLOCK, m, KV_BLOCK]."""
    g, m, d = q.shape
    blocks = k.shape[1] // KV_BLOCK
    q = _pad_tile(q)
    tiles = q[:, None].expand(g, blocks, *q.shape[1:]).reshape(g * blocks, -1, d)
    s = _multiply(tiles, k.reshape(g * blocks, KV_BLOCK, d).transpose(1, 2), bmm)
    return s.view(g, blocks, -1, KV_BLOCK)[:, :, :m]


def _mix(p: Tensor, v: Tensor, bmm: str) -> Tensor:
    """p [g, T / KV_BLOCK, m, KV_BLOCK], v [g, T, D] -> [g, T / KV_BLOCK, m, D], each block by itself."""
    g, blocks, m, _ = p.shape
    p = _pad_tile(p)
    out = _multiply(p.reshape(g * blocks, -1, KV_BLOCK), v.reshape(g * blocks, KV_BLOCK, -1), bmm)
    return out.view(g, blocks, *out.shape[1:])[:, :, :m]


def _multiply(a: Tensor, b: Tensor, bmm: str) -> Tensor:
    """a [g, m, K], m a multiple of ROW_BLOCK, b [g, K, N] -> [g, m, N], as `pick_bmm` names it."""
    if bmm == "whole":
        return torch.bmm(a, b)
    if bmm == "tiles":
        return torch.cat([torch.bmm(tile.contiguous(), b) for tile in a.split(ROW_BLOCK, dim=1)], dim=1)
    wide = torch.promote_types(a.dtype, torch.float32)
    out = torch.zeros(a.shape[0], a.shape[1], b.shape[2], dtype=wide, device=a.device)
    for i in range(a.shape[2]):
        out = out + a[:, :, i, None].to(wide) * b[:, None, i].to(wide)
    return out.to(a.dtype)


def _merge_rows(x: Tensor, n: int) -> Tensor:
    """[n * f, blocks, m, W] -> [n, blocks, f * m, W]."""
    if x.shape[0] == n:
        return x
    _, blocks, m, w = x.shape
    return x.reshape(n, -1, blocks, m, w).transpose(1, 2).reshape(n, blocks, -1, w)


def _split_rows(x: Tensor, groups: int) -> Tensor:
    """The inverse of `_merge_rows` for n * f = groups."""
    if x.shape[0] == groups:
        return x
    n, blocks, _, w = x.shape
    f = groups // n
    return x.reshape(n, blocks, f, -1, w).transpose(1, 2).reshape(groups, blocks, -1, w)


def _pad_tile(x: Tensor) -> Tensor:
    """Rows [..., m, W] up to a multiple of ROW_BLOCK."""
    short = -x.shape[-2] % ROW_BLOCK
    return torch.nn.functional.pad(x, (0, 0, 0, short)) if short else x

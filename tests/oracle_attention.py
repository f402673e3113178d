"""Paged attention cases, and the answer by plain float64 softmax, position by position."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """positions: per slot, the position of each of its rows, -1 for a dead one; a tree's rows come root first."""

    positions: tuple[tuple[int, ...], ...]
    page_size: int
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    tree: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Paged:
    """A case laid out in a pool whose every cell that no row may see is NaN."""

    case: Case
    pool: Tensor  # [P + 1, 2, S, K, D], the prefix stored, the rows' own KV not yet
    page_table: Tensor  # [B, M]
    position: Tensor  # [B, R]
    store: Tensor  # [B, R]
    base: Tensor  # [B]
    path: Tensor | tuple[()]  # [B, R, J]
    q: Tensor  # [n, H, D]
    k: Tensor  # [n, K, D]
    v: Tensor
    keys: list[list[Tensor]]  # per slot and row: k, v of the positions it sees, [2, T, K, D] float64


def paged_case(case: Case, dtype: torch.dtype, device: str = "cpu") -> Paged:
    """Random data for a case. A row's parent in a tree is the latest earlier row one position before it."""
    generator = torch.Generator().manual_seed(case.seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    b, r, s = len(case.positions), len(case.positions[0]), case.page_size
    n, kv, d = b * r, case.kv_heads, case.head_dim
    q, k, v = noise(n, case.heads, d), noise(n, kv, d), noise(n, kv, d)
    position = torch.tensor(case.positions, dtype=torch.int32)
    base = position[:, 0].clamp_min(0)
    depth = int((position - base[:, None]).max()) + 1
    lane = torch.arange(r, dtype=torch.int32)
    store = base[:, None] + lane if case.tree else position.clone()
    width = -(-(int(store.max()) + 1) // s) + 1
    ids = torch.randperm(b * width, generator=generator).to(torch.int32).view(b, width) + 1
    pool = torch.full((b * width + 1, 2, s, kv, d), float("nan"), dtype=dtype)
    path = torch.zeros(b, r, depth, dtype=torch.int32)
    keys: list[list[Tensor]] = []
    for i in range(b):
        prefix = noise(2, int(base[i]), kv, d)
        for t in range(int(base[i])):
            pool[ids[i, t // s], :, t % s] = prefix[:, t]
        chains: list[list[int]] = []
        keys.append([])
        for j in range(r):
            at = int(position[i, j])
            if at < 0:
                chains.append([])
                keys[i].append(torch.zeros(2, 0, kv, d, dtype=torch.float64))
                continue
            above = [c for c in range(j) if int(position[i, c]) == at - 1]
            chains.append([*(chains[above[-1]] if above else []), j])
            own = torch.tensor(chains[j]) + i * r
            keys[i].append(torch.cat((prefix, torch.stack((k[own], v[own]))), dim=1).double())
            path[i, j, : len(chains[j])] = store[i, torch.tensor(chains[j])]
    to = {"device": device}
    return Paged(
        case, pool.to(**to), ids.to(**to), position.to(**to), store.to(**to), base.to(**to),
        path.to(**to) if case.tree else (), q.to(**to), k.to(**to), v.to(**to), keys,
    )  # fmt: skip


def reference_attention(paged: Paged) -> Tensor:
    """[n, H, D] float64, on the CPU."""
    q = paged.q.double().cpu()
    groups = paged.case.heads // paged.case.kv_heads
    rows = [row for slot in paged.keys for row in slot]
    out = torch.zeros_like(q)
    for i, kv in enumerate(rows):
        if kv.shape[1]:
            k, v = kv.repeat_interleave(groups, dim=2)
            p = torch.softmax(torch.einsum("hd,thd->ht", q[i], k) * q.shape[-1] ** -0.5, dim=-1)
            out[i] = torch.einsum("ht,thd->hd", p, v)
    return out

"""Cases for a round's bookkeeping: slots, trees and verdicts in every condition, small and random."""

import torch
from torch import Tensor

import nanospec_fn as ns
from nanospec_fn import acceptance, pages, slots, trees
from nanospec_fn.struct import replace

B, SIZE, CAPACITY = 5, 4, 40


def integers(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def some_slots(seed: int, free: int = 9, b: int = B) -> tuple[pages.Pages, slots.Slots]:
    """Slots in every condition, over a pool in which `free` pages are left."""
    g = torch.Generator().manual_seed(seed)
    s = slots.init(b, CAPACITY, 12)
    total = integers(g, 2, 30, b)
    held = (total + SIZE - 1) // SIZE
    pool = pages.init(free + int(held.sum()))
    pool, page_id, _ = pages.alloc(pool, held, 12)
    s = replace(
        s,
        active=torch.rand(b, generator=g) < 0.9,
        done=torch.where(torch.rand(b, generator=g) < 0.8, 0, 1).to(torch.int32),
        tokens=integers(g, 0, 128, b, CAPACITY + 1),
        total=total,
        length=total - 1,
        prefill_to=torch.where(torch.rand(b, generator=g) < 0.8, total - 1, total),
        limit=total + integers(g, 1, 9, b),
        unseen=integers(g, 1, 3, b),
        page_table=page_id.clamp_min(0),
        num_pages=held,
        stop_ids=integers(g, 0, 128, b, slots.MAX_STOP_IDS),
    )
    return pool, s


def candidates(seed: int, b: int, k: int, level: int, vocab: int = 128) -> tuple[Tensor, Tensor]:
    """Tokens and log-probs [b, m, k] for a tree's level, many of them tied, some absent."""
    g = torch.Generator().manual_seed(seed)
    m = 1 if level == 1 else k
    token = torch.rand(b, m, vocab, generator=g).argsort(-1)[..., :k]
    logp = -integers(g, 1, 4, b, m, k).float()
    absent = torch.rand(token.shape, generator=g) < 0.2
    return torch.where(absent, -1, token), logp.masked_fill(absent, -torch.inf)


def random_tree(seed: int, b: int, k: int, depth: int, vocab: int = 128) -> trees.Tree:
    tree = trees.init_all(b, k * depth)
    for level in range(1, depth + 1):
        tree = trees.expand_all(tree, level, *candidates(seed * 100 + level, b, k, level, vocab))
    return tree


def some_verdict(seed: int) -> acceptance.Verdict:
    """Tokens for each of B slots, up to 5."""
    g, w = torch.Generator().manual_seed(seed), 5
    count = integers(g, 1, w + 1, B)
    here = torch.arange(w) < count[:, None]
    tokens = torch.where(here, integers(g, 0, 128, B, w), -1).to(torch.int32)
    logp = torch.where(here, -torch.rand(B, w, generator=g), 0)
    return acceptance.Verdict(tokens, logp, logp * 2, count, count - 1, tokens[:, 1:])


REQUESTS = (
    ns.Sampling(),
    ns.Sampling(temperature=1.0, seed=1),
    ns.Sampling(temperature=1.0, seed=2, rule="power", alpha=0.5),
    ns.Sampling(temperature=0.8, seed=3, rule="power", alpha=0.2, top_k=6),
    ns.Sampling(temperature=1.0, seed=4, rule="power", alpha=1.0),
    ns.Sampling(temperature=1.0, seed=5, rule="relaxed", tau=0.1, accept_top_k=1),
    ns.Sampling(temperature=1.0, seed=6, rule="relaxed", tau=0.9, accept_top_k=3, top_p=0.8),
)

"""A head's drafting rehearsed along known sequences: every position and depth at once, without a cache or rounds.

Row p of a sequence is the pair (feature p, token p + 1) and predicts token p + 2. At step j it is the
drafted token of depth j after the base p - j: it takes the head's output of step j - 1 at row p - 1 in place of the
target's feature, and attends the true rows up to the base and then its own path, rows of the steps 1..j.

Shapes: B sequences, T tokens, R = T - 1 rows, E hidden, F tapped width, S steps, H / K query / KV heads, D head
dim.
Source: EAGLE-3 (Li et al. 2025), section 3, training-time test.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from nanospec_fn import eagle, model


def outputs(
    params: eagle.HeadParams,
    cfg: eagle.HeadConfig,
    embed: Tensor,
    tokens: Tensor,
    taps: Tensor,
    steps: int,
    feed: Callable[[Tensor], Tensor] | None = None,
) -> list[Tensor]:
    """The head's outputs at every row and step, as it drafts along `tokens`.

    Args:
      tokens: [B, T]; taps: [B, T, F], as `model.hidden` concatenates them.
      feed: what becomes of outputs [n, E] before they are fed to the next step; None: nothing, as the engine does.
    Returns: per step j [B, R, E], what `eagle.logits` reads; rows p < j have no path.
    """
    b, r = tokens.shape[0], tokens.shape[1] - 1
    token = tokens[:, 1:].flatten()
    position = torch.arange(r, device=tokens.device).repeat(b)
    feature = eagle.fuse(params, cfg, taps[:, :-1].flatten(0, 1))
    past: list[tuple[Tensor, Tensor]] = []
    out = []
    for _ in range(steps):
        fed = eagle.advance(params, cfg, embed, token, feature, position, along_paths(cfg, b, r, past))
        out.append(fed.view(b, r, -1))
        feature = shift((feed(fed) if feed else fed).view(b, r, -1), 1, dim=1).flatten(0, 1)
    return out


def along_paths(cfg: eagle.HeadConfig, b: int, r: int, past: list[tuple[Tensor, Tensor]]) -> model.Attention:
    """The attention of unroll step j = len(past), which it appends itself to: keys and values [B, H, R, D] by step."""
    j = len(past)

    def attend(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (by_head(x, b, r, cfg) for x in model.rotate(qkv, cos, sin, cfg.num_kv_heads))
        past.append((k, v))
        if j == 0:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
        q = q * cfg.head_dim**-0.5
        base = torch.ones(r, r, dtype=torch.bool, device=q.device).tril(-j)
        true = (q @ past[0][0].transpose(2, 3)).masked_fill(~base, -torch.inf)
        # Step i's row on the path of row p is p - (j - i).
        path = [tuple(shift(x, j - i, dim=2) for x in past[i]) for i in range(1, j + 1)]
        own = torch.stack([(q * key).sum(-1) for key, _ in path], dim=-1)
        weight = torch.cat((true, own), dim=-1).softmax(-1, dtype=torch.float32).to(q.dtype)
        mixed = weight[..., :r] @ past[0][1]
        for i, (_, value) in enumerate(path):
            mixed = mixed + weight[..., r + i, None] * value
        return mixed.transpose(1, 2).flatten(0, 1)

    return attend


def shift(x: Tensor, rows: int, dim: int) -> Tensor:
    """x with row p along `dim` holding what was row p - rows; zeros come in."""
    if not rows:
        return x
    padding = [0, 0] * (x.dim() - 1 - dim) + [rows, 0]
    return F.pad(x.narrow(dim, 0, x.shape[dim] - rows), padding)


def causal(cfg: model.Config, b: int, t: int) -> model.AttendLayer:
    """Causal attention within each of b sequences of t rows, by the library."""

    def attend(_: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (by_head(x, b, t, cfg) for x in model.rotate(qkv, cos, sin, cfg.num_kv_heads))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)

    return attend


def by_head(x: Tensor, b: int, t: int, cfg: model.Config) -> Tensor:
    """[b * t, heads, D] -> [b, H, t, D], KV heads repeated for their query heads."""
    x = x.view(b, t, *x.shape[1:]).transpose(1, 2)
    return x.repeat_interleave(cfg.num_heads // x.shape[1], dim=1)


def chain_rounds(hits: Sequence[Sequence[bool]], tokens: int) -> Iterator[tuple[int, int]]:
    """The rounds that chains would have along one known sequence: each one's pending token, and what it accepts.

    Right for greedy sequences, and for sampled ones under rule `exact`: a round goes from its pending token to the
    first draft that is not the sequence's own, which the target then emits itself. Token 0 is the prefill's own.

    Args: hits: [D][M], entry (j, m): the draft of depth j + 1 for token m + 1 is right; tokens: of the sequence.
    """
    pending = 0
    while pending + 1 < tokens:
        left, run = tokens - 1 - pending, 0
        while run < min(len(hits), left) and hits[run][pending + run]:
            run += 1
        yield pending, run
        pending += min(run + 1, left)


def accepted_length(hit: Tensor, length: Tensor, prompt: Tensor) -> tuple[int, int]:
    """`chain_rounds` over many sequences: tokens emitted in rounds, and rounds.

    Args: hit: [S, B, R] bool; length, prompt: [B], tokens of each sequence and of the prompt in it.
    """
    emitted = rounds = 0
    for hits, n, first in zip(hit.transpose(0, 1).tolist(), length.tolist(), prompt.tolist(), strict=True):
        # Row p predicts token p + 2: behind the prefill's own token `first`, the first draft is that of row first - 1.
        rounds += len(list(chain_rounds([row[first - 1 :] for row in hits], n - first)))
        emitted += max(0, n - 1 - first)  # a round emits all that follows its pending token, up to the next one
    return emitted, rounds

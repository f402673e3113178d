"""The training-time test of EAGLE-3: a head unrolled over its own features, exactly as it drafts (`rehearsal`).

Row p of a sequence predicts token p + 2; at unroll step j it is the drafted token of depth j after the base p - j.

Shapes: B sequences, T tokens, R = T - 1 rows, E hidden, F tapped width, S unroll steps, m supervised rows,
V vocabulary, Vd draft vocabulary.
Source: EAGLE-3 (Li et al. 2025), section 3; the weights 0.8^j as in SpecForge.
"""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import eagle, model, rehearsal, struct

DECAY = 0.8  # weight of each draft step's loss over the one before, as in SpecForge
CHUNK = 4096  # rows whose logits over the whole vocabulary are in memory at once


@struct.state
class Seen:
    """What the target makes of sequences."""

    taps: Tensor  # [B, T, F], its tapped streams
    x: Tensor  # [B, T, E], its last stream, before the final norm
    best: Tensor  # [B, T] int64, its most probable next token


@struct.state
class Batch:
    """Sequences padded on the right, and what the target says of them."""

    tokens: Tensor  # [B, T] int64
    taps: Tensor  # [B, T, F], the target's tapped streams
    row: Tensor  # [m] int64, supervised rows, flat indices into [B, R]
    live: Tensor  # [S, m] bool, whether the path that ends in the row at step j starts inside the response
    target: Tensor  # [m, Vd] fp32, the target's distribution of the row's token, renormalised over the draft vocabulary
    best: Tensor  # [m] int64, the target's own most probable token, of the whole vocabulary
    known: Tensor  # [m] bool, whether `best` is in the draft vocabulary


def supervise(length: Tensor, prompt: Tensor, width: int, steps: int) -> tuple[Tensor, Tensor]:
    """Which rows are trained on: `Batch.row` and `Batch.live`.

    Step j at row p drafts token p + 2 from the pending token p - j + 1, which must be of the response: the engine
    drafts nothing earlier.

    Args: length, prompt: [B], tokens of each sequence and of its prompt; width: T.
    """
    p = torch.arange(width - 1, device=length.device)
    ends = p + 2 < length[:, None]
    row = (ends & (p + 1 >= prompt[:, None])).flatten().nonzero()[:, 0]
    at, first = row % (width - 1), prompt[row // (width - 1)]
    live = torch.stack([at - j + 1 >= first for j in range(steps)])
    return row, live


def observe(target: ns.Model, taps: tuple[int, ...], tokens: Tensor) -> Seen:
    """Run the target over tokens [B, T]; no row sees the padding on its right."""
    b, t = tokens.shape
    position = torch.arange(t, device=tokens.device).repeat(b)
    with torch.no_grad():
        attend = rehearsal.causal(target.cfg, b, t)
        x, features = model.hidden(target.params, target.cfg, tokens.flatten(), position, attend, taps)
        best = [model.logits(target.params, target.cfg, part).argmax(-1) for part in x.split(CHUNK)]
    return Seen(taps=features.view(b, t, -1), x=x.view(b, t, -1), best=torch.cat(best).view(b, t))


def prepare(target: ns.Model, target_id: Tensor, tokens: Tensor, seen: Seen, row: Tensor, live: Tensor) -> Batch:
    """What a step needs of tokens [B, T], the target's view of them, and `supervise`'s rows."""
    inside = torch.zeros(target.cfg.vocab_size, dtype=torch.bool, device=tokens.device)
    inside = inside.index_fill(0, target_id, True)
    # Row p predicts token p + 2, which the target predicts at p + 1.
    x, best = (y[:, 1:].flatten(0, 1)[row] for y in (seen.x, seen.best))
    with torch.no_grad():
        logits = model.logits(struct.replace(target.params, head=output_rows(target, target_id)), target.cfg, x)
    return Batch(
        tokens=tokens,
        taps=seen.taps,
        row=row,
        live=live,
        target=logits.softmax(-1),
        best=best,
        known=inside[best],
    )


def output_rows(target: ns.Model, target_id: Tensor) -> Tensor:
    """[Vd, E]: the target's output head for the draft vocabulary."""
    return model.output_head(target.params)[target_id]


def loss(
    params: eagle.HeadParams,
    cfg: eagle.HeadConfig,
    embed: Tensor,
    head: Tensor | tuple[()],
    batch: Batch,
    decay: float = DECAY,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Soft cross-entropy to the target at every step, step j weighted by decay^j.

    Rows whose most probable token the draft vocabulary lacks are left out: nothing the head could say is right there.

    Returns: the loss, and per step [S]: `loss` (nats), `accuracy` (the head's best token is the target's; rows with
      unknown tokens count as misses).
    """
    losses, hits = [], []
    for j, out in enumerate(rehearsal.outputs(params, cfg, embed, batch.tokens, batch.taps, len(batch.live))):
        logits = eagle.logits(params, cfg, out.flatten(0, 1)[batch.row], head)
        entropy = -(batch.target * logits.log_softmax(-1)).sum(-1)
        weight = counted(batch, j).float()
        losses.append((entropy * weight).sum() / weight.sum().clamp_min(1))
        right = params.target_id[logits.detach().argmax(-1)] == batch.best
        hits.append((right & batch.live[j]).sum() / batch.live[j].sum().clamp_min(1))
    by_step = torch.stack(losses)
    weights = decay ** torch.arange(len(losses), device=by_step.device, dtype=by_step.dtype)
    return (by_step * weights).sum(), {"loss": by_step.detach(), "accuracy": torch.stack(hits)}


def counted(batch: Batch, step: int = 0) -> Tensor:
    """[m] bool: the rows that the loss of a draft step counts; where the first step has none, no later one has."""
    return batch.live[step] & batch.known


def drafted(
    params: eagle.HeadParams, cfg: eagle.HeadConfig, embed: Tensor, head: Tensor | tuple[()], batch: Batch
) -> Tensor:
    """[S, B, R] bool: whether the greedy draft of depth j + 1 after base p - j is the sequence's own next token."""
    outs = rehearsal.outputs(params, cfg, embed, batch.tokens, batch.taps, len(batch.live))
    b, r = outs[0].shape[:2]
    following = F.pad(batch.tokens[:, 2:], (0, 1), value=-1).flatten()[batch.row]
    hit = torch.zeros(len(outs), b * r, dtype=torch.bool, device=following.device)
    for j, out in enumerate(outs):
        best = params.target_id[eagle.logits(params, cfg, out.flatten(0, 1)[batch.row], head).argmax(-1)]
        hit[j, batch.row] = best == following
    return hit.view(len(outs), b, r)


def trainable(params: eagle.HeadParams) -> eagle.HeadParams:
    """The weights without the vocabulary map: torch.func differentiates floating-point leaves only."""
    return struct.replace(params, target_id=())


def assemble(params: eagle.HeadParams, target_id: Tensor, scale: Tensor, dtype: torch.dtype) -> eagle.HeadParams:
    """The engine's head from trained weights: the map put back, the taps' scale folded into `fc`, cast to `dtype`.

    Training sees taps divided by `scale` [F]: raw streams have norms in the hundreds, where one learning rate for
    all weights would be far too large for `fc`.
    """
    params = struct.replace(params, fc=params.fc / scale)
    cast: eagle.HeadParams = pytree.tree_map(lambda x: x.to(dtype), params)
    return struct.replace(cast, target_id=target_id)

"""One update of an EAGLE-3 head that trains: its state, the statics, and what a step needs of tokens.

Shapes: B sequences, T tokens, F tapped width, S unroll steps, Vd draft vocabulary.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import eagle, struct
from rl import eagle_head, eagle_loss
from rl.eagle_loss import Batch, Seen
from rl.optimizer import AdamState, Optimizer


@struct.state
class TrainState:
    """What training carries from step to step."""

    params: eagle.HeadParams  # fp32, fc in units of the taps' scale; see eagle_loss.assemble
    adam: AdamState
    scale: Tensor  # [F] fp32
    target_id: Tensor  # [Vd] int64


@dataclass(frozen=True)
class HeadRecipe:
    """The hashable statics of training."""

    cfg: eagle.HeadConfig
    unroll: int
    decay: float
    dtype: torch.dtype  # of the forward and backward pass


def init(
    target: ns.Model,
    recipe: HeadRecipe,
    optimize: Optimizer,
    target_id: Tensor,
    tokens: Tensor,
    own_head: bool,
    seed: int,
) -> TrainState:
    """The state before the first step; tokens [B, T]: some sequences to take the taps' scale from."""
    batch = make_batch(
        target, recipe, target_id, tokens, torch.full_like(tokens[:, 0], tokens.shape[1]), tokens[:, 0] * 0
    )
    params = eagle_loss.trainable(eagle_head.init(recipe.cfg, target, target_id, own_head, seed))
    scale = scale_of(batch.taps, recipe.cfg)
    return TrainState(params=params, adam=optimize.init(params), scale=scale, target_id=target_id)


def adopt(head: Any, recipe: HeadRecipe, optimize: Optimizer, taps: Tensor) -> TrainState:
    """A loaded head as training sees it: fp32, `fc` in units of the taps' scale (see `eagle_loss.assemble`)."""
    scale = scale_of(taps, recipe.cfg)
    if recipe.cfg.norm_before_fc:
        scale = torch.ones_like(scale)
    params = pytree.tree_map(lambda x: x.float().clone(), eagle_loss.trainable(head))
    params = struct.replace(params, fc=params.fc * scale)
    return TrainState(params=params, adam=optimize.init(params), scale=scale, target_id=head.target_id.clone())


def train_step(
    target: ns.Model, recipe: HeadRecipe, optimize: Optimizer, train: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Tensor]]:
    """One update. Returns the new state and what the log says: loss, accuracy [S], gradient norm []."""

    def objective(params: eagle.HeadParams) -> tuple[Tensor, dict[str, Tensor]]:
        head = eagle_loss.assemble(params, train.target_id, train.scale, recipe.dtype)
        rows = eagle_loss.output_rows(target, train.target_id)
        return eagle_loss.loss(head, recipe.cfg, target.params.embed, rows, batch, recipe.decay)

    with torch.enable_grad():
        grads, (_, info) = torch.func.grad_and_value(objective, has_aux=True)(train.params)
    with torch.no_grad():
        params, adam, norm = optimize.update(grads, train.adam, train.params)
    return TrainState(params=params, adam=adam, scale=train.scale, target_id=train.target_id), info | {"grad": norm}


def scale_of(taps: Tensor, cfg: eagle.HeadConfig) -> Tensor:
    """The length of each tapped stream in taps [B, T, F] -> [F] fp32, the same for all of a tap's channels.

    The median over tokens: the first token's stream is 50 times as long as the others'.
    """
    length = taps.float().unflatten(-1, (len(cfg.taps), -1)).square().mean(-1).sqrt().flatten(0, 1)
    return length.median(0).values.clamp_min(1e-6).repeat_interleave(cfg.target_hidden_size)


def make_batch(
    target: ns.Model,
    recipe: HeadRecipe,
    target_id: Tensor,
    tokens: Tensor,
    length: Tensor,
    prompt: Tensor,
    seen: Seen | None = None,
    unroll: int | None = None,
) -> Batch:
    """tokens [B, T], length, prompt [B] -> what a step needs of them.

    Args: seen: the target's view, if it was kept; unroll: steps, None for the recipe's.
    """
    row, live = eagle_loss.supervise(length, prompt, tokens.shape[1], unroll or recipe.unroll)
    if seen is None:
        seen = eagle_loss.observe(target, recipe.cfg.taps, tokens)
    return eagle_loss.prepare(target, target_id, tokens, seen, row, live)


def head_of(train: TrainState, dtype: torch.dtype) -> eagle.HeadParams:
    """The head that a state stands for."""
    return eagle_loss.assemble(train.params, train.target_id, train.scale, dtype)

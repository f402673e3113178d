"""The draft of a run: none, a copy of the policy that is refreshed now and then, a head, or a head that keeps learning.

The engine drafts with `ns.Draft.params`; whatever changes them writes into these tensors, so that captured graphs stay
valid: its name ends in `_`. Nothing here reaches the policy: a copy has its own storage, and a head is differentiated
alone.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import eagle, struct
from rl import eagle_loss, eagle_step
from rl.eagle_loss import Batch, Seen
from rl.eagle_step import HeadRecipe, TrainState
from rl.optimizer import Optimizer
from rl.policy import MicroBatch, Scored


@dataclass(frozen=True)
class Upkeep:
    """The statics of a draft's life."""

    refresh: int = 0  # of a frozen copy: policy updates between copies; 0: it stays what it is
    recipe: HeadRecipe | None = None  # of a head that trains
    optimize: Optimizer | None = None  # of the same

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs a head that trains needs."""
        return self.recipe.cfg.taps if self.recipe else ()


@struct.state
class DraftState:
    """What a draft carries from step to step."""

    version: Tensor  # [] int64, of a copy: the policy's version that it is; of a head: how many updates it has had
    changed: Tensor  # [] int64, the policy's version at the last change
    weights: Any  # a refreshed copy's served weights, else ()
    train: Any  # TrainState of a head that trains, else ()


def trained(draft: ns.Draft, depth: int, optimize: Optimizer, policy: ns.Model) -> Upkeep:
    """The upkeep of a head that learns to draft `depth` tokens. Errors: ValueError for a draft that is no head."""
    cfg = getattr(draft.method, "cfg", None)
    if not isinstance(cfg, eagle.HeadConfig):
        raise ValueError(f"draft {draft.method.name!r} is no EAGLE-3 head and cannot be trained")
    return Upkeep(recipe=HeadRecipe(cfg, depth, eagle_loss.DECAY, policy.params.embed.dtype), optimize=optimize)


def begin(model: ns.Model, draft: ns.Draft | None, upkeep: Upkeep, tokens: Tensor) -> DraftState:
    """The state before the first step. Args: tokens: [1, T] of some text, to take the scale of a head's taps from."""
    train: Any = ()
    if draft and upkeep.recipe and upkeep.optimize:
        taps = eagle_loss.observe(model, upkeep.taps, tokens).taps
        train = eagle_step.adopt(draft.params, upkeep.recipe, upkeep.optimize, taps)
    zero = torch.zeros((), dtype=torch.int64)
    return DraftState(zero, zero.clone(), draft.params if draft and upkeep.refresh else (), train)


def restore_(draft: ns.Draft | None, upkeep: Upkeep, saved: DraftState) -> DraftState:
    """Serve a saved state's weights: overwrites `draft.params`."""
    if draft is None:
        return saved
    if upkeep.refresh:
        write_(draft.params, saved.weights)
    if upkeep.recipe:
        serve_(draft, upkeep.recipe, saved.train)
    return struct.replace(saved, weights=draft.params if upkeep.refresh else ())


def refresh_(draft: ns.Draft | None, upkeep: Upkeep, state: DraftState, policy: ns.Model, version: int) -> DraftState:
    """After the policy's update to `version`: overwrite `draft.params`, and so `state.weights`, if it is time."""
    if draft is None or not upkeep.refresh or version % upkeep.refresh:
        return state
    write_(draft.params, policy.params)
    now = torch.full_like(state.version, version)
    return struct.replace(state, version=now, changed=now.clone())


def learn_(
    draft: ns.Draft | None, upkeep: Upkeep, state: DraftState, policy: ns.Model, batches: Sequence[Batch], version: int
) -> tuple[DraftState, list[tuple[float, int]]]:
    """One update of a head that trains for each batch.

    Returns: the state, and of each batch the first draft step's cross-entropy before the update [nats], a mean over its
      supervised rows, and how many these are.

    Soft cross-entropy to the policy's own logits at what it really wrote; gradients reach the head alone. Overwrites
    `draft.params`, nothing of `state`.
    """
    if draft is None or upkeep.recipe is None or upkeep.optimize is None or not batches:
        return state, []
    train, losses = state.train, []
    for batch in batches:
        train, info = eagle_step.train_step(policy, upkeep.recipe, upkeep.optimize, train, batch)
        losses.append((float(info["loss"][0]), int(eagle_loss.counted(batch).sum())))
    serve_(draft, upkeep.recipe, train)
    made = state.version + len(losses)
    return struct.replace(state, version=made, changed=torch.full_like(made, version), train=train), losses


def supervised(
    policy: ns.Model, upkeep: Upkeep, state: DraftState, scored: Sequence[tuple[MicroBatch, Scored]]
) -> Iterator[Batch]:
    """What a head learns from: a batch for every microbatch that the policy has scored, whose streams it kept.

    One without a row that counts is left out: its update would be the optimizer's decay and momentum alone.
    """
    if upkeep.recipe is None:
        return
    for batch, one in scored:
        best = torch.zeros_like(batch.tokens.flatten()).index_put((batch.row,), one.best).view(batch.tokens.shape)
        view = Seen(taps=one.taps, x=one.x, best=best)
        known = batch.tokens, batch.length, batch.prompt
        made = eagle_step.make_batch(policy, upkeep.recipe, state.train.target_id, *known, seen=view)
        if eagle_loss.counted(made).any():
            yield made


def serve_(draft: ns.Draft, recipe: HeadRecipe, train: TrainState) -> None:
    """Serve a head that trains: overwrites `draft.params`."""
    made = eagle_step.head_of(train, recipe.dtype)
    write_(eagle_loss.trainable(draft.params), eagle_loss.trainable(made))


def write_(into: Any, weights: Any) -> None:
    """Overwrite the tensors of a pytree with the values of another of the same structure."""
    for mine, theirs in zip(pytree.tree_leaves(into), pytree.tree_leaves(weights), strict=True):
        mine.copy_(theirs)


def data_parallel(optimize: Optimizer, add_: Callable[[Any], None], ranks: int) -> Optimizer:
    """An optimizer whose gradients are the mean over the ranks; its update overwrites those given with their sum.

    Args: add_: overwrites every leaf with its sum over the ranks.
    """
    if ranks == 1:
        return optimize

    def update_(grads: Any, adam: Any, params: Any) -> Any:
        add_(grads)
        return optimize.update(pytree.tree_map(lambda x: x / ranks, grads), adam, params)

    return Optimizer(optimize.init, update_)

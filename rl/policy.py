"""The policy as it is trained: its log-probs of given tokens, their gradient, and the update of the served weights.

One copy of the weights is served and differentiated, and is updated in place, so that the engine's captured graphs stay
valid. AdamW works on fp32: on the served tensors themselves where they are fp32, else on a master copy.

Shapes: B sequences, T positions, m tokens of a microbatch, n tokens in all, V vocabulary, E hidden.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import filters, model, struct
from rl.optimizer import AdamState, Optimizer
from rl.run_files import RunError


@struct.state
class PolicyState:
    """What the policy carries from step to step."""

    master: model.Params  # fp32
    adam: AdamState


@struct.state
class MicroBatch:
    """Some sequences, padded on the right, and where their completions' tokens are predicted."""

    member: Tensor  # [b] int64, which sequences
    tokens: Tensor  # [b, T] int64
    length: Tensor  # [b] int64, of prompt and completion
    prompt: Tensor  # [b] int64
    row: Tensor  # [m] int64, flat index into [b, T]
    chosen: Tensor  # [m] int64, the token that the row predicts
    index: Tensor  # [m] int64, its place among the n tokens


@struct.state
class Scored:
    """What a policy makes of a microbatch's tokens."""

    logp: Tensor  # [m] fp32 nats, of the chosen tokens
    kl: Tensor  # [m] fp32 nats, KL(policy || reference policy) of the row, over the whole vocabulary
    ref_logp: Tensor  # [m] fp32 nats, the chosen tokens' log-prob under the reference policy
    best: Tensor  # [m] int64, the policy's most probable token
    taps: Tensor  # [b, T, F] the streams that a head reads, F = 0 where none were asked for
    x: Tensor  # [b, T, E] the last stream, before the final norm; E = 0 without taps


def begin(served: model.Params, optimize: Optimizer) -> PolicyState:
    """The state before the first update."""
    master = pytree.tree_map(lambda x: x.float(), served)  # of fp32 tensors: these tensors
    return PolicyState(master=master, adam=optimize.init(master))


def micro_batches(
    sequences: Sequence[Sequence[int]],
    prompts: Sequence[int],
    members: Sequence[int],
    budget: int,
    device: torch.device,
) -> Iterator[MicroBatch]:
    """Microbatches of at most `budget` padded positions, or of one sequence, like lengths together.

    Args: sequences: [B], whole; prompts: [B], tokens of each one's prompt; members: the sequences wanted.
    """
    start = [0]
    for i, tokens in enumerate(sequences):
        start.append(start[-1] + len(tokens) - prompts[i])
    chosen: list[int] = []
    for i in sorted((i for i in members if len(sequences[i]) > prompts[i]), key=lambda i: (len(sequences[i]), i)):
        if chosen and (len(chosen) + 1) * len(sequences[i]) > budget:
            yield micro_batch(sequences, prompts, chosen, start, device)
            chosen = []
        chosen.append(i)
    if chosen:
        yield micro_batch(sequences, prompts, chosen, start, device)


def micro_batch(
    sequences: Sequence[Sequence[int]],
    prompts: Sequence[int],
    members: Sequence[int],
    start: Sequence[int],
    device: torch.device,
) -> MicroBatch:
    """One microbatch. Args: start: [B], the first token's place among the n tokens."""
    width = max(len(sequences[i]) for i in members)
    tokens = torch.tensor([[*sequences[i], *[0] * (width - len(sequences[i]))] for i in members])
    row = [k * width + p - 1 for k, i in enumerate(members) for p in range(prompts[i], len(sequences[i]))]
    index = [start[i] + p for i in members for p in range(len(sequences[i]) - prompts[i])]
    places = torch.tensor(row)
    parts = {
        "member": torch.tensor(members),
        "tokens": tokens,
        "length": torch.tensor([len(sequences[i]) for i in members]),
        "prompt": torch.tensor([prompts[i] for i in members]),
        "row": places,
        "chosen": tokens.flatten()[places + 1],
        "index": torch.tensor(index),
    }
    return MicroBatch(**{name: value.to(device) for name, value in parts.items()})


def rows_of(
    params: model.Params, cfg: model.Config, batch: MicroBatch, temperature: float, taps: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor, Tensor]:
    """The sampled distribution at the rows of a microbatch: log-probs [m, V]; the tapped and the last stream [b, T, *].

    What `ns.forward` computes, its output head at the wanted rows alone; a row has the bits of the engine's.
    """
    b, t = batch.tokens.shape
    position = torch.arange(t, device=batch.tokens.device)
    attend = model.dense_attend(cfg, b, t, position)
    x, tapped = model.hidden(params, cfg, batch.tokens.flatten(), position.repeat(b), attend, taps)
    logits = model.logits(params, cfg, x[batch.row])
    by_row = torch.full_like(logits[:, 0], temperature)
    logp = filters.log_probs(logits, by_row, torch.zeros_like(batch.row, dtype=torch.int32), torch.ones_like(by_row))
    return logp, tapped.view(b, t, -1), x.view(b, t, -1)


def pick(logp: Tensor, batch: MicroBatch) -> Tensor:
    """logp [m, V] -> [m], of the chosen tokens."""
    return logp.gather(1, batch.chosen[:, None])[:, 0]


@torch.no_grad()
def score(
    policy: ns.Model, reference: model.Params, batch: MicroBatch, temperature: float, taps: tuple[int, ...] = ()
) -> Scored:
    """A microbatch's tokens under the policy and under the weights of the reference policy."""
    logp, tapped, x = rows_of(policy.params, policy.cfg, batch, temperature, taps)
    before, _, _ = rows_of(reference, policy.cfg, batch, temperature)
    return Scored(
        logp=pick(logp, batch),
        kl=(logp.exp() * (logp - before)).sum(-1),
        ref_logp=pick(before, batch),
        best=logp.argmax(-1),
        taps=tapped,
        x=x if taps else x[..., :0],
    )


def gradient(
    policy: ns.Model, batches: Iterable[MicroBatch], temperature: float, objective: Callable[[Tensor, Tensor], Tensor]
) -> tuple[model.Params, Tensor]:
    """The gradient of a sum over tokens, fp32, and its value [].

    Args: objective: log-probs [m], their places among the n tokens [m] -> [], the sum over these tokens.
    """
    total = pytree.tree_map(lambda x: torch.zeros_like(x, dtype=torch.float32), policy.params)
    value = torch.zeros((), device=policy.params.embed.device)
    for batch in batches:

        def part(params: model.Params, batch: MicroBatch = batch) -> Tensor:
            logp, _, _ = rows_of(params, policy.cfg, batch, temperature)
            return objective(pick(logp, batch), batch.index)

        with torch.enable_grad():
            grads, more = torch.func.grad_and_value(part)(policy.params)
        for into, grad in zip(pytree.tree_leaves(total), pytree.tree_leaves(grads), strict=True):
            into += grad
        value = value + more
    return total, value


@torch.no_grad()
def update_(
    served: model.Params, state: PolicyState, optimize: Optimizer, grads: model.Params
) -> tuple[PolicyState, Tensor]:
    """One AdamW update: the new state and the gradient's norm [] before clipping. Overwrites `served`.

    Errors: RunError for a gradient that is not finite; nothing has changed then.
    """
    master, adam, norm = optimize.update(grads, state.adam, state.master)
    if not norm.isfinite():
        raise RunError("the gradient is not finite")
    return PolicyState(master=publish_(served, master), adam=adam), norm


def publish_(served: model.Params, master: model.Params) -> model.Params:
    """Overwrite `served` with weights. Returns the master: the served tensors themselves where they are fp32."""
    leaves = pytree.tree_leaves(served)
    for into, value in zip(leaves, pytree.tree_leaves(master), strict=True):
        into.copy_(value)
    return served if all(x.dtype == torch.float32 for x in leaves) else master


@torch.no_grad()
def fingerprint(weights: Any) -> str:
    """A checksum of a pytree's bits, the same on every device; one pass over the weights."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = [leaf.view(words[leaf.element_size()]).sum(dtype=torch.int64) for leaf in pytree.tree_leaves(weights)]
    mixed = 0
    for number in torch.stack(sums).tolist() if sums else []:
        mixed = (mixed * 1_000_003 + number) % 2**64
    return f"{mixed:016x}"

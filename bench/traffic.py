"""The bytes that a round has to move, from shapes alone: what a perfect engine would be left with.

Weights are read once a pass, each slot's KV once for all of its rows; logits are written and read once, in fp32.
Activations are left out: at 32 rows of Llama-8B they are a hundredth of the weights, and mostly stay in cache.
"""

from dataclasses import dataclass

import nanospec_fn as ns
from nanospec_fn import eagle, model

LOGIT = 4  # bytes


@dataclass(frozen=True)
class Load:
    """What one round runs over."""

    slots: int
    context: int  # tokens of every slot
    top_k: int = 1
    depth: int = 0  # 0: plain decoding
    nodes: int = 0  # drafted ones that are verified

    @classmethod
    def of(cls, slots: int, context: int, spec: ns.Speculation | None) -> "Load":
        return cls(slots, context) if spec is None else cls(slots, context, spec.top_k, spec.depth, spec.nodes)


def layer_weights(cfg: model.Config, width: int) -> int:
    """Elements of one layer's matrices; width: of the attention's input."""
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    return (heads + 2 * kv) * width + heads * cfg.hidden_size + 3 * cfg.intermediate_size * cfg.hidden_size


def of_round(load: Load, cfg: model.Config, itemsize: int, draft: model.Config | None = None) -> dict[str, int]:
    """Bytes of one round by phase.

    Args: itemsize: bytes of a weight and of an element of KV; draft: a head's or draft model's config, None for a draft
      without weights.
    Returns: draft, target (its layers' products), attention (KV of the target), head.
    """
    rows = load.slots * (1 + load.nodes)
    return {
        "draft": of_draft(load, draft, itemsize) if draft and load.depth else 0,
        "target": cfg.num_layers * layer_weights(cfg, cfg.hidden_size) * itemsize,
        "attention": cfg.num_layers * kv(cfg, itemsize) * (load.slots * load.context + rows),
        "head": cfg.vocab_size * cfg.hidden_size * itemsize + 2 * rows * cfg.vocab_size * LOGIT,
    }


def of_draft(load: Load, cfg: model.Config, itemsize: int) -> int:
    """Bytes of drafting one tree: a pass for every level, over the newest tokens and then over a level's nodes."""
    head = cfg if isinstance(cfg, eagle.HeadConfig) else None
    vocab = head.draft_vocab_size if head else cfg.vocab_size
    layers = layer_weights(cfg, (2 if head else 1) * cfg.hidden_size) * cfg.num_layers
    fuse = cfg.hidden_size * len(head.taps) * head.target_hidden_size if head else 0
    rows = load.slots * (1 + (load.depth - 1) * load.top_k)
    context = load.slots * load.context * load.depth + rows
    weights = load.depth * (layers + vocab * cfg.hidden_size) + fuse
    return weights * itemsize + cfg.num_layers * kv(cfg, itemsize) * context + 2 * rows * vocab * LOGIT


def kv(cfg: model.Config, itemsize: int) -> int:
    """Bytes of one token's keys and values in one layer."""
    return 2 * cfg.num_kv_heads * cfg.head_dim * itemsize


def milliseconds(size: float, ceiling: float) -> float:
    """The time that `size` bytes take at `ceiling` bytes a second."""
    return 1e3 * size / ceiling

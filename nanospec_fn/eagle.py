"""An EAGLE-3 draft head as pure functions: one decoder layer over the target's features and the next tokens.

Shapes: n rows, E hidden, F target hidden * number of taps, H / K query / KV heads, D head dim, I intermediate,
V target vocabulary, Vd draft vocabulary.

Source: EAGLE-3 (Li et al. 2025), section 3; `config.parse_head` and `weights.build_head` say how public heads differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import kernels, model
from nanospec_fn.struct import state


@dataclass(frozen=True, kw_only=True)
class HeadConfig(model.Config):
    """A head's config: that of a one-layer Llama, whose `vocab_size` is the target's, and what EAGLE-3 adds."""

    target_hidden_size: int
    taps: tuple[int, ...]  # ascending target layers whose *input* is a feature; the layer count taps the last output
    draft_vocab_size: int
    norm_before_residual: bool = False  # the residual is the normed feature
    norm_before_fc: bool = False  # the taps are normed before they are fused


@state
class HeadParams:
    """Weights of a head; `()` where the file has none and the target's tensor is used."""

    fc: Tensor  # [E, F]
    fc_norm: Tensor | tuple[()]  # [F], with norm_before_fc
    feature_norm: Tensor  # [E]
    layer: model.Layer  # attn_norm norms the token's embedding; qkv is [(H + 2K) * D, 2E], embedding first
    norm: Tensor  # [E]
    head: Tensor | tuple[()]  # [Vd, E]
    embed: Tensor | tuple[()]  # [V, E]
    target_id: Tensor  # [Vd] int64, the target's token for each draft token: the file's i + d2t[i]


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The target layers whose inputs feed a head that does not name any: 2, the middle one, the third last."""
    return 2, num_layers // 2, num_layers - 3


def fuse(params: HeadParams, cfg: HeadConfig, features: Tensor) -> Tensor:
    """The target's tapped residual streams [n, F], as `model.hidden` concatenates them, -> features [n, E]."""
    if isinstance(params.fc_norm, Tensor):
        features = kernels.rms_norm(features, params.fc_norm, cfg.rms_eps)
    return kernels.linear(features, params.fc, cfg.gemm)


def advance(
    params: HeadParams,
    cfg: HeadConfig,
    embed: Tensor,
    token: Tensor,
    feature: Tensor,
    position: Tensor,
    attend: model.Attention,
) -> Tensor:
    """One pass of the head over n pairs (feature t, token t + 1), each at position t.

    Args:
      embed: [V, E], the target's embedding; read where the head has none of its own.
      token: [n] target ids.
      feature: [n, E], of `fuse` (true features) or of this function (the recurrent feature of a drafted token).
      position: [n].
      attend: as for `model.decoder_layer`.
    Returns: [n, E], the layer's output before the final norm: the next step's feature, and what `logits` reads.
    """
    table = params.embed if isinstance(params.embed, Tensor) else embed
    both = kernels.embed_beside(table, token, params.layer.attn_norm, feature, params.feature_norm, cfg.rms_eps)
    cos, sin = model.angles(cfg.rope, cfg.head_dim, position)
    residual = both[:, feature.shape[1] :] if cfg.norm_before_residual else feature
    return model.decoder_layer(params.layer, cfg, residual, both, cos, sin, attend)


def logits(params: HeadParams, cfg: HeadConfig, feature: Tensor, head: Tensor | tuple[()] = ()) -> Tensor:
    """feature [n, E] of `advance` -> [n, Vd] fp32.

    Errors: ValueError where neither the head's file nor the caller has an output head.
    """
    weight = params.head if isinstance(params.head, Tensor) else head
    if not isinstance(weight, Tensor):
        raise ValueError("head: this draft head borrows the target's output head, pass it")
    return kernels.linear(kernels.rms_norm(feature, params.norm, cfg.rms_eps), weight, cfg.gemm, dtype=torch.float32)

"""Llama as pure functions over a pytree of weights.

Shapes: B slots, R rows of a slot, n = B * R, E hidden, H / K query / KV heads, D head dim, I intermediate, V vocab,
L layers.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import kernels
from nanospec_fn.kernels import cpu
from nanospec_fn.struct import state


@dataclass(frozen=True)
class Rope:
    """Rotary embedding. kind: "default", "linear" or "llama3" (the last four fields are llama3's, factor is shared)."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class Config:
    """What a Llama-family checkpoint's config says, in one hashable value."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context: int  # positions
    rms_eps: float = 1e-5
    rope: Rope = Rope()
    tied: bool = False  # the output head is the embedding
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    gemm: str = "library"  # kernels.linear's choice for this device and dtype, made by `load`
    bmm: str = "whole"  # kernels.cpu.attention's, likewise


@state
class Layer:
    """Weights of one decoder layer; a bias is `()` where the checkpoint has none."""

    attn_norm: Tensor  # [E]
    qkv: Tensor  # [(H + 2K) * D, E]
    qkv_bias: Tensor | tuple[()]  # [(H + 2K) * D]
    out: Tensor  # [E, H * D]
    out_bias: Tensor | tuple[()]  # [E]
    mlp_norm: Tensor  # [E]
    gate_up: Tensor  # [2I, E]
    gate_up_bias: Tensor | tuple[()]  # [2I]
    down: Tensor  # [E, I]
    down_bias: Tensor | tuple[()]  # [E]


@state
class Params:
    """Weights of a model."""

    embed: Tensor  # [V, E]
    layers: tuple[Layer, ...]
    norm: Tensor  # [E]
    head: Tensor | tuple[()]  # [V, E], () when tied


@dataclass(frozen=True)
class Model:
    """What `load` returns: hashable config, weights, and the tokenizer or None."""

    cfg: Config
    params: Params
    tokenizer: object | None = dataclasses.field(default=None, compare=False)
    name: str = ""


@functools.lru_cache(maxsize=16)  # a pass must not wait for a copy to the device
def inv_freq(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[D/2] fp32, radians per position, llama3's long-context scaling included.

    Source: the Llama 3.1 release; transformers' modeling_rope_utils computes the same values.
    """
    freq = 1.0 / (rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim))
    if rope.kind == "linear":
        freq = freq / rope.factor
    elif rope.kind == "llama3":
        wavelength = 2 * math.pi / freq
        low = rope.original_max_position / rope.low_freq_factor
        high = rope.original_max_position / rope.high_freq_factor
        blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
            rope.high_freq_factor - rope.low_freq_factor
        )
        mixed = (1 - blend) * freq / rope.factor + blend * freq
        scaled = torch.where(wavelength > low, freq / rope.factor, freq)
        freq = torch.where((wavelength <= low) & (wavelength >= high), mixed, scaled)
    # Made first under torch.func.grad it is that call's wrapper, whose memory no kernel can read later.
    # The docs of debug_unwrap warn of wrong derivatives; this is a constant.
    return torch.func.debug_unwrap(freq.to(device))


def angles(rope: Rope, head_dim: int, position: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [n, D/2] fp32 for position [n]."""
    return kernels.angles(position, inv_freq(rope, head_dim, position.device))


def linear(x: Tensor, w: Tensor, bias: Tensor | tuple[()], gemm: str, residual: Tensor | None = None) -> Tensor:
    """x [n, K] -> [n, N], bias and then residual [n, N] added where there is one."""
    if not isinstance(bias, Tensor):
        return kernels.linear(x, w, gemm, residual)
    y = kernels.linear(x, w, gemm) + bias
    return y if residual is None else residual + y


# One layer's attention, which rotates queries and keys itself: a kernel does that in the launch that stores the keys.
# (qkv [n, H + 2K, D], cos, sin [n, D/2] fp32) -> [n, H, D]
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
AttendLayer = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # the same of any layer, by its index


def rotate(qkv: Tensor, cos: Tensor, sin: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """qkv [n, H + 2K, D] -> q [n, H, D] and k [n, K, D] under RoPE, v [n, K, D]."""
    qk, v = qkv.split((qkv.shape[1] - kv_heads, kv_heads), dim=1)
    q, k = kernels.rope(qk, cos, sin).split((qk.shape[1] - kv_heads, kv_heads), dim=1)
    return q, k, v


def decoder_layer(
    w: Layer, cfg: Config, x: Tensor, x_in: Tensor, cos: Tensor, sin: Tensor, attend: Attention
) -> Tensor:
    """One pre-norm layer: residual x [n, E], attention input x_in [n, E_in] (already normed) -> [n, E]."""
    n = x.shape[0]
    qkv = linear(x_in, w.qkv, w.qkv_bias, cfg.gemm).view(n, -1, cfg.head_dim)
    mixed = attend(qkv, cos, sin)
    x = linear(mixed.reshape(n, -1), w.out, w.out_bias, cfg.gemm, residual=x)
    h = kernels.rms_norm(x, w.mlp_norm, cfg.rms_eps)
    if isinstance(w.gate_up_bias, Tensor):
        h = kernels.silu_mul(linear(h, w.gate_up, w.gate_up_bias, cfg.gemm))
    else:
        h = kernels.linear_silu_mul(h, w.gate_up, cfg.gemm)
    return linear(h, w.down, w.down_bias, cfg.gemm, residual=x)


def hidden(
    params: Params,
    cfg: Config,
    token: Tensor,
    position: Tensor,
    attend: AttendLayer,
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor]:
    """The residual stream after the last layer, before the final norm.

    Args:
      token, position: [n]; a padding row may hold any token in range and any position.
      attend: called once per layer.
      taps: layer indices whose *input* is wanted (EAGLE-3 features).
    Returns: x [n, E], and the taps concatenated [n, len(taps) * E].
    """
    n, short = len(token), -len(token) % kernels.row_block(token)
    if short:  # padded once here, so that no function below has to
        token, position = (torch.nn.functional.pad(t, (0, short)) for t in (token, position))
        attend = _of_live_rows(attend, n, short)
    x = params.embed[token]
    cos, sin = angles(cfg.rope, cfg.head_dim, position)
    tapped = []
    for i, w in enumerate(params.layers):
        if i in taps:
            tapped.append(x)
        layer = functools.partial(attend, i)
        x = decoder_layer(w, cfg, x, kernels.rms_norm(x, w.attn_norm, cfg.rms_eps), cos, sin, layer)
    if len(params.layers) in taps:
        tapped.append(x)
    return x[:n], torch.cat(tapped, dim=-1)[:n] if tapped else x[:n, :0]


def _of_live_rows(attend: AttendLayer, n: int, short: int) -> AttendLayer:
    """`attend` for n rows and `short` rows of padding behind them."""

    def live(i: int, *tensors: Tensor) -> Tensor:
        return torch.nn.functional.pad(attend(i, *(x[:n] for x in tensors)), (0, 0, 0, 0, 0, short))

    return live


def output_head(params: Params) -> Tensor:
    """[V, E], the embedding where it is tied."""
    return params.head if isinstance(params.head, Tensor) else params.embed


def logits(params: Params, cfg: Config, x: Tensor) -> Tensor:
    """x [n, E] of `hidden` -> [n, V] fp32."""
    normed = kernels.rms_norm(x, params.norm, cfg.rms_eps)
    return kernels.linear(normed, output_head(params), cfg.gemm, dtype=torch.float32)


def forward(params: Params, cfg: Config, tokens: Tensor) -> Tensor:
    """Logits of whole sequences without a cache; differentiable, the same bits per row as the engine's.

    Args: tokens [B, T] integers, every row full (pad on the right and ignore what follows the padding).
    Returns: [B, T, V] fp32.
    Errors: ValueError for what is no integer tensor [B, T], T past the model's context, and (on a CPU, where looking
      costs nothing) a token that is not in the vocabulary.
    """
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"tokens must be an integer tensor, got {getattr(tokens, 'dtype', type(tokens).__name__)}")
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"tokens must be [B, T] and not empty, got shape {tuple(tokens.shape)}")
    if not tokens.is_cuda and bool(((tokens < 0) | (tokens >= cfg.vocab_size)).any()):
        raise ValueError(f"tokens holds an id that is not in the vocabulary of {cfg.vocab_size}")
    b, t = tokens.shape
    if t > cfg.max_context:
        raise ValueError(f"tokens has {t} positions, the model's context is {cfg.max_context}")
    position = torch.arange(t, device=tokens.device)
    attend = dense_attend(cfg, b, t, position)
    x, _ = hidden(params, cfg, tokens.reshape(-1), position.repeat(b), attend)
    return logits(params, cfg, x).view(b, t, -1)


def dense_attend(cfg: Config, b: int, t: int, position: Tensor) -> AttendLayer:
    """Causal attention among the b * t rows of this very pass."""
    if kernels.on_device(position) and cfg.gemm == "canonical":
        from nanospec_fn.kernels import gpu  # needs Triton

        return lambda _, qkv, cos, sin: gpu.causal_attention(*rotate(qkv, cos, sin, cfg.num_kv_heads), b)
    padded = -(-t // cpu.KV_BLOCK) * cpu.KV_BLOCK
    groups = cfg.num_heads // cfg.num_kv_heads
    causal = position[:, None] >= torch.arange(padded, device=position.device)
    future = cpu.hide(causal.expand(b, -1, -1), cfg.num_kv_heads, groups)

    def attend(_: int, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = rotate(qkv, cos, sin, cfg.num_kv_heads)
        q = group_heads(q.view(b, t, cfg.num_heads, cfg.head_dim), cfg.num_kv_heads)
        k, v = (
            torch.nn.functional.pad(
                y.view(b, t, cfg.num_kv_heads, cfg.head_dim).transpose(1, 2).flatten(0, 1), (0, 0, 0, padded - t)
            )
            for y in (k, v)
        )
        return ungroup_heads(cpu.attention(q, [(k, v, future)], cfg.head_dim**-0.5, cfg.bmm), b, cfg.num_kv_heads, t)

    return attend


def group_heads(q: Tensor, kv_heads: int) -> Tensor:
    """[B, R, H, D] -> [B * K, R * G, D]: the G query heads that share a KV head side by side, row by row."""
    b, r, h, d = q.shape
    return q.view(b, r, kv_heads, h // kv_heads, d).transpose(1, 2).reshape(b * kv_heads, -1, d)


def ungroup_heads(x: Tensor, b: int, kv_heads: int, r: int) -> Tensor:
    """The inverse of `group_heads`, flattened to [B * R, H, D]."""
    d = x.shape[-1]
    return x.view(b, kv_heads, r, -1, d).transpose(1, 2).reshape(b * r, -1, d)

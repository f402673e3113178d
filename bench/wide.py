"""A small Llama inside a larger shape, computing the same function.

The live part of a wide tensor is the small one; the rest is never read (it meets zeros), and is noise so that memory
traffic and power are those of a real model. In the residual stream channels 0 .. e - 1 are the small model's, channel
e is a constant that makes extra vocabulary rows improbable, the others stay zero.

Shapes: small letters are the small model's sizes (e hidden, h / k query / KV heads, d head dim, i intermediate, v
vocabulary, l layers), capitals the wide one's.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nanospec_fn as ns
from bench import shapes
from bench.shapes import Shape
from nanospec_fn import draft_model, eagle, model

NOISE = 0.02  # standard deviation of weights that are never read
NORM_GAIN, ROW_GAIN = 2.0**10, 2.0**15  # of the constant channel: final norm's weight, extra rows of the output head


@dataclass(frozen=True)
class Maker:
    """How wide tensors are made: where, in which precision, and from which noise."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def noise(self, *size: int, mean: float = 0.0) -> Tensor:
        out = torch.empty(*size, device=self.device, dtype=self.dtype)
        return out.normal_(mean, NOISE, generator=self.generator)

    def matrix(self, w: Tensor, rows: Tensor, columns: Tensor, live: Tensor, size: tuple[int, int]) -> Tensor:
        """w [r, c] at rows [r] and columns [c] of a matrix `size`; zero in the rest of the `live` columns, those whose
        input is not zero; noise in the others."""
        out = self.noise(*size).index_fill_(1, live.to(self.device), 0)
        rows, columns = rows.to(self.device), columns.to(self.device)
        out[rows[:, None], columns] = w.to(self.device).to(self.dtype)
        return out

    def vector(self, x: Tensor | tuple[()], rows: Tensor, size: int) -> Tensor | tuple[()]:
        """A bias: x at rows, zero elsewhere."""
        if not isinstance(x, Tensor):
            return ()
        out = torch.zeros(size, device=self.device, dtype=self.dtype)
        out[rows.to(self.device)] = x.to(self.device).to(self.dtype)
        return out

    def norm(self, weight: Tensor, size: int, gain: float | None = None) -> Tensor:
        """A norm's weight: the mean is over `size` channels in place of len(weight)."""
        out = self.noise(size, mean=1.0)
        e = len(weight)
        out[:e] = (weight * (e / size) ** 0.5).to(self.device).to(self.dtype)
        if gain is not None:
            out[e] = gain
        return out


def head_rows(heads: int, group: int, wide_group: int, dim: Tensor, wide_dim: int) -> Tensor:
    """Rows of the wide projection for the rows of `heads` heads: head j of group g stays head j of group g.

    Args: group, wide_group: heads to a KV head; dim: [d], where a head's dims go among the wide_dim of a wide one.
    """
    head = torch.arange(heads)
    head = head // group * wide_group + head % group
    return (head[:, None] * wide_dim + dim).flatten()


@dataclass(frozen=True)
class Places:
    """Where a small layer stands in a wide one: the rows it writes, the columns it reads, and all live columns."""

    stream: Tensor  # [e] the residual stream
    stream_live: Tensor  # [e + 1] the constant too
    joined: Tensor  # the attention's input, several streams side by side
    joined_live: Tensor
    qkv: Tensor  # rows of the projection
    scale: Tensor  # their factors, fp64: attention divides by the square root of the head dim
    mixed: Tensor  # what attention gives
    mixed_live: Tensor
    gate_up: Tensor  # rows of the projection
    mlp: Tensor  # [i] the MLP's inner channels


def find_places(cfg: model.Config, wide: model.Config, inputs: int) -> Places:
    """Args: inputs: streams that the attention's input joins."""
    e, d, i, wide_e, wide_d = cfg.hidden_size, cfg.head_dim, cfg.intermediate_size, wide.hidden_size, wide.head_dim
    group, wide_group = cfg.num_heads // cfg.num_kv_heads, wide.num_heads // wide.num_kv_heads
    # Pair j of the rotation goes to the pair of the same frequency; values have no order to keep.
    pair, half = torch.arange(d // 2) * (wide_d // d), wide_d // 2
    turned, plain = torch.cat((pair, half + pair)), torch.arange(d)
    q = head_rows(cfg.num_heads, group, wide_group, turned, wide_d)
    k = head_rows(cfg.num_kv_heads, 1, 1, turned, wide_d) + wide.num_heads * wide_d
    v = head_rows(cfg.num_kv_heads, 1, 1, plain, wide_d) + (wide.num_heads + wide.num_kv_heads) * wide_d
    scale = torch.ones(len(q) + len(k) + len(v), dtype=torch.float64)
    scale[: len(q)] = (wide_d / d) ** 0.5
    return Places(
        stream=torch.arange(e),
        stream_live=torch.arange(e + 1),
        joined=torch.cat([torch.arange(e) + n * wide_e for n in range(inputs)]),
        joined_live=torch.cat([torch.arange(e + 1) + n * wide_e for n in range(inputs)]),
        qkv=torch.cat((q, k, v)),
        scale=scale,
        mixed=head_rows(cfg.num_heads, group, wide_group, plain, wide_d),
        # A head that was added to a group mixes that group's live values too.
        mixed_live=head_rows(cfg.num_kv_heads * wide_group, 1, 1, plain, wide_d),
        gate_up=torch.cat((torch.arange(i), wide.intermediate_size + torch.arange(i))),
        mlp=torch.arange(i),
    )


def widen_layer(w: model.Layer, cfg: model.Config, wide: model.Config, make: Maker, inputs: int = 1) -> model.Layer:
    """One decoder layer; inputs: streams that the attention's input joins (an EAGLE-3 head: 2)."""
    e, i, at = wide.hidden_size, wide.intermediate_size, find_places(cfg, wide, inputs)
    heads, projected = wide.num_heads * wide.head_dim, (wide.num_heads + 2 * wide.num_kv_heads) * wide.head_dim
    scale = at.scale.to(w.qkv.device).to(w.qkv.dtype)
    bias = w.qkv_bias * scale if isinstance(w.qkv_bias, Tensor) else ()
    return model.Layer(
        attn_norm=make.norm(w.attn_norm, e),
        qkv=make.matrix(w.qkv * scale[:, None], at.qkv, at.joined, at.joined_live, (projected, inputs * e)),
        qkv_bias=make.vector(bias, at.qkv, projected),
        out=make.matrix(w.out, at.stream, at.mixed, at.mixed_live, (e, heads)),
        out_bias=make.vector(w.out_bias, at.stream, e),
        mlp_norm=make.norm(w.mlp_norm, e),
        gate_up=make.matrix(w.gate_up, at.gate_up, at.stream, at.stream_live, (2 * i, e)),
        gate_up_bias=make.vector(w.gate_up_bias, at.gate_up, 2 * i),
        down=make.matrix(w.down, at.stream, at.mlp, at.mlp, (e, i)),
        down_bias=make.vector(w.down_bias, at.stream, e),
    )


def identity(like: model.Layer, cfg: model.Config, wide: model.Config, make: Maker) -> model.Layer:
    """A layer that adds nothing: its projections are zero where anything can be read, so what they feed is never read.

    Args: like: a layer of the small model, for which biases there are.
    """
    e, i, live = wide.hidden_size, wide.intermediate_size, torch.arange(cfg.hidden_size + 1)
    heads, projected = wide.num_heads * wide.head_dim, (wide.num_heads + 2 * wide.num_kv_heads) * wide.head_dim

    def silent(outer: int) -> Tensor:
        return make.noise(outer, e).index_fill_(1, live.to(make.device), 0)

    def bias(of: Tensor | tuple[()], size: int) -> Tensor | tuple[()]:
        return torch.zeros(size, device=make.device, dtype=make.dtype) if isinstance(of, Tensor) else ()

    return model.Layer(
        attn_norm=make.noise(e, mean=1.0),
        qkv=silent(projected),
        qkv_bias=bias(like.qkv_bias, projected),
        out=make.noise(e, heads),
        out_bias=bias(like.out_bias, e),
        mlp_norm=make.noise(e, mean=1.0),
        gate_up=silent(2 * i),
        gate_up_bias=bias(like.gate_up_bias, 2 * i),
        down=make.noise(e, i),
        down_bias=bias(like.down_bias, e),
    )


def widen_embedding(table: Tensor, wide: model.Config, c: float, make: Maker) -> Tensor:
    """[v, e] -> [V, E]: every token carries the constant; added tokens have random vectors, dead channels none."""
    v, e = table.shape
    out = torch.zeros(wide.vocab_size, wide.hidden_size, device=make.device, dtype=make.dtype)
    out[v:, :e] = make.noise(wide.vocab_size - v, e)
    out[:v, :e] = table.to(make.device).to(make.dtype)
    out[:, e] = c
    return out


def widen_output(head: Tensor, rows: int, width: int, make: Maker) -> Tensor:
    """An output head [v, e] -> [rows, width]; added rows read the constant channel, strongly negative."""
    v, e = head.shape
    out = make.matrix(head, torch.arange(v), torch.arange(e), torch.arange(e + 1), (rows, width))
    out[v:, e] = -ROW_GAIN
    return out


def widen_target(small: ns.Model, wide: model.Config, c: float, make: Maker) -> Iterator[tuple[str, Any]]:
    """The fields of `model.Params` one by one, ("layers", a `model.Layer`) once a layer."""
    params = small.params
    yield "embed", widen_embedding(params.embed, wide, c, make)
    for i in shapes.layer_order(small.cfg.num_layers, wide.num_layers):
        if i is None:
            yield "layers", identity(params.layers[0], small.cfg, wide, make)
        else:
            yield "layers", widen_layer(params.layers[i], small.cfg, wide, make)
    yield "norm", make.norm(params.norm, wide.hidden_size, NORM_GAIN)
    yield "head", widen_output(model.output_head(params), wide.vocab_size, wide.hidden_size, make)


def widen_head(
    draft: ns.Draft, small: ns.Model, wide: model.Config, shape: Shape, c: float, make: Maker
) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """An EAGLE-3 head for the wide target, with an output head of its own."""
    cfg, params = head_of(draft), draft.params
    vocab = draft_vocabulary(cfg, shape)
    order = shapes.layer_order(small.cfg.num_layers, wide.num_layers)
    places = [order.index(i) for i in range(small.cfg.num_layers)] + [wide.num_layers]
    wide_cfg = dataclasses.replace(
        shapes.wide_config(cfg, shape, c, make.device, make.dtype),
        num_layers=1,
        target_hidden_size=wide.hidden_size,
        taps=tuple(places[tap] for tap in cfg.taps),
        draft_vocab_size=vocab,
    )
    e, wide_e, taps = cfg.hidden_size, wide.hidden_size, len(cfg.taps)
    read, live = (torch.cat([torch.arange(n) + tap * wide_e for tap in range(taps)]) for n in (e, e + 1))
    fc = make.matrix(params.fc, torch.arange(e), read, live, (wide_e, taps * wide_e))
    fc[e, e] = 1  # the feature carries the first tap's constant
    output = params.head if isinstance(params.head, Tensor) else model.output_head(small.params)
    own = params.target_id.cpu()
    unused = torch.ones(wide.vocab_size, dtype=torch.bool).index_fill_(0, own, False).nonzero()[:, 0]
    target_id, rank = torch.cat((own, unused[len(unused) - (vocab - len(own)) :])).sort()
    return wide_cfg, eagle.HeadParams(
        fc=fc,
        fc_norm=(),
        feature_norm=make.norm(params.feature_norm, wide_e),
        layer=widen_layer(params.layer, cfg, wide_cfg, make, inputs=2),
        norm=make.norm(params.norm, wide_e, NORM_GAIN),
        head=widen_output(output, vocab, wide_e, make)[rank.to(make.device)],
        embed=(),
        target_id=target_id.to(make.device),
    )


def draft_vocabulary(cfg: eagle.HeadConfig, shape: Shape) -> int:
    """The wide head's draft vocabulary: the shape's, or the head's own where that is larger."""
    return max(shape.draft_vocab_size, cfg.draft_vocab_size)


def head_of(draft: ns.Draft) -> eagle.HeadConfig:
    """The config of an EAGLE-3 head that can be widened.

    Errors: ValueError for another kind of draft, or a head that the constant channel does not pass through.
    """
    if not isinstance(draft.method, draft_model.Eagle3):
        raise ValueError(f"draft must be an EAGLE-3 head, got {draft.method.name!r}")
    cfg, layer = draft.method.cfg, draft.params.layer
    for name, found in (
        ("norm_before_residual", cfg.norm_before_residual),
        ("norm_before_fc", cfg.norm_before_fc),
        ("an embedding of its own", isinstance(draft.params.embed, Tensor)),
        ("biases", isinstance(layer.qkv_bias, Tensor) or isinstance(layer.gate_up_bias, Tensor)),
        ("a hidden size that is not its target's", cfg.hidden_size != cfg.target_hidden_size),
    ):
        if found:
            raise ValueError(f"draft: a head with {name} cannot be widened")
    return cfg

"""Random models made on the device, in the shapes that the GPU tests and timings use."""

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import draft, draft_model, eagle, model

LLAMA_8B = model.Config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_context=4096,
    rope=model.Rope(theta=500000.0, kind="llama3", factor=8.0),
    gemm="canonical",
)
TINY = model.Config(
    vocab_size=384,
    hidden_size=192,
    intermediate_size=320,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    max_context=1024,
    tied=True,
    gemm="canonical",
)
GEMMS = {  # [N, K] of a Llama-3.1-8B layer, and its head
    "qkv": (6144, 4096),
    "out": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "head": (128256, 4096),
}


def noise(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) * scale).to(dtype)


def random_layer(cfg: model.Config, seed: int, width: int | None = None) -> model.Layer:
    e, i, d = cfg.hidden_size, cfg.intermediate_size, cfg.head_dim
    width = width or e

    def matrix(outer: int, inner: int, n: int) -> Tensor:
        return noise(outer, inner, seed=seed * 16 + n, scale=1.5 * inner**-0.5)

    return model.Layer(
        attn_norm=1 + noise(width if width == e else e, seed=seed * 16, scale=0.1),
        qkv=matrix((cfg.num_heads + 2 * cfg.num_kv_heads) * d, width, 1),
        qkv_bias=(),
        out=matrix(e, cfg.num_heads * d, 2),
        out_bias=(),
        mlp_norm=1 + noise(e, seed=seed * 16 + 3, scale=0.1),
        gate_up=matrix(2 * i, e, 4),
        gate_up_bias=(),
        down=matrix(e, i, 5),
        down_bias=(),
    )


def random_model(cfg: model.Config, seed: int = 0) -> model.Model:
    """A model whose layers all matter; its logits spread over a few nats."""
    params = model.Params(
        embed=noise(cfg.vocab_size, cfg.hidden_size, seed=seed, scale=0.5),
        layers=tuple(random_layer(cfg, seed * 1000 + i + 1) for i in range(cfg.num_layers)),
        norm=1 + noise(cfg.hidden_size, seed=seed + 7, scale=0.1),
        head=() if cfg.tied else noise(cfg.vocab_size, cfg.hidden_size, seed=seed + 8, scale=2 * cfg.hidden_size**-0.5),
    )
    return model.Model(cfg, params)


def near_copy(target: model.Model, scale: float = 0.06) -> draft.Draft:
    """The target with noise on its weights: a draft that is right often, not always."""
    counter = iter(range(10**6))

    def shake(x: Tensor) -> Tensor:
        return x + noise(*x.shape, seed=next(counter), scale=scale * float(x.float().std()))

    return draft.Draft(draft_model.LlamaDraft(target.cfg), pytree.tree_map(shake, target.params))


def random_head(target: model.Model, draft_vocab: int) -> draft.Draft:
    """An EAGLE-3 head of the target's width with random weights: right about never, but its cost is true."""
    cfg = target.cfg
    e = cfg.hidden_size
    fields = {name: getattr(cfg, name) for name in cfg.__dataclass_fields__} | {"num_layers": 1, "tied": False}
    head_cfg = eagle.HeadConfig(
        **fields, target_hidden_size=e, taps=eagle.default_taps(cfg.num_layers), draft_vocab_size=draft_vocab
    )
    params = eagle.HeadParams(
        fc=noise(e, 3 * e, seed=91, scale=(3 * e) ** -0.5),
        fc_norm=(),
        feature_norm=1 + noise(e, seed=92, scale=0.1),
        layer=random_layer(head_cfg, 93, width=2 * e),
        norm=1 + noise(e, seed=94, scale=0.1),
        head=noise(draft_vocab, e, seed=95, scale=2 * e**-0.5),
        embed=(),
        target_id=torch.arange(draft_vocab, device="cuda"),
    )
    return draft.Draft(draft_model.Eagle3(head_cfg), params)

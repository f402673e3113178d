"""A head's files: how one starts, and the folder that a loader reads.

Every file is written whole or not at all. A head's config.json comes last and goes first: a folder without it does not
load.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from torch import Tensor

import nanospec_fn as ns
from nanospec_fn import eagle, files, model, weights
from rl import eagle_loss


def config_for(target: ns.Model, taps: tuple[int, ...], draft_vocab: int, intermediate: int) -> eagle.HeadConfig:
    """A head of the target's own shape but for its MLP's width."""
    shape = {name: getattr(target.cfg, name) for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads")}
    shape |= {name: getattr(target.cfg, name) for name in ("head_dim", "max_context", "rms_eps", "rope", "gemm", "bmm")}
    return eagle.HeadConfig(
        **shape,
        num_layers=1,
        intermediate_size=intermediate,
        target_hidden_size=target.cfg.hidden_size,
        taps=taps,
        draft_vocab_size=draft_vocab,
    )


def init(cfg: eagle.HeadConfig, target: ns.Model, target_id: Tensor, own_head: bool, seed: int) -> eagle.HeadParams:
    """Random fp32 weights, close to passing the last tap on: its stream is nearest to what the output head reads.

    Args: target_id: [Vd]; own_head: start an output head of the head's own from the target's rows, else borrow these.
    """
    device = target.params.embed.device
    generator = torch.Generator().manual_seed(seed)
    e, i, taps = cfg.hidden_size, cfg.intermediate_size, len(cfg.taps)
    heads = cfg.num_heads * cfg.head_dim

    def random(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return (torch.randn(rows, columns, generator=generator) * gain * columns**-0.5).to(device)

    def ones() -> Tensor:
        return torch.ones(e, device=device)

    fc = random(e, taps * e, 0.1)
    fc[:, -e:] += torch.eye(e, device=device)
    layer = model.Layer(
        attn_norm=ones(),
        qkv=random(heads + 2 * cfg.num_kv_heads * cfg.head_dim, 2 * e),
        qkv_bias=(),
        out=random(e, heads, 0.5),
        out_bias=(),
        mlp_norm=ones(),
        gate_up=random(2 * i, e),
        gate_up_bias=(),
        down=random(e, i, 0.5),
        down_bias=(),
    )
    return eagle.HeadParams(
        fc=fc,
        fc_norm=(),
        feature_norm=ones(),
        layer=layer,
        norm=target.params.norm.float().clone(),
        head=eagle_loss.output_rows(target, target_id).float() if own_head else (),
        embed=(),
        target_id=target_id,
    )


def write_folder(
    folder: Path, params: eagle.HeadParams, cfg: eagle.HeadConfig, target: ns.Model, dtype: torch.dtype
) -> None:
    """A head as SGLang and `load_draft` read it; without an output head it is marked to take the target's rows."""
    (folder / "config.json").unlink(missing_ok=True)
    tensors = {key: value.to("cpu", dtype).contiguous() for key, value in named(params, cfg).items()}
    for key, value in tensors.items():
        if not value.isfinite().all():
            raise ValueError(f"tensor {key!r} holds values that are not finite in {dtype}")
    target_id = params.target_id.cpu()
    if cfg.draft_vocab_size < cfg.vocab_size:
        tensors["d2t"] = target_id - torch.arange(len(target_id))
        tensors["t2d"] = torch.zeros(cfg.vocab_size, dtype=torch.bool).index_fill_(0, target_id, True)
    files.write(folder / "model.safetensors", to_bytes(tensors, metadata={"format": "pt"}))
    raw = describe(cfg, target, dtype) | ({} if isinstance(params.head, Tensor) else {"lm_head": weights.TARGET_ROWS})
    files.write(folder / "config.json", (json.dumps(raw, indent=2) + "\n").encode())


def named(params: eagle.HeadParams, cfg: eagle.HeadConfig) -> dict[str, Tensor]:
    """A head's weights under LlamaForCausalLMEagle3's names."""
    kv = cfg.num_kv_heads * cfg.head_dim
    q, k, v = params.layer.qkv.split((cfg.num_heads * cfg.head_dim, kv, kv))
    gate, up = params.layer.gate_up.chunk(2)
    layer = {"input_layernorm": params.layer.attn_norm, "hidden_norm": params.feature_norm}
    layer |= {"post_attention_layernorm": params.layer.mlp_norm, "self_attn.q_proj": q, "self_attn.k_proj": k}
    layer |= {"self_attn.v_proj": v, "self_attn.o_proj": params.layer.out, "mlp.gate_proj": gate, "mlp.up_proj": up}
    layer |= {"mlp.down_proj": params.layer.down}
    head = {"lm_head": params.head} if isinstance(params.head, Tensor) else {}
    top = {"fc": params.fc, "norm": params.norm} | head | {f"midlayer.{key}": value for key, value in layer.items()}
    return {f"{key}.weight": value for key, value in top.items()}


def describe(cfg: eagle.HeadConfig, target: ns.Model, dtype: torch.dtype) -> dict[str, Any]:
    """config.json of a head."""
    rope: dict[str, Any] = {"rope_type": cfg.rope.kind}
    if cfg.rope.kind != "default":
        rope |= {"factor": cfg.rope.factor}
    if cfg.rope.kind == "llama3":
        rope |= {"low_freq_factor": cfg.rope.low_freq_factor, "high_freq_factor": cfg.rope.high_freq_factor}
        rope |= {"original_max_position_embeddings": cfg.rope.original_max_position}
    eos = list(target.cfg.eos_ids)
    # SGLang and SpecForge name the layer whose output is tapped, vLLM the one whose input is; here it is SGLang's. All
    # of them tap the same inputs where nothing is named.
    default = cfg.taps == eagle.default_taps(target.cfg.num_layers)
    named_taps = {} if default else {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in cfg.taps]}
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "target_hidden_size": cfg.target_hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_context,
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": cfg.rope.theta,
        "rope_scaling": None if cfg.rope.kind == "default" else rope,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "vocab_size": cfg.vocab_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "bos_token_id": target.cfg.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_config": {"use_aux_hidden_state": True} | named_taps,
    }

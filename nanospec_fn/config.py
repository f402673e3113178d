"""config.json as this engine's hashable configs. A key that asks for anything other than a plain Llama is refused.

Shapes as in `model` and `eagle`. Errors are ValueError that names the file and the key.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nanospec_fn import eagle, model

HEAD_ARCHITECTURES = ("LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3Speculator", "Eagle3DraftModel")


def parse(raw: dict[str, Any], path: Path, architectures: tuple[str, ...] = ("LlamaForCausalLM",)) -> model.Config:
    """config.json -> Config; absent keys mean what transformers' LlamaConfig says.

    Errors: ValueError naming the key that is missing, out of range, or asks for something other than a plain Llama.
    """
    supported: dict[str, tuple[Any, ...]] = {
        "model_type": ("llama",),
        "hidden_act": ("silu",),
        "sliding_window": (),
        "quantization_config": (),
        "rope_interleaved": (False,),
        "partial_rotary_factor": (1,),
    }
    for key, values in supported.items():
        if raw.get(key) is not None and raw[key] not in values:
            raise ValueError(f"{path}: {key} {raw[key]!r} is not supported")
    for found in typed(raw, "architectures", list, path) or architectures[:1]:
        if found not in architectures:
            raise ValueError(f"{path}: architecture {found!r} is not supported ({', '.join(architectures)})")
    for kind in typed(raw, "layer_types", list, path):
        if kind != "full_attention":
            raise ValueError(f"{path}: layer_types {kind!r} is not supported")

    def positive(key: str, default: int | None = None) -> int:
        value = default if raw.get(key) is None else raw[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{path}: {key} must be a positive integer, got {value!r}")
        return value

    hidden, heads = positive("hidden_size"), positive("num_attention_heads")
    kv_heads, head_dim = positive("num_key_value_heads", heads), positive("head_dim", hidden // heads)
    if heads % kv_heads:
        raise ValueError(f"{path}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    if head_dim % 4:  # rows of 6 or 10 are not row-canonical on a CPU; nobody has such heads
        raise ValueError(f"{path}: head_dim must be a multiple of 4, got {head_dim}")
    vocab_size = positive("vocab_size")
    eos_ids = token_ids(raw.get("eos_token_id"), "eos_token_id", path)
    for token in eos_ids:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{path}: eos_token_id {token} is not in the vocabulary of {vocab_size}")
    bos = raw.get("bos_token_id")
    return model.Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=positive("intermediate_size"),
        num_layers=positive("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context=positive("max_position_embeddings", 2048),
        rms_eps=number(raw, "rms_norm_eps", path, 1e-6),
        rope=parse_rope(raw, path),
        tied=bool(raw.get("tie_word_embeddings")),
        eos_ids=eos_ids,
        bos_id=bos if isinstance(bos, int) else None,
    )


def parse_head(raw: dict[str, Any], target: model.Config, path: Path) -> eagle.HeadConfig:
    """A head's config.json in any of the three forms -> HeadConfig.

    The head's rope is its own: a config without any means base 10000, unscaled, whatever the target has.
    """
    nested = typed(raw, "transformer_layer_config", dict, path) or None
    layer = parse(
        # The layer count is 36 or 40 in some public heads, the target's; there is always one. A head ends nothing.
        {**(nested or raw), "num_hidden_layers": 1, "architectures": raw.get("architectures"), "eos_token_id": None},
        path,
        HEAD_ARCHITECTURES,
    )
    # The nested form counts a layer's input, as this engine does; the others its output.
    about = typed(raw, "eagle_config", dict, path)
    if about.get("use_aux_hidden_state") is False:
        raise ValueError(f"{path}: eagle_config.use_aux_hidden_state False is not supported")
    key = "eagle_aux_hidden_state_layer_ids"
    ids = about.get(key) if raw.get(key) is None else raw[key]
    taps: tuple[int, ...]
    if ids is None:
        taps = eagle.default_taps(target.num_layers)
    else:
        taps = tuple(sorted(i + (nested is None) for i in token_ids(ids, key, path)))
    if not taps or len(set(taps)) != len(taps) or taps[0] < 0 or taps[-1] > target.num_layers:
        raise ValueError(f"{path}: layers {taps} are not distinct inputs of the target's {target.num_layers} layers")
    target_hidden = raw.get("target_hidden_size") or layer.hidden_size
    for what, mine, its in (
        ("hidden size", target_hidden, target.hidden_size),
        ("vocabulary", layer.vocab_size, target.vocab_size),
    ):
        if mine != its:
            raise ValueError(f"{path}: the head is for a target of {what} {mine}, this target's is {its}")
    draft_vocab = raw.get("draft_vocab_size") or layer.vocab_size
    if not isinstance(draft_vocab, int) or not 0 < draft_vocab <= layer.vocab_size:
        raise ValueError(f"{path}: draft_vocab_size {draft_vocab!r} is not in 1..{layer.vocab_size}")
    return eagle.HeadConfig(
        **vars(layer) | {"gemm": target.gemm, "bmm": target.bmm, "tied": False},
        target_hidden_size=target_hidden,
        taps=taps,
        draft_vocab_size=draft_vocab,
        norm_before_residual=bool(raw.get("norm_before_residual")),
        norm_before_fc=bool(raw.get("norm_before_fc")),
    )


def parse_rope(raw: dict[str, Any], path: Path) -> model.Rope:
    """Every form that config.json has had: rope_theta with rope_scaling, and transformers 5's rope_parameters."""
    merged: dict[str, Any] = {}
    forms = (typed(raw, key, dict, path) for key in ("rope_scaling", "rope_parameters"))
    for form in ({"rope_theta": raw.get("rope_theta")}, *forms):
        for key, value in form.items():
            key = "rope_type" if key == "type" else key
            if isinstance(value, dict):
                raise ValueError(f"{path}: rope_parameters for each kind of layer ({key!r}) are not supported")
            # A null beside the real value is a known exporter's bug; two real values are nobody's to choose from.
            if value is not None and merged.setdefault(key, value) != value:
                raise ValueError(f"{path}: {key} is both {merged[key]!r} and {value!r}")
    kind = merged.get("rope_type", "default")
    theta = number(merged, "rope_theta", path, 10000.0)
    if merged.get("partial_rotary_factor", 1) != 1:
        raise ValueError(f"{path}: partial_rotary_factor {merged['partial_rotary_factor']!r} is not supported")
    if kind == "default":
        return model.Rope(theta=theta)
    if kind == "linear":
        return model.Rope(theta=theta, kind=kind, factor=number(merged, "factor", path))
    if kind == "llama3":
        return model.Rope(
            theta=theta,
            kind=kind,
            factor=number(merged, "factor", path),
            low_freq_factor=number(merged, "low_freq_factor", path),
            high_freq_factor=number(merged, "high_freq_factor", path),
            original_max_position=int(number(merged, "original_max_position_embeddings", path)),
        )
    raise ValueError(f"{path}: rope type {kind!r} is not supported (default, linear, llama3)")


def typed(raw: Mapping[str, Any], key: str, kind: type, path: Path) -> Any:
    """A list's or an object's value, an empty one where the key is absent or null."""
    value = raw.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise ValueError(f"{path}: {key} must be {'a list' if kind is list else 'an object'}, got {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str, path: Path, default: float | None = None) -> float:
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise ValueError(f"{path}: {key} must be a positive number, got {value!r}")
    return float(value)


def token_ids(value: Any, key: str, path: Path) -> tuple[int, ...]:
    """An id, a list of ids or null -> a tuple of ids."""
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{path}: {key} must be an id or a list of ids, got {value!r}")
    return tuple(ids)

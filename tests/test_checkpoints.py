"""Targets in every public form: logits equal transformers', EOS, rope and biases survive."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanospec_fn import chat, checkpoint, model, weights
from nanospec_fn.struct import bytes_equal
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[1]


def load(path) -> model.Model:
    return weights.load(str(path), device="cpu", dtype="fp32")


def tokens_for(raw: dict, length: int = 600) -> torch.Tensor:
    return torch.randint(0, raw["vocab_size"], (1, length), generator=torch.Generator().manual_seed(1))


def logits(m: model.Model, raw: dict) -> torch.Tensor:
    return model.forward(m.params, m.cfg, tokens_for(raw))


def assert_same_function(m: model.Model, hf: LlamaForCausalLM, raw: dict) -> None:
    torch.testing.assert_close(logits(m, raw), hf(tokens_for(raw)).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", tiny.SHAPES)
def test_logits_equal_transformers(shape, tmp_path):
    """C1-C4, 600 positions of an original context of 64. Catches a wrong fuse order, group size, head_dim or tie."""
    raw = tiny.config(shape)
    hf = tiny.llama(raw)
    m = load(tiny.write(tmp_path, raw, tiny.state_of(hf)))
    assert_same_function(m, hf, raw)
    assert m.tokenizer is None
    assert m.cfg.tied == raw["tie_word_embeddings"] == (m.params.head == ())


@pytest.mark.parametrize("form", ["sharded", "bin", "bin-legacy", "bin-sharded"])
def test_containers_hold_the_same_weights(form, tmp_path):
    """Catches a shard that is left out, and a tensor taken from the wrong one."""
    raw = tiny.config("llama-3.1-8b")
    state = tiny.state_of(tiny.llama(raw))
    single = load(tiny.write(tmp_path / "single", raw, state))
    other = load(tiny.write(tmp_path / form, raw, state, form))
    assert bytes_equal(single.params, other.params)
    assert single.cfg == other.cfg


@pytest.mark.parametrize("shape", ["llama-3.1-8b", "smollm2-135m"])
def test_saved_by_transformers_5(shape, tmp_path):
    """C8: rope_parameters and dtype in place of rope_theta, rope_scaling and torch_dtype."""
    raw = tiny.config(shape)
    hf = tiny.llama(raw)
    hf.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in saved
    assert "rope_scaling" not in saved
    assert_same_function(load(tmp_path), hf, raw)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_half_precision_file_is_loaded_as_asked(stored, tmp_path):
    """C4's copies differ in dtype; the file's must not leak into the model."""
    raw = tiny.config("tinyllama-1.1b")
    state = {key: value.to(stored) for key, value in tiny.state_of(tiny.llama(raw)).items()}
    m = load(tiny.write(tmp_path, raw, state))
    assert m.params.embed.dtype == torch.float32
    assert torch.equal(m.params.embed, state["model.embed_tokens.weight"].float())


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "smollm2-135m", "tinyllama-1.1b"])
def test_gguf_logits_equal_transformers(shape, tmp_path):
    """C9: llama.cpp reorders the rows of q and k (each by its own number of heads)."""
    raw = tiny.config(shape, rope_scaling=None)
    hf = tiny.llama(raw)
    m = load(tiny.write_gguf(tmp_path / "m.gguf", raw, tiny.state_of(hf)))
    assert_same_function(m, hf, raw)
    assert m.cfg.eos_ids == (2,)
    assert m.cfg.rms_eps == 1e-5


def test_gguf_llama3_scaling(tmp_path):
    """GGUF keeps Llama 3's scaling as a tensor of divisors; ignoring it is right only for short prompts."""
    scaling = tiny.LLAMA3_SCALING | {"original_max_position_embeddings": 8192, "factor": 32.0}
    raw = tiny.config("llama-3.2-1b", rope_scaling=scaling, head_dim=64)
    hf = tiny.llama(raw)
    plain = tiny.llama(raw | {"rope_scaling": None}).model.rotary_emb.inv_freq
    divisor = plain / hf.model.rotary_emb.inv_freq
    m = load(tiny.write_gguf(tmp_path / "m.gguf", raw, tiny.state_of(hf), divisor))
    assert m.cfg.rope == model.Rope(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    assert_same_function(m, hf, raw)
    odd = tiny.write_gguf(tmp_path / "odd.gguf", raw, tiny.state_of(hf), divisor.flip(0).contiguous())
    with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
        load(odd)


def test_c02_several_eos_ids(tmp_path):
    """Catches reading config.json's scalar alone: a Llama 3 chat turn then never ends."""
    raw = tiny.config("tinyllama-1.1b", eos_token_id=5)
    state = tiny.state_of(tiny.llama(raw))

    def eos(**generation) -> tuple[int, ...]:
        shutil.rmtree(tmp_path / "m", ignore_errors=True)
        return load(tiny.write(tmp_path / "m", raw, state, **generation)).cfg.eos_ids

    assert eos(eos_token_id=[5, 9]) == (5, 9)
    assert eos(eos_token_id=9) == (9,)
    assert eos(eos_token_id=[9]) == (9,)
    assert eos(eos_token_id=None) == (5,)
    assert eos(temperature=0.6) == (5,)
    assert eos() == (5,)
    raw["eos_token_id"] = [5, 7]
    assert eos() == (5, 7)
    raw["eos_token_id"] = 0  # SmolLM2's base model: an id that is falsy
    assert eos() == (0,)
    assert eos(eos_token_id=0) == (0,)
    raw["eos_token_id"] = None
    assert eos() == ()
    del raw["eos_token_id"]
    assert eos() == ()


LLAMA3 = {"rope_theta": 500000.0, **tiny.LLAMA3_SCALING}
OLD_LLAMA3 = {("type" if key == "rope_type" else key): value for key, value in tiny.LLAMA3_SCALING.items()}
ROPE_FORMS = {  # name: (config.json's keys, what they mean in transformers 5's words)
    "top-level theta": ({"rope_theta": 5000.0}, {"rope_type": "default", "rope_theta": 5000.0}),
    "theta an int": ({"rope_theta": 5000}, {"rope_type": "default", "rope_theta": 5000.0}),
    "rope_parameters": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
        {"rope_type": "default", "rope_theta": 5000.0},
    ),
    "rope_parameters llama3": ({"rope_parameters": LLAMA3}, LLAMA3),
    "null theta beside it": ({"rope_theta": None, "rope_parameters": LLAMA3}, LLAMA3),
    "both forms": ({"rope_theta": 500000.0, "rope_scaling": tiny.LLAMA3_SCALING, "rope_parameters": LLAMA3}, LLAMA3),
    "rope_scaling": ({"rope_theta": 500000.0, "rope_scaling": tiny.LLAMA3_SCALING}, LLAMA3),
    "type for rope_type": ({"rope_theta": 500000.0, "rope_scaling": OLD_LLAMA3}, LLAMA3),
    "linear": (
        {"rope_theta": 5000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
    ),
    "no theta": ({}, {"rope_type": "default", "rope_theta": 10000.0}),
    "all null": (
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": None},
        {"rope_type": "default", "rope_theta": 10000.0},
    ),
}


@pytest.mark.parametrize("form", ROPE_FORMS)
def test_c11_rope_forms(form, tmp_path):
    """One set of weights under every way of writing its rope. Catches a theta that falls back to 10000."""
    keys, meaning = ROPE_FORMS[form]
    base = tiny.config("tinyllama-1.1b", rope_theta=..., rope_scaling=..., rope_parameters=...)
    hf = tiny.llama(base | {"rope_parameters": dict(meaning)})
    m = load(tiny.write(tmp_path, base | keys, tiny.state_of(hf)))
    assert_same_function(m, hf, base)
    other = tiny.llama(base | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}})
    same = torch.allclose(hf(tokens_for(base)).logits, other(tokens_for(base)).logits, atol=1e-2)
    assert same == (meaning == {"rope_type": "default", "rope_theta": 10000.0})  # so the check above can fail


@pytest.mark.parametrize(
    "keys, named",
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 5000.0}}, "rope_theta is both 10000.0 and 5000.0"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5000.0}}}, "full_attention"),
        ({"rope_theta": "10000"}, "rope_theta must be a positive number"),
        ({"rope_theta": -1}, "rope_theta must be a positive number"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_c11_unsupported_rope_is_refused_by_name(keys, named, tmp_path):
    raw = tiny.config("tinyllama-1.1b", rope_theta=..., rope_scaling=...)
    state = tiny.state_of(tiny.llama(raw))
    with pytest.raises(ValueError, match=named):
        load(tiny.write(tmp_path, raw | keys, state))


@pytest.mark.parametrize(
    "flags", [{"attention_bias": True}, {"mlp_bias": True}, {"attention_bias": True, "mlp_bias": True}]
)
@pytest.mark.parametrize("form", ["safetensors", "gguf"])
def test_c12_biases(flags, form, tmp_path):
    """Catches biases skipped as unexpected, and q/k biases left in llama.cpp's order."""
    raw = tiny.config("smollm2-135m", **flags)
    hf = tiny.llama(raw)
    state = tiny.state_of(hf)
    if form == "gguf":
        m = load(tiny.write_gguf(tmp_path / "m.gguf", raw, state))
    else:
        m = load(tiny.write(tmp_path, raw, state))
    assert_same_function(m, hf, raw)


def test_c12_biases_that_the_config_denies_are_refused(tmp_path):
    raw = tiny.config("smollm2-135m", attention_bias=True)
    state = tiny.state_of(tiny.llama(raw))
    with pytest.raises(ValueError, match=r"self_attn\.[qkvo]_proj\.bias' is unknown"):
        load(tiny.write(tmp_path, raw | {"attention_bias": False}, state))


@pytest.fixture(scope="module")
def smollm2_reference(smollm2) -> LlamaForCausalLM:
    """transformers' model of the GGUF file, tensor by tensor, without this project's loader."""
    reader = gguf.GGUFReader(checkpoint.find_smollm2())
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, rms_norm_eps=1e-5, rope_theta=100000.0,
        tie_word_embeddings=True,
    )  # fmt: skip
    names = {llama_cpp: hugging_face for hugging_face, llama_cpp in tiny.GGUF_LAYER.items()}
    state = {}
    for tensor in reader.tensors:
        value = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        stem = tensor.name.removesuffix(".weight")
        if stem in ("token_embd", "output_norm"):
            state["model.embed_tokens.weight" if stem == "token_embd" else "model.norm.weight"] = value
            continue
        _, layer, part = stem.split(".")
        if part in ("attn_q", "attn_k"):
            # Row 64h + i of a Hugging Face head is llama.cpp's row 64h + 2i, or 64h + 2(i - 32) + 1 for i >= 32.
            rows = [
                64 * h + (2 * i if i < 32 else 2 * (i - 32) + 1) for h in range(len(value) // 64) for i in range(64)
            ]
            value = value[rows]
        state[f"model.layers.{layer}.{names[part]}.weight"] = value
    with torch.device("meta"):  # random weights for 135M parameters would take seconds
        hf = LlamaForCausalLM(config).eval()
    missing, unexpected = hf.load_state_dict(state, strict=False, assign=True)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    hf.tie_weights()
    hf.model.rotary_emb = LlamaRotaryEmbedding(config)
    return hf


@pytest.mark.smollm2
def test_c09_smollm2(smollm2, smollm2_reference):
    """Real weights, a real prompt: logits, greedy answer, EOS from the metadata."""
    prompt = chat.encode(smollm2.tokenizer, "What is the capital of France?")
    tokens = torch.tensor([prompt])
    mine = model.forward(smollm2.params, smollm2.cfg, tokens)
    theirs = smollm2_reference(tokens).logits
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-3)
    assert torch.equal(mine.argmax(-1), theirs.argmax(-1))
    answer = smollm2_reference.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=7
    )
    assert chat.decode(smollm2.tokenizer, answer[0, len(prompt) :].tolist()) == "The capital of France is Paris."
    cfg = smollm2.cfg
    assert (cfg.eos_ids, cfg.bos_id, cfg.tied, cfg.rope.theta, cfg.max_context) == ((2,), 1, True, 100000.0, 8192)


def test_weights_are_not_the_files_pages(tmp_path):
    """Catches memory-mapped weights: training would write them, and a rewritten file would change them."""
    raw = tiny.config("tinyllama-1.1b")
    state = tiny.state_of(tiny.llama(raw))
    m = load(tiny.write(tmp_path, raw, state))
    before = (tmp_path / "model.safetensors").read_bytes()
    m.params.embed.zero_()
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert bytes_equal(load(tmp_path).params.embed, state["model.embed_tokens.weight"])


@pytest.mark.smollm2
@pytest.mark.usefixtures("smollm2")
def test_c09_peak_memory():
    """Under 3 times the fp32 weights (538 MB), the libraries included. Catches tensors that are all kept twice."""
    # VmHWM and not getrusage: a child process inherits its parent's ru_maxrss.
    code = (
        "import nanospec_fn.weights as w; w.load('smollm2', device='cpu', dtype='fp32');"
        "print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    peak = 1024 * int(done.stdout)
    assert 4 * 134_515_008 < peak < 3 * 4 * 134_515_008

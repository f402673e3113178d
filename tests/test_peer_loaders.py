"""A trained head's folder, held against what the released loaders of other engines ask of one (as recorded facts)."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig

from bench import apart
from nanospec_fn import eagle
from rl import eagle_head
from tests import tiny

LOADERS = json.loads((Path(__file__).parent / "peers" / "eagle3-loaders.json").read_text())
PEERS = [name for name in LOADERS if name != "about"]
LAYERS = 8  # the fewest at which the default taps 2, 4, 5 are distinct and not one apart from the end

DEFAULT = eagle.default_taps(LAYERS)


@pytest.fixture(params=["smollm2-135m", "llama-3.1-8b"])
def target(request):
    return tiny.model(request.param, num_hidden_layers=LAYERS)


def write(folder, target, draft_vocab=50, taps=DEFAULT, own_head=True):
    """A head as rl.train_eagle writes it; its config."""
    vocab = target.cfg.vocab_size
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:draft_vocab].sort().values
    cfg = eagle_head.config_for(target, taps, draft_vocab, 40)
    params = eagle_head.init(cfg, target, ids, own_head, 0)
    eagle_head.write_folder(folder, params, cfg, target, torch.float32)
    return cfg


def shapes(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118


def sizes(cfg):
    """The letters of the recorded shapes."""
    return {
        "E": cfg.hidden_size,
        "F": cfg.target_hidden_size,
        "T": len(cfg.taps),
        "Q": cfg.num_heads * cfg.head_dim,
        "K": cfg.num_kv_heads * cfg.head_dim,
        "I": cfg.intermediate_size,
        "V": cfg.vocab_size,
        "D": cfg.draft_vocab_size,
        "L": LAYERS,
    }


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("whole", [False, True], ids=["mapped", "whole vocabulary"])
def test_a_trained_head_has_the_tensors_that_a_peer_loads(peer, whole, target, tmp_path):
    """Bugs: a name that SGLang passes over in silence; the halves of the attention's input left apart; a map where the
    vocabularies are equal, or none where they are not."""
    cfg = write(tmp_path, target, target.cfg.vocab_size if whole else 50)
    letters, found = sizes(cfg), shapes(tmp_path)

    def expected(kind):
        return {key: tuple(eval(size, letters) for size in shape) for key, shape in LOADERS[peer][kind].items()}

    required, optional = expected("tensors"), expected("optional")
    assert set(required) <= set(found) <= {*required, *optional}
    assert found == {key: (required | optional)[key] for key in found}
    assert ("d2t" in found) == (not whole)


@pytest.mark.parametrize("peer", PEERS)
def test_a_trained_heads_config_says_what_a_peer_reads(peer, target, tmp_path):
    """Bugs: a key missing, for which transformers puts Llama-7B's; a rope that transformers reads otherwise."""
    cfg = write(tmp_path, target)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert set(LOADERS[peer]["config_keys"]) <= set(raw)
    assert set(raw["architectures"]) <= set(LOADERS[peer]["architectures"])
    read = LlamaConfig.from_pretrained(tmp_path)  # as both peers read it
    assert (read.hidden_size, read.intermediate_size, read.num_hidden_layers) == (cfg.hidden_size, 40, 1)
    assert (read.num_attention_heads, read.num_key_value_heads) == (cfg.num_heads, cfg.num_kv_heads)
    assert (read.head_dim, read.vocab_size, read.draft_vocab_size) == (cfg.head_dim, cfg.vocab_size, 50)
    assert (read.rms_norm_eps, read.tie_word_embeddings) == (cfg.rms_eps, False)
    assert read.rope_parameters["rope_theta"] == cfg.rope.theta
    assert read.rope_parameters["rope_type"] == cfg.rope.kind
    assert read.rope_parameters.get("factor", 1.0) == (cfg.rope.factor if cfg.rope.kind != "default" else 1.0)


def taps(peer, folder):
    """The target's layers whose inputs a peer feeds to the head."""
    raw = json.loads((folder / "config.json").read_text())
    ids = raw["eagle_config"].get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return tuple(eval(tap, {"L": LAYERS}) for tap in LOADERS[peer]["default_taps"])
    return tuple(eval(LOADERS[peer]["input_of_layer"], {"i": i}) for i in ids)


@pytest.mark.parametrize(
    "peer",
    ["vllm-0.26.0", "sglang-0.5.17"],
)
def test_peers_tap_a_default_heads_own_layers(peer, target, tmp_path):
    """Bug: the features of a layer early: the peer runs, and accepts next to nothing."""
    cfg = write(tmp_path, target)
    assert taps(peer, tmp_path) == cfg.taps


def test_peers_disagree_about_named_taps(target, tmp_path):
    """So bench.run refuses such a head for vLLM: right for one engine is wrong for the other."""
    cfg = write(tmp_path, target, taps=(1, 3, 6))
    assert taps("sglang-0.5.17", tmp_path) == cfg.taps
    assert taps("vllm-0.26.0", tmp_path) == tuple(tap - 1 for tap in cfg.taps)
    with pytest.raises(ValueError, match="takes one layer early"):
        apart.find_head("vllm", f"eagle:{tmp_path}")
    assert apart.find_head("sglang", f"eagle:{tmp_path}")[1] == str(tmp_path)


def test_target_rows_are_no_peers(target, tmp_path):
    """Neither loader knows the key: vLLM would take V rows for D, SGLang memory that nobody has written."""
    write(tmp_path, target, own_head=False)
    assert "lm_head.weight" not in shapes(tmp_path)
    for engine in apart.MODULE:
        with pytest.raises(ValueError, match=r"has no lm_head\.weight"):
            apart.find_head(engine, f"eagle:{tmp_path}")


def test_the_recorded_releases_are_the_adapters():
    assert sorted(PEERS) == sorted(f"{engine}-{release}" for engine, release in apart.RELEASE.items())

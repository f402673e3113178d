"""The EAGLE-3 head against an implementation written apart from it (oracle_eagle), on random heads."""

import pytest
import torch
from torch import Tensor

from nanospec_fn import eagle, model, weights
from nanospec_fn.struct import replace
from tests import tiny
from tests.oracle_eagle import Oracle

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("smollm2-135m")
LENGTH = 11
FORMS = {
    "original": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
    "sglang": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}},
    "speculators": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    "norm_before_residual": {"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    "norm_before_fc": {"norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    "own embedding": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
    "borrowed head": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "draft_vocab_size": 128},
}


@pytest.fixture(scope="module")
def target() -> model.Model:
    return tiny.model("smollm2-135m")


def features_of(target: model.Model, tokens: Tensor, taps: tuple[int, ...]) -> Tensor:
    """[T, 3E] from transformers' hidden states, whose entry i is the input of layer i."""
    hf = tiny.llama(RAW)
    states = hf(tokens[None], output_hidden_states=True).hidden_states
    return torch.cat([states[i][0] for i in taps], dim=-1)


def attend_to(cfg: model.Config, past: list[tuple[Tensor, Tensor]]):
    """Causal attention over all rows so far; keeps them in `past`."""

    def attend(qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = model.rotate(qkv, cos, sin, cfg.num_kv_heads)
        past.append((k, v))
        k, v = (
            torch.cat(x).repeat_interleave(cfg.num_heads // cfg.num_kv_heads, dim=1) for x in zip(*past, strict=True)
        )
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        scores = torch.einsum("qhd,khd->hqk", q, k) * cfg.head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    return attend


@pytest.fixture(params=FORMS)
def case(request, target, tmp_path):
    changes = FORMS[request.param]
    draft_vocab = changes.get("draft_vocab_size", 32)
    state = tiny.head_state(RAW, draft_vocab, seed=3, own_embed=request.param == "own embedding")
    if "norm_before_fc" in changes:
        state["input_norm.weight"] = 1 + 0.3 * torch.randn(3 * 72, generator=torch.Generator().manual_seed(4))
    if request.param == "borrowed head":
        del state["lm_head.weight"]
    form = request.param if request.param in ("original", "sglang") else "speculators"
    cfg, params = weights.load_eagle(str(tiny.write_head(tmp_path, RAW, state, form, **changes)), target)
    oracle = Oracle(
        state,
        target.params.embed,
        target.params.embed,  # tied
        RAW["num_attention_heads"],
        RAW["num_key_value_heads"],
        norm_before_residual=cfg.norm_before_residual,
        norm_before_fc=cfg.norm_before_fc,
    )
    return cfg, params, oracle


def step(params, cfg, embed, token, feature, position, attend, head=()):
    """The next features, and the logits that they give."""
    out = eagle.advance(params, cfg, embed, token, feature, position, attend)
    return out, eagle.logits(params, cfg, out, head)


def test_step_equals_the_oracle_at_all_positions_and_along_paths(case, target):
    """Catches: embedding and feature swapped, norms swapped, a residual that is normed (or not), the normed output fed
    back in place of the raw one, positions shifted between context and draft, the target's rope or embedding taken."""
    cfg, params, oracle = case
    tokens = torch.randint(0, 128, (LENGTH + 1,), generator=torch.Generator().manual_seed(2))
    features = features_of(target, tokens[:-1], cfg.taps)
    position = torch.arange(LENGTH)
    past: list[tuple[Tensor, Tensor]] = []
    fused = eagle.fuse(params, cfg, features)
    embed = target.params.embed
    out, logits = step(params, cfg, embed, tokens[1:], fused, position, attend_to(cfg, past), head=embed)
    assert logits.shape == (LENGTH, cfg.draft_vocab_size)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, oracle.full(tokens.tolist(), features), rtol=1e-4, atol=1e-4)

    path, drafted = [], [logits[-1]]
    feature = out[-1:]
    for depth in range(4):
        path.append(int(params.target_id[drafted[-1].argmax()]))
        feature, row = step(
            params,
            cfg,
            embed,
            torch.tensor(path[-1:]),
            feature,
            position[-1:] + 1 + depth,
            attend_to(cfg, past),
            head=embed,
        )
        drafted.append(row[0])
    expected = oracle.draft(tokens.tolist(), features, path)
    torch.testing.assert_close(torch.stack(drafted), expected, rtol=1e-4, atol=1e-4)
    assert expected.std() > 0.3  # logits that a wrong head could not match by being small


def test_taps_are_the_layers_inputs(target):
    """The engine's features equal transformers' hidden states; catches an off-by-one, which only lowers acceptance."""
    tokens = torch.randint(0, 128, (LENGTH,), generator=torch.Generator().manual_seed(5))
    position = torch.arange(LENGTH)
    attend = model.dense_attend(target.cfg, 1, LENGTH, position)
    _, mine = model.hidden(target.params, target.cfg, tokens, position, attend, (1, 2, 4))
    torch.testing.assert_close(mine, features_of(target, tokens, (1, 2, 4)), rtol=1e-4, atol=1e-5)


def test_c10_each_draft_token_maps_to_its_target(target):
    """Row i of the output head wins: the proposal is the mapped id, for every i."""
    cfg, params, state = tiny.head(RAW, target)
    feature = torch.randn(1, 72, generator=torch.Generator().manual_seed(6))
    direction = torch.nn.functional.rms_norm(feature, (72,), params.norm, cfg.rms_eps)
    for i in range(32):
        head = torch.zeros(32, 72)
        head[i] = direction
        winner = eagle.logits(replace(params, head=head), cfg, feature).argmax()
        assert params.target_id[winner] == i + state["d2t"][i]


def test_borrowed_head_must_be_passed(target, tmp_path):
    state = tiny.head_state(RAW, 128)
    del state["lm_head.weight"]
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "draft_vocab_size": 128}
    cfg, params = weights.load_eagle(str(tiny.write_head(tmp_path, RAW, state, "speculators", **ids)), target)
    with pytest.raises(ValueError, match="head: this draft head borrows"):
        eagle.logits(params, cfg, torch.ones(1, 72))


def test_head_is_differentiable(target):
    """Training a head needs gradients through every weight."""
    cfg, params, _ = tiny.head(RAW, target)
    with torch.enable_grad():
        leaves, spec = torch.utils._pytree.tree_flatten(params)
        leaves = [leaf.clone().requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
        params = torch.utils._pytree.tree_unflatten(leaves, spec)
        fused = eagle.fuse(params, cfg, torch.randn(5, 3 * 72))
        _, logits = step(params, cfg, target.params.embed, torch.arange(5), fused, torch.arange(5), attend_to(cfg, []))
        logits.logsumexp(-1).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.abs().sum() > 0 for leaf in leaves if leaf.is_floating_point())

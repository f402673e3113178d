"""Other engines on the same weights, prompts and machine, for the plain comparison."""

import time
from collections.abc import Sequence
from typing import Any

import torch

import nanospec_fn as ns
from bench.measure import Measured


class Transformers:
    """transformers' greedy `generate` over left-padded batches of the given size."""

    def __init__(self, model: ns.Model) -> None:
        self.model = to_transformers(model)
        self.stop = list(model.cfg.eos_ids)

    def measure(self, requests: Sequence[Sequence[int]], bs: int, max_tokens: int) -> Measured:
        """Complete token-id prompts, `bs` at a time."""
        outputs: list[list[int]] = []
        per_token = []
        start = time.perf_counter()
        for first in range(0, len(requests), bs):
            tokens, clock = self.batch(requests[first : first + bs], max_tokens)
            outputs += tokens
            if len(clock) > 1:
                per_token.append((clock[-1] - clock[0]) / (len(clock) - 1))
        seconds = time.perf_counter() - start
        tpot_ms = 1e3 * sum(per_token) / len(per_token) if per_token else float("nan")
        return Measured(outputs, seconds, tpot_ms, round_ms=float("nan"), mean_accepted_len=float("nan"))

    def batch(self, requests: Sequence[Sequence[int]], max_tokens: int) -> tuple[list[list[int]], list[float]]:
        """One batch: its tokens, stop token included, and when each step ended."""
        from transformers import GenerationConfig

        longest, device = max(map(len, requests)), self.model.device
        pad = self.stop[0] if self.stop else 0
        ids = torch.tensor([[pad] * (longest - len(r)) + list(r) for r in requests], device=device)
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in requests], device=device)
        clock: list[float] = []

        def stamp(input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
            if device.type == "cuda":
                torch.cuda.synchronize()
            clock.append(time.perf_counter())
            return torch.zeros(len(input_ids), dtype=torch.bool, device=device)

        config = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=self.stop or None, pad_token_id=pad
        )
        with torch.no_grad():
            out = self.model.generate(ids, attention_mask=mask, generation_config=config, stopping_criteria=[stamp])
        return [self.until_stop(row) for row in out[:, longest:].tolist()], clock

    def until_stop(self, tokens: list[int]) -> list[int]:
        """Cut after the first stop token: what follows is padding."""
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.stop), len(tokens))
        return tokens[:end]


def to_transformers(model: ns.Model) -> Any:
    """The same weights, not copied, as transformers' LlamaForCausalLM: whatever file they came from."""
    from transformers import LlamaConfig, LlamaForCausalLM

    cfg, rope, embed = model.cfg, model.cfg.rope, model.params.embed
    scaling: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        scaling["factor"] = rope.factor
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling["original_max_position_embeddings"] = rope.original_max_position
    config = LlamaConfig(
        vocab_size=cfg.vocab_size,
        hidden_size=cfg.hidden_size,
        intermediate_size=cfg.intermediate_size,
        num_hidden_layers=cfg.num_layers,
        num_attention_heads=cfg.num_heads,
        num_key_value_heads=cfg.num_kv_heads,
        head_dim=cfg.head_dim,
        max_position_embeddings=cfg.max_context,
        rms_norm_eps=cfg.rms_eps,
        rope_parameters=scaling,
        tie_word_embeddings=cfg.tied,
        attention_bias=len(model.params.layers[0].qkv_bias) > 0,
        mlp_bias=len(model.params.layers[0].down_bias) > 0,
        dtype=embed.dtype,
    )
    peer: Any = LlamaForCausalLM(config)
    peer = peer.to(device=embed.device, dtype=embed.dtype).eval()
    weights: dict[str, Any] = {"model.embed_tokens.weight": embed, "model.norm.weight": model.params.norm}
    weights["lm_head.weight"] = embed if cfg.tied else model.params.head
    for i, layer in enumerate(model.params.layers):
        weights |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer_weights(layer, cfg).items()}
    peer.load_state_dict(weights, assign=True)
    return peer


def layer_weights(layer: Any, cfg: ns.Config) -> dict[str, torch.Tensor]:
    """One layer's tensors under transformers' names; the fused ones are cut into views."""
    heads = [n * cfg.head_dim for n in (cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads)]
    named = {"input_layernorm.weight": layer.attn_norm, "post_attention_layernorm.weight": layer.mlp_norm}
    for kind, qkv, out, gate_up, down in (
        ("weight", layer.qkv, layer.out, layer.gate_up, layer.down),
        ("bias", layer.qkv_bias, layer.out_bias, layer.gate_up_bias, layer.down_bias),
    ):
        if len(qkv):
            q, k, v = qkv.split(heads)
            named |= {f"self_attn.{n}_proj.{kind}": t for n, t in (("q", q), ("k", k), ("v", v), ("o", out))}
        if len(down):
            gate, up = gate_up.chunk(2)
            named |= {f"mlp.{n}_proj.{kind}": t for n, t in (("gate", gate), ("up", up), ("down", down))}
    return named

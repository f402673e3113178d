"""EAGLE-3 once more, for checking: plain loops over positions and heads, no cache, straight from a file's tensors.

Written from the paper (Li et al. 2025), sharing nothing with the library. Names are the original form's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


@dataclass(frozen=True)
class Oracle:
    """A head: tensors by name, and the sizes that shapes do not give."""

    state: dict[str, Tensor]
    embed: Tensor  # [V, E], the target's, used where the state has none
    lm_head: Tensor | None  # [V, E], likewise
    heads: int
    kv_heads: int
    theta: float = 10000.0
    eps: float = 1e-5
    norm_before_residual: bool = False
    norm_before_fc: bool = False

    def norm(self, name: str, x: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.state[f"{name}.weight"], self.eps)

    def proj(self, name: str, x: Tensor) -> Tensor:
        return linear(x, self.state[f"midlayer.{name}.weight"], self.state.get(f"midlayer.{name}.bias"))

    def fuse(self, features: Tensor) -> Tensor:
        """[T, 3E] -> [T, E]."""
        if self.norm_before_fc:
            features = self.norm("input_norm", features)
        return linear(features, self.state["fc.weight"])

    def layer(self, tokens: list[int], features: Tensor, positions: list[int]) -> Tensor:
        """The layer's output [T, E] for pairs (feature, next token), causal in the order given."""
        table = self.state.get("embed_tokens.weight", self.embed)
        embedded = self.norm("midlayer.input_layernorm", torch.stack([table[t] for t in tokens]))
        normed = self.norm("midlayer.hidden_norm", features)
        x = torch.cat([embedded, normed], dim=-1)
        q, k, v = (self.proj(f"self_attn.{name}_proj", x) for name in "qkv")
        d = q.shape[1] // self.heads
        rows = []
        for t in range(len(tokens)):
            out = []
            for h in range(self.heads):
                g = h * self.kv_heads // self.heads
                query = self.rotate(q[t, h * d : (h + 1) * d], positions[t])
                keys = torch.stack([self.rotate(k[j, g * d : (g + 1) * d], positions[j]) for j in range(t + 1)])
                weight = torch.softmax(keys @ query / d**0.5, dim=0)
                out.append(weight @ v[: t + 1, g * d : (g + 1) * d])
            rows.append(torch.cat(out))
        residual = normed if self.norm_before_residual else features
        y = residual + self.proj("self_attn.o_proj", torch.stack(rows))
        z = self.norm("midlayer.post_attention_layernorm", y)
        return y + self.proj("mlp.down_proj", silu(self.proj("mlp.gate_proj", z)) * self.proj("mlp.up_proj", z))

    def rotate(self, x: Tensor, position: int) -> Tensor:
        d = len(x)
        out = torch.empty_like(x)
        for i in range(d // 2):
            angle = torch.tensor(position * self.theta ** (-2 * i / d))
            out[i] = x[i] * torch.cos(angle) - x[i + d // 2] * torch.sin(angle)
            out[i + d // 2] = x[i + d // 2] * torch.cos(angle) + x[i] * torch.sin(angle)
        return out

    def logits(self, out: Tensor) -> Tensor:
        """Layer output [T, E] -> [T, Vd]."""
        return linear(self.norm("norm", out), self.state.get("lm_head.weight", self.lm_head))

    def full(self, tokens: list[int], features: Tensor) -> Tensor:
        """Logits [T, Vd] at every position from true features.

        Args: tokens, T + 1 target ids; features [T, 3E] of the target at positions 0..T-1.
        """
        return self.logits(self.layer(tokens[1:], self.fuse(features), list(range(len(tokens) - 1))))

    def draft(self, tokens: list[int], features: Tensor, path: list[int]) -> Tensor:
        """Logits [len(path) + 1, Vd]: after the context, then after each drafted target id of `path`.

        Each drafted token is paired with the layer's own last output in place of the true feature it has not got.
        """
        inputs, fed = self.fuse(features), list(tokens[1:])
        found = []
        for token in [*path, None]:
            out = self.layer(fed, inputs, list(range(len(fed))))
            found.append(self.logits(out[-1:])[0])
            if token is not None:
                fed, inputs = [*fed, token], torch.cat([inputs, out[-1:]])
        return torch.stack(found)

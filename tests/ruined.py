"""Copies of a good head that are ruined in ways the doctor has no repair for; tests/doctored.py has those it has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.doctored import Tensors

Change = Callable[[dict[str, Any], Tensors], None]


def replace_by_noise(*names: str) -> Change:
    """Matrices drawn anew, of the size they had; no names: all of them."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(1)
        for key, value in tensors.items():
            if value.dim() == 2 and (not names or any(name in key for name in names)):
                noise = value.float().std() * torch.randn(value.shape, generator=generator)
                tensors[key] = noise.to(value.dtype)

    return change


def zero(name: str) -> Change:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        tensors[name] = torch.zeros_like(tensors[name])

    return change


def shuffle_rows(output_head: Tensor | None = None) -> Change:
    """The output head's rows in another order. Args: output_head: [V, E], of a target whose rows the head borrows."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        if raw.pop("lm_head", None):
            assert output_head is not None
            rows = output_head[torch.arange(len(tensors["d2t"])) + tensors["d2t"]].half()
        else:
            rows = tensors["lm_head.weight"]
        tensors["lm_head.weight"] = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(3))]

    return change


def ruins(output_head: Tensor | None = None) -> dict[str, tuple[str, Change]]:
    """By name, the doctor's verdict and what is done."""
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    return {
        "random": ("broken", replace_by_noise()),
        "another fc": ("broken", replace_by_noise("fc.weight")),
        "another qkv": ("broken", replace_by_noise("q_proj", "k_proj", "v_proj")),
        "output rows shuffled": ("broken", shuffle_rows(output_head)),
        **{f"{name} of zeros": ("zero_weights", zero(f"{name}.weight")) for name in norms},
    }

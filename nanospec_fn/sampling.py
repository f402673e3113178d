"""How a request is sampled: the parameters that a user sets, their check, and their form on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import rng
from nanospec_fn.struct import state

RULES = ("exact", "relaxed", "power")  # a rule's code is its index
EXACT, RELAXED, POWER = range(3)
INT32_MAX = 2**31 - 1
SMALLEST = 1e-30  # of alpha and top_p: fp32 keeps it apart from 0 with room to spare


@dataclass(frozen=True)
class Sampling:
    """How one request is sampled. `validate` names what is wrong with it."""

    max_tokens: int = 128
    temperature: float = 0.0  # 0: the argmax
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    seed: int = 0
    rule: str = "exact"
    tau: float = 1.0  # relaxed: accept a token of at least this probability
    accept_top_k: int = 0  # relaxed: or one among this many most probable
    alpha: float = 1.0  # power: the exponent of the acceptance probability
    stop_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def validate(self) -> None:
        """Raise a ValueError that names the first parameter which is out of range or clashes with another."""
        _check_int("max_tokens", self.max_tokens, 1, INT32_MAX)
        _check_real("temperature", self.temperature, 0, 1e6)
        if 0 < self.temperature < 1e-6:
            raise ValueError(f"temperature must be 0 or at least 1e-6, got {self.temperature!r}")
        _check_int("top_k", self.top_k, 0, INT32_MAX)
        _check_real("top_p", self.top_p, SMALLEST, 1)
        _check_int("seed", self.seed, 0, 2**63 - 1)
        if self.rule not in RULES:
            raise ValueError(f"rule must be one of {', '.join(RULES)}, got {self.rule!r}")
        _check_real("tau", self.tau, 0, 1)
        _check_int("accept_top_k", self.accept_top_k, 0, INT32_MAX)
        _check_real("alpha", self.alpha, SMALLEST, 1)
        if not isinstance(self.stop_ids, tuple | list):
            raise ValueError(f"stop_ids must be a tuple of token ids, got {self.stop_ids!r}")
        for token in self.stop_ids:
            _check_int("stop_ids", token, 0, INT32_MAX)
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        self._check_clashes()

    def _check_clashes(self) -> None:
        if self.rule != "exact" and self.temperature == 0:
            raise ValueError(
                f"rule {self.rule!r} needs a temperature above 0: at 0 only 'exact' has a behaviour log-prob"
            )
        if self.rule != "power" and self.alpha != 1:
            raise ValueError(f"alpha belongs to rule 'power', got alpha={self.alpha!r} with rule {self.rule!r}")
        for name, off in (("tau", 1), ("accept_top_k", 0)):
            if self.rule != "relaxed" and getattr(self, name) != off:
                got = f"{name}={getattr(self, name)!r}"
                raise ValueError(f"{name} belongs to rule 'relaxed', got {got} with rule {self.rule!r}")
        if self.rule == "relaxed" and self.tau == 1 and self.accept_top_k == 0:
            raise ValueError(
                "rule 'relaxed' with tau=1 and accept_top_k=0 accepts nothing; lower tau or raise accept_top_k"
            )


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")


def _check_real(name: str, value: object, low: float, high: float) -> None:
    # The range refuses nan and inf too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}")


@state
class Controls:
    """What the device needs of a `Sampling`, per slot or per row."""

    key: Tensor  # [n] int64, rng key of the request
    temperature: Tensor  # [n] fp32
    top_k: Tensor  # [n] int32, 0 off
    top_p: Tensor  # [n] fp32, 1 off
    rule: Tensor  # [n] int32, EXACT, RELAXED or POWER
    tau: Tensor  # [n] fp32, probability
    accept_top_k: Tensor  # [n] int32
    alpha: Tensor  # [n] fp32


def controls(batch: Sequence[Sampling], device: torch.device | str = "cpu") -> Controls:
    """One slot per request, in order."""

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return Controls(
        key=rng.key(column([s.seed for s in batch], torch.int64)),
        temperature=column([s.temperature for s in batch], torch.float32),
        top_k=column([s.top_k for s in batch], torch.int32),
        top_p=column([s.top_p for s in batch], torch.float32),
        rule=column([RULES.index(s.rule) for s in batch], torch.int32),
        tau=column([s.tau for s in batch], torch.float32),
        accept_top_k=column([s.accept_top_k for s in batch], torch.int32),
        alpha=column([s.alpha for s in batch], torch.float32),
    )

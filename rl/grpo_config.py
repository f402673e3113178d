"""What a run of GRPO is made from, and what of it the engine, the loss and a checkpoint want to know."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from rl import policy_loss, tasks
from rl.policy_loss import Recipe

# Fields that may differ between a run and the one that goes on with it.
FREE = ("out", "resume", "steps", "save_every", "quiet", "device")


@dataclass(frozen=True)
class GrpoConfig:
    """A run; every field is an option of `python -m rl.grpo`, whose --help says more of each.

    From Python: `grpo.run(GrpoConfig(out=Path("runs/e0"), steps=5), Ranks())`. `slots`, `micro_tokens` and `out` are
    what the command line works out from the rest where they are not given.
    """

    out: Path  # folder of the log and the checkpoint
    model: str = "auto"
    task: str = "toy"
    steps: int = 20  # updates of the policy
    seed: int = 0
    resume: bool = False
    device: str = "auto"
    dtype: str = "auto"  # of the served weights
    deterministic: bool = False  # see `grpo_options.deterministic`, which has to come before anything runs
    quiet: bool = False
    save_every: int = 10  # steps
    eval_every: int = 0  # steps; 0: never
    eval_limit: int = 64  # problems

    prompts: int = 4  # problems of a step
    group: int = 4  # completions of a problem
    max_tokens: int = 16  # of a completion
    temperature: float = 1.0
    slots: int = 16  # completions at once
    acceptance: str = "exact"  # the rule, of nanospec_fn.sampling.RULES
    alpha: float = 1.0  # of "power"
    tau: float = 1.0  # of "relaxed"
    accept_topk: int = 0  # of "relaxed"

    draft: str = "none"
    draft_refresh: int = 0  # of "frozen": steps between copies; 0: never
    draft_train: bool = False  # of a head
    draft_lr: float = 1e-4  # of a head that trains
    spec_topk: int = 1
    spec_depth: int = 5

    correction: str = Recipe.correction
    is_clip: float = Recipe.is_clip
    icepop_low: float = Recipe.icepop_low
    icepop_high: float = Recipe.icepop_high
    m2po_tau: float = Recipe.m2po_tau
    loss: str = Recipe.loss
    clip_eps: float = Recipe.clip_eps
    kl_beta: float = Recipe.kl_beta
    lr: float = 5e-5
    micro_tokens: int = 1024  # positions at once in the trainer

    def validate(self) -> None:
        """Refuse what nothing further down would refuse by name. Errors: ValueError that begins with the field."""
        known = {"task": tasks.NAMES, "correction": policy_loss.CORRECTIONS, "loss": policy_loss.LOSSES}
        for name, names in known.items():
            if getattr(self, name) not in names:
                raise ValueError(f"{name} must be one of {', '.join(names)}, got {getattr(self, name)!r}")
        for name in ("steps", "prompts", "group", "micro_tokens", "save_every", "eval_limit"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.icepop_low > self.icepop_high:
            raise ValueError(f"icepop_low {self.icepop_low:g} is above icepop_high {self.icepop_high:g}")


def recipe(config: GrpoConfig) -> Recipe:
    """The loss."""
    return Recipe(**{field.name: getattr(config, field.name) for field in fields(Recipe)})


def sampling(config: GrpoConfig) -> ns.Sampling:
    """How a completion is sampled, all but its seed."""
    return ns.Sampling(
        max_tokens=config.max_tokens,
        temperature=config.temperature,
        rule=config.acceptance,
        alpha=config.alpha,
        tau=config.tau,
        accept_top_k=config.accept_topk,
    )


def signature(config: GrpoConfig) -> dict[str, Any]:
    """What must be equal between a run and the one that goes on with it."""
    return {name: value for name, value in sorted(vars(config).items()) if name not in FREE}

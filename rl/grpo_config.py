"""What a run of GRPO is made from, and what of it the engine, the loss and a checkpoint want to know."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import nanospec_fn as ns
from nanospec_fn import checkpoint, draft_model, files, weights
from rl import limits, policy_loss, run_files, tasks
from rl.policy_loss import Recipe

LOG, STATE = "log.jsonl", "state.safetensors"  # in `out`
# Fields that may differ between a run and the one that goes on with it.
FREE = ("out", "resume", "steps", "save_every", "quiet", "device")
NAMES = {"task": tasks.NAMES, "correction": policy_loss.CORRECTIONS, "loss": policy_loss.LOSSES}
DRAFTS = ("none", "frozen", "eagle", "model")  # kinds of a draft
# The least value of what is counted.
WHOLE = dict.fromkeys(("steps", "save_every", "eval_limit", "prompts", "group", "max_tokens", "micro_tokens"), 1)
WHOLE |= dict.fromkeys(("seed", "eval_every", "draft_refresh", "accept_topk"), 0)
# Ends of the other numbers, and whether the lower one is a value too; `ns.Sampling` knows those of the rules.
REAL = {
    "temperature": (0, 1e6, False),
    "draft_lr": (0, 1, False),
    "is_clip": (0, 1e6, False),
    "icepop_low": (0, 1, True),
    "icepop_high": (1, 1e6, True),
    "m2po_tau": (0, 1e6, True),
    "clip_eps": (0, 1, False),
    "kl_beta": (0, 1e6, True),
    "lr": (0, 1, False),
}
# A field that only means something beside another: field, the other, the values of it that give a meaning.
BELONGS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("alpha", "acceptance", ("power",)),
    ("tau", "acceptance", ("relaxed",)),
    ("accept_topk", "acceptance", ("relaxed",)),
    ("is_clip", "correction", ("clipped",)),
    ("icepop_low", "correction", ("icepop",)),
    ("icepop_high", "correction", ("icepop",)),
    ("m2po_tau", "correction", ("m2po",)),
    ("draft_refresh", "draft", ("frozen",)),
    ("draft_train", "draft", ("eagle",)),
    ("draft_lr", "draft_train", ("True",)),
    ("spec_topk", "draft", ("frozen", "eagle", "model")),
    ("spec_depth", "draft", ("frozen", "eagle", "model")),
)


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
    deterministic: bool = False  # from Python, `grpo_options.deterministic()` has to come before anything runs
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
        """Refuse what the fields alone show to be wrong. Errors: ValueError that begins with the field."""
        limits.check(self, NAMES, WHOLE, REAL)
        if draft_name(self.draft).kind == "none" and self.acceptance != "exact":
            raise ValueError(f"acceptance: {self.acceptance} needs a draft to accept from, got draft none")
        check_belonging(self, [f.name for f in fields(self) if getattr(self, f.name) != f.default])
        with limits.renamed({"rule": "acceptance", "accept_top_k": "accept_topk"}):
            sampling(self).validate()
        with limits.renamed({"max_slots": "slots"}):
            ns.EngineConfig(max_slots=self.slots).validate()
        with limits.renamed({"top_k": "spec_topk", "depth": "spec_depth"}):
            ns.Speculation(top_k=self.spec_topk, depth=self.spec_depth).validate()


def draft_name(text: str) -> draft_model.DraftName:
    """What the field `draft` says. Errors: ValueError that begins with the field."""
    try:
        named = draft_model.DraftName.parse(text)
    except ValueError:
        named = None
    if named is None or named.kind not in DRAFTS:
        raise ValueError(f"draft must be one of none, frozen, eagle, eagle:X, model:X, got {text!r}")
    return named


def check_belonging(config: GrpoConfig, given: Collection[str]) -> None:
    """Errors: ValueError for one of the fields that were given, without the one that it belongs to."""
    for name, other, values in BELONGS:
        got = getattr(config, other)
        kind = draft_name(got).kind if other == "draft" else str(got)
        if name in given and kind not in values:
            raise ValueError(f"{name}: needs {other} {' or '.join(values)}, got {got}")


def check_surroundings(config: GrpoConfig, size: int) -> None:
    """Refuse what the process and its files show to be wrong, before anything is loaded. Args: size: ranks of the run.

    Errors: ValueError that begins with the field.
    """
    if config.deterministic and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic: call rl.grpo_options.deterministic() first, before anything runs on the device"
        )
    if config.prompts % size:
        raise ValueError(f"prompts: {config.prompts} groups cannot be shared evenly by {size} ranks")
    try:
        tasks.check(config.task)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"task: {error}") from error
    try:
        check_draft(config)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"draft: {error}") from error


def check_draft(config: GrpoConfig) -> None:
    """Errors: ValueError, FileNotFoundError for a draft that is not there."""
    named = draft_name(config.draft)
    if named.source:
        checkpoint.open_checkpoint(named.source)
    elif named.kind == "eagle":
        name = weights.model_name(config.model)
        if draft_model.bundled_head(name) is None:
            raise ValueError(f"eagle: no head comes with model {name!r}; pass eagle:PATH_OR_ID")


def check_folder(config: GrpoConfig) -> None:
    """`out` is new, or holds the run that `resume` goes on with. Errors: ValueError that begins with the field."""
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"out: {config.out} is a file")
    for path in (config.out / LOG, config.out / STATE):
        if os.path.lexists(path) and not files.is_file(path):
            raise ValueError(f"out: {path} is {'a folder' if files.is_folder(path) else 'no regular file'}")
    if not config.resume and any((config.out / name).exists() for name in (LOG, STATE)):
        raise ValueError(f"out: {config.out} holds a run; resume it, or name another folder")
    if config.resume:
        try:
            check_same(config.out, signature(config))
        except ValueError as error:
            raise ValueError(f"resume: {error}") from error


def check_same(out: Path, wanted: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another run: its checkpoint says which, and the log's header.

    Args: wanted: `signature`, or more of what a checkpoint belongs to; what it does not name is not compared.
    Errors: ValueError naming the file and every option that differs.
    """
    state, log = out / STATE, out / LOG
    saved: dict[Path, dict[str, Any]] = {}
    if files.is_file(state):
        saved[state] = run_files.read_about(state)
    lines = run_files.read_lines(log, most=1) if files.is_file(log) else []
    if lines and ("header" in lines[0] or not saved):  # beside a checkpoint a log that has lost its header gets one
        saved[log] = about_of(lines[0], f"{log}:1")
    for path, about in saved.items():
        run_files.same_run({name: about.get(name) for name in wanted}, wanted, path)


def about_of(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """What the first line of a log says that the run belongs to, as a checkpoint does. Errors: ValueError."""
    header = line.get("header")
    options, model = (header.get(name) if isinstance(header, dict) else None for name in ("options", "model"))
    if not isinstance(header, dict) or not isinstance(options, dict) or not isinstance(model, dict):
        raise ValueError(f"{where}: no header, so nothing says which run this is")
    return options | {"weights": model.get("weights"), "ranks": header.get("ranks")}


def how_to_go_on(config: GrpoConfig) -> str:
    """What --resume would do with what a run that ended has left."""
    if files.is_file(config.out / STATE):
        return "--resume goes on from the last checkpoint"
    return "no checkpoint yet: --resume starts at step 1"


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

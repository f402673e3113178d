"""The options of `python -m rl.grpo`, and every refusal that needs no model."""

import argparse
import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import torch

import nanospec_fn as ns
from nanospec_fn import arguments, checkpoint, draft_model, weights
from nanospec_fn import sampling as samplings
from rl import grpo_config, policy_loss, ranks, run_files, tasks
from rl.grpo_config import GrpoConfig
from rl.train_config import DTYPES
from rl.train_options import real

# An option that only means something beside another: option, the other, the values of it that give a meaning.
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
    ("draft_lr", "draft", ("eagle",)),
    ("spec_topk", "draft", ("frozen", "eagle", "model")),
    ("spec_depth", "draft", ("frozen", "eagle", "model")),
)


def draft_name(text: str) -> str:
    """The type of --draft."""
    kind, _, name = text.partition(":")
    if text in ("none", "frozen", "eagle") or (kind in ("eagle", "model") and name):
        return text
    raise argparse.ArgumentTypeError(f"must be one of none, frozen, eagle, eagle:X, model:X, got {text!r}")


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.grpo."""
    parser = arguments.Parser(
        prog="python -m rl.grpo",
        description="GRPO on rollouts that the speculative engine samples.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", help='"smollm2", a folder, a .gguf file or a hub id')
    add("--task", help=f"one of {', '.join(tasks.NAMES)}")
    add("--steps", type=arguments.positive, help="updates of the policy")
    add("--seed", type=arguments.natural)
    add(
        "--out",
        type=arguments.path,
        help="folder of the log and the checkpoint (runs/NAME, the name made from the options)",
    )
    add("--resume", action="store_true", help="go on from the checkpoint in --out; without one, start")
    add("--device", help="auto, cpu, cuda, cuda:N or mps")
    add("--dtype", choices=("auto", *DTYPES), help="of the served weights; updates are made in fp32")
    add("--deterministic", action="store_true", help="the library's deterministic kernels on CUDA: resume to the bit")
    add("--quiet", action="store_true", help="no progress bar")
    add("--save-every", type=arguments.positive, help="steps between checkpoints; the last one is saved")
    add("--eval-every", type=arguments.natural, help="steps between greedy evaluations on held-out problems; 0: none")
    add("--eval-limit", type=arguments.positive, help="problems of an evaluation")
    roll = parser.add_argument_group("rollouts")
    roll.add_argument("--prompts", type=arguments.positive, help="problems of a step")
    roll.add_argument("--group", type=arguments.positive, help="completions of a problem")
    roll.add_argument("--max-tokens", type=arguments.positive, help="most tokens of a completion")
    roll.add_argument("--temperature", type=real(0, 1e6))
    roll.add_argument("--slots", type=arguments.positive, help="completions at once (all of a step's, at most 512)")
    roll.add_argument("--acceptance", choices=samplings.RULES, help="which drafted tokens are emitted")
    roll.add_argument("--alpha", type=float, help="of power: the exponent of the acceptance probability (1)")
    roll.add_argument("--tau", type=float, help="of relaxed: accept from this probability on (1)")
    roll.add_argument("--accept-topk", type=arguments.natural, help="of relaxed: accept the so many most probable (0)")
    draft = parser.add_argument_group("draft")
    draft.add_argument("--draft", type=draft_name, metavar="none|frozen|eagle|eagle:X|model:X")
    draft.add_argument(
        "--draft-refresh", type=arguments.natural, help="of frozen: copy the policy every K steps (0: never)"
    )
    draft.add_argument("--draft-train", action="store_true", help="of a head: train it on the rollouts")
    draft.add_argument("--draft-lr", type=real(0, 1), help="of a head that trains (1e-4)")
    draft.add_argument("--spec-topk", type=arguments.positive, help="nodes of a level of the draft tree (1: a chain)")
    draft.add_argument("--spec-depth", type=arguments.positive, help="levels of the draft tree (5)")
    loss = parser.add_argument_group("loss; weights and ratios are per token")
    loss.add_argument("--correction", choices=policy_loss.CORRECTIONS, help="of the sampler's bias")
    loss.add_argument("--is-clip", type=real(0, 1e6), help="of clipped: the largest weight (2)")
    loss.add_argument("--icepop-low", type=real(0, 1, True), help="of icepop: mask a smaller weight (0.5)")
    loss.add_argument("--icepop-high", type=real(1, 1e6, True), help="of icepop: mask a larger one (5)")
    loss.add_argument("--m2po-tau", type=real(0, 1e6, True), help="of m2po: the largest mean of (log r)^2 (0.04)")
    loss.add_argument("--loss", choices=policy_loss.LOSSES, help="the denominator")
    loss.add_argument("--clip-eps", type=real(0, 1), help="PPO's clip of pi_theta / pi_old")
    loss.add_argument("--kl-beta", type=real(0, 1e6, True), help="of the KL to the policy of step 0")
    loss.add_argument("--lr", type=real(0, 1), help="learning rate of AdamW, constant")
    loss.add_argument("--micro-tokens", type=arguments.positive, help="positions at once (1024; 8192 on CUDA)")
    # What belongs to another option is known to be given by its not being None; `parse` fills in the rest.
    later = {"out", "slots", "micro_tokens", *(name for name, *_ in BELONGS)}
    parser.set_defaults(**{f.name: None if f.name in later else f.default for f in dataclasses.fields(GrpoConfig)})
    return parser


def parse(argv: Sequence[str] | None = None) -> GrpoConfig:
    """The options of a run; whatever is wrong with them ends the program with a line that names it."""
    parser = build_parser()
    args = parser.parse_args(argv)
    belong(parser, args)
    derive(parser, args)
    config = GrpoConfig(**vars(args))
    check(parser, config)
    return config


def belong(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse an option without the one that it belongs to, else fill in its default."""
    for name, other, values in BELONGS:
        option, beside = (f"--{x.replace('_', '-')}" for x in (name, other))
        if getattr(args, name) is None:
            setattr(args, name, getattr(GrpoConfig, name))
        elif getattr(args, other).partition(":")[0] not in values:
            wanted = " or ".join(f"{beside} {value}" for value in values)
            parser.error(f"argument {option}: needs {wanted}, got {beside} {getattr(args, other)}")


def derive(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in what follows from the other options and the machine."""
    try:
        device = weights.pick_device(ranks.device_of(args.device))
    except ValueError as error:
        parser.error(f"argument --device: {error}")
    args.micro_tokens = args.micro_tokens or (8192 if device.type == "cuda" else GrpoConfig.micro_tokens)
    args.slots = args.slots or min(args.prompts * args.group, 512)
    args.out = args.out or Path("runs") / name_of(args)


def check(parser: argparse.ArgumentParser, config: GrpoConfig) -> None:
    """Refuse, before any work, what argparse alone cannot check."""
    if not config.model:
        parser.error("argument --model: model is empty")
    try:
        tasks.check(config.task)
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument --task: {error}")
    check_sizes(parser, config)
    check_draft(parser, config)
    check_folder(parser, config)


def check_folder(parser: argparse.ArgumentParser, config: GrpoConfig) -> None:
    """--out is new, or holds the run that --resume goes on with."""
    if config.out.exists() and not config.out.is_dir():
        parser.error(f"argument --out: {config.out} is a file")
    if not config.resume and (config.out / "log.jsonl").exists():
        parser.error(f"argument --out: {config.out} holds a run; pass --resume to go on with it, or another folder")
    saved = config.out / "state.safetensors"
    if config.resume and saved.exists():
        try:
            about, wanted = run_files.read_about(saved), grpo_config.signature(config)
            run_files.same_run({name: about.get(name) for name in wanted}, wanted, saved)
        except ValueError as error:
            parser.error(f"argument --resume: {error}")


def check_sizes(parser: argparse.ArgumentParser, config: GrpoConfig) -> None:
    """Sizes and sampling parameters."""
    arguments.checked(
        parser,
        ns.Sampling,
        {
            "max_tokens": ("--max-tokens", config.max_tokens),
            "temperature": ("--temperature", config.temperature),
            "seed": ("--seed", config.seed),
            "rule": ("--acceptance", config.acceptance),
            "alpha": ("--alpha", config.alpha),
            "tau": ("--tau", config.tau),
            "accept_top_k": ("--accept-topk", config.accept_topk),
        },
    )
    arguments.checked(parser, ns.EngineConfig, {"max_slots": ("--slots", config.slots)})
    size = ranks.world_size()
    if config.prompts % size:
        parser.error(f"argument --prompts: {config.prompts} groups cannot be shared evenly by {size} ranks")
    try:
        config.validate()
    except ValueError as error:
        parser.error(f"argument --{str(error).split()[0].replace('_', '-')}: {error}")


def check_draft(parser: argparse.ArgumentParser, config: GrpoConfig) -> None:
    """The draft, its tree, and whether there is anything to accept."""
    if config.draft == "none":
        if config.acceptance != "exact":
            parser.error(f"argument --acceptance: {config.acceptance} needs a draft to accept from, got --draft none")
        return
    spec = {"top_k": ("--spec-topk", config.spec_topk), "depth": ("--spec-depth", config.spec_depth)}
    arguments.checked(parser, ns.Speculation, spec)
    kind, _, source = config.draft.partition(":")
    if config.draft_lr != GrpoConfig.draft_lr and not config.draft_train:
        parser.error("argument --draft-lr: needs --draft-train")
    try:
        if source:
            checkpoint.open_checkpoint(source)
        elif kind == "eagle":
            bundled(config.model)
    except (ValueError, FileNotFoundError) as error:
        parser.error(f"argument --draft: {' '.join(str(error).split())}")


def bundled(name: str) -> None:
    """Errors: ValueError where no head comes with a model of this name."""
    name = (os.environ.get("NANOSPEC_MODEL") or "smollm2") if name == "auto" else name
    heads = (Path(draft_model.__file__).parent / "heads").glob("*/config.json")
    if name not in [config.parent.name for config in heads]:
        raise ValueError(f"eagle: no head comes with model {name!r}; pass eagle:PATH_OR_ID")


def name_of(args: argparse.Namespace) -> str:
    """A folder's name that tells runs apart."""
    rule = args.acceptance + {"power": f"{args.alpha:g}", "relaxed": f"{args.tau:g}-{args.accept_topk}"}.get(
        args.acceptance, ""
    )
    draft = args.draft.partition(":")[0] + ("-train" if args.draft_train else "")
    draft += f"-refresh{args.draft_refresh}" if args.draft_refresh else ""
    return "-".join((args.task, draft, rule, args.correction, args.loss, f"seed{args.seed}"))


def deterministic() -> None:
    """Make the library's CUDA kernels repeatable; to be called before anything runs on the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

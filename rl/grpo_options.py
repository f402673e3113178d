"""The options of `python -m rl.grpo`: a command line as a `GrpoConfig`."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from nanospec_fn import arguments, weights
from nanospec_fn import sampling as samplings
from rl import grpo_config, policy_loss, ranks, tasks
from rl.grpo_config import GrpoConfig

CUDA_TOKENS = 8192  # positions at once in a trainer on CUDA
MOST_SLOTS = 512  # that are taken where --slots is not given
OPTIONS = {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(GrpoConfig)}


def real(name: str) -> Callable[[str], float]:
    """The type of the option that sets a number of the config."""
    return arguments.real(*grpo_config.REAL[name])


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.grpo."""
    parser = arguments.Parser(
        prog="python -m rl.grpo",
        description="GRPO on rollouts that the speculative engine samples.",
    )
    add = parser.add_argument
    add("--model", help='"smollm2", a folder, a .gguf file or a hub id')
    add("--task", help=f"one of {', '.join(tasks.NAMES)}")
    add("--steps", type=arguments.positive, help="updates of the policy")
    add("--seed", type=arguments.natural, help="of the problems' order and of what is sampled")
    add(
        "--out",
        type=arguments.folder,
        help="folder of the log and the checkpoint (runs/NAME, the name made from the options)",
    )
    add("--resume", action="store_true", help="go on from the checkpoint in --out; without one, start")
    add("--device", help="auto, cpu, cuda, cuda:N or mps")
    add("--dtype", choices=("auto", *weights.PRECISIONS), help="of the served weights; updates are made in fp32")
    add("--deterministic", action="store_true", help="the library's deterministic kernels on CUDA: resume to the bit")
    add("--quiet", action="store_true", help="no progress bar")
    add("--save-every", type=arguments.positive, help="steps between checkpoints; the last one is saved")
    add("--eval-every", type=arguments.natural, help="steps between greedy evaluations on held-out problems; 0: none")
    add("--eval-limit", type=arguments.positive, help="problems of an evaluation")
    roll = parser.add_argument_group("rollouts")
    roll.add_argument("--prompts", type=arguments.positive, help="problems of a step")
    roll.add_argument("--group", type=arguments.positive, help="completions of a problem")
    roll.add_argument("--max-tokens", type=arguments.positive, help="most tokens of a completion")
    roll.add_argument("--temperature", type=real("temperature"), help="above 0")
    roll.add_argument(
        "--slots", type=arguments.positive, help=f"completions at once (all of a step's, at most {MOST_SLOTS})"
    )
    roll.add_argument("--acceptance", choices=samplings.RULES, help="which drafted tokens are emitted")
    roll.add_argument("--alpha", type=float, help="of power: the exponent of the acceptance probability")
    roll.add_argument("--tau", type=float, help="of relaxed: accept from this probability on")
    roll.add_argument("--accept-topk", type=arguments.natural, help="of relaxed: accept the so many most probable")
    draft = parser.add_argument_group("draft")
    draft.add_argument("--draft", metavar="none|frozen|eagle|eagle:X|model:X", help="frozen: a copy of the policy")
    draft.add_argument(
        "--draft-refresh", type=arguments.natural, help="of frozen: copy the policy every K steps; 0: never"
    )
    draft.add_argument("--draft-train", action="store_true", help="of a head: train it on the rollouts")
    draft.add_argument("--draft-lr", type=real("draft_lr"), help="learning rate of a head that trains")
    draft.add_argument("--spec-topk", type=arguments.positive, help="nodes of a level of the draft tree; 1: a chain")
    draft.add_argument("--spec-depth", type=arguments.positive, help="levels of the draft tree")
    loss = parser.add_argument_group("loss; weights and ratios are per token")
    loss.add_argument("--correction", choices=policy_loss.CORRECTIONS, help="of the sampler's bias")
    loss.add_argument("--is-clip", type=real("is_clip"), help="of clipped: the largest weight")
    loss.add_argument("--icepop-low", type=real("icepop_low"), help="of icepop: mask a smaller weight")
    loss.add_argument("--icepop-high", type=real("icepop_high"), help="of icepop: mask a larger one")
    loss.add_argument("--m2po-tau", type=real("m2po_tau"), help="of m2po: the largest mean of (log r)^2")
    loss.add_argument("--loss", choices=policy_loss.LOSSES, help="the denominator")
    loss.add_argument("--clip-eps", type=real("clip_eps"), help="PPO's clip of pi_theta / pi_old")
    loss.add_argument("--kl-beta", type=real("kl_beta"), help="of the KL to the policy of step 0")
    loss.add_argument("--lr", type=real("lr"), help="learning rate of AdamW, constant")
    loss.add_argument(
        "--micro-tokens",
        type=arguments.positive,
        help=f"positions at once ({GrpoConfig.micro_tokens}; {CUDA_TOKENS} on CUDA)",
    )
    later = ("out", "slots", "micro_tokens")  # what `derive` fills in
    parser.set_defaults(**{f.name: None if f.name in later else f.default for f in dataclasses.fields(GrpoConfig)})
    return parser


def parse(argv: Sequence[str] | None = None) -> GrpoConfig:
    """The options of a run; whatever is wrong with them ends the program with a line that names it."""
    parser = build_parser()
    args = parser.parse_args(argv)
    derive(parser, args)
    config = arguments.checked(parser, GrpoConfig, {name: (OPTIONS[name], x) for name, x in vars(args).items()})
    try:
        grpo_config.check_belonging(config, given(parser, argv))
    except ValueError as error:
        parser.error(arguments.error_line(error, OPTIONS))
    return config


def given(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> list[str]:
    """The fields whose options are on the command line, also with a value that is the default."""
    missing = object()
    found = vars(parser.parse_args(argv, argparse.Namespace(**dict.fromkeys(OPTIONS, missing))))
    return [name for name, value in found.items() if value is not missing]


def derive(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Fill in what follows from the other options and the machine."""
    try:
        device = weights.pick_device(ranks.device_of(args.device))
    except ValueError as error:
        parser.error(f"argument --device: {error}")
    args.micro_tokens = args.micro_tokens or (CUDA_TOKENS if device.type == "cuda" else GrpoConfig.micro_tokens)
    args.slots = args.slots or min(args.prompts * args.group, MOST_SLOTS)
    try:
        args.out = args.out or Path("runs") / name_of(args)
    except ValueError as error:
        parser.error(arguments.error_line(error, OPTIONS))


def name_of(args: argparse.Namespace) -> str:
    """A folder's name that tells runs apart. Errors: ValueError for a draft of no such name."""
    rule = args.acceptance + {"power": f"{args.alpha:g}", "relaxed": f"{args.tau:g}-{args.accept_topk}"}.get(
        args.acceptance, ""
    )
    draft = grpo_config.draft_name(args.draft).kind + ("-train" if args.draft_train else "")
    draft += f"-refresh{args.draft_refresh}" if args.draft_refresh else ""
    return "-".join((args.task, draft, rule, args.correction, args.loss, f"seed{args.seed}"))


def say(text: str) -> None:
    """A line for who started the run."""
    print(f"python -m rl.grpo: {' '.join(text.split())}", file=sys.stderr)


def deterministic() -> None:
    """Make the library's CUDA kernels repeatable; to be called before anything runs on the device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

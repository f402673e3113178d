"""The options of `python -m rl.train_eagle`, and their checks: before any work, and against the target."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

import nanospec_fn as ns
from nanospec_fn import arguments, eagle
from rl import eagle_loss, rollouts

SHORT = 2  # draft steps of the first updates
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def real(low: float, high: float, low_too: bool = False) -> Callable[[str], float]:
    """The type of a number between two others, the upper one included."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (low < value <= high or (low_too and value == low)):
            raise argparse.ArgumentTypeError(f"must be a number from {low:g} to {high:g}, got {text!r}")
        return value

    return number


def natural(text: str) -> int:
    """The type of a count that may be 0."""
    return 0 if text == "0" else arguments.positive(text)


def source(text: str) -> str:
    """The type of --prompts."""
    try:
        rollouts.parse_source(text)
    except (ValueError, FileNotFoundError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.train_eagle."""
    parser = arguments.Parser(
        prog="python -m rl.train_eagle",
        description="Train an EAGLE-3 head for a Llama on the target's own completions.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", default="auto", help='the target: "smollm2", a folder, a .gguf file or a hub id')
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="of the target; the head's weights train in fp32")
    add("--out", type=Path, required=True, help="folder of the head, its data, log and training state")
    add("--seed", type=natural, default=0)
    add("--quiet", action="store_true", help="no progress bar")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=Path, help="rollouts to train on (default: OUT/rollouts.npz), made if missing")
    data.add_argument("--prompts", nargs="+", type=source, help="one or more of self:N, gsm8k[:N] (train), FILE[:N]")
    data.add_argument(
        "--temperatures", nargs="+", type=real(0, 100, True), default=[0.0, 1.0], help="the prompts take turns"
    )
    data.add_argument("--response-tokens", type=arguments.positive, default=256, help="most tokens of a response")
    data.add_argument("--slots", type=arguments.positive, default=256, help="requests at once")
    data.add_argument("--max-len", type=arguments.positive, default=512, help="tokens of a sequence; more is cut off")
    data.add_argument("--held-out", type=natural, default=64, help="sequences to evaluate on; at most a tenth")
    head = parser.add_argument_group("head")
    head.add_argument("--draft-vocab", type=arguments.positive, default=32000, help="tokens, at most 32000")
    head.add_argument(
        "--taps", nargs="+", type=natural, help="target layers whose inputs the head reads (2, L // 2, L - 3)"
    )
    head.add_argument("--intermediate", type=arguments.positive, help="MLP width (the target's)")
    head.add_argument("--lm-head", choices=("own", "target-rows"), default="own", help="trained, or the target's rows")
    head.add_argument("--head-dtype", choices=tuple(DTYPES), default="fp16", help="of the head's file")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=arguments.positive, default=2000)
    train.add_argument("--batch", type=arguments.positive, default=32, help="sequences")
    train.add_argument("--unroll", type=arguments.positive, default=5, help="draft steps")
    train.add_argument("--short-steps", type=natural, default=0, help=f"first updates, which unroll {SHORT} steps")
    train.add_argument(
        "--decay", type=real(0, 1), default=eagle_loss.DECAY, help="weight of each unroll step over the one before"
    )
    train.add_argument("--lr", type=real(0, 1), default=1e-3, help="peak learning rate")
    train.add_argument("--warmup", type=real(0, 1, True), default=0.05, help="share of the steps")
    train.add_argument("--weight-decay", type=real(0, 1, True), default=0.01)
    train.add_argument("--clip", type=real(0, 1e9), default=1.0, help="largest gradient norm")
    train.add_argument("--keep-features", action="store_true", help="run the target once, not at every step")
    train.add_argument("--log-every", type=arguments.positive, default=20, help="steps")
    train.add_argument("--eval-every", type=arguments.positive, default=200, help="steps")
    train.add_argument("--save-every", type=arguments.positive, default=200, help="steps")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse, before any work, what argparse alone cannot check."""
    try:
        ns.EngineConfig(max_slots=args.slots).validate()
    except ValueError as error:
        parser.error(f"argument --slots: {error}")
    if args.draft_vocab > 32000:
        parser.error(f"argument --draft-vocab: at most 32000, got {args.draft_vocab}")
    if args.unroll >= args.max_len - 2:
        parser.error(f"argument --unroll: {args.unroll} steps need sequences of more than {args.max_len} tokens")
    if args.unroll > 32:
        parser.error(f"argument --unroll: at most 32, got {args.unroll}")
    if args.taps and sorted(set(args.taps)) != args.taps:
        parser.error(f"argument --taps: must ascend, got {' '.join(map(str, args.taps))}")
    if args.out.exists() and not args.out.is_dir():
        parser.error(f"argument --out: {args.out} is a file")
    if args.data is not None and args.prompts is None and not args.data.is_file():
        parser.error(f"argument --data: {args.data} does not exist, and without --prompts it cannot be made")
    args.data = args.data or args.out / "rollouts.npz"
    if not args.data.is_file() and not args.prompts:
        parser.error("argument --prompts: required, as the data does not exist yet")


def check_model(target: ns.Model, args: argparse.Namespace) -> None:
    """Refuse what does not fit the target."""
    layers = target.cfg.num_layers
    taps = args.taps or eagle.default_taps(layers)
    if len(set(taps)) != len(taps) or not 0 < min(taps) <= max(taps) <= layers:
        raise ValueError(f"argument --taps: {taps} are not distinct inputs 1..{layers} of the target's layers")
    if args.max_len > target.cfg.max_context:
        raise ValueError(f"argument --max-len: {args.max_len} is over the target's context {target.cfg.max_context}")

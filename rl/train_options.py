"""The options of `python -m rl.train_eagle`, and their checks: before any work, and against the target."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import nanospec_fn as ns
from nanospec_fn import arguments, eagle
from rl import rollouts
from rl.train_config import DTYPES, LM_HEADS, SHORT, TrainConfig


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
    add("--model", help='the target: "smollm2", a folder, a .gguf file or a hub id')
    add("--device", help="auto, cpu, cuda, cuda:N or mps")
    add("--dtype", choices=("auto", *DTYPES), help="of the target; the head's weights train in fp32")
    add("--out", type=arguments.folder, required=True, help="folder of the head, its data, log and training state")
    add("--seed", type=arguments.natural)
    add("--quiet", action="store_true", help="no progress bar")
    data = parser.add_argument_group("data")
    data.add_argument(
        "--data", type=arguments.path, help="rollouts to train on (default: OUT/rollouts.npz), made if missing"
    )
    data.add_argument("--prompts", nargs="+", type=source, help="one or more of self:N, gsm8k[:N] (train), FILE[:N]")
    data.add_argument("--temperatures", nargs="+", type=real(0, 100, True), help="the prompts take turns")
    data.add_argument("--response-tokens", type=arguments.positive, help="most tokens of a response")
    data.add_argument("--slots", type=arguments.positive, help="requests at once")
    data.add_argument("--max-len", type=arguments.positive, help="tokens of a sequence; more is cut off")
    data.add_argument("--held-out", type=arguments.natural, help="sequences to evaluate on; at most a tenth")
    head = parser.add_argument_group("head")
    head.add_argument("--draft-vocab", type=arguments.positive, help="tokens, at most 32000")
    head.add_argument(
        "--taps", nargs="+", type=arguments.natural, help="target layers whose inputs the head reads (2, L // 2, L - 3)"
    )
    head.add_argument("--intermediate", type=arguments.positive, help="MLP width (the target's)")
    head.add_argument("--lm-head", choices=LM_HEADS, help="trained, or the target's rows")
    head.add_argument("--head-dtype", choices=DTYPES, help="of the head's file")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=arguments.positive)
    train.add_argument("--batch", type=arguments.positive, help="sequences")
    train.add_argument("--unroll", type=arguments.positive, help="draft steps")
    train.add_argument("--short-steps", type=arguments.natural, help=f"first updates, which unroll {SHORT} steps")
    train.add_argument("--decay", type=real(0, 1), help="weight of each unroll step over the one before")
    train.add_argument("--lr", type=real(0, 1), help="peak learning rate")
    train.add_argument("--warmup", type=real(0, 1, True), help="share of the steps")
    train.add_argument("--weight-decay", type=real(0, 1, True))
    train.add_argument("--clip", type=real(0, 1e9), help="largest gradient norm")
    train.add_argument("--keep-features", action="store_true", help="run the target once, not at every step")
    train.add_argument("--log-every", type=arguments.positive, help="steps")
    train.add_argument("--eval-every", type=arguments.positive, help="steps")
    train.add_argument("--save-every", type=arguments.positive, help="steps")
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig) if field.name != "out"}
    parser.set_defaults(**defaults)
    return parser


def parse(argv: Sequence[str] | None = None) -> TrainConfig:
    """The options of a run; whatever is wrong with them ends the program with a line that names it."""
    parser = build_parser()
    args: dict[str, Any] = vars(parser.parse_args(argv))
    config = TrainConfig(**args | {name: tuple(x) for name, x in args.items() if isinstance(x, list)})
    check(parser, config)
    return config


def check(parser: argparse.ArgumentParser, config: TrainConfig) -> None:
    """Refuse, before any work, what argparse alone cannot check."""
    try:
        ns.EngineConfig(max_slots=config.slots).validate()
    except ValueError as error:
        parser.error(f"argument --slots: {error}")
    if config.draft_vocab > 32000:
        parser.error(f"argument --draft-vocab: at most 32000, got {config.draft_vocab}")
    if config.unroll >= config.max_len - 2:
        parser.error(f"argument --unroll: {config.unroll} steps need sequences of more than {config.max_len} tokens")
    if config.unroll > 32:
        parser.error(f"argument --unroll: at most 32, got {config.unroll}")
    if config.taps and sorted(set(config.taps)) != list(config.taps):
        parser.error(f"argument --taps: must ascend, got {' '.join(map(str, config.taps))}")
    if config.data is not None and config.prompts is None and not config.data.is_file():
        parser.error(f"argument --data: {config.data} does not exist, and without --prompts it cannot be made")
    if config.data_file.is_dir():
        parser.error(f"argument --data: {config.data_file} is a folder")
    if not config.data_file.is_file() and not config.prompts:
        parser.error("argument --prompts: required, as the data does not exist yet")


def check_model(target: ns.Model, config: TrainConfig) -> None:
    """Refuse what does not fit the target."""
    layers = target.cfg.num_layers
    taps = config.taps or eagle.default_taps(layers)
    if len(set(taps)) != len(taps) or not 0 < min(taps) <= max(taps) <= layers:
        raise ValueError(f"argument --taps: {list(taps)} are not distinct inputs 1..{layers} of the target's layers")
    if config.max_len > target.cfg.max_context:
        raise ValueError(f"argument --max-len: {config.max_len} is over the target's context {target.cfg.max_context}")

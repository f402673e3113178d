"""The options of `python -m rl.train_eagle`: a command line as a `TrainConfig`."""

import argparse
import dataclasses
from collections.abc import Callable, Sequence

from nanospec_fn import arguments, weights
from rl import train_config
from rl.train_config import LM_HEADS, SHORT, TrainConfig

OPTIONS = {field.name: f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(TrainConfig)}


def real(name: str) -> Callable[[str], float]:
    """The type of the option that sets a number of the config."""
    return arguments.real(*train_config.REAL[name])


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.train_eagle."""
    parser = arguments.Parser(
        prog="python -m rl.train_eagle",
        description="Train an EAGLE-3 head for a Llama on the target's own completions.",
    )
    add = parser.add_argument
    add("--model", help='the target: "smollm2", a folder, a .gguf file or a hub id')
    add("--device", help="auto, cpu, cuda, cuda:N or mps")
    add("--dtype", choices=("auto", *weights.PRECISIONS), help="of the target; the head's weights train in fp32")
    add("--out", type=arguments.folder, required=True, help="folder of the head, its data, log and training state")
    add("--seed", type=arguments.natural, help="of the data, the head and the order")
    add("--quiet", action="store_true", help="no progress bar")
    data = parser.add_argument_group("data")
    data.add_argument("--data", type=arguments.path, help="rollouts to train on, made if missing (OUT/rollouts.npz)")
    data.add_argument("--prompts", nargs="+", help="one or more of self:N, gsm8k[:N] (train), FILE[:N]")
    data.add_argument(
        "--temperatures",
        nargs="+",
        type=arguments.real(0, train_config.MOST_TEMPERATURE, True),
        help="the prompts take turns",
    )
    data.add_argument("--response-tokens", type=arguments.positive, help="most tokens of a response")
    data.add_argument("--slots", type=arguments.positive, help="requests at once")
    data.add_argument("--max-len", type=arguments.positive, help="tokens of a sequence; more is cut off")
    data.add_argument("--held-out", type=arguments.natural, help="sequences to evaluate on; at most a tenth")
    head = parser.add_argument_group("head")
    head.add_argument("--draft-vocab", type=arguments.positive, help=f"tokens, at most {train_config.MOST_DRAFT_VOCAB}")
    head.add_argument(
        "--taps", nargs="+", type=arguments.natural, help="target layers whose inputs the head reads (2, L // 2, L - 3)"
    )
    head.add_argument("--intermediate", type=arguments.positive, help="MLP width (the target's)")
    head.add_argument("--lm-head", choices=LM_HEADS, help="trained, or the target's rows")
    head.add_argument("--head-dtype", choices=weights.PRECISIONS, help="of the head's file")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=arguments.positive, help="updates")
    train.add_argument("--batch", type=arguments.positive, help="sequences")
    train.add_argument("--unroll", type=arguments.positive, help="draft steps")
    train.add_argument("--short-steps", type=arguments.natural, help=f"first updates, which unroll {SHORT} steps")
    train.add_argument("--decay", type=real("decay"), help="weight of each unroll step over the one before")
    train.add_argument("--lr", type=real("lr"), help="peak learning rate")
    train.add_argument("--warmup", type=real("warmup"), help="share of the steps")
    train.add_argument("--weight-decay", type=real("weight_decay"), help="of AdamW")
    train.add_argument("--clip", type=real("clip"), help="largest gradient norm")
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
    args = {name: tuple(x) if isinstance(x, list) else x for name, x in vars(parser.parse_args(argv)).items()}
    return arguments.checked(parser, TrainConfig, {name: (OPTIONS[name], x) for name, x in args.items()})

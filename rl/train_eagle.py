"""Train an EAGLE-3 head for a Llama on the target's own completions: `python -m rl.train_eagle --model M --out DIR`.

DIR gets config.json and model.safetensors (the head, written last), rollouts.npz (the data, made once), log.jsonl (a
strict JSON line every few steps) and train.safetensors (weights and optimizer; the same command goes on from there, on
a CPU to the same bits).
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import arguments, eagle, struct
from rl import eagle_data, eagle_head, eagle_loss, optimizer, rollouts
from rl.eagle_loss import Batch, Seen
from rl.optimizer import AdamState, Optimizer
from rl.rollouts import Rollouts

SHORT = 2  # draft steps of the first updates
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@struct.state
class TrainState:
    """What training carries from step to step."""

    params: eagle.HeadParams  # fp32, fc in units of the taps' scale; see eagle_loss.complete
    adam: AdamState
    scale: Tensor  # [F] fp32
    target_id: Tensor  # [Vd] int64


@dataclass(frozen=True)
class Recipe:
    """The hashable statics of training."""

    cfg: eagle.HeadConfig
    unroll: int
    decay: float
    dtype: torch.dtype  # of the forward and backward pass


def train_step(
    target: ns.Model, recipe: Recipe, optimize: Optimizer, train: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Tensor]]:
    """One update. Returns the new state and what the log tells: loss, accuracy [S], gradient norm []."""

    def objective(params: eagle.HeadParams) -> tuple[Tensor, dict[str, Tensor]]:
        head = eagle_loss.complete(params, train.target_id, train.scale, recipe.dtype)
        rows = eagle_loss.output_rows(target, train.target_id)
        return eagle_loss.loss(head, recipe.cfg, target.params.embed, rows, batch, recipe.decay)

    with torch.enable_grad():
        grads, (_, info) = torch.func.grad_and_value(objective, has_aux=True)(train.params)
    with torch.no_grad():
        params, adam, norm = optimize.update(grads, train.adam, train.params)
    return TrainState(params=params, adam=adam, scale=train.scale, target_id=train.target_id), info | {"grad": norm}


def init(
    target: ns.Model, recipe: Recipe, optimize: Optimizer, target_id: Tensor, tokens: Tensor, own_head: bool, seed: int
) -> TrainState:
    """The state before the first step; tokens [B, T]: some sequences to take the taps' scale from."""
    batch = look_at(target, recipe, target_id, tokens, torch.full_like(tokens[:, 0], tokens.shape[1]), tokens[:, 0] * 0)
    taps = batch.taps.float().unflatten(-1, (len(recipe.cfg.taps), -1))
    # The median: the first token's stream is 50 times as long as the others'.
    scale = taps.square().mean(-1).sqrt().flatten(0, 1).median(0).values.clamp_min(1e-6)
    params = eagle_loss.trainable(eagle_head.init(recipe.cfg, target, target_id, own_head, seed))
    scale = scale.repeat_interleave(recipe.cfg.target_hidden_size)
    return TrainState(params=params, adam=optimize.init(params), scale=scale, target_id=target_id)


def look_at(
    target: ns.Model,
    recipe: Recipe,
    target_id: Tensor,
    tokens: Tensor,
    length: Tensor,
    prompt: Tensor,
    seen: Seen | None = None,
    unroll: int | None = None,
) -> Batch:
    """tokens [B, T], length, prompt [B] -> what a step needs of them.

    Args: seen: the target's view, where it is kept; unroll: steps, where they are not the recipe's.
    """
    row, live = eagle_loss.supervise(length, prompt, tokens.shape[1], unroll or recipe.unroll)
    if seen is None:
        seen = eagle_loss.observe(target, recipe.cfg.taps, tokens)
    return eagle_loss.prepare(target, target_id, tokens, seen, row, live)


def head_of(recipe: Recipe, train: TrainState, dtype: torch.dtype) -> eagle.HeadParams:
    """The head that a state stands for."""
    return eagle_loss.complete(train.params, train.target_id, train.scale, dtype)


def evaluate(
    target: ns.Model, recipe: Recipe, train: TrainState, data: Rollouts, members: Sequence[int], args: Any
) -> dict[str, Any]:
    """Held-out figures: loss and accuracy per step, and the mean accepted length of a chain of that depth.

    The replayed length is exact for this data; see `eagle_loss.accepted_length`.
    """
    head = head_of(recipe, train, recipe.dtype)
    embed, rows = target.params.embed, eagle_loss.output_rows(target, train.target_id)
    seen = torch.zeros(2, recipe.unroll)
    emitted = rounds = count = 0
    ordered = sorted(members, key=lambda i: len(data.sequence(i)))
    for start in range(0, len(ordered), args.batch):
        chosen = ordered[start : start + args.batch]
        tokens, length, prompt = eagle_data.collate(data, chosen, args.max_len, embed.device)
        batch = look_at(target, recipe, train.target_id, tokens, length, prompt)
        with torch.no_grad():
            _, info = eagle_loss.loss(head, recipe.cfg, embed, rows, batch)
            hit = eagle_loss.drafted(head, recipe.cfg, embed, rows, batch)
        weight = batch.row.numel()
        seen += torch.stack((info["loss"], info["accuracy"])).float().cpu() * weight
        count += weight
        more = eagle_loss.accepted_length(hit.cpu(), length, prompt)
        emitted, rounds = emitted + more[0], rounds + more[1]
    loss, accuracy = (seen / max(count, 1)).tolist()
    return {"loss": loss, "accuracy": accuracy, "accepted_length": emitted / rounds if rounds else None}


def fit(
    target: ns.Model, data: Rollouts, args: argparse.Namespace, on_step: Callable[[int], None] | None = None
) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """Train as `args` say, from args.out/train.safetensors where that is there, and write the head.

    Args: on_step: told each step's number before it is taken.
    Returns: the head, fp32.
    """
    device = target.params.embed.device
    members, held_out = eagle_data.split(len(data), args.held_out, args.seed)
    lengths = [min(len(data.sequence(i)), args.max_len) for i in members]
    size = min(args.draft_vocab, target.cfg.vocab_size)
    target_id = eagle_data.most_frequent(data, members, target.cfg.vocab_size, size).to(device)
    taps = tuple(args.taps or eagle.default_taps(target.cfg.num_layers))
    intermediate = args.intermediate or target.cfg.intermediate_size
    cfg = eagle_head.config_for(target, taps, size, intermediate)
    recipe = Recipe(cfg=cfg, unroll=args.unroll, decay=args.decay, dtype=target.params.embed.dtype)
    schedule = optimizer.warmup_cosine(args.lr, args.steps, max(1, round(args.warmup * args.steps)))
    optimize = optimizer.adamw(schedule, decay=args.weight_decay, clip=args.clip)
    first, _, _ = eagle_data.collate(data, members[: args.batch], args.max_len, device)
    train = init(target, recipe, optimize, target_id, first, args.lm_head == "own", args.seed)

    path, log, about = args.out / "train.safetensors", args.out / "log.jsonl", signature(args, data)
    if path.exists():
        train = eagle_head.load_state(path, train, lambda found: same_run(found, about, path))
    done = int(train.adam.count)
    keep_log(log, done)
    per_epoch = len(eagle_data.batches(lengths, args.batch, args.seed, 0))
    epoch, order = -1, []
    kept, start = (
        eagle_data.observe_all(target, recipe.cfg.taps, data, members, args.batch, args.max_len)
        if args.keep_features
        else (None, {})
    )
    begun, tokens_seen = time.perf_counter(), 0
    for step in tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step", disable=args.quiet):
        if on_step:
            on_step(step)
        if step // per_epoch != epoch:
            epoch = step // per_epoch
            order = eagle_data.batches(lengths, args.batch, args.seed, epoch)
        chosen = [members[i] for i in order[step % per_epoch]]
        tokens, length, prompt = eagle_data.collate(data, chosen, args.max_len, device)
        known = eagle_data.recall(kept, [start[i] for i in chosen], tokens) if kept else None
        unroll = min(SHORT, args.unroll) if step < args.short_steps else args.unroll
        batch = look_at(target, recipe, target_id, tokens, length, prompt, known, unroll)
        train, info = train_step(target, recipe, optimize, train, batch)
        tokens_seen += tokens.numel()
        last = step + 1 == args.steps
        line: dict[str, Any] = {}
        if last or (step + 1) % args.log_every == 0:
            line = {name: value.tolist() for name, value in info.items()}
            line["lr"] = schedule(train.adam.count - 1).tolist()
            if not torch.isfinite(info["grad"]):
                raise RuntimeError(f"step {step}: the gradient is not finite")
        if held_out and (last or (step + 1) % args.eval_every == 0):
            line["held_out"] = evaluate(target, recipe, train, data, held_out, args)
        if line:
            seconds = time.perf_counter() - begun
            line = {"step": step + 1, "epoch": step / per_epoch} | line
            append(log, line | {"seconds": seconds, "tokens_per_second": tokens_seen / seconds})
        if last or (step + 1) % args.save_every == 0:
            eagle_head.save_state(path, train, about)
    head = head_of(recipe, train, torch.float32)
    eagle_head.write_folder(args.out, head, cfg, target, DTYPES[args.head_dtype])
    return cfg, head


# What may differ between two runs of which one goes on with the other's state.
FREE = ("out", "data", "prompts", "device", "log_every", "eval_every", "save_every", "quiet", "slots", "keep_features")


def signature(args: argparse.Namespace, data: Rollouts) -> dict[str, Any]:
    """What must be equal for a state to be gone on with."""
    options = {name: value for name, value in sorted(vars(args).items()) if name not in FREE}
    return options | {"sequences": len(data), "data_tokens": len(data.tokens)}


def same_run(found: dict[str, Any], wanted: dict[str, Any], path: Path) -> None:
    wanted = json.loads(json.dumps(wanted))
    for name in sorted({*found, *wanted}):
        if found.get(name) != wanted.get(name):
            raise ValueError(f"{path}: is of a run with {name} {found.get(name)!r}, not {wanted.get(name)!r}")


def append(log: Path, line: dict[str, Any]) -> None:
    with log.open("a", encoding="utf-8") as file:
        file.write(arguments.json_line(line) + "\n")


def keep_log(log: Path, done: int) -> None:
    """Drop the lines of steps that will be taken again, and one that was cut off."""
    if log.exists():
        whole = [line for line in log.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("}\n")]
        kept = [line for line in whole if json.loads(line)["step"] <= done]
        eagle_head.write_whole(log, "".join(kept).encode())


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
        description=str(__doc__).split("\n\n")[0],
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
    data.add_argument("--data", type=Path, help="rollouts to train on (default: OUT/rollouts.npz), made if not there")
    data.add_argument("--prompts", nargs="+", type=source, help="self:N, gsm8k[:N] (train) or FILE[:N], several")
    data.add_argument("--temperatures", nargs="+", type=real(0, 100, True), default=[0.0, 1.0], help="in turn")
    data.add_argument("--response-tokens", type=arguments.positive, default=256, help="at most, per prompt")
    data.add_argument("--slots", type=arguments.positive, default=256, help="requests at once")
    data.add_argument("--max-len", type=arguments.positive, default=512, help="tokens of a sequence; more is cut off")
    data.add_argument("--held-out", type=natural, default=64, help="sequences to evaluate on; at most a tenth")
    head = parser.add_argument_group("head")
    head.add_argument("--draft-vocab", type=arguments.positive, default=32000, help="tokens, at most 32000")
    head.add_argument("--taps", nargs="+", type=natural, help="target layers whose input is seen (2, L // 2, L - 3)")
    head.add_argument("--intermediate", type=arguments.positive, help="MLP width (the target's)")
    head.add_argument("--lm-head", choices=("own", "target-rows"), default="own", help="trained, or the target's rows")
    head.add_argument("--head-dtype", choices=tuple(DTYPES), default="fp16", help="of the head's file")
    train = parser.add_argument_group("training")
    train.add_argument("--steps", type=arguments.positive, default=2000)
    train.add_argument("--batch", type=arguments.positive, default=32, help="sequences")
    train.add_argument("--unroll", type=arguments.positive, default=5, help="draft steps")
    train.add_argument("--short-steps", type=natural, default=0, help=f"updates at first that unroll {SHORT} steps")
    train.add_argument("--decay", type=real(0, 1), default=0.8, help="weight of each unroll step over the one before")
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
    """Refuse, before any work, what argparse alone cannot see."""
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
        parser.error(f"argument --data: {args.data} is not there, and without --prompts it cannot be made")
    args.data = args.data or args.out / "rollouts.npz"
    if not args.data.is_file() and not args.prompts:
        parser.error("argument --prompts: needed, as there is no data yet")


def check_model(target: ns.Model, args: argparse.Namespace) -> None:
    """Refuse what does not go with the target."""
    layers = target.cfg.num_layers
    taps = args.taps or eagle.default_taps(layers)
    if len(set(taps)) != len(taps) or not 0 < min(taps) <= max(taps) <= layers:
        raise ValueError(f"argument --taps: {taps} are not distinct inputs 1..{layers} of the target's layers")
    if args.max_len > target.cfg.max_context:
        raise ValueError(f"argument --max-len: {args.max_len} is over the target's context {target.cfg.max_context}")


def make_data(target: ns.Model, args: argparse.Namespace) -> Rollouts:
    """The rollouts of --data, made and written first where they are not there."""
    if not args.data.is_file():
        engine = ns.EngineConfig(max_slots=args.slots)
        prompts = rollouts.gather_prompts(target, args.prompts, engine, args.seed)
        limits = args.response_tokens, args.max_len
        made = rollouts.complete(target, prompts, args.temperatures, *limits, engine, args.seed)
        about = {"model": target.name, "prompts": args.prompts, "temperatures": args.temperatures, "seed": args.seed}
        args.data.parent.mkdir(parents=True, exist_ok=True)
        rollouts.save(args.data, made, about)
    return rollouts.load(args.data, target.cfg.vocab_size)[0]


def main(argv: list[str] | None = None) -> int:
    """Make the data, train, write the head; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    check(parser, args)
    try:
        target = ns.load(args.model, device=args.device, dtype=args.dtype)
        check_model(target, args)
        args.out.mkdir(parents=True, exist_ok=True)
        data = make_data(target, args)
        fit(target, data, args)
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

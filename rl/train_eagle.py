"""Train an EAGLE-3 head for a Llama on the target's own completions: `python -m rl.train_eagle --model M --out DIR`.

DIR gets config.json and model.safetensors (the head, written last), rollouts.npz (the data, made once), log.jsonl (a
strict JSON line every few steps) and train.safetensors (weights and optimizer; the same command goes on from there, on
a CPU to the same bits).
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import eagle, rehearsal, struct
from rl import eagle_data, eagle_head, eagle_loss, optimizer, rollouts, run_files
from rl.eagle_loss import Batch, Seen
from rl.optimizer import AdamState, Optimizer
from rl.rollouts import Rollouts
from rl.train_options import DTYPES, SHORT, build_parser, check, check_model


@struct.state
class TrainState:
    """What training carries from step to step."""

    params: eagle.HeadParams  # fp32, fc in units of the taps' scale; see eagle_loss.assemble
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
        head = eagle_loss.assemble(params, train.target_id, train.scale, recipe.dtype)
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
    params = eagle_loss.trainable(eagle_head.init(recipe.cfg, target, target_id, own_head, seed))
    scale = scale_of(batch.taps, recipe.cfg)
    return TrainState(params=params, adam=optimize.init(params), scale=scale, target_id=target_id)


def scale_of(taps: Tensor, cfg: eagle.HeadConfig) -> Tensor:
    """The length of each tapped stream in taps [B, T, F] -> [F] fp32, the same for all of a tap's channels.

    The median over tokens: the first token's stream is 50 times as long as the others'.
    """
    length = taps.float().unflatten(-1, (len(cfg.taps), -1)).square().mean(-1).sqrt().flatten(0, 1)
    return length.median(0).values.clamp_min(1e-6).repeat_interleave(cfg.target_hidden_size)


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

    Args: seen: the target's view, if it was kept; unroll: steps, None for the recipe's.
    """
    row, live = eagle_loss.supervise(length, prompt, tokens.shape[1], unroll or recipe.unroll)
    if seen is None:
        seen = eagle_loss.observe(target, recipe.cfg.taps, tokens)
    return eagle_loss.prepare(target, target_id, tokens, seen, row, live)


def head_of(recipe: Recipe, train: TrainState, dtype: torch.dtype) -> eagle.HeadParams:
    """The head that a state stands for."""
    return eagle_loss.assemble(train.params, train.target_id, train.scale, dtype)


def evaluate(
    target: ns.Model, recipe: Recipe, train: TrainState, data: Rollouts, members: Sequence[int], args: Any
) -> dict[str, Any]:
    """Held-out figures: loss and accuracy per step, and the mean accepted length of a chain of that depth.

    The replayed length is exact for this data; see `rehearsal.accepted_length`.
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
        more = rehearsal.accepted_length(hit.cpu(), length, prompt)
        emitted, rounds = emitted + more[0], rounds + more[1]
    loss, accuracy = (seen / max(count, 1)).tolist()
    return {"loss": loss, "accuracy": accuracy, "accepted_length": emitted / rounds if rounds else None}


def fit(
    target: ns.Model, data: Rollouts, args: argparse.Namespace, on_step: Callable[[int], None] | None = None
) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """Train as `args` say, resuming from args.out/train.safetensors if it exists, and write the head.

    Args: on_step: told each step's number before it is taken.
    Returns: the head, fp32.
    """
    members, held_out = eagle_data.split(len(data), args.held_out, args.seed)
    path, log, about = args.out / "train.safetensors", args.out / "log.jsonl", signature(args, data)
    schedule = optimizer.warmup_cosine(args.lr, args.steps, max(1, round(args.warmup * args.steps)))
    optimize = optimizer.adamw(schedule, decay=args.weight_decay, clip=args.clip)
    recipe, train = begin(target, data, members, optimize, args)
    if path.exists():
        train = run_files.load_state(path, train, lambda saved: run_files.same_run(saved, about, path))
    done = int(train.adam.count)
    if log.exists():
        run_files.keep_lines(log, lambda line: line["step"] <= done)
    batch_of = batches_by_step(target, recipe, train.target_id, data, members, args)
    begun, tokens_seen = time.perf_counter(), 0
    for step in tqdm(range(done, args.steps), initial=done, total=args.steps, unit="step", disable=args.quiet):
        if on_step:
            on_step(step)
        batch, epoch = batch_of(step)
        train, info = train_step(target, recipe, optimize, train, batch)
        tokens_seen += batch.tokens.numel()
        last = step + 1 == args.steps
        line: dict[str, Any] = {}
        if last or (step + 1) % args.log_every == 0:
            line = {name: value.tolist() for name, value in info.items()}
            line["lr"] = schedule(train.adam.count - 1).tolist()
            if not torch.isfinite(info["grad"]):
                raise run_files.RunError(f"step {step}: the gradient is not finite")
        if held_out and (last or (step + 1) % args.eval_every == 0):
            line["held_out"] = evaluate(target, recipe, train, data, held_out, args)
        if line:
            seconds = time.perf_counter() - begun
            rate = {"seconds": seconds, "tokens_per_second": tokens_seen / seconds}
            run_files.append(log, {"step": step + 1, "epoch": epoch} | line | rate)
        if last or (step + 1) % args.save_every == 0:
            run_files.save_state(path, train, about)
    head = head_of(recipe, train, torch.float32)
    eagle_head.write_folder(args.out, head, recipe.cfg, target, DTYPES[args.head_dtype])
    return recipe.cfg, head


def begin(
    target: ns.Model, data: Rollouts, members: Sequence[int], optimize: Optimizer, args: argparse.Namespace
) -> tuple[Recipe, TrainState]:
    """The statics of a run and its state before the first step."""
    size = min(args.draft_vocab, target.cfg.vocab_size)
    target_id = eagle_data.most_frequent(data, members, target.cfg.vocab_size, size).to(target.params.embed.device)
    taps = tuple(args.taps or eagle.default_taps(target.cfg.num_layers))
    cfg = eagle_head.config_for(target, taps, size, args.intermediate or target.cfg.intermediate_size)
    recipe = Recipe(cfg=cfg, unroll=args.unroll, decay=args.decay, dtype=target.params.embed.dtype)
    tokens, _, _ = eagle_data.collate(data, members[: args.batch], args.max_len, target_id.device)
    return recipe, init(target, recipe, optimize, target_id, tokens, args.lm_head == "own", args.seed)


def batches_by_step(
    target: ns.Model,
    recipe: Recipe,
    target_id: Tensor,
    data: Rollouts,
    members: Sequence[int],
    args: argparse.Namespace,
) -> Callable[[int], tuple[Batch, float]]:
    """A function of the step's number alone: its batch, and how many epochs were done before it."""
    lengths = [min(len(data.sequence(i)), args.max_len) for i in members]
    order = functools.lru_cache(maxsize=1)(lambda epoch: eagle_data.batches(lengths, args.batch, args.seed, epoch))
    kept, start = (
        eagle_data.observe_all(target, recipe.cfg.taps, data, members, args.batch, args.max_len)
        if args.keep_features
        else (None, {})
    )
    per_epoch = len(order(0))

    def batch_of(step: int) -> tuple[Batch, float]:
        chosen = [members[i] for i in order(step // per_epoch)[step % per_epoch]]
        tokens, length, prompt = eagle_data.collate(data, chosen, args.max_len, target_id.device)
        seen = eagle_data.recall(kept, [start[i] for i in chosen], tokens) if kept else None
        unroll = min(SHORT, args.unroll) if step < args.short_steps else args.unroll
        return look_at(target, recipe, target_id, tokens, length, prompt, seen, unroll), step / per_epoch

    return batch_of


# Options that may differ between a run and the one that resumes it.
FREE = ("out", "data", "prompts", "device", "log_every", "eval_every", "save_every", "quiet", "slots", "keep_features")


def signature(args: argparse.Namespace, data: Rollouts) -> dict[str, Any]:
    """What must be equal between a saved state and the run that resumes it."""
    options = {name: value for name, value in sorted(vars(args).items()) if name not in FREE}
    return options | {"sequences": len(data), "data_tokens": len(data.tokens)}


def make_data(target: ns.Model, args: argparse.Namespace) -> Rollouts:
    """The rollouts of --data, made and written first if they do not exist."""
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
    except run_files.RunError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

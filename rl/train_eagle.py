"""Train an EAGLE-3 head for a Llama on the target's own completions: `python -m rl.train_eagle --model M --out DIR`.

DIR gets config.json and model.safetensors (the head, written last), rollouts.npz (the data, made once), log.jsonl (a
strict JSON line every few steps) and train.safetensors (weights and optimizer; the same command goes on from there, on
a CPU to the same bits).
"""

import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import arguments, eagle, rehearsal, weights
from rl import (
    eagle_data,
    eagle_head,
    eagle_loss,
    eagle_step,
    optimizer,
    rollouts,
    run_files,
    train_config,
    train_options,
)
from rl.eagle_loss import Batch
from rl.eagle_step import HeadRecipe, TrainState
from rl.optimizer import Optimizer
from rl.rollouts import Rollouts
from rl.train_config import FREE, SHORT, TrainConfig


def evaluate(
    target: ns.Model, recipe: HeadRecipe, train: TrainState, data: Rollouts, members: Sequence[int], config: TrainConfig
) -> dict[str, Any]:
    """Held-out figures: loss and accuracy per step, and the mean accepted length of a chain of that depth.

    The replayed length is exact for this data; see `rehearsal.accepted_length`.
    """
    head = eagle_step.head_of(train, recipe.dtype)
    embed, rows = target.params.embed, eagle_loss.output_rows(target, train.target_id)
    seen = torch.zeros(2, recipe.unroll)
    emitted = rounds = count = 0
    ordered = sorted(members, key=lambda i: len(data.sequence(i)))
    for start in range(0, len(ordered), config.batch):
        chosen = ordered[start : start + config.batch]
        tokens, length, prompt = eagle_data.collate(data, chosen, config.max_len, embed.device)
        batch = eagle_step.make_batch(target, recipe, train.target_id, tokens, length, prompt)
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
    target: ns.Model, data: Rollouts, config: TrainConfig, on_step: Callable[[int], None] | None = None
) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """Train as `config` says, resuming from config.out/train.safetensors if it exists, and write the head.

    Args: on_step: told each step's number before it is taken.
    Returns: the head, fp32.
    """
    members, held_out = eagle_data.split(len(data), config.held_out, config.seed)
    path, log, about = config.out / "train.safetensors", config.out / "log.jsonl", signature(config, data)
    schedule = optimizer.warmup_cosine(config.lr, config.steps, max(1, round(config.warmup * config.steps)))
    optimize = optimizer.adamw(schedule, decay=config.weight_decay, clip=config.clip)
    recipe, train = begin(target, data, members, optimize, config)
    if path.exists():
        train = run_files.load_state(path, train, lambda saved: run_files.same_run(saved, about, path))
    done = int(train.adam.count)
    if log.exists():
        run_files.keep_steps(log, done)
    batch_of = batches_by_step(target, recipe, train.target_id, data, members, config)
    begun, tokens_seen = time.perf_counter(), 0
    for step in tqdm(range(done, config.steps), initial=done, total=config.steps, unit="step", disable=config.quiet):
        if on_step:
            on_step(step)
        batch, epoch = batch_of(step)
        train, info = eagle_step.train_step(target, recipe, optimize, train, batch)
        tokens_seen += batch.tokens.numel()
        last = step + 1 == config.steps
        line: dict[str, Any] = {}
        if last or (step + 1) % config.log_every == 0:
            line = {name: value.tolist() for name, value in info.items()}
            line["lr"] = schedule(train.adam.count - 1).tolist()
            if not torch.isfinite(info["grad"]):
                raise run_files.RunError(f"step {step}: the gradient is not finite")
        if held_out and (last or (step + 1) % config.eval_every == 0):
            line["held_out"] = evaluate(target, recipe, train, data, held_out, config)
        if line:
            seconds = time.perf_counter() - begun
            rate = {"seconds": seconds, "tokens_per_second": tokens_seen / seconds}
            run_files.append(log, {"step": step + 1, "epoch": epoch} | line | rate)
        if last or (step + 1) % config.save_every == 0:
            run_files.save_state(path, train, about)
    head = eagle_step.head_of(train, torch.float32)
    eagle_head.write_folder(config.out, head, recipe.cfg, target, weights.PRECISIONS[config.head_dtype])
    return recipe.cfg, head


def begin(
    target: ns.Model, data: Rollouts, members: Sequence[int], optimize: Optimizer, config: TrainConfig
) -> tuple[HeadRecipe, TrainState]:
    """The statics of a run and its state before the first step."""
    size = min(config.draft_vocab, target.cfg.vocab_size)
    target_id = eagle_data.most_frequent(data, members, target.cfg.vocab_size, size).to(target.params.embed.device)
    taps = tuple(config.taps or eagle.default_taps(target.cfg.num_layers))
    cfg = eagle_head.config_for(target, taps, size, config.intermediate or target.cfg.intermediate_size)
    recipe = HeadRecipe(cfg=cfg, unroll=config.unroll, decay=config.decay, dtype=target.params.embed.dtype)
    tokens, _, _ = eagle_data.collate(data, members[: config.batch], config.max_len, target_id.device)
    return recipe, eagle_step.init(target, recipe, optimize, target_id, tokens, config.lm_head == "own", config.seed)


def batches_by_step(
    target: ns.Model,
    recipe: HeadRecipe,
    target_id: Tensor,
    data: Rollouts,
    members: Sequence[int],
    config: TrainConfig,
) -> Callable[[int], tuple[Batch, float]]:
    """A function of the step's number alone: its batch, and how many epochs were done before it."""
    lengths = [min(len(data.sequence(i)), config.max_len) for i in members]
    order = functools.lru_cache(maxsize=1)(lambda epoch: eagle_data.batches(lengths, config.batch, config.seed, epoch))
    kept, start = (
        eagle_data.observe_all(target, recipe.cfg.taps, data, members, config.batch, config.max_len)
        if config.keep_features
        else (None, {})
    )
    per_epoch = len(order(0))

    def batch_of(step: int) -> tuple[Batch, float]:
        chosen = [members[i] for i in order(step // per_epoch)[step % per_epoch]]
        tokens, length, prompt = eagle_data.collate(data, chosen, config.max_len, target_id.device)
        seen = eagle_data.recall(kept, [start[i] for i in chosen], tokens) if kept else None
        unroll = min(SHORT, config.unroll) if step < config.short_steps else config.unroll
        return eagle_step.make_batch(target, recipe, target_id, tokens, length, prompt, seen, unroll), step / per_epoch

    return batch_of


def signature(config: TrainConfig, data: Rollouts) -> dict[str, Any]:
    """What must be equal between a saved state and the run that resumes it."""
    options = {name: value for name, value in sorted(vars(config).items()) if name not in FREE}
    return options | {"sequences": len(data), "data_tokens": len(data.tokens)}


def make_data(target: ns.Model, config: TrainConfig) -> Rollouts:
    """The rollouts of --data, made and written first if they do not exist."""
    path = config.data_file
    if not path.is_file():
        if not config.prompts:
            raise ValueError(f"prompts: needed, as {path} does not exist yet")
        path.parent.mkdir(parents=True, exist_ok=True)  # before the work, which is minutes
        engine, bar = ns.EngineConfig(max_slots=config.slots), not config.quiet
        prompts = rollouts.gather_prompts(target, config.prompts, engine, config.seed, progress=bar)
        limits = config.response_tokens, config.max_len
        made = rollouts.complete(target, prompts, config.temperatures, *limits, engine, config.seed, progress=bar)
        about = {"model": target.name} | {name: getattr(config, name) for name in ("prompts", "temperatures", "seed")}
        rollouts.save(path, made, about)
    return rollouts.load(path, target.cfg.vocab_size)[0]


def run(config: TrainConfig) -> tuple[eagle.HeadConfig, eagle.HeadParams]:
    """Load the target, make the data if there is none, train, write the head -> the head, fp32.

    Errors: ValueError that begins with the field, before any work; ValueError, OSError as the loaders, `make_data` and
      `fit`.
    """
    config.validate()
    train_config.check_files(config)
    target = ns.load(config.model, device=config.device, dtype=config.dtype)
    train_config.check_target(config, target)
    config.out.mkdir(parents=True, exist_ok=True)
    return fit(target, make_data(target, config), config)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the options say; the exit code."""
    config, parser = train_options.parse(argv), train_options.build_parser()
    try:
        run(config)
    except run_files.RunError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(arguments.error_line(error, train_options.OPTIONS))
    return 0


if __name__ == "__main__":
    sys.exit(main())

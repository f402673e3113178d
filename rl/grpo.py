"""GRPO on rollouts of the speculative engine: `python -m rl.grpo --draft frozen --acceptance power --alpha 0.3`.

A step samples groups of completions, scores them, weighs every token by pi_old / mu, and updates the policy in place.
--out gets log.jsonl (a header, then a strict JSON line a step) and state.safetensors (weights, optimizer, draft); with
--resume the same command goes on from there, on a CPU to the same bits. `torchrun` shares the prompts among its ranks.
Source: GRPO (Shao et al. 2024, arXiv 2402.03300).
"""

import functools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import arguments, model, struct
from rl import (
    alarm,
    drafts,
    experience,
    grpo_config,
    grpo_log,
    grpo_options,
    optimizer,
    policy,
    policy_loss,
    ranks,
    run_files,
    tasks,
)
from rl.drafts import DraftState, Upkeep
from rl.experience import EVALUATE, Experience, Order, Version
from rl.grpo_config import LOG, STATE, GrpoConfig, how_to_go_on
from rl.grpo_log import Known
from rl.grpo_options import say
from rl.optimizer import Optimizer
from rl.policy import MicroBatch, PolicyState, Scored
from rl.policy_loss import Recipe
from rl.ranks import Ranks
from rl.tasks import Task


@dataclass(frozen=True)
class Setting:
    """What stays the same over a run."""

    config: GrpoConfig
    ranks: Ranks
    task: Task
    engine: ns.Engine  # serves the policy's weights and the draft's
    reference: model.Params  # the reference policy: that of step 0
    recipe: Recipe
    optimize: Optimizer
    upkeep: Upkeep


@struct.state
class RunState:
    """What a run carries from step to step, and a checkpoint holds.

    Where the served weights are fp32 `policy.master` is these tensors, and `draft.weights` is those of a copy that is
    refreshed: a step overwrites both, so only the newest state of a run may be used.
    """

    policy: PolicyState
    draft: DraftState

    @property
    def step(self) -> int:
        """Updates made, the policy's version."""
        return int(self.policy.adam.count)


def train_step_(setting: Setting, state: RunState) -> tuple[RunState, dict[str, Any]]:
    """One step: the new state, and its line of the log. Overwrites the engine's weights: the policy's, the draft's."""
    config, served = setting.config, setting.engine.model
    clock = [time.perf_counter()]
    rollouts = collect(setting, state)
    clock.append(time.perf_counter())

    tokens = experience.tokens_of(rollouts, served.params.embed.device)
    scored, known = score(setting, rollouts)
    reward = torch.tensor([one.value for one in rollouts.rewards], dtype=torch.float64).view(-1, config.group)
    by_group, flat = policy_loss.advantages(reward)
    advantage = by_group.flatten().to(tokens.target)[tokens.sequence]
    weights = policy_loss.correct(setting.recipe, known.old, tokens.behaviour, advantage)
    length = torch.tensor(rollouts.lengths, device=advantage.device)
    scale = policy_loss.token_scale(config.loss, length, config.max_tokens)[tokens.sequence]
    clock.append(time.perf_counter())

    draft, losses = train_draft_(setting, state, scored)
    clock.append(time.perf_counter())

    def objective(logp: Tensor, at: Tensor) -> Tensor:
        part = pytree.tree_map(lambda x: x[at], (known.old, known.ref_logp, advantage, weights, scale))
        return policy_loss.loss(setting.recipe, logp, *part)

    # What a flat group adds is 0, unless there is a KL to the reference policy.
    with_signal = [i for i in own_sequences(setting) if config.kl_beta or not flat[i // config.group]]
    grads, loss = policy.gradient(served, micro_batches(setting, rollouts, with_signal), config.temperature, objective)
    ranks.add_(setting.ranks, (grads, loss))
    trained, norm = policy.update_(served.params, state.policy, setting.optimize, grads)
    draft = drafts.refresh_(setting.engine.draft, setting.upkeep, draft, served, state.step + 1)
    clock.append(time.perf_counter())

    line = grpo_log.of_rollouts(rollouts, clock) | grpo_log.of_tokens(config, tokens, known, weights)
    line |= grpo_log.of_versions(rollouts.version, tokens, state.step, int(state.draft.changed))
    line |= {"groups_with_signal": int((~flat).sum()), "groups": len(flat), "lr": config.lr}
    line |= {"loss": float(loss), "grad_norm": float(norm), "draft_loss": grpo_log.mean_loss(losses)}
    return RunState(policy=trained, draft=draft), {"step": state.step + 1} | line


def collect(setting: Setting, state: RunState) -> Experience:
    """The rollouts of the next step, by all ranks."""
    config, draft = setting.config, setting.engine.draft
    version = Version(state.step, int(state.draft.version) if draft else None)
    order = Order(config.seed, state.step + 1, config.prompts, config.group, grpo_config.sampling(config), version)
    mine, gather = setting.ranks.share(config.prompts), functools.partial(ranks.gather, setting.ranks)
    return experience.collect(setting.engine, setting.task, order, mine, gather)


def own_sequences(setting: Setting) -> list[int]:
    """The sequences that this rank has sampled and trains on."""
    group = setting.config.group
    return [i * group + j for i in setting.ranks.share(setting.config.prompts) for j in range(group)]


def micro_batches(setting: Setting, rollouts: Experience, members: Sequence[int]) -> Iterator[MicroBatch]:
    """Some of the sequences as microbatches."""
    sequences = [rollouts.sequence(i) for i in range(len(rollouts.prompts))]
    device = setting.engine.model.params.embed.device
    return policy.micro_batches(
        sequences, list(map(len, rollouts.prompts)), members, setting.config.micro_tokens, device
    )


def score(setting: Setting, rollouts: Experience) -> tuple[list[tuple[MicroBatch, Scored]], Known]:
    """The tokens under the policy and the reference policy: this rank's microbatches, and all tokens' log-probs."""
    served, taps, temperature = setting.engine.model, setting.upkeep.taps, setting.config.temperature
    batches = micro_batches(setting, rollouts, own_sequences(setting))
    scored = [(batch, policy.score(served, setting.reference, batch, temperature, taps)) for batch in batches]
    own = [(batch.index.cpu(), *(x.cpu() for x in (s.logp, s.ref_logp, s.kl))) for batch, s in scored]
    known = torch.zeros(3, sum(rollouts.lengths))
    for index, *columns in (part for parts in ranks.gather(setting.ranks, own) for part in parts):
        known[:, index] = torch.stack(columns)
    return scored, Known(*known.to(served.params.embed.device))


def train_draft_(
    setting: Setting, state: RunState, scored: Sequence[tuple[MicroBatch, Scored]]
) -> tuple[DraftState, list[tuple[float, int]]]:
    """Train the head on the rollouts, if it is to learn; overwrites the served one.

    Ranks make as many updates as the one with fewest batches that have something to learn from.
    Returns: the state, and all ranks' losses as of `drafts.learn_`.
    """
    upkeep, served = setting.upkeep, setting.engine.model
    if upkeep.recipe is None:
        return state.draft, []
    batches = list(drafts.supervised(served, upkeep, state.draft, scored))
    fewest = min(ranks.gather(setting.ranks, len(batches)))
    draft, own = drafts.learn_(setting.engine.draft, upkeep, state.draft, served, batches[:fewest], state.step)
    return draft, [one for part in ranks.gather(setting.ranks, own) for one in part]


def evaluate(setting: Setting, state: RunState) -> dict[str, Any]:
    """Greedy completions of held-out problems: shares that are solved, mean reward."""
    config = setting.config
    problems = setting.task.held_out[: config.eval_limit]
    mine = setting.ranks.share(len(problems))
    prompts = experience.encode(setting.engine.model, [problems[i] for i in mine])
    seeds = [experience.seed_of(config.seed, state.step, EVALUATE, i, 0) for i in mine]
    greedy = ns.Sampling(max_tokens=config.max_tokens)
    done = experience.roll_out(setting.engine, prompts, greedy, seeds)
    own = [setting.task.reward(problems[i], one.text, one.tokens) for i, one in zip(mine, done, strict=True)]
    return grpo_log.of_rewards([one for part in ranks.gather(setting.ranks, own) for one in part]) | {
        "n": len(problems)
    }


Hook = Callable[[str, int], None]  # what is about to be done, and in which step: tests end a run there


def fit_(setting: Setting, state: RunState, about: dict[str, Any], on: Hook = lambda what, step: None) -> RunState:
    """Train from `state` to the last step, with a log line after each and a checkpoint after some.

    Overwrites what `train_step_` does.
    """
    config, first, resumed = setting.config, setting.ranks.first, state.step > 0
    wanted = alarm.served(setting.engine)
    todo = range(state.step + 1, config.steps + 1)
    with tqdm(todo, initial=state.step, total=config.steps, unit="step", disable=config.quiet or not first) as bar:
        for step in bar:
            on("rollout", step)
            alarm.check(setting.engine, setting.ranks, wanted, state.step, int(state.draft.version))
            state, line = train_step_(setting, state)
            alarm.check_bits(setting.engine, line)
            wanted, last = alarm.served(setting.engine), step == config.steps
            evaluated = setting.task.held_out and config.eval_every and (last or step % config.eval_every == 0)
            line |= {"eval": evaluate(setting, state) if evaluated else None, "resumed": resumed}
            if first:
                on("log", step)
                run_files.append(config.out / LOG, line)
            if first and (last or step % config.save_every == 0):
                on("checkpoint", step)
                run_files.save_state(config.out / STATE, state, about)
            bar.set_postfix(reward=f"{line['reward']:.3f}", tok_s=f"{line['tok_s']:.0f}", refresh=False)
    return state


def begin(served: ns.Model, draft: ns.Draft | None, task: Task, config: GrpoConfig, world: Ranks) -> Setting:
    """Everything that a run needs, made once.

    Errors: ValueError for a prompt that leaves no room in the model's context, or what the engine refuses.
    """
    used = list(task.problems[: config.steps * config.prompts])
    used += task.held_out[: config.eval_limit] if config.eval_every else []
    longest = max(map(len, experience.encode(served, used))) + config.max_tokens
    if longest > served.cfg.max_context:
        raise ValueError(
            f"max_tokens: the longest prompt has {longest - config.max_tokens} tokens, with "
            f"{config.max_tokens} more it is over the model's context of {served.cfg.max_context}"
        )
    speculation = ns.Speculation(top_k=config.spec_topk, depth=config.spec_depth) if draft else None
    sizes = ns.EngineConfig(max_slots=config.slots, max_context=longest)
    engine = ns.prepare(served, draft, sizes, speculation)
    engine.program.check_sampling(grpo_config.sampling(config))

    def rate(value: float) -> Optimizer:
        return optimizer.adamw(lambda count: torch.full_like(count, value, dtype=torch.float64))

    upkeep = Upkeep(refresh=config.draft_refresh)
    if draft and config.draft_train:
        add = functools.partial(ranks.add_, world)
        upkeep = drafts.trained(
            draft, config.spec_depth, drafts.data_parallel(rate(config.draft_lr), add, world.size), served
        )
    reference = pytree.tree_map(torch.clone, served.params)
    return Setting(config, world, task, engine, reference, grpo_config.recipe(config), rate(config.lr), upkeep)


def init(setting: Setting) -> RunState:
    """The state before the first step."""
    served, draft = setting.engine.model, setting.engine.draft
    tokens = torch.tensor(experience.encode(served, setting.task.problems[:1]), device=served.params.embed.device)
    return RunState(
        policy=policy.begin(served.params, setting.optimize),
        draft=drafts.begin(served, draft, setting.upkeep, tokens),
    )


def resume_(setting: Setting, state: RunState, about: dict[str, Any]) -> RunState:
    """The state of --out's checkpoint, served; without a checkpoint `state`. The log goes on from there.

    Overwrites the engine's weights, the policy's and the draft's.
    Errors: ValueError naming the options that differ, or a file that is no checkpoint, or no log.
    """
    log, path = setting.config.out / LOG, setting.config.out / STATE
    grpo_config.check_same(setting.config.out, about)
    if path.exists():
        state = run_files.load_state(path, state, lambda saved: run_files.same_run(saved, about, path))
        master = policy.publish_(setting.engine.model.params, state.policy.master)
        draft = drafts.restore_(setting.engine.draft, setting.upkeep, state.draft)
        state = RunState(policy=struct.replace(state.policy, master=master), draft=draft)
    ranks.gather(setting.ranks, None)  # nobody writes before everybody has read
    if setting.ranks.first and state.step:
        kept = run_files.keep_steps(log, state.step) if log.exists() else set()
        if lacking := state.step - len(kept):
            say(f"{log} lacks {lacking} of the steps 1 to {state.step}")
    if setting.ranks.first and not state.step:
        say("no checkpoint yet: starting at step 1")
    return state


def write_header(setting: Setting, state: RunState, about: dict[str, Any]) -> None:
    """Begin the log, or put a header before the lines of one that a resumed run goes on with."""
    log, served = setting.config.out / LOG, setting.engine.model
    lines = run_files.read_lines(log) if state.step and log.exists() else []
    if lines and "header" in lines[0]:
        return
    own = () if state.policy.master is served.params else state.policy.master
    held = {"served": served.params, "master": own, "optimizer": state.policy.adam, "first": setting.reference}
    held |= {"draft": setting.engine.params.draft, "draft_training": state.draft.train}
    run_files.write_lines(log, [grpo_log.header(setting.config, served, about, held), *lines])


def run(config: GrpoConfig, world: Ranks, on: Hook = lambda what, step: None) -> RunState:
    """Load, begin or resume, train.

    Errors: ValueError that begins with the field, before anything is loaded; ValueError, FileNotFoundError as `begin`,
      `resume_` and the loaders.
    """
    config.validate()
    grpo_config.check_surroundings(config, world.size)
    if world.first:  # the one that writes there: another might find what it has written already
        grpo_config.check_folder(config)
    loaded = ns.load(config.model, device=ranks.device_of(config.device), dtype=config.dtype)
    draft = ns.load_draft(config.draft, loaded)
    setting = begin(loaded, draft, tasks.load(config.task, loaded, config.seed), config, world)
    state = init(setting)
    about = grpo_config.signature(config) | {"weights": policy.fingerprint(loaded.params), "ranks": world.size}
    if config.resume:
        state = resume_(setting, state, about)
    if world.first:
        with run_files.writing(config.out):
            config.out.mkdir(parents=True, exist_ok=True)
        write_header(setting, state, about)
        if state.step >= config.steps:
            say(f"already at step {state.step}")
    return fit_(setting, state, about, on)


def main(argv: Sequence[str] | None = None) -> int:
    """Train a policy; the exit code."""
    config = grpo_options.parse(argv)
    if config.deterministic:
        grpo_options.deterministic()
    world = ranks.start(config.device)
    try:
        run(config, world)
    except (ValueError, OSError) as error:
        say(f"error: {arguments.error_line(error, grpo_options.OPTIONS)}")
        return 2
    except KeyboardInterrupt:
        say(f"interrupted; {how_to_go_on(config)}")
        return 1
    except run_files.WriteError as error:
        say(f"{error}; {how_to_go_on(config)}")
        return 1
    except run_files.RunError as error:
        say(str(error))
        return 1
    ranks.stop(world)
    return 0


if __name__ == "__main__":
    sys.exit(main())

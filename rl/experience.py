"""One step's rollouts: groups of completions that the engine samples, their rewards, and their tokens in one row.

Shapes: P prompts, G completions of each, B = P * G sequences (sequence i answers prompt i // G), n tokens of all
completions, sequence after sequence.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import nanospec_fn as ns
from nanospec_fn import chat, struct
from rl.tasks import Problem, Reward, Task

TRAIN, EVALUATE = 0, 1  # what a draw is for


@dataclass(frozen=True)
class Version:
    """Which weights sampled a token: updates of the policy made before, and of the draft (None without a draft)."""

    policy: int
    draft: int | None


@dataclass(frozen=True)
class Experience:
    """The rollouts of one step, by all ranks."""

    prompts: list[list[int]]  # [B], token ids
    completions: list[ns.Completion]  # [B]
    rewards: list[Reward]  # [B]
    group: int  # G
    version: Version

    @property
    def lengths(self) -> list[int]:
        """[B], tokens of each completion, its stop token among them; 0 for one that could not be served."""
        return [len(one.tokens) for one in self.completions]

    def sequence(self, i: int) -> list[int]:
        """Prompt and completion of sequence i."""
        return [*self.prompts[i], *self.completions[i].tokens]


@struct.state
class Tokens:
    """What the sampler knows of every emitted token."""

    sequence: Tensor  # [n] int64
    target: Tensor  # [n] fp32 nats, log-prob under the policy that was served
    behaviour: Tensor  # [n] fp32 nats, with which it was emitted
    origin: Tensor  # [n] int64, 0 the target's own, d > 0 drafted at depth d
    policy_version: Tensor  # [n] int64
    draft_version: Tensor  # [n] int64, -1 without a draft


def tokens_of(experience: Experience, device: torch.device) -> Tokens:
    """The tokens of all sequences in one row."""
    done = experience.completions

    def column(values: list[list[float]] | list[list[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor([x for row in values for x in row], dtype=dtype, device=device)

    n, version = sum(experience.lengths), experience.version
    draft = -1 if version.draft is None else version.draft
    return Tokens(
        sequence=torch.arange(len(done), device=device).repeat_interleave(
            torch.tensor(experience.lengths, device=device)
        ),
        target=column([one.target_logp for one in done], torch.float32),
        behaviour=column([one.behaviour_logp for one in done], torch.float32),
        origin=column([one.origin for one in done], torch.int64),
        policy_version=torch.full((n,), version.policy, device=device),
        draft_version=torch.full((n,), draft, device=device),
    )


def seed_of(*names: int) -> int:
    """A request's seed from the run's seed, the step, the prompt's and the sample's place in it: not from the rank."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=8).digest(), "big") >> 1


def problems_of(problems: Sequence[Problem], step: int, count: int) -> list[Problem]:
    """The problems of a step >= 1: the next `count`, from the beginning again after the last."""
    return [problems[i % len(problems)] for i in range((step - 1) * count, step * count)]


def encode(model: ns.Model, problems: Sequence[Problem]) -> list[list[int]]:
    """The prompts of problems as token ids. Errors: ValueError as `chat.encode`."""
    return [chat.encode(model.tokenizer, problem.prompt) for problem in problems]


def roll_out(
    engine: ns.Engine, prompts: Sequence[Sequence[int]], sampling: ns.Sampling, seeds: Sequence[int]
) -> list[ns.Completion]:
    """Complete prompts [B], each with its own seed.

    Errors: KeyboardInterrupt where it was interrupted: a part of a step is of no use.
    """
    requests = [replace(sampling, seed=seed) for seed in seeds]
    done = ns.generate(engine.model, prompts, requests, engine=engine)
    if any(one.finish_reason == "aborted" for one in done):
        raise KeyboardInterrupt
    return done


@dataclass(frozen=True)
class Order:
    """What a step wants sampled."""

    seed: int  # of the run
    step: int  # from 1
    prompts: int  # P
    group: int  # G
    sampling: ns.Sampling  # all but the seed
    version: Version


def collect(
    engine: ns.Engine,
    task: Task,
    order: Order,
    share: Sequence[int],
    gather: Callable[[list[ns.Completion]], list[list[ns.Completion]]],
) -> Experience:
    """The rollouts of a step.

    Args:
      share: this rank's prompts, indices below P. Of N ranks, rank r has r, r + N, ...
      gather: this rank's completions -> those of every rank, by rank.
    """
    group = order.group
    problems = problems_of(task.problems, order.step, order.prompts)
    prompts = encode(engine.model, problems)
    mine = [prompts[i] for i in share for _ in range(group)]
    seeds = [seed_of(order.seed, order.step, TRAIN, i, j) for i in share for j in range(group)]
    parts = gather(roll_out(engine, mine, order.sampling, seeds))
    ranks = len(parts)
    done = [parts[i % ranks][i // ranks * group + j] for i in range(order.prompts) for j in range(group)]
    rewards = [task.reward(problems[i // group], one.text, one.tokens) for i, one in enumerate(done)]
    return Experience([prompts[i // group] for i in range(len(done))], done, rewards, group, order.version)

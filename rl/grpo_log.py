"""The lines of a run's log: a header, then one a step. docs/rl.md says what each field means."""

import itertools
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import revision, struct
from rl import mismatch
from rl.experience import Experience, Tokens, Version
from rl.grpo_config import GrpoConfig
from rl.policy_loss import Weights
from rl.tasks import Reward


@struct.state
class Known:
    """What the trainer itself knows of every token; fp32 nats."""

    old: Tensor  # [n], log-prob under the policy that was served
    ref_logp: Tensor  # [n], under the reference policy
    kl: Tensor  # [n], KL(pi_old || pi_0) of the token's row, over the whole vocabulary


def header(config: GrpoConfig, model: ns.Model, about: Mapping[str, Any], held: Mapping[str, Any]) -> dict[str, Any]:
    """The first line. Args: held: pytrees by name, whose bytes are told."""
    embed = model.params.embed
    options = {name: str(value) if name == "out" else value for name, value in sorted(vars(config).items())}
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nanospec": revision.version("nanospec"),
    }
    about_model = {
        "name": model.name,
        "parameters": sum(x.numel() for x in pytree.tree_leaves(model.params)),
        "weights": about["weights"],
        "dtype": str(embed.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(embed.device) if embed.is_cuda else str(embed.device),
    }
    size = {name: sum(x.numel() * x.element_size() for x in pytree.tree_leaves(tree)) for name, tree in held.items()}
    return {
        "header": {
            "options": options,
            "versions": versions,
            "model": about_model,
            "bytes": size,
            "ranks": about["ranks"],
            "commit": revision.commit(),
        }
    }


def of_rewards(rewards: Sequence[Reward]) -> dict[str, float | None]:
    """Their mean, and the shares that are solved."""
    n = len(rewards)
    return {
        "reward": sum(one.value for one in rewards) / n if n else None,
        **{
            name: sum(getattr(one, name) for one in rewards) / n if n else None
            for name in ("solved", "strict", "flexible")
        },
    }


def mean_loss(losses: Sequence[tuple[float, int]]) -> float | None:
    """The mean of batches' (mean loss, rows), each row counting once; None without a row."""
    rows = sum(n for _, n in losses)
    return sum(loss * n for loss, n in losses) / rows if rows else None


def of_rollouts(rollouts: Experience, clock: Sequence[float]) -> dict[str, Any]:
    """Rewards, lengths and speed.

    Args: clock: seconds at the beginning, after the rollouts, after pi_old, after the draft's training, at the end.
    """
    done, n = rollouts.completions, sum(rollouts.lengths)
    roll, before, teaching, after = (later - earlier for earlier, later in itertools.pairwise(clock))
    return of_rewards(rollouts.rewards) | {
        "mean_length": n / len(done),
        "truncated": sum(one.finish_reason == "length" for one in done) / len(done),
        "rollout_s": roll,
        "tok_s": n / roll,
        "train_s": before + after,
        "draft_s": teaching,
        "accepted_len": ns.mean_accepted_len(done),
        "tokens": n,
        "prompts": len(done) // rollouts.group,
        "group": rollouts.group,
    }


def of_tokens(config: GrpoConfig, tokens: Tokens, known: Known, weights: Weights) -> dict[str, Any]:
    """How far the sampler was from the policy, what the correction made of it, and the most memory there was in use."""
    device = tokens.target.device
    exact, gap = mismatch.agreement(known.old, tokens.target)
    n, rule = max(len(known.old), 1), config.acceptance
    return mismatch.weights(known.old, tokens.behaviour) | {
        "chi2": mismatch.chi_square(
            rule, config.alpha, config.spec_topk, tokens.target, tokens.behaviour, tokens.origin
        ),
        "masked": int((~weights.keep).sum()) / n,
        "clipped": int(weights.clipped.sum()) / n,
        "missing_mass": mismatch.missing_mass(rule, tokens.target, tokens.origin),
        "kl_mu_old": mismatch.divergence(known.old, tokens.behaviour),
        "kl_old_0": float(known.kl.double().mean()) if len(known.kl) else None,
        "kl_mean_gap": gap,
        "exact_share": exact,
        "memory_gb": torch.cuda.max_memory_allocated(device) / 1e9 if device.type == "cuda" else None,
    }


def of_versions(version: Version, tokens: Tokens, policy: int, changed: int) -> dict[str, Any]:
    """Which weights sampled. Args: policy: the version that is about to be updated; changed: that at the draft's last
    change."""
    stale = float((tokens.policy_version != policy).double().mean()) if len(tokens.policy_version) else 0.0
    age = None if version.draft is None else version.policy - changed
    return {"policy_version": version.policy, "draft_version": version.draft, "draft_age": age, "stale": stale}

"""The stale-weight alarm: what the engine samples with has to be what the log says.

Checksums find weights that were changed, or left alone, behind the run's back. What no checksum finds, such as a
captured graph that reads another address, shows in the log-probs of the tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

import nanospec_fn as ns
from rl import policy, ranks
from rl.ranks import Ranks
from rl.run_files import RunError


@dataclass(frozen=True)
class Served:
    """Checksums of an engine's weights."""

    policy: str
    draft: str


def served(engine: ns.Engine) -> Served:
    """Checksums of the weights that an engine would sample with; one pass over them."""
    return Served(policy.fingerprint(engine.params.target), policy.fingerprint(engine.params.draft))


def check(engine: ns.Engine, rank: Ranks, wanted: Served, policy_version: int, draft_version: int) -> None:
    """Before rollouts. Args: wanted: `served` when these versions had been made.

    Errors: RunError where the engine serves other weights, or one rank others than the rest.
    """
    found, step = served(engine), policy_version + 1
    for name, version in (("policy", policy_version), ("draft", draft_version)):
        if getattr(found, name) != getattr(wanted, name):
            raise RunError(f"step {step}: the engine does not serve {name} version {version}")
    if len({one.policy for one in ranks.gather(rank, found)}) > 1:
        raise RunError(f"step {step}: the ranks hold different weights of policy version {policy_version}")


def check_bits(engine: ns.Engine, line: Mapping[str, Any]) -> None:
    """After a step, by its line of the log.

    Errors: RunError where fp32 on a CPU, which promises equal bits, gave engine and trainer other log-probs.
    """
    embed = engine.model.params.embed
    if embed.device.type == "cpu" and embed.dtype == torch.float32 and line["exact_share"] not in (None, 1.0):
        raise RunError(
            f"step {line['step']}: the engine sampled with other weights than the trainer's: "
            f"{line['exact_share']:.1%} of the tokens have the trainer's log-prob"
        )

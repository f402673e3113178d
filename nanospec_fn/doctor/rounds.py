"""Rounds of a chain, and what they tell of acceptance where the end of a completion cut one short.

A cut round ended on an accepted draft because the completion did: what it drafted past there was never tested, so it
counts where it was tested and nowhere else.

Source: Kaplan and Meier 1958, Nonparametric estimation from incomplete observations: a cut round is a censored one, and
where it will be cut is known before it drafts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

import nanospec_fn as ns
from nanospec_fn import rehearsal


@dataclass(frozen=True)
class Round:
    """One round: the drafted tokens that were emitted, in order."""

    start: int  # position in the sequence of the first token that it emits
    accepted: int
    cut: bool  # the completion ended on the last of them

    def tested(self, depth: int) -> bool:
        """Whether the draft of this depth, from 1, met the target's token."""
        return depth <= self.accepted + (not self.cut)


@dataclass(frozen=True)
class Reach:
    """How many rounds accept at least so many drafted tokens."""

    depth: int
    share: float  # of all rounds, estimated
    tested: int  # rounds that tested a draft of this depth


class Stretch(NamedTuple):
    """The rounds that begin in a stretch of positions."""

    start: int
    rounds: int
    mean_length: float  # tokens, the bonus counted


def of(prompt: int, one: ns.Completion) -> list[Round]:
    """The rounds of a completion behind a prompt of so many tokens."""
    found, done = [], 1  # the prefill's own token
    for accepted in one.accepted:
        left = len(one.tokens) - done
        found.append(Round(prompt + done, accepted, cut=accepted == left))
        done += min(accepted + 1, left)
    return found


def along(hit: Tensor, length: Sequence[int]) -> list[Round]:
    """The rounds that chains would have had along known completions.

    Args: hit: [D, B, M] bool, entry (j, b, m): the draft of depth j + 1 for token m + 1 of completion b is right;
      length: tokens of each completion.
    """
    return [
        Round(pending + 1, accepted, cut=pending + 1 + accepted == n)
        for hits, n in zip(hit.transpose(0, 1).tolist(), length, strict=True)
        for pending, accepted in rehearsal.chain_rounds(hits, n)
    ]


def reach(rounds: Sequence[Round], depth: int) -> tuple[Reach, ...]:
    """Acceptance by depth from 1 to `depth`, or to the deepest that is known: others were cut before they got there."""
    found, share = [], 1.0
    for d in range(1, depth + 1):
        tested = sum(r.tested(d) for r in rounds)
        if share and not tested:
            break
        share *= sum(r.accepted >= d for r in rounds) / tested if tested else 0.0
        found.append(Reach(d, share, tested))
    return tuple(found)


def mean_length(rounds: Sequence[Round], depth: int) -> float:
    """Tokens that an uncut round emits, the bonus counted: a lower bound where no round tested every depth."""
    return 1 + sum(r.share for r in reach(rounds, depth))


def by_position(rounds: Sequence[Round], depth: int) -> tuple[Stretch, ...]:
    """Rounds by the position that they begin at; stretches double."""
    bins: dict[int, list[Round]] = {}
    for r in rounds:
        bins.setdefault(0 if r.start < 32 else 1 << (r.start.bit_length() - 1), []).append(r)
    return tuple(Stretch(start, len(bins[start]), mean_length(bins[start], depth)) for start in sorted(bins))

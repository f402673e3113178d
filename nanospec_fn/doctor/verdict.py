"""What the doctor reports: what it saw, what it tried, and how that becomes one verdict.

Every verdict rests on a sign test, and none is given where the test could not have told: a damage that is not found and
an input that makes no difference mean something only where a majority of two to one would have been seen.
"""

import itertools
from dataclasses import dataclass, replace
from typing import NamedTuple

from nanospec_fn.doctor.examine import DEPTH, Comparison, sign_test
from nanospec_fn.doctor.rounds import Reach, Stretch

HEALTHY = 2.0  # tokens a round of a chain of examine.DEPTH, the bonus counted: below, a draft hardly pays for itself
CHANCE = 1e-8  # of a majority by luck, under which a way counts as better
LUCK = 0.01  # the same where one thing is asked and not many ways are tried
LIFT = 0.05  # of the mean accepted length, relative, that a way must bring unless the files speak for it
MAP_LIFT = 0.02  # the same of another map of ids, where the file's own is one of zeros
SOUND = ("healthy", "weak")
UNCLEAR, BROKEN = "not_enough_evidence", "broken"  # the verdicts that name no damage and are not sound


class Finding(NamedTuple):
    """What was looked at, and what was seen."""

    check: str
    text: str


class Verdict(NamedTuple):
    """A name for programs and a sentence for people; of a damage, how it is known."""

    name: str
    reason: str


@dataclass(frozen=True)
class Trial:
    """A way to run the head that was tried, or one of its inputs taken from elsewhere."""

    damage: str  # what it would have undone
    how: str
    comparison: Comparison


@dataclass(frozen=True)
class Report:
    """What was found. The first damage is the verdict."""

    target: str
    draft: str
    findings: tuple[Finding, ...] = ()
    damages: tuple[Verdict, ...] = ()
    doubts: tuple[str, ...] = ()  # what would change the verdict and cannot be told from so little
    trials: tuple[Trial, ...] = ()
    controls: tuple[Trial, ...] = ()  # the draft without one of its inputs, against the draft as it is
    positions: int = 0  # tokens of the completions that a draft could have been right about
    rounds: int = 0  # the engine's, those left out that the end of a completion cut short
    accepted_length: float | None = None  # of the engine's rounds, the bonus counted
    by_depth: tuple[Reach, ...] = ()
    by_position: tuple[Stretch, ...] = ()

    def saw(self, check: str, text: str) -> "Report":
        return replace(self, findings=(*self.findings, Finding(check, text)))

    def blames(self, damage: str, reason: str) -> "Report":
        return replace(self, damages=(*self.damages, Verdict(damage, reason)))

    def doubt(self, reason: str) -> "Report":
        return replace(self, doubts=(*self.doubts, reason))

    @property
    def verdict(self) -> Verdict:
        """The first damage with the others told; without one, what the rounds show."""
        if self.damages:
            first, *others = self.damages
            return Verdict(first.name, first.reason + "".join(f"; also {d.name}: {d.reason}" for d in others))
        if self.accepted_length is None:
            return Verdict("unmeasured", "the completions are too short for a round")
        length = f"{self.accepted_length:.2f} tokens a round"
        if self.positions < needed():
            return Verdict(UNCLEAR, f"{length} along {self.positions} positions, and a verdict takes {needed()}")
        if self.doubts:
            return Verdict(UNCLEAR, "; ".join((length, *self.doubts)))
        return self._measured(length + ("; no other way to run it is better" if self.trials else ""))

    def _measured(self, seen: str) -> Verdict:
        """The verdict on a draft without a known damage."""
        assert self.accepted_length is not None
        # A round is worth HEALTHY tokens where as many drafted tokens are accepted as rounds are made.
        accepted = round((self.accepted_length - 1) * self.rounds / (HEALTHY - 1))
        last = self.by_depth[-1]
        untold = round((DEPTH - last.depth) * last.share * self.rounds / (HEALTHY - 1))  # at most, of depths not tested
        if sign_test(accepted, self.rounds) < LUCK:
            return Verdict("healthy", seen)
        deaf = [c for c in self.controls if c.comparison.chance >= LUCK]
        if deaf:
            told = "; ".join(evidence(c.how, c.comparison) for c in deaf)
            reason = f"{seen}; broken in a way this doctor does not know, an input makes it no better: {told}"
            return Verdict(BROKEN, reason)
        unclear = [c for c in self.controls if c.comparison.chance >= CHANCE]
        if unclear:
            told = "; ".join(evidence(c.how, c.comparison) for c in unclear)
            return Verdict(UNCLEAR, f"{seen}; weak or broken, an input that may make it no better: {told}")
        if sign_test(self.rounds, accepted + untold) < LUCK:
            return Verdict("weak", f"{seen}, under {HEALTHY:g}, it predicts poorly")
        return Verdict(UNCLEAR, f"{seen}; as near to {HEALTHY:g} as {self.rounds} rounds can tell: healthy or weak")


def needed() -> int:
    """The fewest positions of which two in three on one side are no luck."""
    return next(n for n in itertools.count(1) if sign_test(n - n // 3, n // 3) < CHANCE)


def helps(found: Comparison, lift: float) -> bool:
    """Whether a way is better by more than luck and by enough to matter."""
    return found.chance < CHANCE and found.other >= found.given * (1 + lift)


def evidence(how: str, found: Comparison) -> str:
    """How a repair is known to be one."""
    return (
        f"{how}: {found.given:.2f} -> {found.other:.2f} tokens a round, better from {found.more} of {found.positions} "
        f"positions and worse from {found.fewer} (by luck: {found.chance:.0e})"
    )

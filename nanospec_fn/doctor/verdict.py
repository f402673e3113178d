"""What the doctor reports: what it saw, what it tried, and how that becomes one verdict.

Every verdict rests on a sign test, and none is given where the test could not have told: a damage that is not found and
an input that makes no difference mean something only where a majority of two to one would have been seen.
"""

import itertools
from dataclasses import dataclass, replace

from nanospec_fn.doctor.examine import DEPTH, Comparison, sign_test
from nanospec_fn.doctor.rounds import Reach

HEALTHY = 2.0  # tokens a round of a chain of examine.DEPTH, the bonus counted: below, a draft hardly pays for itself
CHANCE = 1e-8  # of a majority by luck, under which a way counts as better
LUCK = 0.01  # the same where one thing is asked and not many ways are tried
LIFT = 0.02  # of the mean accepted length, relative, that a way must bring unless the files speak for it
SOUND = ("healthy", "weak")
UNCLEAR, BROKEN = "not_enough_evidence", "broken"  # the verdicts that name no damage and are not sound


@dataclass(frozen=True)
class Trial:
    """A way to run the head that was tried, or one of its inputs taken from elsewhere."""

    damage: str  # what it would have undone
    how: str
    comparison: Comparison


@dataclass(frozen=True)
class Report:
    """What was found. A damage is a verdict's name and how it is known; the first one is the verdict."""

    target: str
    draft: str
    findings: tuple[tuple[str, str], ...] = ()  # what was looked at, what was seen
    damages: tuple[tuple[str, str], ...] = ()
    doubts: tuple[str, ...] = ()  # what would change the verdict and cannot be told from so little
    trials: tuple[Trial, ...] = ()
    controls: tuple[Trial, ...] = ()  # the draft without one of its inputs, against the draft as it is
    positions: int = 0  # tokens of the completions that a draft could have been right about
    rounds: int = 0  # the engine's, those left out that the end of a completion cut short
    accepted_length: float | None = None  # of the engine's rounds, the bonus counted
    by_depth: tuple[Reach, ...] = ()
    by_position: tuple[tuple[int, int, float], ...] = ()  # from this position on, rounds, their mean length

    def saw(self, check: str, text: str) -> "Report":
        return replace(self, findings=(*self.findings, (check, text)))

    def blames(self, damage: str, reason: str) -> "Report":
        return replace(self, damages=(*self.damages, (damage, reason)))

    def doubt(self, reason: str) -> "Report":
        return replace(self, doubts=(*self.doubts, reason))

    @property
    def verdict(self) -> tuple[str, str]:
        """A name for programs and a sentence for people."""
        if self.damages:
            name, reason = self.damages[0]
            others = "".join(f"; also {other}: {why}" for other, why in self.damages[1:])
            return name, reason + others
        if self.accepted_length is None:
            return "unmeasured", "the completions are too short for a round"
        length = f"{self.accepted_length:.2f} tokens a round"
        if self.positions < needed():
            return UNCLEAR, f"{length} along {self.positions} positions, and a verdict takes {needed()}"
        if self.doubts:
            return UNCLEAR, "; ".join((length, *self.doubts))
        return self._measured(length + ("; no other way to run it is better" if self.trials else ""))

    def _measured(self, seen: str) -> tuple[str, str]:
        """The verdict on a draft without a known damage."""
        assert self.accepted_length is not None
        # A round is worth HEALTHY tokens where as many drafted tokens are accepted as rounds are made.
        accepted = round((self.accepted_length - 1) * self.rounds / (HEALTHY - 1))
        last = self.by_depth[-1]
        untold = round((DEPTH - last.depth) * last.share * self.rounds / (HEALTHY - 1))  # at most, of depths not tested
        if sign_test(accepted, self.rounds) < LUCK:
            return "healthy", seen
        deaf = [c for c in self.controls if c.comparison.chance >= LUCK]
        if deaf:
            told = "; ".join(evidence(c.how, c.comparison) for c in deaf)
            return BROKEN, f"{seen}; broken in a way this doctor does not know, an input makes it no better: {told}"
        unclear = [c for c in self.controls if c.comparison.chance >= CHANCE]
        if unclear:
            told = "; ".join(evidence(c.how, c.comparison) for c in unclear)
            return UNCLEAR, f"{seen}; weak or broken, an input that may make it no better: {told}"
        if sign_test(self.rounds, accepted + untold) < LUCK:
            return "weak", f"{seen}, under {HEALTHY:g}, it predicts poorly"
        return UNCLEAR, f"{seen}; as near to {HEALTHY:g} as {self.rounds} rounds can tell: healthy or weak"


def needed() -> int:
    """The fewest positions of which two in three on one side are no luck."""
    return next(n for n in itertools.count(1) if sign_test(n - n // 3, n // 3) < CHANCE)


def helps(found: Comparison, lift: float = LIFT) -> bool:
    """Whether a way is better by more than luck and by enough to matter."""
    return found.chance < CHANCE and found.other >= found.given * (1 + lift)


def evidence(how: str, found: Comparison) -> str:
    """How a repair is known to be one."""
    return (
        f"{how}: {found.given:.2f} -> {found.other:.2f} tokens a round, better from {found.more} of {found.positions} "
        f"positions and worse from {found.fewer} (by luck: {found.chance:.0e})"
    )

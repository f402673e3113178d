"""What the doctor reports: what it saw, what it tried, and how that becomes one verdict."""

from dataclasses import dataclass, replace

from nanospec_fn.doctor.examine import Comparison

HEALTHY = 2.0  # tokens a round of a chain of examine.DEPTH, the bonus counted: below, a draft hardly pays for itself
CHANCE = 1e-8  # of a majority by luck, under which a way counts as better
LIFT = 0.02  # of the mean accepted length, relative, that a way must bring unless the files speak for it


@dataclass(frozen=True)
class Trial:
    """A way to run the head that was tried."""

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
    trials: tuple[Trial, ...] = ()
    accepted_length: float | None = None  # of the engine's rounds, the bonus counted
    by_depth: tuple[float, ...] = ()  # of the rounds, the share that accepted at least 1, 2, .. drafted tokens
    by_position: tuple[tuple[int, int, float], ...] = ()  # from this position on, rounds, their mean length

    def saw(self, check: str, text: str) -> "Report":
        return replace(self, findings=(*self.findings, (check, text)))

    def blames(self, damage: str, reason: str) -> "Report":
        return replace(self, damages=(*self.damages, (damage, reason)))

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
        tried = "; no other way to run it is better" if self.trials else ""
        if self.accepted_length < HEALTHY:
            return "weak", f"{length}, under {HEALTHY:g}{tried}, it predicts poorly"
        return "healthy", f"{length}{tried}"


def helps(found: Comparison, lift: float = LIFT) -> bool:
    """Whether a way is better by more than luck and by enough to matter."""
    return found.chance < CHANCE and found.other >= found.given * (1 + lift)


def evidence(how: str, found: Comparison) -> str:
    """How a repair is known to be one."""
    return (
        f"{how}: {found.given:.2f} -> {found.other:.2f} tokens a round, better from {found.more} of {found.positions} "
        f"positions and worse from {found.fewer} (by luck: {found.chance:.0e})"
    )

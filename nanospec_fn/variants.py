"""Which shape of round comes next: pure host policy, from measured times and running acceptance. No torch.

Under rule `exact` no bit of the output depends on the choice, so the driver (engine.py) may take, round by round, the
variant that promises the most tokens a second: no draft, a short chain, a long one, a tree. Every variant is a function
of the same state. The rule that explores is deterministic: each variant is measured a few times at each batch size,
and then again whenever one more round of it costs at most a hundredth of the time since its last (a tenth, while little
is known of its acceptance; a thousandth, where no acceptance could make it win).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

# Rounds of a variant before its time at a batch size is believed; the first one compiles, and does not count.
PROBES = 3
# A variant is measured again once this many times what a round of it takes have passed since its last.
PATIENCE = 100
HURRY = 10  # the same where its acceptance is hardly known
HOPELESS = 1000  # the same where it would lose with everything accepted
KNOWN = 16  # drafts that were tested, decayed, before it is
# Rows of one pass. Beyond it a pass is bound by arithmetic, and a drafted row costs what a sequence's own does: on an
# H200 an 8B model gained 2% from drafts at 128 slots, of 6 rows each, and nothing at 256 (docs/performance.md).
MAX_ROWS = 768
DECAY = 0.99  # what one more draft of its kind leaves of a draft's weight in the acceptance: about 100 count
SMOOTHING = 0.2  # weight of the newest time


@dataclass(frozen=True)
class Variant:
    """A shape of round."""

    top_k: int  # variants of one top_k share what is known of acceptance: level d is the same in each
    depth: int  # 0: plain decoding
    rows: int  # of the target's pass, for each slot: the nodes and the root


@dataclass(frozen=True)
class Config:
    """What there is to choose from; the first variant is plain decoding, which always fits."""

    variants: tuple[Variant, ...]
    max_rows: int = MAX_ROWS  # of a pass over all slots; larger rounds are not taken

    def fits(self, bucket: int) -> list[int]:
        """Indices of the variants whose rounds over so many slots stay within the budget."""
        return [i for i, v in enumerate(self.variants) if i == 0 or v.rows * bucket <= self.max_rows]


@dataclass(frozen=True)
class Time:
    """What rounds of one variant take at one bucket."""

    ms: float
    samples: int
    last: float  # Stats.elapsed at the newest of them


@dataclass(frozen=True)
class Level:
    """How often drafting was right at one depth, where it had been right above; decayed counts."""

    reached: float = 0.0
    passed: float = 0.0

    @property
    def rate(self) -> float:
        """The chance of one more token; one half where nothing is known."""
        return (self.passed + 0.5) / (self.reached + 1.0)


@dataclass(frozen=True)
class Stats:
    """What has been seen. Times belong to a bucket of slots, acceptance to all of them."""

    elapsed: float = 0.0  # milliseconds of all rounds
    times: Mapping[tuple[int, int], Time] = field(default_factory=dict)  # by (bucket, variant)
    levels: Mapping[int, tuple[Level, ...]] = field(default_factory=dict)  # by top_k, from depth 1 on


@dataclass(frozen=True)
class Backlog:
    """How far the draft may be behind: by slot, the most tokens that it has not been run on.

    A plain round after another needs one row of the draft a slot, where one after a tree needs `most`. What a step of
    the target's alone left out is not counted: it stays a hole, behind which the draft's guesses are worth less.
    """

    most: int  # tokens of the longest round: of a slot of which nothing is known
    tokens: Mapping[int, int] = field(default_factory=dict)
    newest: int = 0  # what the newest step that was issued emits at most
    holes: frozenset[int] = frozenset()  # slots whose request the draft has missed a part of


@dataclass(frozen=True)
class Choice:
    """What the next step runs."""

    variant: int  # of a round, an index
    alone: bool = False  # the target without the draft, which then misses what the step emits


def choose(
    config: Config, stats: Stats, backlog: Backlog, slots: Sequence[int], bucket: int, running: int, may_leave: bool
) -> Choice:
    """What a step without a lossy request runs; of a prefill only whether it is the target's alone counts.

    - The target alone, where rounds over all that run have no room for a tree;
    - else what `pick` picks; where that is no tree, and the draft has missed a part of every request of the round, the
      target alone again: to keep up would cost more than it is worth.

    Args:
      slots, bucket: of the round, none of a prefill, and what the step is padded to.
      running: the bucket of all requests in slots.
      may_leave: whether the draft may miss anything: not beside a lossy request, whose law depends on what it has seen.
    """
    if may_leave and config.fits(running) == [0]:
        return Choice(0, alone=True)
    variant = pick(config, stats, bucket)
    behind = bool(slots) and backlog.holes.issuperset(slots)
    return Choice(variant, alone=may_leave and behind and not config.variants[variant].depth)


def expected(variant: Variant, stats: Stats) -> float:
    """Tokens that a round emits for a slot, the target's own included."""
    levels = stats.levels.get(variant.top_k, ())
    total = alive = 1.0
    for depth in range(variant.depth):
        alive *= (levels[depth] if depth < len(levels) else Level()).rate
        total += alive
    return total


def pick(config: Config, stats: Stats, bucket: int) -> int:
    """The variant, an index, that the next round over a bucket of slots should have.

    One that is not known at this bucket yet, or whose turn to be measured again has come; else the one that is
    expected to emit the most tokens a millisecond, at ties the earlier one.
    """
    fits = config.fits(bucket)
    times = {i: stats.times.get((bucket, i), Time(0.0, 0, 0.0)) for i in fits}
    for i in fits:
        if times[i].samples < PROBES:
            return i
    rates = {i: expected(config.variants[i], stats) / times[i].ms for i in fits}
    best = max(fits, key=lambda i: rates[i])
    for i in fits:
        if i != best and stats.elapsed - times[i].last >= _patience(config.variants[i], stats, times[i], rates[best]):
            return i
    return best


def _patience(variant: Variant, stats: Stats, time: Time, best: float) -> float:
    """Milliseconds after which a variant that is not the best one is measured again."""
    if (1 + variant.depth) / time.ms <= best:  # it would lose with everything accepted: only its time could change that
        return HOPELESS * time.ms
    levels = stats.levels.get(variant.top_k, ())
    known = not variant.depth or (levels and levels[0].reached >= KNOWN)
    return (PATIENCE if known else HURRY) * time.ms


def observe(
    config: Config, stats: Stats, bucket: int, variant: int, milliseconds: float, accepted: Sequence[int]
) -> Stats:
    """Take in one round.

    Args:
      bucket, variant: of the round.
      milliseconds: what it took, above 0.
      accepted: for each slot that took part and goes on, the drafted tokens that were right.
    """
    old = stats.times.get((bucket, variant))
    elapsed = stats.elapsed + milliseconds
    if old is None or old.samples < 2:  # the first one may have captured a graph
        time = Time(milliseconds, old.samples + 1 if old else 1, elapsed)
    else:  # one hiccup of the machine must not decide: no sample counts for more than twice the estimate
        ms = old.ms + SMOOTHING * (min(milliseconds, 2 * old.ms) - old.ms)
        time = Time(ms, old.samples + 1, elapsed)
    stats = replace(stats, elapsed=elapsed, times={**stats.times, (bucket, variant): time})
    shape = config.variants[variant]
    if not shape.depth or not accepted:
        return stats
    return replace(stats, levels={**stats.levels, shape.top_k: _count(stats, shape, accepted)})


def _count(stats: Stats, shape: Variant, accepted: Sequence[int]) -> tuple[Level, ...]:
    """The levels of a shape's kind after one more round."""
    levels = list(stats.levels.get(shape.top_k, ()))
    levels += [Level()] * (shape.depth - len(levels))
    exactly = [0] * (shape.depth + 1)
    for n in accepted:
        exactly[n] += 1
    reached, kept = len(accepted), DECAY ** len(accepted)
    for depth in range(shape.depth):
        passed = reached - exactly[depth]
        level = levels[depth]
        levels[depth] = Level(level.reached * kept + reached, level.passed * kept + passed)
        reached = passed
    return tuple(levels)


def kept_up(backlog: Backlog, slots: Iterable[int]) -> bool:
    """Whether the draft has been run on all but the newest token of each slot, whatever is still to be read."""
    return all(backlog.tokens.get(slot, backlog.most) == 1 for slot in slots)


def issued(backlog: Backlog, slots: Iterable[int], emits: int) -> Backlog:
    """Take in a step over these slots that emits at most so many tokens; it may yet be refused pages."""
    behind = {slot: max(backlog.tokens.get(slot, backlog.most), emits) for slot in slots}
    return replace(backlog, tokens={**backlog.tokens, **behind}, newest=emits)


def landed(backlog: Backlog, emitted: Mapping[int, int]) -> Backlog:
    """Take in what a step emitted by slot; a newer one may have been issued since."""
    behind = {slot: max(count, backlog.newest) for slot, count in emitted.items()}
    return replace(backlog, tokens={**backlog.tokens, **behind})


def left_out(backlog: Backlog, slots: Iterable[int]) -> Backlog:
    """Take in a step of the target's alone over these slots."""
    return replace(backlog, holes=backlog.holes.union(slots))


def seated(backlog: Backlog, coming: Mapping[int, int | None]) -> Backlog:
    """Take in new requests.

    Args: coming: their slots, and the slot whose prompt's KV, the draft's with it, each takes over, or None. A donor's
      hole may lie behind the prompt; the new request is taken to have it all the same.
    """
    inherited = {slot for slot, donor in coming.items() if donor in backlog.holes}
    return replace(backlog, holes=backlog.holes.difference(coming).union(inherited))

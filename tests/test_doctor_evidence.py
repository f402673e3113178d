"""The doctor claims what its evidence carries: rounds that were cut, few positions, drafts at a verdict's border."""

import itertools
from dataclasses import replace

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import rehearsal
from nanospec_fn.doctor import diagnosis, examine, rounds, verdict
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.examine import Comparison
from nanospec_fn.doctor.rounds import Reach, Round
from nanospec_fn.doctor.verdict import Report, Trial
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> ns.Model:
    """A tiny random target."""
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    return ns.load(str(tiny.write(tmp_path_factory.mktemp("t") / "m", raw, tiny.state_of(tiny.llama(raw)))))


def test_rounds_and_where_they_are_cut():
    """Bugs: a round at the wrong position; a cut that is not seen; a full round counted as cut."""
    # Behind a prompt of 30: rounds begin at 31, 34 (2 drafts and the bonus before it), 35; the limit cuts the last.
    one = ns.Completion(tokens=list(range(6)), accepted=[2, 0, 1])
    found = rounds.of(30, one)
    assert found == [Round(31, 2, cut=False), Round(34, 0, cut=False), Round(35, 1, cut=True)]
    # Depth 1 was tested by all, depth 2 by the first and depth 3 too, where it failed.
    assert rounds.reach(found, 4) == (Reach(1, 2 / 3, 3), Reach(2, 2 / 3, 1), Reach(3, 0.0, 1), Reach(4, 0.0, 0))
    assert rounds.mean_length(found, 4) == 1 + 2 / 3 + 2 / 3
    assert rounds.by_position(found, 4) == ((0, 1, 3.0), (32, 2, 1.5))


def test_what_no_round_tested_is_not_known():
    """Bug: a draft of depth 3 called rejected, or accepted, where all completions end before it."""
    short = [Round(5, 2, cut=True), Round(9, 0, cut=False)]
    assert rounds.reach(short, 5) == (Reach(1, 0.5, 2), Reach(2, 0.5, 1))


def test_uncut_rounds_are_counted_plainly():
    """Bug: an estimate that differs from the plain share where nothing is missing."""
    accepted = [5, 0, 3, 1, 0, 2, 5, 4, 0, 1]
    found = [Round(i, a, cut=False) for i, a in enumerate(accepted)]
    shares = [r.share for r in rounds.reach(found, 5)]
    assert shares == pytest.approx([sum(a >= d for a in accepted) / 10 for d in range(1, 6)])
    assert rounds.mean_length(found, 5) == pytest.approx(1 + sum(accepted) / 10)


def test_a_cut_round_does_not_count_as_a_miss(target):
    """A copy of the target is always right, so every round is worth 6 tokens, however short the completion is.

    Bug: 8 tokens are the prefill's, a round of 6 and a round that the limit cut to 1: 3.5 tokens a round.
    """
    prompts = [[5, 6, 7], [9, 8]]
    report = diagnosis.diagnose(Case(target, prompts, max_tokens=8), "frozen")
    assert report.accepted_length == 6.0
    assert report.by_depth == (Reach(1, 1.0, 4), *(Reach(d, 1.0, 2) for d in (2, 3, 4, 5)))
    assert (report.rounds, report.positions) == (2, 14)
    # The first rounds begin at 4 and 3, the others six tokens on.
    assert report.by_position == ((0, 4, 6.0),)


def test_rehearsed_rounds_are_the_engines(target):
    """Bug: a rehearsal that cuts its last round elsewhere than the limit does."""
    prompts, draft = [[5, 6, 7], [9, 8]], ns.load_draft("frozen", target)
    for most in (3, 7, 8, 13):
        out = ns.generate(target, prompts, ns.Sampling(max_tokens=most), draft=draft, speculation=ns.Speculation())
        length = [len(one.tokens) for one in out]
        hit = torch.ones(5, 2, max(length), dtype=torch.bool)  # it is always right
        engine = [(r.accepted, r.cut) for p, one in zip(prompts, out, strict=True) for r in rounds.of(len(p), one)]
        assert [(r.accepted, r.cut) for r in rounds.along(hit, length)] == engine


def test_a_prompt_moves_rounds_and_changes_none():
    """Bug: a replay behind a prompt that reads the hits of the row before or after. The oracle is `along`, which is
    given the same hits from the prefill's own token on."""
    generator = torch.Generator().manual_seed(0)
    for depth, prompt, tokens in itertools.product((1, 3), (1, 4), (0, 1, 2, 7, 12)):
        hit = torch.rand(depth, 5, prompt + tokens, generator=generator) < 0.7
        found = rounds.along(hit[:, :, prompt - 1 :], [tokens] * 5)
        sizes = (torch.full((5,), size) for size in (prompt + tokens, prompt))
        assert rehearsal.accepted_length(hit, *sizes) == (5 * max(0, tokens - 1), len(found))
        assert sum(r.accepted + (not r.cut) for r in found) == 5 * max(0, tokens - 1)


def test_the_positions_that_a_verdict_takes():
    """The smallest number of which two in three are under 1e-8 by luck. The oracle is Pascal's triangle."""
    row, n = [1], 0
    while sum(row[: n // 3 + 1]) * 10**8 >= 2**n:
        row, n = [a + b for a, b in itertools.pairwise([0, *row, 0])], n + 1
    assert verdict.needed() == n


PLENTY = Report("t", "d", positions=1000, rounds=300, by_depth=(*(Reach(d, 0.1, 9) for d in range(1, 6)),))


def heard(more: int, fewer: int) -> Trial:
    found = Comparison(1.1, 1.2, 1000, more, fewer, 0.0, examine.sign_test(more, fewer))
    return Trial("broken", "its tokens, not those of elsewhere", found)


def test_a_verdict_needs_its_evidence():
    """Bugs: a firm word on a few positions, for a length that is 2 within its error, or for a doubtful control."""
    good, poor = replace(PLENTY, accepted_length=3.0), replace(PLENTY, accepted_length=1.3)
    assert (good.verdict.name, poor.verdict.name) == ("healthy", "weak")
    few = verdict.needed() - 1
    assert replace(good, positions=few).verdict.name == replace(poor, positions=few).verdict.name == verdict.UNCLEAR
    assert f"{few} positions" in replace(good, positions=few).verdict.reason
    for length, word in ((2.3, "healthy"), (2.1, verdict.UNCLEAR), (2.0, verdict.UNCLEAR), (1.9, verdict.UNCLEAR)):
        assert replace(PLENTY, accepted_length=length).verdict.name == word
    assert good.doubt("the template").verdict == (verdict.UNCLEAR, "3.00 tokens a round; the template")
    # Half of all rounds may have gone on to depths that were not tested.
    short = replace(poor, by_depth=(Reach(1, 0.5, 300),))
    assert short.verdict.name == verdict.UNCLEAR
    assert replace(good, positions=few).blames("refused", "by its files").verdict.name == "refused"
    reads, may_read, deaf = heard(700, 300), heard(550, 450), heard(500, 500)
    for controls, word in (
        ([reads, reads], "weak"),
        ([reads, may_read], verdict.UNCLEAR),
        ([reads, deaf], "broken"),
        ([may_read, deaf], "broken"),
    ):
        assert replace(poor, controls=tuple(controls)).verdict.name == word
        assert replace(good, controls=tuple(controls)).verdict.name == "healthy"


def test_inputs_from_elsewhere(target):
    """Bugs: an input left in its place, or one that no position has; the prompt moved too."""
    view = examine.observe(target, [1], [[5, 6], [7]], [[1, 2, 3], [4, 8]])
    moved = examine.elsewhere(view, view.tokens)
    # Response tokens 1 2 3 4 8, each replaced by the one two before it.
    assert moved.tolist() == [[5, 6, 4, 8, 1], [7, 2, 3, *view.tokens[1, 3:].tolist()]]
    features = examine.elsewhere(view, view.streams[1])
    assert torch.equal(features[0, 2], view.streams[1][1, 1])
    assert torch.equal(features[0, :2], view.streams[1][0, :2])

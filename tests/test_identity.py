"""bench.identity: does it see one differing bit, and nothing else?"""

import dataclasses
import json
import math

import pytest

import nanospec_fn as ns
from bench import identity
from bench.identity import Task, Work
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
WORKS = [Work(2, 3, 12), Work(1, 2, 6), Work(2, 1, 6, eager=True)]


@pytest.fixture(scope="module")
def task() -> Task:
    model = tiny.model()
    return Task(model, ns.load_draft("frozen", model), "frozen", [[1, 2, 3], [4, 5], [6, 7, 8, 9]], "auto")


def test_what_is_compared(task):
    """Catches: a reference that is compared with itself, a shape or a batch left out."""
    rows = list(identity.compare(task, WORKS, [None, ns.Speculation(depth=2)], 1.0, scored=2))
    assert [(r["shape"], r["bs"], r["eager"], r["against"]) for r in rows] == [
        ("plain", 2, False, "score"),
        ("plain", 1, False, "plain"),
        ("plain", 2, True, "plain"),
        ("1x2", 2, False, "plain"),
        ("1x2", 1, False, "plain"),
        ("1x2", 2, True, "plain"),
    ]
    assert [r["differing"] for r in rows] == [0] * 6
    assert all(r["mean_accepted_len"] > 1 for r in rows[3:])


WIDE_AND_LONG = [Work(2, 1, 12), Work(1, 3, 5), Work(2, 2, 6, eager=True)]


def test_the_reference_covers_the_most_prompts_and_the_most_tokens(task):
    """Catches: a reference of the most tokens in all; prompts of a wider work not compared."""
    rows = list(identity.compare(task, WIDE_AND_LONG, [None, ns.Speculation(depth=2)], 1.0, scored=3))
    assert [(r["bs"], r["prompts"], r["tokens"], r["against"]) for r in rows[:4]] == [
        (2, 3, 12, "score"),
        (1, 3, 5, "plain"),
        (2, 1, 12, "plain"),
        (2, 2, 6, "plain"),
    ]
    assert len(rows) == 7
    assert [r["differing"] for r in rows] == [0] * 7


def test_a_difference_in_the_last_prompt_is_seen(task, monkeypatch):
    """Catches: completions that no completion of the reference stands beside, left out without a word."""
    real = identity.complete

    def last_token_off(task, one, spec, temperature):
        out, seconds = real(task, one, spec, temperature)
        if spec and one.prompts == 3:
            out[2] = dataclasses.replace(out[2], tokens=[*out[2].tokens[:-1], out[2].tokens[-1] ^ 1])
        return out, seconds

    monkeypatch.setattr(identity, "complete", last_token_off)
    rows = list(identity.compare(task, WIDE_AND_LONG, [None, ns.Speculation(depth=2)], 1.0, scored=1))
    assert [r["differing"] for r in rows if (r["prompts"], r["shape"]) == (3, "1x2")] == [1]
    assert sum(r["differing"] for r in rows) == 1


def test_completions_without_a_reference_are_no_comparison(task):
    """Catches: as above, where a list is passed that is too short."""
    reference, _ = identity.complete(task, WORKS[0], None, 1.0)
    with pytest.raises(ValueError, match="zip"):
        identity.differing(reference, reference[:2], 12)


def test_more_prompts_than_there_are_are_refused_before_a_model_loads(tmp_path, monkeypatch, capsys):
    """Catches: a row that says 100 prompts of a file that has 2."""
    (tmp_path / "two.txt").write_text("one\ntwo\n")
    monkeypatch.delattr(ns, "load")
    with pytest.raises(SystemExit, match="2"):
        identity.main(["--bs", "1:2x8", "2:3x4", "--prompts", str(tmp_path / "two.txt")])
    assert f"3 prompts are more than the 2 of {tmp_path / 'two.txt'}" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["token", "logp", "short", "behaviour"])
def test_one_differing_bit_is_seen(task, change):
    """Catches: log-probs compared with a tolerance, an output that ends early and is called equal."""
    reference, _ = identity.complete(task, WORKS[0], None, 1.0)
    out = [dataclasses.replace(o) for o in reference]
    one = out[1]
    up = [*one.target_logp[:-1], math.nextafter(one.target_logp[-1], 0)]
    out[1] = {
        "token": dataclasses.replace(one, tokens=[*one.tokens[:-1], one.tokens[-1] ^ 1]),
        "logp": dataclasses.replace(one, target_logp=up, behaviour_logp=up),
        "short": dataclasses.replace(one, tokens=one.tokens[:-1]),
        "behaviour": dataclasses.replace(one, behaviour_logp=up),
    }[change]
    assert identity.differing(reference, reference, 12) == 0
    assert identity.differing(out, reference, 12) == 1


def test_a_difference_fails_the_command(task, monkeypatch, capsys, tmp_path):
    """Catches: a table that shows a difference beside an exit code that says all is well."""
    monkeypatch.setattr(identity, "load", lambda *_: task)
    options = ["--bs", "2:3x8", "--shape", "1x2", "--temperature", "0", "--out", str(tmp_path / "rows.jsonl")]
    assert identity.main(options) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [r["differing"] for r in rows] == [0, 0]
    assert "| 1x2 | 0 | 2 | 3 x 8 | eager | plain | 0 |" in capsys.readouterr().out
    monkeypatch.setattr(identity, "differing", lambda *_: 1)
    assert identity.main(options) == 1


@pytest.mark.parametrize("text", ["8", "8:40", "8:0x5", "a:1x1", "1:2x3x4"])
def test_bad_work_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        identity.main(["--bs", text])
    assert "BS:PROMPTSxTOKENS" in capsys.readouterr().err

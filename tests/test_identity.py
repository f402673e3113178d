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
    assert "| 1x2 | 0 | 2 | 3 x 8 | captured | plain | 0 |" in capsys.readouterr().out
    monkeypatch.setattr(identity, "differing", lambda *_: 1)
    assert identity.main(options) == 1


@pytest.mark.parametrize("text", ["8", "8:40", "8:0x5", "a:1x1", "1:2x3x4"])
def test_bad_work_is_refused(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        identity.main(["--bs", text])
    assert "BS:PROMPTSxTOKENS" in capsys.readouterr().err

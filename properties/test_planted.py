"""Each planted bug makes the state machine fail, by a property that is meant to see it."""

import re
from collections import Counter

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from properties.machine import MODES
from properties.planted import PLANTS
from properties.test_engine import CI, Schedules

# The gate's own run, ended at the first failure: no shrinking.
FIRST = settings(CI, phases=(Phase.generate,), print_blob=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANTS)
def test_planted_bug_is_caught(name, monkeypatch, one_thread, capsys):
    """Catches a state machine that no longer reaches, or no longer looks at, what it claims to hold."""
    plant, expected = PLANTS[name]
    monkeypatch.setattr(Schedules, "seen", Counter())
    plant(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        run_state_machine_as_test(Schedules, settings=FIRST)
    caught_by = re.match(r"([\w-]+):", str(caught.value))
    assert caught_by, str(caught.value)
    with capsys.disabled():
        print(f"\n{name}: caught by {caught_by[1]!r} after {sum(Schedules.seen[mode] for mode in MODES)} engines")
    assert caught_by[1] in expected, str(caught.value)

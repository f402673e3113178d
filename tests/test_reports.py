"""What a step did, as the host reads it: bit by bit, by request, and one step behind."""

import dataclasses
import math
from typing import Any

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import reports, schedule, struct
from tests.scripted import assert_empty, greedy, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
CONFIG = ns.EngineConfig(max_slots=2, num_pages=40, page_size=4, prefill_chunk=8)


def info(b: int, w: int, count: list[int], **columns: Any) -> ns.Info:
    """A step's info of b rows, none of it but what is given worth a look."""
    zeros = torch.zeros(b, dtype=torch.int32)
    return ns.Info(
        **{
            "tokens": torch.arange(b * w, dtype=torch.int32).view(b, w),
            "target_logp": torch.zeros(b, w),
            "behaviour_logp": torch.zeros(b, w),
            "count": torch.tensor(count, dtype=torch.int32),
            "accepted": zeros,
            "done": zeros,
            "ok": torch.ones(b, dtype=torch.bool),
            "left": zeros,
            "tree": (),
            "evidence": (),
        }
        | columns
    )


def test_a_step_comes_to_the_host_bit_by_bit():
    """Bug: columns shifted in the one copy; a log-prob read as an integer, or rounded on the way."""
    logp = torch.tensor([[-0.0, -math.inf, -1e-45, -1 / 3]] * 3)
    given = info(
        *(3, 4, [1, 0, 4]),
        target_logp=logp,
        behaviour_logp=logp.flip(1),
        accepted=torch.tensor([0, 0, 3], dtype=torch.int32),
        done=torch.tensor([2, 0, 1], dtype=torch.int32),
        ok=torch.tensor([True, False, True]),
        left=torch.tensor([7, 8, 9], dtype=torch.int32),
    )
    narrow, tokens, target_logp, behaviour_logp = reports.unpack(reports.pack(given))
    assert narrow == [[1, 0, 4], [0, 0, 3], [2, 0, 1], [1, 0, 1], [7, 8, 9]]
    assert tokens == [0, 8, 9, 10, 11]
    assert str(target_logp) == str([-0.0, *logp[0].tolist()])
    assert str(behaviour_logp) == str([*logp[0, -1:].tolist(), *logp[0].flip(0).tolist()])


def test_a_step_on_a_cpu_is_timed_until_it_is_read(monkeypatch):
    """Bug: a clock that stops when the step is issued, or counts seconds."""
    now = iter((1.0, 3.5))
    monkeypatch.setattr(reports.time, "perf_counter", lambda: next(now))
    lane = next(reports.lanes(torch.device("cpu"), 1, 1))
    lane.start()
    assert lane.clock() == 2500


def test_a_report_is_read_by_request():
    """Bug: another row's tokens; padding rows told of; a refused prompt that is not said to be unread."""
    given = info(4, 2, [2, 0, 1, 0], accepted=torch.tensor([1, 0, 1, 0], dtype=torch.int32))
    given = struct.replace(
        given,
        done=torch.tensor([0, 0, 1, 0], dtype=torch.int32),
        ok=torch.tensor([True, False, True, True]),
        left=torch.tensor([0, 5, 0, 6], dtype=torch.int32),
    )
    issued = reports.Report(3, [4, 5, 6, 7], {4: 40, 5: 50, 6: 60}, False, 4, 0, reports.pack(given), (), lambda: 2.5)
    landed = reports.read(issued)
    updates = [*landed.updates]
    assert [(u.request, u.tokens, u.origin, u.accepted, u.finish_reason) for u in updates] == [
        (40, [0, 1], [1, 0], 1, None),
        (60, [4], [1], 1, "stop"),
    ]
    assert {(u.step, u.milliseconds, u.evidence) for u in updates} == {(3, 2.5, None)}
    assert landed.events == schedule.Events(emitted=((40, 2), (60, 1)), refused=(50,), finished=(60,))
    assert (landed.accepted, landed.milliseconds) == ([1], 2.5)
    landed = reports.read(dataclasses.replace(issued, prefill=True))
    assert [u.accepted for u in landed.updates] == [None, None]
    assert landed.accepted == []
    assert landed.events.prefilled == ((40, 0), (50, 5), (60, 0))


def watched(engine: ns.Engine) -> tuple[ns.Engine, list[str]]:
    """Log what is issued, read, inserted and evicted, in order."""
    log: list[str] = []

    def logged(name: str, call: Any) -> Any:
        def run(*args: Any) -> Any:
            log.append(name)
            return call(*args)

        return run

    def run(*args: Any) -> Any:
        report, number = original(*args), len([x for x in log if x.startswith("issue")])
        log.append(f"issue {number}")
        return dataclasses.replace(report, clock=logged(f"read {number}", report.clock))

    original = engine.run
    engine.run, engine.insert, engine.evict = run, logged("insert", engine.insert), logged("evict", engine.evict)
    return engine, log


def test_results_are_read_one_step_behind():
    """Bug: the host waits for a step before it issues the next; or it inserts and evicts on guesses."""
    starts, request = [prompt(20, 1), prompt(5, 2)], ns.Sampling(max_tokens=6)
    engine, log = watched(ns.prepare(target(), None, CONFIG))
    engine.behind = True
    out = ns.generate(target(), starts, request, engine=engine)
    assert [o.tokens for o in out] == [list(greedy(tuple(s), 6)) for s in starts]
    # Chunks of 8 for 20 and 5 tokens, the second's rounds in between; each read comes after the next issue.
    rest = log[1:]
    assert log[0] == "insert"  # both at once
    assert rest[:5] == ["issue 0", "issue 1", "read 0", "issue 2", "read 1"]
    for kind in ("insert", "evict"):
        for i, what in enumerate(log):
            if what == kind:
                issued, read = (len([x for x in log[:i] if x.startswith(k)]) for k in ("issue", "read"))
                assert issued == read, "someone comes or goes on what has not been read"
    # 3 chunks, 2 rounds of the second between them, 5 for what the first lacks: no step is issued for nobody.
    steps = [f"{what} {i}" for i in range(10) for what in ("issue", "read")]
    assert sorted(rest[:-1]) == sorted([*steps, "evict"])
    assert rest[-1] == "evict"
    engine.behind = False
    del log[:]
    ns.generate(target(), starts, request, engine=engine)
    assert [x for x in log if x.startswith(("issue", "read"))] == steps
    assert_empty(engine)


class Lent(reports.HostLane):
    """A lane whose tables lie in memory that its next step overwrites, as on CUDA."""

    memory, free = None, True

    def bring(self, table: torch.Tensor) -> torch.Tensor:
        assert self.free, "a step takes the lane of one that has not been read"
        self.free, self.memory = False, torch.empty(1000, dtype=torch.int32) if self.memory is None else self.memory
        return self.memory[: table.numel()].view(table.shape).copy_(table)

    def clock(self) -> float:
        self.free = True
        return super().clock()


def test_a_table_stays_until_it_has_been_read(monkeypatch):
    """Bugs: one lane for a step in flight and the next one; what is told of a step looked up after its lane went on."""
    monkeypatch.setattr(reports, "HostLane", Lent)
    engine = ns.prepare(target(), None, CONFIG)
    engine.behind = True
    starts, request = [prompt(20, 1), prompt(5, 2), prompt(9, 3)], ns.Sampling(max_tokens=9)
    out = ns.generate(target(), starts, request, engine=engine)
    assert [o.tokens for o in out] == [list(greedy(tuple(s), 9)) for s in starts]
    assert_empty(engine)

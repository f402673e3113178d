"""Where a round's time goes: torch profiler's trace of an eager round, cut into phases.

A captured graph leaves no trace of who launched what, so the same round is run eagerly: the draft's and the attention
backend's methods inside named ranges, everything else told apart by its place between them and, for matrix products
and vocabulary-wide work, by name. Work counts on the device where there is one (kernels), else on the CPU (operators).
"""

import dataclasses
import inspect
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")
Event = dict[str, Any]  # of a Chrome trace; "ts" and "dur" are microseconds

PHASES = {
    "draft": "the draft's passes, and fusing the target's features for it",
    "target": "matrix products of the target's layers",
    "attention": "attention of the target, its KV store (and rotation, where that is one launch) included",
    "pointwise": "the rest of the target's layers: norms, rotation, activation",
    "head": "the output head's product, and what reads whole rows of logits",
    "accept": "reserving pages, accepting, committing, emitting",
    "other": "work that the trace does not tie to a launch",
}
# Parts of the names of kernels and operators.
PRODUCTS = ("_few_rows", "_many_rows", "gemm", "nvjet", "cutlass", "aten::mm", "aten::addmm", "mkldnn::_linear")
VOCABULARY = (
    *("find_peaks", "_masses", "_logs", "_draws", "_choose", "_nodes", "_log_probs", "find_cuts", "_top"),
    *("softmax", "logsumexp", "topk", "argmax", "sort"),
)
RANGE = "phase:"
PROPOSE, FUSE = "propose", "fuse"  # of the draft: what comes between them is the target's pass
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class Work:
    """A kernel, or an operator's own time on a CPU."""

    name: str
    launched: float | None  # microseconds, of the host's clock; None: the trace has no launch of it
    ms: float


def marked(value: T, label: Callable[[str], str | None]) -> T:
    """A frozen dataclass of the same kind whose methods run inside named ranges of the profiler.

    Args: label: a method's name -> its range, None for a method that stays as it is.
    """

    def within(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            with torch.profiler.record_function(RANGE + name):
                return method(self, *args, **kwargs)

        return call

    whole: Any = value  # no type says "a dataclass, and of the same kind as what is returned"
    kind = type(value)
    found = {name: m for base in reversed(kind.__mro__) for name, m in vars(base).items() if inspect.isfunction(m)}
    ranges = {name: label(name) for name in found if not name.startswith("_")}
    methods = {name: within(found[name], given) for name, given in ranges.items() if given}
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(whole)}
    return type(kind.__name__, (kind,), methods)(**fields)


def mark_draft(method: T) -> T:
    """A draft's method with the ranges that `attribute` goes by."""
    return marked(method, lambda name: name if name in (PROPOSE, FUSE) else None)


def mark_attention(attend: T) -> T:
    """An attention backend with all of its work in one range."""
    return marked(attend, lambda _: "attention")


def trace(run: Callable[[], T], device: torch.device) -> tuple[list[Event], T]:
    """The profiler's events of one call, and its result."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    with torch.profiler.profile(activities=kinds, acc_events=True) as profiler:  # False warns on torch 2.11
        result = run()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8", errors="replace"))["traceEvents"], result


def attribute(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of each phase in the trace of one marked round.

    Errors: ValueError for a trace without the draft's ranges.
    """
    ranges = [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(RANGE)]
    named = {name: [e for e in ranges if e["name"] == RANGE + name] for name in (PROPOSE, FUSE)}
    if not all(named.values()):
        raise ValueError("the trace has no ranges of the draft's methods")
    begin, end = named[PROPOSE][0]["ts"] + named[PROPOSE][0]["dur"], named[FUSE][-1]["ts"]
    draft = [e for name in named.values() for e in name]
    attention = [e for e in ranges if e["name"] == RANGE + "attention"]
    total = dict.fromkeys(PHASES, 0.0)
    for work in device_work(events) or host_work(events):
        total[_phase(work, begin, end, draft, attention)] += work.ms
    return total


def _phase(work: Work, begin: float, end: float, draft: Iterable[Event], attention: Iterable[Event]) -> str:
    at = work.launched
    if at is None:
        return "other"
    if any(e["ts"] <= at <= e["ts"] + e["dur"] for e in draft):
        return "draft"
    if any(e["ts"] <= at <= e["ts"] + e["dur"] for e in attention):
        return "attention"
    product = any(part in work.name for part in PRODUCTS)
    if begin <= at <= end:
        return "target" if product else "pointwise"
    if at > end and (product or any(part in work.name for part in VOCABULARY)):
        return "head"
    return "accept"


def device_work(events: Iterable[Event]) -> list[Work]:
    """Kernels and copies on a device, with the time at which the host launched them."""
    launched, found = {}, []
    for e in events:
        number = (e.get("args") or {}).get("correlation")
        if e.get("cat") in LAUNCH and number is not None:
            launched[number] = e["ts"]
        elif e.get("cat") in DEVICE:
            found.append((e, number))
    return [Work(e["name"], launched.get(number), e["dur"] / 1e3) for e, number in found]


def host_work(events: Iterable[Event]) -> list[Work]:
    """Operators of the host, each without those that it called."""
    ops = [e for e in events if e.get("cat") == "cpu_op"]
    found: list[Work] = []
    for thread in {e["tid"] for e in ops}:
        mine = sorted((e for e in ops if e["tid"] == thread), key=lambda e: (e["ts"], -e["dur"]))
        own = [e["dur"] for e in mine]
        open_: list[int] = []
        for i, e in enumerate(mine):
            while open_ and mine[open_[-1]]["ts"] + mine[open_[-1]]["dur"] <= e["ts"]:
                open_.pop()
            if open_:
                own[open_[-1]] -= e["dur"]
            open_.append(i)
        found += [Work(e["name"], e["ts"], max(0.0, ms) / 1e3) for e, ms in zip(mine, own, strict=True)]
    return found

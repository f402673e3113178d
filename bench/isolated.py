"""An engine in a process of its own: a job in, one JSON line per pass out, a time limit, and nothing left running.

The parent calls `run`; the process runs `serve` with the engine's own adapter. It imports nothing of nanospec_fn, so
that the engine starts as in anyone's program.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).parents[1])  # where `python -m bench.X` is found
POLL = 0.2  # seconds
WARM_UP = 8  # tokens
LOG_LINES = 20  # of a failed engine's log, in the error


class EngineError(RuntimeError):
    """An engine's process ended, or was ended, before it had given every pass."""


@dataclass(frozen=True)
class Job:
    """What an engine is to measure; greedy, so without a seed."""

    model: str  # a folder or hub id
    draft: str | None  # an EAGLE-3 head's folder or hub id; None: no speculation
    depth: int  # drafted levels
    top_k: int  # nodes of a level
    dtype: str  # "bfloat16", "float32"
    bs: int  # requests at once
    max_tokens: int  # per request
    stop_ids: Sequence[int]
    requests: Sequence[Sequence[int]]  # token ids
    passes: int  # over all requests

    @property
    def context(self) -> int:
        """Tokens that the longest request needs, with room for what is drafted past its end."""
        return max(map(len, self.requests)) + self.max_tokens + 64


@dataclass(frozen=True)
class Answer:
    """One request's completion."""

    tokens: list[int]  # stop token included
    decode_seconds: float  # first token to last


def figures(answers: Sequence[Answer], rounds: int | None, seconds: float) -> dict[str, Any]:
    """The fields of `measure.Measured` for one pass.

    Args: rounds: of all requests together; None without speculation, where each token after the first is a round.
    """
    after_first = sum(len(answer.tokens) - 1 for answer in answers)
    rounds = after_first if rounds is None else rounds
    per_token = [a.decode_seconds / (len(a.tokens) - 1) for a in answers if len(a.tokens) > 1]
    return {
        "outputs": [answer.tokens for answer in answers],
        "seconds": seconds,
        "tpot_ms": 1e3 * sum(per_token) / len(per_token) if per_token else float("nan"),
        # Engines count rounds in total, so this is the mean over rounds and not over requests.
        "round_ms": 1e3 * sum(a.decode_seconds for a in answers) / rounds if rounds else float("nan"),
        "mean_accepted_len": after_first / rounds if rounds else float("nan"),
    }


def run(module: str, job: Job, limit: float) -> Iterator[dict[str, Any]]:
    """Run a job in `python -m module`; each pass's `figures` as it ends.

    The process and all that it started are killed at the end, after `limit` seconds, and when the caller stops.

    Errors: EngineError with the end of the engine's log.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(dataclasses.asdict(job)))
        results = folder / "results.jsonl"
        results.touch()
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder / "job.json"), str(results)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))},
                start_new_session=True,
            )
        try:
            yield from follow(process, results, job.passes, limit)
        except EngineError as error:
            lines = (folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            raise EngineError("\n".join([str(error), *lines[-LOG_LINES:]])) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def follow(process: subprocess.Popen[bytes], results: Path, passes: int, limit: float) -> Iterator[dict[str, Any]]:
    """The whole lines of a growing file, until there are `passes`."""
    end, seen = time.monotonic() + limit, 0
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL)
        code = process.returncode  # read before the file: a process that has ended writes no more
        lines = results.read_text().split("\n")[:-1]
        yield from map(json.loads, lines[seen:])
        seen = len(lines)
        if seen >= passes:
            return
        if code is not None:
            raise EngineError(f"ended with exit code {code} after {seen} of {passes} passes")
        if time.monotonic() > end:
            raise EngineError(f"took more than {limit:g} s, and gave {seen} of {passes} passes")


def serve(argv: Sequence[str], start: Callable[[Job], Callable[[Job], tuple[list[Answer], int | None]]]) -> None:
    """The process's side: warm up, then time each pass.

    Args: start: loads the engine; returns what completes a job's requests: the answers in order, and the rounds.
    """
    job = Job(**json.loads(Path(argv[1]).read_text()))
    complete = start(job)
    complete(dataclasses.replace(job, requests=job.requests[: job.bs], max_tokens=min(job.max_tokens, WARM_UP)))
    for _ in range(job.passes):
        begin = time.perf_counter()
        answers, rounds = complete(job)
        line = json.dumps(figures(answers, rounds, time.perf_counter() - begin))
        with Path(argv[2]).open("a") as file:
            file.write(line + "\n")

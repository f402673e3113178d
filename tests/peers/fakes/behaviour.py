"""What both stand-ins share: the record that they keep to, how they fail, and what they answer.

FAKE_ENGINE: good; crash (on loading); late (in the second pass); hang (with a child, whose id goes to FAKE_CHILD).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

MODE = os.environ.get("FAKE_ENGINE", "good")
DEPTH = 2  # drafted tokens that are accepted a round


def record(engine):
    return json.loads(next(Path(__file__).parents[1].glob(f"{engine}-*.json")).read_text())


def check(given, known):
    if unknown := set(given) - set(known):
        raise TypeError(f"unexpected keyword argument {sorted(unknown)[0]!r}")


def fields(known, **values):
    """An object with the recorded fields, None where nothing else is said."""
    check(values, known)
    return SimpleNamespace(**(dict.fromkeys(known) | values))


def load():
    """What happens as the engine loads."""
    print("loading weights", flush=True)
    if MODE == "crash":
        raise RuntimeError("CUDA out of memory")
    if MODE == "hang":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(os.environ["FAKE_CHILD"]).write_text(str(child.pid))
        time.sleep(600)


def fail_late(calls):
    """The warm-up is the first call, the first pass the second."""
    if MODE == "late" and calls == 3:
        raise RuntimeError("device-side assert")


def tokens(prompt, max_tokens):
    """The answer to a prompt: so many tokens, less by its length modulo 3."""
    return [5 + (sum(prompt) + i) % 50 for i in range(max_tokens - len(prompt) % 3)]


def rounds(answer):
    """How many rounds its tokens after the first took."""
    return -(-(len(answer) - 1) // (DEPTH + 1))

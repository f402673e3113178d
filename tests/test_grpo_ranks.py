"""One GRPO run in two processes (Gloo, on the CPU): the same rollouts as in one, and an end with a name, not a hang."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from rl import grpo, grpo_options
from rl.ranks import Ranks
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = "--device cpu --prompts 4 --group 3 --max-tokens 6 --lr 1e-2 --save-every 1 --quiet"
POWER = "--draft frozen --acceptance power --alpha 0.3 --correction m2po --draft-refresh 2"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    raw = tiny.config("tinyllama-1.1b")
    return tiny.write(tmp_path_factory.mktemp("target"), raw, tiny.state_of(tiny.llama(raw)))


def lines_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def torchrun(text: str) -> int:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rl.grpo"]
    return subprocess.run([*command, *text.split()], env=ENVIRONMENT, timeout=240).returncode


def test_two_ranks_are_one_run(folder, tmp_path):
    """At equal weights the same rollouts, to the bit; later steps to the rounding of a sum over ranks; and it resumes.

    Catches: seeds of the rank, a share that is sampled twice or left out, gradients averaged for added, a mask or a
    denominator of one rank's tokens, a file that two ranks write.
    """
    text = f"--model {folder} {SIZES} {POWER}"
    assert torchrun(f"{text} --steps 1 --out {tmp_path / 'two'}") == 0
    assert torchrun(f"{text} --steps 3 --out {tmp_path / 'two'} --resume") == 0
    grpo.run(grpo_options.parse(f"{text} --steps 3 --out {tmp_path / 'one'}".split()), Ranks())
    (two, *mine), (one, *theirs) = lines_of(tmp_path / "two"), lines_of(tmp_path / "one")
    assert (two["header"]["ranks"], one["header"]["ranks"]) == (2, 1)
    assert [line["step"] for line in mine] == [1, 2, 3]
    same = "reward solved tokens mean_length accepted_len w_mean w_max w_min ess chi2 masked kl_mu_old exact_share"
    for name in (*same.split(), "groups_with_signal", "missing_mass", "kl_old_0"):
        assert mine[0][name] == theirs[0][name], name
    for a, b in zip(mine, theirs, strict=True):
        assert a["exact_share"] == 1
        for name in ("reward", "loss", "grad_norm", "w_mean"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), name
    a, b = (load_file(tmp_path / name / "state.safetensors") for name in ("two", "one"))
    for name in b:
        assert (a[name].double() - b[name].double()).abs().max() < 1e-4, name


GATHER_TWICE = """
import os, signal, sys
from rl import ranks
mine = ranks.start("cpu")
ranks.gather(mine, mine.rank)
if mine.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
sys.stdin.read()  # until the other one is dead
try:
    ranks.gather(mine, mine.rank)
except ranks.RunError as error:
    print(error)
"""


def test_who_died_before_the_others_came_is_named():
    """Bug: a connection that is closed already is told of by its port, not by its rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": "2"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    both = [
        subprocess.Popen([sys.executable, "-c", GATHER_TWICE], env=ENVIRONMENT | where | {"RANK": str(rank)}, **pipes)
        for rank in (0, 1)
    ]
    both[1].communicate(timeout=100)
    assert both[0].communicate("go on", timeout=100)[0] == "rank 0 of 2: rank 1 died or does not answer\n"


@pytest.mark.slow
def test_a_dead_rank_ends_the_run_with_its_name(folder, tmp_path):
    """Without torchrun's own watch: rank 1 is killed in the middle, and rank 0 says so and ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    text = f"-m rl.grpo --model {folder} {SIZES} --steps 500 --out {tmp_path / 'run'}"
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, *text.split()],
            env=ENVIRONMENT | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    log = tmp_path / "run/log.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (log.exists() and log.read_text().count("\n") >= 3):
        time.sleep(0.05)
    ranks[1].send_signal(signal.SIGKILL)
    said = ranks[0].communicate(timeout=100)[1]
    ranks[1].communicate()
    assert ranks[0].returncode == 1
    assert said.splitlines()[-1] == "python -m rl.grpo: rank 0 of 2: rank 1 died or does not answer"
    steps = [line["step"] for line in lines_of(tmp_path / "run")[1:]]
    assert steps == list(range(1, len(steps) + 1))

"""What every test may ask for. properties/conftest.py imports the fixtures from here."""

import functools
import importlib.util
import os

import pytest
import torch

# Triton reads it when it is first imported, by whichever test file comes first.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

import nanospec_fn.weights
from nanospec_fn import checkpoint
from nanospec_fn.model import Model
from tests import needs


@functools.cache
def load_smollm2() -> Model:
    return nanospec_fn.weights.load("smollm2", device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def smollm2() -> Model:
    """SmolLM2-135M-Instruct in fp32 on the CPU. In the gate (NANOSPEC_GATE=1) its absence is a failure."""
    try:
        checkpoint.find_smollm2()
    except FileNotFoundError as error:
        needs.lacking(str(error))
    return load_smollm2()


@pytest.fixture(autouse=True)
def _no_grad():
    """Tests that differentiate say so with torch.enable_grad()."""
    with torch.no_grad():
        yield


@pytest.fixture
def matplotlib() -> None:
    """For tests that draw: the extra `rl` has it. In the gate (NANOSPEC_GATE=1) its absence is a failure."""
    if importlib.util.find_spec("matplotlib") is None:
        needs.lacking("matplotlib is not installed")


@pytest.fixture
def one_thread():
    """For tests of many tiny models: threads that wait for each other cost ten times the work where cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

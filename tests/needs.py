"""What a test needs and a machine may lack: in the gate (NANOSPEC_GATE=1) that is a failure, elsewhere a skip."""

import importlib.util
import os
from typing import NoReturn

import pytest
import torch


def in_gate() -> bool:
    return os.environ.get("NANOSPEC_GATE") == "1"


def lacking(reason: str) -> NoReturn:
    """End the test that asks: something it needs is not here."""
    (pytest.fail if in_gate() else pytest.skip)(reason)


def no_interpreter() -> str:
    """Why Triton's interpreter does not run here, "" where it does; in the gate the import is left to fail."""
    if torch.cuda.is_available():
        return "the kernels, and what they serve, run for real in tests/gpu"
    if importlib.util.find_spec("triton") is None and not in_gate():
        return "needs Triton (pip install --no-deps triton==3.9.0)"
    return ""

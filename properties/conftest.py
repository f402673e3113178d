"""The same fixtures as tests/."""

from tests.conftest import _no_grad, one_thread, smollm2

__all__ = ["_no_grad", "one_thread", "smollm2"]

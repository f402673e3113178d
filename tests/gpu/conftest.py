"""Every test file here needs a GPU: without one it is told of as skipped, and not imported."""

from pathlib import Path

import pytest
import torch


class Elsewhere(pytest.Module):
    """A test file on a machine without a GPU."""

    def collect(self):
        pytest.skip("needs a CUDA device", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """None: as everywhere."""
    return None if torch.cuda.is_available() else Elsewhere.from_parent(parent, path=module_path)

"""Every test file here needs a GPU: without one it is told of as skipped, and not imported.

The one skip that the gate has. CI runs on machines without a GPU, which no change of the code gives it, and the
kernels' logic is tested there under Triton's interpreter (tests/test_triton_*.py). `make gpu-bits` runs these files;
where its machine turns out to have no GPU it fails, as pytest does where it has run nothing.
"""

from pathlib import Path

import pytest
import torch


class Elsewhere(pytest.Module):
    """A test file on a machine without a GPU."""

    def collect(self):
        pytest.skip("needs a CUDA device: `make gpu-bits` on a machine with one", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """None: as everywhere."""
    return None if torch.cuda.is_available() else Elsewhere.from_parent(parent, path=module_path)

"""Kernels whose start overlaps the end of the one before (programmatic dependent launch, on Hopper and later).

A kernel calls `begin` before it reads what another kernel wrote. What comes earlier, such as a prefetch of weights, may
run while the kernel before it still does. Every kernel that is launched with `launch` has to call it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


def launch(x: Tensor) -> dict[str, bool]:
    """Keywords of a kernel's launch on x's device; Triton's interpreter knows no such thing."""
    able = x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"OVERLAP": able, "launch_pdl": able}


@triton.jit
def begin(OVERLAP: tl.constexpr):
    """Let the next kernel start as soon as there is room, and wait for the results of those before."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(address, OVERLAP: tl.constexpr):
    """Fetch the cache lines of these addresses (pointers, any shape) into L2."""
    if OVERLAP:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [address.to(tl.uint64, bitcast=True)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

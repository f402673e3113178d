"""Dependent launches (from Hopper on): a kernel's programs take their places while the kernel before it still ends.

What is launched so calls `wait` before it reads or writes anything that another kernel does, and `release` where the
next one's programs may begin to come. A kernel of few programs releases at its start; a product last, or the next one's
programs would crowd on the processors that are free first. Kernels that run once a layer, or once a level of a tree,
are launched so; what runs once a round is not worth it. A kernel launched in the ordinary way waits by itself.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Until the kernel before has ended, and all that it wrote can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    """Let the next kernel's programs come, once all programs of this one have said so or ended."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def enter(DEPENDENT: tl.constexpr):
    """`wait` and `release`: how a short kernel begins."""
    wait(DEPENDENT)
    release(DEPENDENT)


@functools.cache
def launch_options(device: torch.device) -> dict[str, Any]:
    """What a kernel of this kind is launched with on a device: its DEPENDENT, and Triton's own option for it."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}

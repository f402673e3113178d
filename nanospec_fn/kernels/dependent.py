"""Dependent launches (from Hopper on): a kernel's programs take their places while the kernel before it still ends.

A kernel that is launched so calls `wait` before it reads or writes anything that another one does, and `release` where
the next may come: its programs then stand in line, so no launch is waited for. `wait` returns when the kernel before
has ended, what it wrote in sight. Early `release` suits a kernel of few programs; in a product it comes last, or the
next one's programs would crowd on the processors that are free first.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release(DEPENDENT: tl.constexpr):
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def enter(DEPENDENT: tl.constexpr):
    """Both, at the start of a kernel that is short."""
    wait(DEPENDENT)
    release(DEPENDENT)


@functools.cache
def dependent(device: torch.device) -> dict[str, Any]:
    """The options of a launch on this device: the kernel's DEPENDENT, and Triton's own where it can be True."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"DEPENDENT": False}
    return {"DEPENDENT": True, "launch_pdl": True}

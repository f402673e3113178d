"""Row-canonical arithmetic: a row's bits depend on that row alone.

cpu.py is plain torch; the other files are Triton, and gpu.py gives those that stand in for cpu.py's functions a
gradient. The functions here take plain tensors and pick a side by where these are.

Other kernels do a whole step of some module on that module's states, which this package, standing above them all, knows
nothing of. So filters, trees, acceptance, pages, slots, model, attention, flashinfer, draft and draft_model import
theirs themselves: where `on_device` says so, or in an attention backend that runs on CUDA only. Triton is imported
inside functions, so that a machine without it can do without.

Shapes: n rows, K/N the inner and outer width of a matrix.
"""

from types import ModuleType

import torch
from torch import Tensor

from nanospec_fn.kernels import cpu

# Over a tree's few nodes, in plain torch on any device.
from nanospec_fn.kernels.cpu import exp as exp
from nanospec_fn.kernels.cpu import log_add_exp as log_add_exp
from nanospec_fn.kernels.cpu import log_one_minus_exp as log_one_minus_exp
from nanospec_fn.kernels.cpu import log_sum_exp_few as log_sum_exp_few


def on_device(x: Tensor) -> bool:
    """Whether the Triton kernels serve x. float64 is for checks: the library's arithmetic, no promise.

    Everything that differs between the two sides asks here, so that a test can send whole rounds through Triton's
    interpreter (tests/interpreted.py).
    """
    return x.is_cuda and x.dtype != torch.float64


def _of(x: Tensor) -> ModuleType:
    if not on_device(x):
        return cpu
    from nanospec_fn.kernels import gpu

    return gpu


def pick_gemm(device: torch.device, dtype: torch.dtype) -> str:
    """`linear`'s choice for a device: "canonical" (Triton) on CUDA; a tested one on a CPU; else "library"."""
    if device.type == "cpu":
        return cpu.pick_gemm(dtype)
    return "canonical" if device.type == "cuda" else "library"


def pick_bmm(device: torch.device, dtype: torch.dtype) -> str:
    """`cpu.attention`'s way to multiply on a device: a tested one on a CPU, the library's on others."""
    return cpu.pick_bmm(dtype) if device.type == "cpu" else "whole"


def check(gemm: str, bmm: str) -> None:
    """Errors: ValueError for a way to multiply that there is not."""
    for name, given, known in (("gemm", gemm, ("canonical", *cpu.GEMMS)), ("bmm", bmm, cpu.BMMS)):
        if given not in known:
            raise ValueError(f"the model's config has {name} {given!r}, known are {', '.join(known)}")


def row_block(x: Tensor) -> int:
    """Row counts that are a multiple of this need no padding inside the functions below."""
    return 1 if on_device(x) else cpu.ROW_BLOCK


def linear(x: Tensor, w: Tensor, gemm: str, residual: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """x [n, K] @ w [N, K]^T -> [n, N].

    Args:
      gemm: of `pick_gemm`, or "library" for `F.linear`, which promises nothing about bits.
      residual: [n, N], added to the rounded product.
      dtype: of the result, rounded once where the kernel can; None: x's.
    """
    if gemm == "canonical" and on_device(x):
        from nanospec_fn.kernels import gpu

        return gpu.linear(x, w, residual, dtype)
    y = cpu.linear(x, w, gemm)
    y = y if residual is None else residual + y
    return y if dtype is None else y.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [n, E] normalised per row in fp32, or in float64 if it is that, times weight [E]."""
    return _of(x).rms_norm(x, weight, eps)


def linear_silu_mul(x: Tensor, w: Tensor, gemm: str) -> Tensor:
    """`silu_mul` of x [n, K] @ w [2I, K]^T: [n, I]. In one launch, with the same bits, where that can be."""
    if gemm == "canonical" and on_device(x):
        from nanospec_fn.kernels import gpu

        return gpu.linear_silu_mul(x, w)
    return silu_mul(linear(x, w, gemm))


def embed_beside(table: Tensor, token: Tensor, table_weight: Tensor, x: Tensor, x_weight: Tensor, eps: float) -> Tensor:
    """Each row's token, embedded and normed, beside its normed x: table [V, E], token [n], x [n, E] -> [n, 2E]."""
    if on_device(x) and not torch.is_grad_enabled():
        from nanospec_fn.kernels import rows

        return rows.embed_beside(table, token, table_weight, x, x_weight, eps)
    return torch.cat((rms_norm(table[token], table_weight, eps), rms_norm(x, x_weight, eps)), dim=-1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [n, 2I] -> silu(gate) * up [n, I]."""
    return _of(gate_up).silu_mul(gate_up)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [n, heads, D] by cos, sin [n, D/2]; pair i is (i, i + D/2), as in Hugging Face checkpoints."""
    return _of(x).rope(x, cos, sin)


def angles(position: Tensor, freq: Tensor) -> tuple[Tensor, Tensor]:
    """cos, sin [n, D/2] fp32 of position [n] times freq [D/2] fp32, in radians."""
    if on_device(position):
        from nanospec_fn.kernels import gpu

        return gpu.angles(position, freq)
    phase = position.float()[:, None] * freq
    return torch.cos(phase), torch.sin(phase)


def rows_at(x: Tensor, row: Tensor) -> Tensor:
    """x [B, R, F], row [B, m] integer -> [B, m, F]."""
    if on_device(x) and not torch.is_grad_enabled():
        from nanospec_fn.kernels import rows

        return rows.rows_at(x, row)
    return x.gather(1, row.long()[:, :, None].expand(-1, -1, x.shape[2]))


def log_sum_exp(x: Tensor) -> Tensor:
    """x [n, V] -> [n], -inf for a row of nothing else."""
    return _of(x).log_sum_exp(x)


def top(x: Tensor, k: int, names: Tensor | tuple[()] = ()) -> tuple[Tensor, Tensor]:
    """The k most probable tokens of each row: logits x [n, V] -> log-probs [n, k], ids [n, k] int64.

    Args: names: [V] int64, what to return for each id; () for the id itself.
    """
    if on_device(x):
        from nanospec_fn.kernels import vocab

        return vocab.top(x, k, names if isinstance(names, Tensor) else None)
    logp, token = cpu.top(x, k)
    return logp, names[token] if isinstance(names, Tensor) else token

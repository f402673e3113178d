"""Which launch suits a product of 96 to 1024 rows: `python -m tests.gpu.tiles [minutes]` on an H200.

For every shape of Llama-3.1-8B and each row count of rounds, TB/s of weights: the three best launches, what
`launches.pick_tile` picks, and cuBLAS. The bits of each are compared with those of the 8-row kernel. Compile them
first, in several processes: `python -m tests.gpu.tiles warm:PART:PARTS`.
"""

import itertools
import sys
import time
from collections import defaultdict

import torch
from torch import Tensor

from nanospec_fn.kernels import gemm, launches
from tests.gpu.shapes import GEMMS, noise
from tests.gpu.timing import graph, milliseconds

ROWS = (96, 168, 192, 256, 384, 512, 672, 1024)
SHARED_MEMORY = 227_000  # bytes of it that a program may have, some left for barriers


def candidates(n: int) -> list[launches.Tile]:
    """Launches worth a try: the copy engine under programs that stay, with as many stages as fit, or one less."""
    found = []
    for (rows, more), cols, warps in itertools.product(
        ((64, 0), (128, 0), (64, 32), (128, 64)), (64, 128, 256), (4, 8)
    ):
        fit = min(12, SHARED_MEMORY // ((rows + more + cols) * 64 * 2))
        spilled = (rows + more) * cols // (warps * 32) > 192  # registers of a thread for the sums
        if rows + more >= n + 128 or fit < 3 or spilled:
            continue
        for stages, overlap in itertools.product((fit - 1, fit), (False, True)):
            found.append(launches.Tile(rows, cols, 64, warps, stages, "tma", launches.SMS, more, overlap))
    return found


def weights(name: str) -> list[Tensor]:
    """Enough copies that none is read from L2."""
    outer, inner = GEMMS[name]
    return [noise(outer, inner, seed=i, scale=inner**-0.5) for i in range(max(2, 200_000_000 // (outer * inner * 2)))]


def keeps_bits(x: Tensor, w: Tensor, tile: launches.Tile, gated: bool) -> bool:
    """Whether a launch gives rows, the first and the last, what eight rows alone get."""
    whole = gemm.linear(x, w, tile=tile, gated=gated)
    first = gemm.linear(x[:8], w, gated=gated)
    last = gemm.linear(x[-8:], w, gated=gated)
    return torch.equal(whole[:8], first) and torch.equal(whole[-8:], last)


def sweep(name: str, n: int, ws: list[Tensor]) -> tuple[launches.Tile, float, float]:
    """The best tile of a product, its TB/s of weights and cuBLAS's."""
    x, size, gated = noise(n, ws[0].shape[1]), ws[0].numel() * 2 * len(ws), name == "gate_up"
    results, wrong = [], []
    for tile in candidates(n):
        try:
            if not keeps_bits(x, ws[0], tile, gated):
                wrong.append(tuple(tile))
                continue
            took = milliseconds(graph(lambda t=tile: [gemm.linear(x, w, tile=t, gated=gated) for w in ws]), 5)
            results.append((size / took / 1e9, tile))
        except Exception as error:  # a launch that the device refuses
            print("refused", tuple(tile), f"{type(error).__name__}: {error}"[:100], flush=True)
    library = size / milliseconds(graph(lambda: [torch.nn.functional.linear(x, w) for w in ws]), 5) / 1e9
    results.sort(reverse=True)
    picked = launches.pick_tile(n, *ws[0].shape, x.dtype)
    now = next((rate for rate, tile in results if tile == picked), 0.0)
    leaders = ", ".join(f"{rate:.2f} TB/s {tuple(tile)}" for rate, tile in results[:3])
    print(f"{name} rows {n}: {leaders}; as picked {now:.2f}; cublas {library:.2f}; other bits: {wrong}", flush=True)
    return results[0][1], results[0][0], library


def warm(part: int, parts: int) -> None:
    """Compile a share of the candidates, for the others to find in Triton's cache."""
    jobs = sorted({(tile, gated) for n in ROWS for tile in candidates(n) for gated in (False, True)})
    x, w = noise(96, 4096), noise(6144, 4096)
    for tile, gated in jobs[part::parts]:
        try:
            gemm.linear(x, w, tile=tile, gated=gated)
        except Exception as error:  # a launch that the device refuses
            print("refused", tuple(tile), f"{type(error).__name__}: {error}"[:100], flush=True)


def main(minutes: float) -> None:
    start, best = time.monotonic(), defaultdict(dict)
    for name in GEMMS:
        ws = weights(name)
        for n in ROWS:
            if time.monotonic() - start > minutes * 60:
                print("out of time at", name, n)
                return
            best[n][name] = sweep(name, n, ws)
        del ws
    for n, found in best.items():
        print(n, {name: (*tile, round(rate, 2), round(library, 2)) for name, (tile, rate, library) in found.items()})


if __name__ == "__main__":
    with torch.no_grad():
        if sys.argv[1:2] and sys.argv[1].startswith("warm"):  # warm:PART:PARTS
            warm(*map(int, sys.argv[1].split(":")[1:]))
        else:
            main(float(sys.argv[1]) if sys.argv[1:] else 2.0)

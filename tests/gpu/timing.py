"""Times of matrix products on a GPU, in CUDA graphs: `python -m tests.gpu.timing sweep|gemms`; see docs/performance.md.

`python -m bench.roofline` times whole rounds.
"""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nanospec_fn.kernels import gemm
from tests.gpu.shapes import GEMMS, noise


def milliseconds(run: Callable[[], Any], repeats: int = 20) -> float:
    """Median of `repeats` replays."""
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def graph(run: Callable[[], Any]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        run()
    captured.replay()
    return captured.replay


def copies(name: str) -> list[Tensor]:
    """Enough copies of a shape's weights that none is read from L2."""
    outer, inner = GEMMS[name]
    return [noise(outer, inner, seed=i, scale=inner**-0.5) for i in range(max(2, 300_000_000 // (outer * inner * 2)))]


FEW = ((16, 512, 2, 3), (16, 512, 4, 3), (16, 256, 2, 5), (32, 256, 4, 3), (32, 256, 2, 3), (32, 128, 4, 5))
FEW += ((64, 128, 4, 4), (64, 128, 4, 5), (64, 64, 4, 6), (64, 256, 4, 3), (128, 64, 4, 5), (128, 64, 8, 5))
FEW += ((128, 128, 8, 3), (128, 128, 4, 3))
MANY = ((64, 64, 4, 5), (128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3))


def candidates(n: int) -> list[gemm.Tile]:
    """Launches worth a try for n rows that fit in shared memory."""
    sizes = [size for size in (8, 16, 32, 64) if max(8, n // 4) <= size <= max(16, n)]
    found = [gemm.Tile(size, *rest) for size in sizes for rest in FEW if size > 8 or rest[0] >= 32]
    if n > 64:
        found += [gemm.Tile(128, *rest) for rest in MANY]
    return [t for t in found if (t.rows + t.cols) * t.depth * 2 * t.stages <= 225_000]


def warm(part: int, parts: int) -> None:
    """Compile a share of the candidates, for the others to find in Triton's cache."""
    x, w = noise(512, 1024), noise(256, 1024)
    for tile in sorted({tile for n in SWEPT for tile in candidates(n)})[part::parts]:
        try:
            gemm.linear(x, w, tile=tile)
        except Exception as error:  # a launch that the device refuses
            print("refused", tuple(tile), str(error)[:60])


SWEPT = (8, 32, 64, 192)


def sweep() -> None:
    for name, n in itertools.product(GEMMS, SWEPT):
        sweep_one(name, n)


def sweep_one(name: str, r: int) -> None:
    weights = copies(name)
    x = noise(r, weights[0].shape[1])
    size = weights[0].numel() * 2
    want = gemm.linear(x, weights[0])

    def rate(linear: Callable[..., Tensor], **launch: Any) -> float:
        """TB/s of weights."""
        return size * len(weights) / milliseconds(graph(lambda: [linear(x, w, **launch) for w in weights]), 7) / 1e9

    results, wrong = [], 0
    for tile in candidates(r):
        try:
            wrong += not torch.equal(gemm.linear(x, weights[0], tile=tile), want)
            results.append((rate(gemm.linear, tile=tile), tile))
        except Exception as error:  # a launch that the device refuses
            print("refused", tuple(tile), str(error)[:60])
    results.sort(reverse=True)
    library = rate(torch.nn.functional.linear)
    print(f"{name} rows {r}: cublas {library:.2f} TB/s; {len(results)} tiles, {wrong} with other bits", flush=True)
    for found, tile in results[:4]:
        print(f"    {found:.2f} TB/s  {tuple(tile)}", flush=True)


def gemms() -> None:
    """All products of one Llama-8B pass in one graph, as the engine launches them, beside cuBLAS."""
    layers = {
        name: [noise(*shape, seed=i) for i in range(32 if name != "head" else 1)] for name, shape in GEMMS.items()
    }
    for m in (1, 8, 32, 64, 256):
        inputs = {k: noise(m, k, seed=k) for k in (4096, 14336)}

        def run(linear: Callable[[Tensor, Tensor], Tensor], inputs: dict[int, Tensor] = inputs) -> None:
            for i in range(32):
                for name in ("qkv", "out", "gate_up", "down"):
                    linear(inputs[GEMMS[name][1]], layers[name][i])
            linear(inputs[4096], layers["head"][0])

        mine, theirs = graph(lambda: run(gemm.linear)), graph(lambda: run(torch.nn.functional.linear))
        print(f"gemms m {m}: canonical {milliseconds(mine):.3f} ms, cublas {milliseconds(theirs):.3f} ms", flush=True)
    x = noise(8192, 4096)
    for name in ("qkv", "gate_up"):
        w = layers[name][0]
        flops = 2 * x.shape[0] * w.numel()
        mine, theirs = graph(lambda w=w: gemm.linear(x, w)), graph(lambda w=w: torch.nn.functional.linear(x, w))
        print(f"prefill {name} 8192 rows: {flops / milliseconds(mine) / 1e9:.0f} TFLOP/s, "
              f"cublas {flops / milliseconds(theirs) / 1e9:.0f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    with torch.no_grad():
        for what in sys.argv[1:]:
            if what.startswith("warm"):  # warm:PART:PARTS
                warm(*map(int, what.split(":")[1:]))
                continue
            {"sweep": sweep, "gemms": gemms}[what]()

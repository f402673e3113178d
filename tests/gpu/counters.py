"""What the hardware's counters say of products and attention, by Nsight Compute; see docs/performance.md.

    ncu --profile-from-start off --clock-control none --csv --metrics $(python -m tests.gpu.counters metrics) \
        python -m tests.gpu.counters launch > counters.csv
    python -m tests.gpu.counters table counters.csv

Each launch runs alone, its operands not in L2: ncu empties the caches before it.
"""

import csv
import sys

import torch

from nanospec_fn.kernels import attend, gemm
from tests.gpu.shapes import GEMMS, noise
from tests.oracle_attention import Case, paged_case

METRICS = {
    "us": "gpu__time_duration.sum",
    "dram %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor %": "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_elapsed",
    "busy SM %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "load": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "barrier": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "gmma": "smsp__average_warps_issue_stalled_gmma_per_issue_active.ratio",
    "wait": "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
}
ROWS = (1, 32, 168, 192, 672)
CONTEXT = 250
ATTENTION = (("plain", 1, 1), ("plain", 32, 1), ("chain", 32, 6), ("tree", 8, 21), ("tree", 32, 21))  # slots, rows


def rows_of(kind: str, rows: int) -> tuple[int, ...]:
    """Positions of a slot's rows: a tree's has five levels of four nodes."""
    return tuple(CONTEXT + (i if kind != "tree" else -(-i // 4)) for i in range(rows))


def launch() -> None:
    """One launch of each, in the order that `table` tells of; those that compile come first, unseen."""
    products = [(name, n) for name in GEMMS for n in ROWS]
    weights = {name: noise(*shape) for name, shape in GEMMS.items()}
    cases = [paged_case(Case((rows_of(kind, r),) * b, 16, 32, 8, 128, tree=kind == "tree"), torch.bfloat16, "cuda")
             for kind, b, r in ATTENTION]  # fmt: skip
    for seen in (False, True):
        if seen:
            torch.cuda.cudart().cudaProfilerStart()
        for name, n in products:
            gemm.linear(noise(n, GEMMS[name][1]), weights[name])
        for paged in cases:
            attend.attend(paged.pool, paged.q, paged.position, paged.page_table, paged.base, paged.path)
        torch.cuda.synchronize()
    torch.cuda.cudart().cudaProfilerStop()


def table(path: str) -> None:
    """The counters of every kernel, in the order of launches; stalls in warps that wait for each that issues."""
    with open(path) as file:
        lines = [line for line in file if line.startswith('"')]
    found: dict[str, dict[str, str]] = {}
    for row in csv.DictReader(lines):
        found.setdefault(row["ID"], {"kernel": row["Kernel Name"]})[row["Metric Name"]] = row["Metric Value"]
    labels = iter([f"{name} {n}" for name in GEMMS for n in ROWS])
    print("| launch | " + " | ".join(METRICS) + " |\n" + "|---" * (len(METRICS) + 1) + "|")
    for one in found.values():
        product = one["kernel"].startswith(("_few_rows", "_many_rows"))
        if not product and not one["kernel"].startswith("_"):
            continue  # the library's own, which fills a tensor
        label = next(labels) if product else one["kernel"]
        print(f"| {label} | " + " | ".join(one.get(metric, "") for metric in METRICS.values()) + " |")


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "metrics":
        print(",".join(METRICS.values()))
    else:
        {"launch": launch, "table": table}[what](*rest)

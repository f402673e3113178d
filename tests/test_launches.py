"""The launches that kernels pick by size, beside what an H200 measured of them: bench/results/h200/trials."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch

from nanospec_fn.kernels import launches
from tests.gpu.shapes import GEMMS

TRIALS = Path(__file__).parent.parent / "bench/results/h200/trials"
KV_HEADS, GROUPS = 8, 4  # of what was measured


def test_products_take_a_tile_that_is_nearly_the_quickest():
    """Bugs: waves counted of another tile, rows that are thrown away left out, a limit of the processor off by two."""
    known = []
    for row in map(json.loads, (TRIALS / "product-tiles.jsonl").read_text().splitlines()):
        tile = launches.pick_tile(row["rows"], *GEMMS[row["shape"]], torch.bfloat16)
        rates = {tuple(found["tile"]): found["tb_s"] for found in row["tiles_tb_s"]}
        shape = (tile.rows, tile.more, tile.cols, tile.depth, tile.warps, tile.stages, tile.overlap)
        if shape in rates:  # not all that is picked was tried at every size
            known.append((rates[shape] / max(rates.values()), row["shape"], row["rows"]))
    assert len(known) == 35
    assert min(known)[0] > 0.95, min(known)


def attention(slots: int, rows: int, tree: bool) -> str:
    """The name in attention-tiles.txt of what is picked."""
    pairs = slots * KV_HEADS
    cut = launches.is_cut(pairs, rows, GROUPS, tree)
    launch = launches.pick_launch(rows * GROUPS, pairs, cut, tree, most=128)
    own = launches.pick_own_launch(GROUPS, cut) if tree else launches.Launch(0, 0)
    # The rows of a tree that is cut are folded in its second launch, which has the first one's warps in the trials.
    ends = f"S{(own if tree else launch).fold_stages}" if cut else "F"
    return f"a2r{launch.rows}w{launch.warps}{ends}o{own.warps}"


def test_attention_takes_a_launch_that_is_nearly_the_quickest():
    """Bugs: a launch that is cut, though it fills the device; warps of the one for the other; a tree's two mixed up."""
    lines = (TRIALS / "attention-tiles.txt").read_text().splitlines()
    known = []
    for line in lines:
        slots, rows, context, tree = ast.literal_eval(re.search(r"ATT (\(.*?\))", line)[1])
        times = {name: us for us, name in ast.literal_eval(re.search(r"best (\[.*?\])", line)[1])}
        known.append((times[attention(slots, rows, bool(tree))] / min(times.values()), slots, rows, context))
    assert len(known) == len(lines) == 24
    assert max(known)[0] < 1.12, max(known)


@pytest.mark.parametrize("groups", [1, 7, 17])
def test_one_row_of_a_tree_is_one_tile(groups):
    """Bug: query heads of a KV head past the tile's last row, whose results are never written."""
    for cut in (False, True):
        assert launches.pick_own_launch(groups, cut).rows >= max(16, groups)

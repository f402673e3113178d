"""The phases of a round on a GPU: every kernel is tied to its launch, and lands where it belongs."""

import pytest
import torch

import nanospec_fn as ns
from bench import rounds
from tests.gpu.shapes import TINY, near_copy, random_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("spec", [None, ns.Speculation(depth=3), ns.Speculation(top_k=3, depth=3)], ids=str)
@pytest.mark.parametrize("attend", ["canonical", "sdpa"])
def test_every_kernel_has_a_phase(spec, attend):
    """Bugs: kernels whose launch the trace does not show; a fused kernel that no name or range covers."""
    target = random_model(TINY)
    draft = near_copy(target) if spec else None
    timing = rounds.measure(target, draft, spec, slots=4, context=40, repeats=3, attend=attend)
    assert timing.phases["other"] == 0
    wanted = {"target", "attention", "pointwise", "head", "accept"} | ({"draft"} if spec else set())
    assert wanted <= {name for name, ms in timing.phases.items() if ms > 0}, timing.phases
    # Three layers of draft for each of three levels, and as many of target: no phase is all of the round.
    assert max(timing.phases.values()) < 0.95 * sum(timing.phases.values())


def test_the_products_of_each_side_are_told_apart():
    """Bug: the draft's products, which come first and have the same names, counted as the target's."""
    target = random_model(TINY)
    found = [
        rounds.measure(target, near_copy(target) if spec else None, spec, 4, 40, 3).phases["target"]
        for spec in (None, ns.Speculation(depth=3))
    ]
    assert found[1] < 1.6 * found[0]  # 4 rows a slot in place of 1; with the draft's 3 passes it would be 4 times


def test_the_read_ceiling_is_no_cache():
    """Bug: a buffer that L2 holds, whose rate no weight is read at: twice the size must not be read at another rate."""
    device = torch.device("cuda")
    rates = [rounds.read_ceiling(device, size) for size in (2 << 30, 4 << 30)]
    assert rates[1] == pytest.approx(rates[0], rel=0.1)

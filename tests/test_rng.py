"""rng: the bits against plain Python integers, the numbers at their extremes, and statistics.

Every statistic runs on fixed keys, so it passes or fails for good; the odds are those of a false alarm when the mix is
changed. Bounds in sigmas of a normal: 5.5 are odds of 4e-8.
"""

import math

import numpy as np
import pytest
import torch

from nanospec_fn import rng

SIGMAS = 5.5


def mix64(x: int) -> int:
    x = (x ^ x >> 27) * 0x3C79AC492BA7B653 % 2**64
    x = (x ^ x >> 33) * 0x1C69B3F74AC4AE35 % 2**64
    return x ^ x >> 27


def mix32(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % 2**32
    x = (x ^ x >> 15) * 0x846CA68B % 2**32
    return x ^ x >> 16


def fold_in(key: int, data: int) -> int:
    return mix64(((key ^ data % 2**64) + 0x9E3779B97F4A7C15) % 2**64)


def u_of(key: int, index: int) -> np.float32:
    bits = (mix32((mix32(index ^ key % 2**32) + (key >> 32)) % 2**32) + 2**31) % 2**32
    return min(np.float32((bits + 0.5) * 2.0**-32), np.float32(1 - 2.0**-24))


@pytest.mark.parametrize("seed", [0, 1, 2, 12345, 2**31, 2**63 - 1])
def test_bits_equal_plain_integers(seed):
    """Catches an arithmetic shift, a product that does not wrap, and a half of the key that is not used."""
    expected = mix64((seed + 0x9E3779B97F4A7C15) % 2**64)
    key = rng.key(torch.tensor(seed))
    assert key.item() % 2**64 == expected
    for data in (0, 1, -1, 7, 2**31, 128255):
        folded = rng.fold_in(key, data)
        assert folded.item() % 2**64 == fold_in(expected, data)
        assert torch.equal(rng.fold_in(key, torch.tensor(data)), folded)
        u = u_of(fold_in(expected, data), 0)
        assert rng.uniform(folded).item() == u
    draws = rng.gumbel(key, 300)
    for index in (0, 1, 255, 299):
        exact = -math.log(-math.log1p(-float(u_of(expected, index))))
        assert draws[index].item() == pytest.approx(exact, rel=1e-6, abs=1e-6)


def test_golden():
    """The bits are part of the contract: a seed gives the same text in every version."""
    key = rng.draw_key(rng.key(torch.tensor([0, 1, 2**63 - 1])), torch.tensor([0, 5, 128000]), rng.TARGET)
    assert key.tolist() == GOLDEN_KEYS
    assert (rng.uniform(key).double() * 2**33).long().tolist() == GOLDEN_UNIFORMS
    assert rng.gumbel(key, 3).tolist() == [pytest.approx(row, rel=1e-6) for row in GOLDEN_GUMBELS]


GOLDEN_KEYS = [-5335053777604615088, 1022693183619201763, 2925013486253257033]
GOLDEN_UNIFORMS = [3184129024, 4880656896, 396867744]  # in units of 2^-33
GOLDEN_GUMBELS = [
    [0.7697742, -0.5984957, -0.8064567],
    [0.1746464, 0.9234877, 2.154167],
    [3.051185, -0.3376243, -0.7101935],
]


def test_conversion_rounds_once_and_stays_inside():
    """Catches 24-bit uniforms (u = 0), a u of 1 and the infinite draws that follow from either."""
    bits = torch.tensor([-(2**31), -(2**31) + 1, -(2**31) + 2**24 + 1, -1, 0, 12345678, 2**31 - 129, 2**31 - 1])
    u = rng._uniform(bits.to(torch.int32))
    exact = np.float32((bits.numpy() + 2**31 + 0.5) * 2.0**-32)
    assert u.tolist() == np.minimum(exact, np.float32(1 - 2.0**-24)).tolist()
    assert u[0].item() == 2.0**-33
    assert u[-1].item() == 1 - 2.0**-24
    g = -torch.log(-torch.log1p(-u))
    assert torch.isfinite(g).all()
    assert g[0].item() == pytest.approx(33 * math.log(2), rel=1e-6)
    assert g[-1].item() == pytest.approx(-math.log(24 * math.log(2)), rel=1e-6)


@pytest.mark.parametrize("n", [1, 3, 16, 33, 1000, 49157])
def test_a_row_is_its_key_alone(n):
    """Catches bits that depend on neighbours, and vector and scalar paths of log that differ."""
    keys = rng.key(torch.arange(9))
    whole = rng.gumbel(keys, n)
    for rows in (1, 2, 5):
        assert torch.equal(rng.gumbel(keys[3 : 3 + rows], n), whole[3 : 3 + rows])
    index = torch.tensor([0, n // 2, n - 1])
    assert torch.equal(rng.gumbel_at(keys[:, None], index), whole[:, index])
    assert torch.equal(torch.func.vmap(lambda k: rng.gumbel(k, n))(keys), whole)


def streams() -> dict[str, torch.Tensor]:
    """2^16 uniforms along each axis that a draw is named by."""
    n = torch.arange(2**16)
    one = rng.key(torch.tensor(7))
    return {
        "seeds": rng.uniform(rng.key(n)),
        "positions": rng.uniform(rng.fold_in(one, n)),
        "purposes": rng.uniform(rng.fold_in(rng.fold_in(one, n // 3), n % 3)),
        "indices": torch.exp(-torch.exp(-rng.gumbel(one, 2**16).double())).float(),
        "candidates": rng.uniform(rng.fold_in(rng.draw_key(one, torch.tensor(3), rng.ACCEPT), n)),
    }


@pytest.mark.parametrize("name", ["seeds", "positions", "purposes", "indices", "candidates"])
def test_uniform_and_independent_of_the_neighbour(name):
    """Chi-square over 256 cells, and over the 16 x 16 cells of neighbours and of draws 256 apart. Odds: 1e-7 each."""
    u = streams()[name]
    for cells in ((u * 256).long(), *((u[:-d] * 16).long() * 16 + (u[d:] * 16).long() for d in (1, 256))):
        counts = torch.bincount(cells.clamp(0, 255), minlength=256).double()
        expected = len(cells) / 256
        chi = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi - 255) < SIGMAS * math.sqrt(2 * 255)


def test_gumbel_moments():
    """Mean 0.5772, variance 1.6449 over 2^20 draws. Odds 1e-7."""
    g = rng.gumbel(rng.key(torch.arange(16)), 2**16).double()
    n = g.numel()
    assert g.mean().item() == pytest.approx(0.5772157, abs=SIGMAS * math.sqrt(1.6449 / n))
    # The fourth central moment is 14.6, so the variance of the squared deviation is 14.6 - 1.6449^2.
    assert g.var().item() == pytest.approx(1.644934, abs=SIGMAS * math.sqrt((14.6 - 2.7) / n))


def flips(a: torch.Tensor, b: torch.Tensor, width: int) -> torch.Tensor:
    return torch.stack([((a ^ b) >> i) & 1 for i in range(width)], -1).double()


@pytest.mark.parametrize("what", ["seed", "data", "key"])
def test_avalanche_of_keys(what):
    """Each of 64 output bits flips half the time, whichever input bit is flipped: 64 x 64 cells of 2048 trials.
    The bound of 6.5 sigmas has odds of 4e-7 over all cells."""
    trials = torch.arange(2048)
    worst = 0.0
    for bit in range(63):
        flip = torch.tensor(1 << bit)
        if what == "seed":
            pair = rng.key(trials), rng.key(trials ^ flip)
        elif what == "data":
            pair = rng.fold_in(rng.key(torch.tensor(5)), trials), rng.fold_in(rng.key(torch.tensor(5)), trials ^ flip)
        else:
            keys = rng.key(trials)
            pair = rng.fold_in(keys, 3), rng.fold_in(keys ^ flip, 3)
        rate = flips(*pair, 64).mean(0)
        worst = max(worst, (rate - 0.5).abs().max().item())
    assert worst < 6.5 * 0.5 / math.sqrt(2048)


@pytest.mark.parametrize("what", ["index", "key"])
def test_avalanche_of_bits(what):
    """The same of the 32-bit mix, for each bit of the index and of both halves of the key: odds 2e-7."""
    trials = torch.arange(4096)
    base = rng.key(trials)
    for bit in range(17 if what == "index" else 63):
        flip = torch.tensor(1 << bit)
        before = rng._bits32(base, trials)
        after = rng._bits32(base, trials ^ flip) if what == "index" else rng._bits32(base ^ flip, trials)
        rate = flips(before.long(), after.long(), 32).mean(0)
        assert (rate - 0.5).abs().max().item() < 6.5 * 0.5 / math.sqrt(4096)


def test_keys_with_close_low_halves_share_no_row():
    """Catches a mix whose second half of the key only moves the first's output: one row would be the other permuted.
    4096 draws of 2^32 values meet by chance 0.004 times."""
    for other in (1234567 + (6 << 32), 1234568 + (6 << 32), 1234567 + (5 << 33)):
        a, b = (rng._bits32(torch.tensor(key), torch.arange(4096)) for key in (1234567 + (5 << 32), other))
        assert len(set(a.tolist()) & set(b.tolist())) < 3
        correlation = torch.corrcoef(torch.stack((a.double(), b.double())))[0, 1].item()
        assert abs(correlation) < SIGMAS / math.sqrt(4096)


def test_wide_flat_rows_have_no_ties_at_the_maximum():
    """24-bit uniforms tie in 0.6% of such rows: 100 rows of 128256. Odds of one tie with 32 bits: 100 * 1e-6."""
    top = rng.gumbel(rng.key(torch.arange(100)), 128256).topk(2).values
    assert (top[:, 0] > top[:, 1]).all()


def test_first_token_follows_the_distribution():
    """The Gumbel argmax over positions draws from p. Chi-square with 3 degrees of freedom below 40: odds 1e-8."""
    p = torch.tensor([0.5, 0.25, 0.2, 0.05])
    keys = rng.draw_key(rng.key(torch.tensor(3)), torch.arange(2**15), rng.TARGET)
    counts = torch.bincount((p.log() + rng.gumbel(keys, 4)).argmax(-1), minlength=4)
    expected = p * 2**15
    assert ((counts - expected) ** 2 / expected).sum().item() < 40

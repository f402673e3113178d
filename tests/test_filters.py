"""filters: which log-prob is which, what is kept, and the coupled draw; plain Python and float64 as oracles."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec_fn import filters, kernels, rng
from nanospec_fn.filters import log_probs

INF = float("inf")


def one(row, temperature=1.0, top_k=0, top_p=1.0):
    """log_probs of one row, as a list."""
    x = torch.as_tensor(row)[None]
    columns = torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p])
    return log_probs(x, *columns)[0]


# Which log-prob is which (C15)


def test_c15_log_prob_at_a_temperature():
    """Catches raw log-probs (-0.4076) and log-probs divided by T (-0.8152)."""
    assert one([2.0, 1.0, 0.0], 0.5)[0].item() == pytest.approx(-0.1429, abs=5e-5)


def test_c15_analogue_of_top_p():
    """Kept mass is renormalised: with top_p 0.9 the weights e^4, e^2 stay (0.867 < 0.9 is crossed by the second)."""
    logp = one([2.0, 1.0, 0.0], 0.5, top_p=0.9)
    assert logp[0].item() == pytest.approx(-math.log(1 + math.exp(-2)), abs=1e-6)  # -0.1269, not -0.1429
    assert logp[2].item() == -INF
    assert one([2.0, 1.0, 0.0], 0.5, top_p=0.86).tolist() == [0.0, -INF, -INF]


def test_c15_at_temperature_zero_is_the_raw_log_prob():
    """Filters do not apply: nothing is sampled."""
    assert one([2.0, 1.0, 0.0], 0.0, top_k=1, top_p=0.1).tolist() == pytest.approx(
        [-0.4076, -1.4076, -2.4076], abs=5e-5
    )


# Filters


def kept_oracle(row, temperature, top_k, top_p):
    scaled = [x / temperature for x in row]
    ids = sorted(range(len(row)), key=lambda v: (-scaled[v], v))[: top_k or None]
    weights = [math.exp(scaled[v] - scaled[ids[0]]) for v in ids]
    kept, mass = [], 0.0
    for v, w in zip(ids, weights, strict=True):
        if top_p < 1 and kept and mass >= top_p * sum(weights):
            break
        kept.append(v)
        mass += w
    return {v: scaled[v] - scaled[ids[0]] - math.log(mass) for v in kept}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(-8, 8), min_size=2, max_size=40),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.integers(0, 45),
    st.sampled_from([1.0, 0.97, 0.613, 0.21, 1e-9]),
)
def test_filters_equal_plain_python(row, temperature, top_k, top_p):
    """Catches ties by place, top-p before top-k, mass that is not renormalised and a crossing token that is dropped."""
    row = [x / 3 for x in row]
    expected = kept_oracle(row, temperature, top_k, top_p)
    found = one(torch.tensor(row, dtype=torch.float64), temperature, top_k, top_p).tolist()
    assert {v for v, p in enumerate(found) if p > -INF} == set(expected)
    for v, p in expected.items():
        assert found[v] == pytest.approx(p, abs=1e-6)


def test_ties_at_the_cut_go_to_the_lowest_ids():
    assert one([1.0, 2.0, 2.0, 2.0, 0.0], top_k=2).tolist()[1:4] == pytest.approx([-math.log(2), -math.log(2), -INF])
    assert (one([0.0] * 8, top_p=0.5) > -INF).tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_a_wide_row_is_cut_as_its_full_sort_says(spread):
    """Catches a cut beyond the ordered head of a wide row: flat rows keep more than filters.HEAD tokens."""
    x = torch.randn(6, 5000, generator=torch.Generator().manual_seed(1)).mul(spread)
    top_k = torch.tensor([0, 0, 3000, 50, 0, 1024])
    top_p = torch.tensor([0.9, 0.2, 0.9, 1.0, 0.9999, 0.5])
    found = log_probs(x, torch.ones(6), top_k, top_p)
    for row in range(6):
        kept = kept_oracle(x[row].double().tolist(), 1.0, int(top_k[row]), float(top_p[row]))
        disputed = set((found[row] > -INF).nonzero()[:, 0].tolist()) ^ set(kept)
        # The cut itself is where fp32's cumulative mass says; flat rows have a weight of 2e-4 a token.
        assert torch.softmax(x[row].double(), 0)[list(disputed)].sum() < (1e-6 if spread else 3e-4)


@pytest.mark.parametrize("width", [5, 33, 1000, 49157])
def test_a_row_has_the_same_bits_among_any_rows(width):
    """Catches sums split among threads, scalar tails, and a neighbour's filter that changes a row."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, width, generator=generator) * 4
    temperature = torch.tensor([0.0, 1.0, 0.7, 1.3]).repeat(10)
    top_k, top_p = (
        torch.tensor([0, 3, 0, 0, 9]).repeat(8),
        torch.tensor([1.0, 0.9, 1.0, 1.0, 1.0, 0.5, 1.0, 1.0]).repeat(5),
    )
    whole = log_probs(x, temperature, top_k, top_p)
    for first, n in ((0, 1), (2, 1), (5, 1), (1, 2), (4, 3), (8, 4), (11, 7), (3, 21)):
        part = slice(first, first + n)
        assert torch.equal(log_probs(x[part].clone(), temperature[part], top_k[part], top_p[part]), whole[part])


@pytest.mark.parametrize("width", [5, 1000, 49157])
def test_a_lone_row_adds_up_to_the_same_bits(width):
    """Catches a sum over one wide row, which torch splits among its threads."""
    x = torch.randn(40, width, generator=torch.Generator().manual_seed(0)) - 12
    x[:, 3] = 0  # a sum near 1, whose logarithm shows its last bit
    alone = torch.cat([kernels.log_sum_exp(row[None]) for row in x])
    assert torch.equal(alone, kernels.log_sum_exp(x))
    assert alone.tolist() == pytest.approx(torch.logsumexp(x.double(), -1).tolist(), abs=1e-6)
    assert kernels.log_sum_exp(torch.full((2, 3), -INF)).tolist() == [-INF, -INF]


def test_extreme_temperatures_and_logits_stay_finite():
    """Catches logits / T that overflow to inf - inf."""
    assert one([30.0, 29.0, -INF], 1e-6).tolist() == [0.0, pytest.approx(-1e6), -INF]
    assert one([3e38, -3e38], 1e-6).tolist() == [0.0, -INF]
    assert one([5.0, -5.0], 1e6).tolist() == pytest.approx([-math.log(2)] * 2, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_128k_wide_rows_against_float64(dtype):
    x = (torch.randn(3, 128256, generator=torch.Generator().manual_seed(2)) * 3).to(dtype)
    columns = torch.tensor([1.0, 0.6, 2.0]), torch.tensor([0, 40, 0]), torch.tensor([1.0, 0.95, 0.9])
    found, exact = log_probs(x, *columns), log_probs(x.double(), *columns)
    assert found.dtype == torch.float32
    assert torch.equal(found > -INF, exact > -INF)
    finite = exact > -INF
    assert (found[finite] - exact[finite]).abs().max() < 1e-5


# The coupled draw


def test_argmax_ties_go_to_the_lowest_id():
    """C16: two equal rows of the head give exact ties."""
    x = torch.tensor([[1.0, 7.0, 7.0, 3.0], [-INF, -INF, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    assert filters.lowest_argmax(x).tolist() == [1, 2, 0]
    cold = torch.zeros(3)
    assert filters.target_tokens(x, x, torch.arange(3), cold, torch.arange(3)).tolist() == [1, 2, 0]


def test_coupled_draw_is_the_named_gumbel_argmax():
    """Catches a draw named by its row: the same key and position give the same token anywhere."""
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(3))
    key, position = rng.key(torch.tensor([11])), torch.tensor([6])
    logp = log_probs(x, torch.ones(1), torch.zeros(1), torch.ones(1))
    noise = rng.gumbel_at(rng.draw_key(key, position, rng.TARGET)[:, None], torch.arange(50))
    token = int((logp + noise).argmax())
    rows = 5
    many = filters.target_tokens(
        x.expand(rows, -1),
        logp.expand(rows, -1),
        key.expand(rows),
        torch.tensor([1.0, 0, 1, 0, 1]),
        position.expand(rows),
    )
    assert many.tolist() == [token, int(x.argmax())] * 2 + [token]

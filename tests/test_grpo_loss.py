"""The loss of GRPO: advantages, weights, gradients, against numbers worked by hand, plain autograd and enumeration."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl import mismatch, policy_loss
from rl.policy_loss import CORRECTIONS, LIMIT, LOSSES, Recipe, Weights

LN2 = math.log(2)


def test_advantages_by_hand():
    """Catches: the sample deviation for the group's, a flat group divided by its rounding error, a mean of all."""
    reward = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.1, 0.1, 0.1, 0.1], [3.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    found, flat = policy_loss.advantages(reward)
    assert flat.tolist() == [False, True, False]
    third = math.sqrt(3)  # (3 - 0.75) / sqrt(27 / 16), and -0.75 / the same
    expected = [[1, -1, -1, 1], [0, 0, 0, 0], [third, -third / 3, -third / 3, -third / 3]]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=3e-6)
    assert found[1].tolist() == [0.0] * 4


def test_a_group_of_one_says_nothing():
    found, flat = policy_loss.advantages(torch.tensor([[0.7], [0.0]]))
    assert (found.tolist(), flat.tolist()) == ([[0.0], [0.0]], [True, True])


def test_rewards_must_be_numbers():
    with pytest.raises(ValueError, match="reward holds a number that is not finite"):
        policy_loss.advantages(torch.tensor([[0.0, math.nan]]))


def test_denominators_by_hand():
    """Three completions of 2, 0 and 6 tokens, at most 10. Catches: an empty one that divides by 0 or is left out."""
    length = torch.tensor([2, 0, 6])
    assert policy_loss.token_scale("dapo", length, 10).tolist() == [1 / 8] * 3
    torch.testing.assert_close(policy_loss.token_scale("dr_grpo", length, 10), torch.full((3,), 1 / 30))
    torch.testing.assert_close(policy_loss.token_scale("grpo", length, 10), torch.tensor([1 / 6, 0, 1 / 18]))
    nothing = torch.tensor([0, 0])
    for loss in LOSSES:
        assert policy_loss.token_scale(loss, nothing, 10).isfinite().all()


# Five tokens: w = 1, 2, 1/4, 8, 6; the advantages' signs make the second, third and fourth ones that run away.
BEHAVIOUR = torch.tensor([-1.0, -2.0, -1.5, -3.0, -2.5])
OLD = BEHAVIOUR + torch.tensor([0.0, LN2, -2 * LN2, 3 * LN2, math.log(6)])
ADVANTAGE = torch.tensor([1.0, 1.0, -1.0, 2.0, -1.0])
SCALE = torch.tensor([0.5, 0.5, 0.25, 0.25, 0.25])
RUN = {"is_clip": 3.0, "icepop_low": 0.5, "icepop_high": 6.5, "m2po_tau": (1 + 4) / 2 * LN2**2 + 1e-6}
BY_HAND = {  # w, kept, clipped
    "none": ([1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
    "exact": ([1, 2, 0.25, 8, 6], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0]),
    "clipped": ([1, 2, 0.25, 3, 3], [1, 1, 1, 1, 1], [0, 0, 0, 1, 1]),
    "icepop": ([1, 2, 0.25, 8, 6], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]),
    # (log r)^2 of the three that run away: 1, 4, 9 times ln(2)^2; without the largest their mean is 2.5.
    "m2po": ([1, 2, 0.25, 8, 6], [1, 1, 1, 0, 1], [0, 0, 0, 0, 0]),
}


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_weights_by_hand(correction):
    """Catches: mu / pi for pi / mu, a bound off by one side, masked tokens that are clipped as well."""
    found = policy_loss.correct(Recipe(correction=correction, **RUN), OLD, BEHAVIOUR, ADVANTAGE)
    w, keep, clipped = BY_HAND[correction]
    torch.testing.assert_close(found.w, torch.tensor(w, dtype=torch.float32), rtol=1e-5, atol=0)
    assert found.keep.int().tolist() == keep
    assert found.clipped.int().tolist() == clipped


def plain_loss(correction: str, logits: Tensor, chosen: Tensor, beta: float, ref_logp: Tensor) -> Tensor:
    """The loss written down token by token in float64, for plain autograd."""
    logp = logits.log_softmax(-1)
    total = torch.zeros((), dtype=torch.float64)
    for t, (w, keep) in enumerate(zip(*BY_HAND[correction][:2], strict=True)):
        if keep:
            rho = torch.exp(logp[t, chosen[t]] - OLD[t])
            gain = rho * ADVANTAGE[t]
            if correction != "m2po":
                gain = min(gain, min(max(rho, torch.tensor(0.8)), torch.tensor(1.2)) * ADVANTAGE[t])
            ratio = torch.exp(ref_logp[t] - logp[t, chosen[t]])
            total = total + SCALE[t] * w * (beta * rho * (ratio - 1 - torch.log(ratio)) - gain)
    return total


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_gradient_is_plain_autograds(correction, beta):
    """On logits whose log-probs at the chosen tokens lie around pi_old, inside the clip and outside on both sides.

    Catches: a gradient through w, a mask or a scale of the wrong token, the KL's sign, clipping of the wrong side.
    """
    generator = torch.Generator().manual_seed(1)
    chosen = torch.tensor([0, 2, 1, 3, 2])
    logits = torch.randn(5, 4, generator=generator, dtype=torch.float64)
    ratio = torch.tensor([1.0, 1.5, 0.5, 0.7, 1.4], dtype=torch.float64).log()
    others = torch.logsumexp(logits.scatter(1, chosen[:, None], -math.inf), 1)
    wanted = (OLD + ratio).double()  # all below 0
    logits = logits.scatter(1, chosen[:, None], (others + wanted - (-wanted.expm1()).log())[:, None])
    ref_logp = OLD.double() - 0.4
    with torch.enable_grad():
        theirs = logits.clone().requires_grad_()
        expected = plain_loss(correction, theirs, chosen, beta, ref_logp)
        expected.backward()
        mine = logits.clone().requires_grad_()
        recipe = Recipe(correction=correction, kl_beta=beta, **RUN)
        weights = policy_loss.correct(recipe, OLD, BEHAVIOUR, ADVANTAGE)
        logp = mine.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        found = policy_loss.loss(recipe, logp, OLD, ref_logp, ADVANTAGE, weights, SCALE)
        found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-7)
    assert mine.grad.abs().amax() > 0.1


def test_gradient_at_the_first_update_by_hand():
    """pi_theta = pi_old: d loss / d logp = -scale * w * A of the kept tokens, whatever the clip."""
    for correction, (w, keep, _) in BY_HAND.items():
        recipe = Recipe(correction=correction, **RUN)
        weights = policy_loss.correct(recipe, OLD, BEHAVIOUR, ADVANTAGE)
        grad = torch.func.grad(lambda x, r=recipe, k=weights: policy_loss.loss(r, x, OLD, OLD, ADVANTAGE, k, SCALE))(
            OLD
        )
        expected = -SCALE * torch.tensor(w) * ADVANTAGE * torch.tensor(keep)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=0)


def test_clip_stops_the_gradient_only_where_the_ratio_ran_with_the_advantage():
    """PPO's four cases by hand, eps 0.2: rho = 1.5 and 0.5 with A = 1 and -1. Catches: clipping both sides."""
    rho, advantage = torch.tensor([1.5, 0.5, 1.5, 0.5]), torch.tensor([1.0, 1.0, -1.0, -1.0])
    one = Weights(torch.ones(4), torch.ones(4, dtype=torch.bool), torch.zeros(4, dtype=torch.bool))
    old = torch.full((4,), -2.0)

    def loss(x: Tensor, correction: str) -> Tensor:
        return policy_loss.loss(Recipe(correction=correction), x, old, old, advantage, one, torch.ones(4))

    value = loss(old + rho.log(), "exact")
    assert float(value) == pytest.approx(-(1.2 + 0.5 - 1.5 - 0.8))
    grad = torch.func.grad(lambda x: loss(x, "exact"))(old + rho.log())
    torch.testing.assert_close(grad, torch.tensor([0, -0.5, 1.5, 0]))
    grad = torch.func.grad(lambda x: loss(x, "m2po"))(old + rho.log())
    torch.testing.assert_close(grad, torch.tensor([-1.5, -0.5, 1.5, 0.5]))


@given(
    st.lists(st.tuples(st.integers(-8, 8), st.integers(-1, 1), st.booleans()), min_size=1, max_size=9),
    st.integers(0, 40),
)
def test_m2po_masks_as_few_as_bring_the_mean_down(tokens, tau):
    """Against the definition, mask by mask. Catches: a mean over other tokens, an order from the smallest, >= for >."""
    log_r, advantage, live = (torch.tensor(list(column)) for column in zip(*tokens, strict=True))
    keep = policy_loss.m2po_keep(log_r.float(), advantage.float(), live, float(tau))
    left = [i for i, (r, a, on) in enumerate(tokens) if on and r * a > 0]
    while left and sum(tokens[i][0] ** 2 for i in left) / len(left) > tau:
        largest = max(left, key=lambda i: (tokens[i][0] ** 2, i))
        left.remove(largest)
    masked = [i for i, (r, a, on) in enumerate(tokens) if on and r * a > 0 and i not in left]
    assert keep.tolist() == [i not in masked for i in range(len(tokens))]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_no_ratio_makes_the_loss_or_the_gradient_infinite(correction, loss):
    """C18: 300 tokens a factor 0.7 below, 300 above, then log-ratios of +-89 and log-probs of minus infinity.

    Catches: exp before the clamp, a mask after exp (0 * inf), a product over the sequence.
    """
    step = math.log(0.7)
    log_w = torch.tensor([step] * 300 + [-step] * 300 + [89.0, -89.0, 0.0, 0.0, 0.0])
    old = torch.full_like(log_w, -100.0)
    behaviour = old - log_w
    old[-3:-1], behaviour[-2:] = -math.inf, -math.inf
    advantage = torch.cat((torch.ones(300), -torch.ones(300), torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0])))
    recipe = Recipe(correction=correction, loss=loss, kl_beta=0.1)
    weights = policy_loss.correct(recipe, old, behaviour, advantage)
    assert weights.w.isfinite().all()
    assert not weights.keep[-3:].any()
    scale = policy_loss.token_scale(loss, torch.tensor([605]), 700).expand(605)

    def value_of(logp: Tensor) -> Tensor:
        return policy_loss.loss(recipe, logp, old, old - 89, advantage, weights, scale)

    for shift in (0.0, 89.0, -89.0):
        logp = (old + shift).clamp_max(0)
        logp[5] = -math.inf
        grad, value = torch.func.grad_and_value(value_of)(logp)
        assert value.isfinite()
        assert grad.isfinite().all()
        assert grad[-3:].tolist() == [0, 0, 0]
    raw = mismatch.weights(old, behaviour)
    assert raw["w_max"] == pytest.approx(math.exp(89), rel=1e-5)
    assert raw["w_min"] == pytest.approx(math.exp(-89), rel=1e-5)
    # Under m2po the two run away with their advantages and are masked first.
    assert int(weights.clipped.sum()) == {"exact": 2, "clipped": 2}.get(correction, 0)
    if correction in ("exact", "clipped"):
        largest = {"exact": math.exp(LIMIT), "clipped": 2.0}[correction]
        assert float(weights.w.max()) == pytest.approx(largest)


def power(p: Tensor, candidate: int, alpha: float) -> Tensor:
    """mu of `power` at a row with one candidate, from its definition."""
    mu = p * (1 - p[candidate] ** alpha) / (1 - p[candidate])
    return mu.index_put((torch.tensor(candidate),), p[candidate] ** alpha)


def test_exact_weights_have_the_gradient_under_the_policy_and_no_weights_do_not():
    """By enumeration: the mean over mu of a token's gradient is that of E_pi[A], with a KL that of KL(pi || pi_0)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(6, generator=generator)
    ref_logp = torch.randn(6, generator=generator).log_softmax(-1)
    advantage = torch.randn(6, generator=generator)
    old = logits.log_softmax(-1)
    mu = power(old.exp(), 2, 0.3)
    assert float(mu.sum()) == pytest.approx(1)

    def mean_gradient(correction: str, beta: float) -> Tensor:
        recipe = Recipe(correction=correction, kl_beta=beta)
        weights = policy_loss.correct(recipe, old, mu.log(), advantage)
        return torch.func.grad(
            lambda x: policy_loss.loss(recipe, x.log_softmax(-1), old, ref_logp, advantage, weights, mu)
        )(logits)

    def wanted(x: Tensor, beta: float) -> Tensor:
        logp = x.log_softmax(-1)
        return (logp.exp() * (beta * (logp - ref_logp) - advantage)).sum()

    for beta in (0.0, 0.5):
        expected = torch.func.grad(wanted)(logits, beta)
        torch.testing.assert_close(mean_gradient("exact", beta), expected, rtol=1e-4, atol=1e-6)
        assert (mean_gradient("none", beta) - expected).abs().amax() > 0.05


def test_on_a_chain_clipping_from_one_over_alpha_on_changes_nothing():
    generator = torch.Generator().manual_seed(4)
    for alpha in (0.1, 0.3, 0.9):
        p = (3 * torch.randn(50, generator=generator)).softmax(-1)
        mu = power(p, 7, alpha)
        found = policy_loss.correct(Recipe("clipped", is_clip=1 / alpha), p.log(), mu.log(), torch.ones(50))
        assert torch.equal(found.w, policy_loss.correct(Recipe("exact"), p.log(), mu.log(), torch.ones(50)).w)
        assert not found.clipped.any()


def test_chi_square_of_a_chain_is_the_sum_over_the_vocabulary():
    """Every token of random rows, whichever was emitted, gives its row's own value, up to the rounding of its weight.

    Catches: an inverse that drifts near 0 or 1, the accepted token's weight for the candidate's probability."""
    generator = torch.Generator().manual_seed(5)
    for alpha in (0.05, 0.3, 0.9, 1.0):
        for sharpness in (0.1, 1, 5, 20):
            p = (sharpness * torch.randn(12, generator=generator, dtype=torch.float64)).softmax(-1)
            candidate = int(torch.randint(12, (), generator=generator))
            mu = power(p, candidate, alpha)
            expected = float((p.square() / mu).sum() - 1)
            for token in range(12):
                one = p[token].log()[None], mu[token].log()[None], torch.tensor([int(token == candidate)])
                found = mismatch.chi_square("power", alpha, 1, *one)
                assert found == pytest.approx(expected, rel=1e-3, abs=1e-9)
    bare = torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([0])
    assert mismatch.chi_square("power", 0.3, 1, *bare) == 0
    assert mismatch.chi_square("exact", 1.0, 4, *bare) == 0
    assert mismatch.chi_square("power", 0.3, 2, *bare) is None
    assert mismatch.chi_square("relaxed", 1.0, 1, *bare) is None


def test_figures_of_the_mismatch_by_hand():
    """w = 1, 3, 0.5, 0 (a token that the policy cannot emit), and one without a behaviour log-prob."""
    behaviour = torch.tensor([-1.0, -2.0, -1.0, -1.0, -math.inf])
    old = torch.tensor([-1.0, -2.0 + math.log(3), -1.0 + math.log(0.5), -math.inf, -1.0])
    found = mismatch.weights(old, behaviour)
    assert found["w_mean"] == pytest.approx(4.5 / 3)
    assert found["ess"] == pytest.approx(4.5**2 / (3 * 10.25))
    assert mismatch.divergence(old[:3], behaviour[:3]) == pytest.approx((LN2 - math.log(3)) / 3)
    assert mismatch.divergence(old, behaviour) is None
    assert mismatch.agreement(old, old) == (1.0, 0.0)
    share, gap = mismatch.agreement(old[:3], torch.tensor([-1.0, -2.0, -1.0]))
    assert (share, gap) == (pytest.approx(1 / 3), pytest.approx((math.log(3) + LN2) / 3))
    nothing = torch.zeros(0)
    assert mismatch.weights(nothing, nothing) == dict.fromkeys(("w_mean", "w_max", "w_min", "ess"))
    assert mismatch.divergence(nothing, nothing) is None
    target = torch.tensor([0.25, 0.5, 1.0]).log()
    assert mismatch.missing_mass("relaxed", target, torch.tensor([1, 0, 2])) == pytest.approx(0.25)
    assert mismatch.missing_mass("power", target, torch.tensor([1, 0, 2])) == 0

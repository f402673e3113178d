"""How far the sampler's distribution mu is from the policy's pi_old: figures of a batch of tokens, in float64.

All of them are per token, given its prefix. Shapes: n tokens.
"""

import torch
from torch import Tensor

LARGEST = 700.0  # nats: exp of it is finite in float64
HALVINGS = 200


def weights(old: Tensor, behaviour: Tensor) -> dict[str, float | None]:
    """Of the raw weight w = pi_old / mu, before any correction: w_mean, w_max, w_min, and `ess`.

    ess: (sum w)^2 / (n sum w^2), the effective sample size as a share of the tokens, 1 where all weights are equal.
    Tokens whose log-probs are not finite are left out; None where there is none.
    """
    log_w = (old.double() - behaviour.double())[old.isfinite() & behaviour.isfinite()]
    if not len(log_w):
        return dict.fromkeys(("w_mean", "w_max", "w_min", "ess"))
    w = log_w.clamp_max(LARGEST).exp()
    even = (log_w - log_w.amax()).exp()  # the same up to a factor, which ess does not see
    ess = even.sum().square() / (len(even) * even.square().sum())
    return {"w_mean": float(w.mean()), "w_max": float(w.max()), "w_min": float(w.min()), "ess": float(ess)}


def divergence(old: Tensor, behaviour: Tensor) -> float | None:
    """KL(mu || pi_old) in nats a token: the mean of log mu - log pi_old over the sampler's tokens.

    Unbiased, so that it may come out below 0. None where it is infinite or there is no token.
    """
    mean = (behaviour.double() - old.double()).mean()
    return float(mean) if mean.isfinite() else None


def agreement(old: Tensor, served: Tensor) -> tuple[float | None, float | None]:
    """The share of tokens whose log-prob has the same bits in trainer and engine, and the mean gap in nats."""
    if not len(old):
        return None, None
    # Two infinities of one sign agree.
    gap = torch.where(old == served, 0.0, (old.double() - served.double()).abs())
    return int((old == served).sum()) / len(old), float(gap.mean())  # a mean on a GPU may be a bit below 1


def chi_square(rule: str, alpha: float, top_k: int, target: Tensor, behaviour: Tensor, origin: Tensor) -> float | None:
    """The mean over rows of sum_x pi(x)^2 / mu(x) - 1, exactly; None where the distributions are not at hand.

    exact: 0. `power` on a chain: a row has one candidate of probability p, so mu(x) = pi(x) * kappa elsewhere, with
    kappa = (1 - p^alpha) / (1 - p), and the sum is p^(2 - alpha) + (1 - p) / kappa - 1. An accepted token has p as its
    own target log-prob; for another, p follows from its weight 1 / kappa, which rises with p. None on a tree, whose
    rows have candidates that no token tells of, and under `relaxed`, where it is infinite at rows that leave mass out.

    Args: target, behaviour, origin: [n] of the sampler, see ns.Completion.
    """
    if rule == "exact":
        return 0.0
    if rule != "power" or top_k > 1 or not len(target):
        return None
    p = torch.where(origin > 0, target.double().exp(), candidate(target.double() - behaviour.double(), alpha))
    rest = torch.where(p < 1, (1 - p).square() / -torch.expm1(alpha * p.log()), 0.0)
    return float((p ** (2 - alpha) + rest - 1).mean())


def candidate(log_w: Tensor, alpha: float) -> Tensor:
    """The p in [0, 1] at which (1 - p) / (1 - p^alpha) = exp(log_w) [n]; 0 for log_w <= 0, as without a candidate."""
    low, high = torch.full_like(log_w, -LARGEST), torch.zeros_like(log_w)  # of log p
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        below = (-torch.expm1(middle)).log() - (-torch.expm1(alpha * middle)).log() < log_w
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return torch.where(log_w > 0, high.exp(), 0.0)


def missing_mass(rule: str, target: Tensor, origin: Tensor) -> float | None:
    """The mean over rows of pi's mass that mu cannot reach; only `relaxed` leaves any, at rows where it accepts."""
    if not len(target):
        return None
    if rule != "relaxed":
        return 0.0
    return float(torch.where(origin > 0, -torch.expm1(target.double()), 0.0).mean())

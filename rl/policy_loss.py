"""The loss of GRPO on tokens that another sampler drew: advantages, importance weights, and the clipped objective.

Everything is per token: a weight belongs to one token given its prefix. The product of a sequence's weights would be
unbiased for whole sequences and collapses with their length; no product is taken anywhere.

Three log-probs of a token meet here: `behaviour` (mu, with which the sampler emitted it), `old` (pi_old, the policy
that was served, as the trainer itself computes it) and `logp` (pi_theta, the policy that is differentiated).

Log-ratios are cut to +-LIMIT before exp, and what is masked is masked before exp, so that no token can make the loss or
a gradient infinite or NaN. Shapes: P prompts, G completions of each, B = P * G sequences, n tokens of all of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import struct

CORRECTIONS = ("none", "exact", "clipped", "icepop", "m2po")
LOSSES = ("dapo", "grpo", "dr_grpo")
LIMIT = 20.0  # nats, e^20 = 4.9e8


@dataclass(frozen=True)
class Recipe:
    """The hashable statics of the loss."""

    correction: str = "exact"
    is_clip: float = 2.0  # of "clipped": the largest weight
    icepop_low: float = 0.5  # of "icepop": weights outside of low..high mask their token
    icepop_high: float = 5.0
    m2po_tau: float = 0.04  # of "m2po": the largest mean of (log r)^2, nats^2
    loss: str = "dapo"  # the denominator, see `token_scale`
    clip_eps: float = 0.2
    kl_beta: float = 0.0


def advantages(reward: Tensor) -> tuple[Tensor, Tensor]:
    """reward [P, G] -> advantage [P, G], flat [P] bool: whether all of a group's rewards are equal.

    A = (R - mean of the group) / (its standard deviation + 1e-6), the deviation being that of the group itself (divided
    by G). A flat group, and so any group of one, has A = 0 exactly. It stays in every denominator (`token_scale`): an
    update shrinks with the share of groups that say something. Source: GRPO (Shao et al. 2024, arXiv 2402.03300),
    section 4.1.2. Dr. GRPO also leaves out the division by the deviation; here --loss chooses the denominator only.

    Errors: ValueError for a reward that is not finite.
    """
    if not reward.isfinite().all():
        raise ValueError("reward holds a number that is not finite")
    flat = reward.amax(1) == reward.amin(1)
    centred = reward - reward.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True).sqrt() + 1e-6)
    return torch.where(flat[:, None], 0.0, scaled), flat


def token_scale(loss: str, length: Tensor, max_tokens: int) -> Tensor:
    """What one token of each sequence weighs in the loss, a sum: length [B] -> [B] fp32.

    grpo: 1 / (B * own length), the mean of each sequence and then of the batch (arXiv 2402.03300, equation 3).
    dr_grpo: 1 / (B * max_tokens), the same for every token of every step (Liu et al. 2025, arXiv 2503.20783).
    dapo: 1 / (tokens of all sequences) (Yu et al. 2025, arXiv 2503.14476, equation 8).
    Every emitted token counts: also those of flat groups, and those that a correction masks.
    """
    length = length.float()
    if loss == "grpo":
        return torch.where(length > 0, 1 / (len(length) * length.clamp_min(1)), 0.0)
    tokens = length.sum().clamp_min(1) if loss == "dapo" else torch.tensor(float(len(length) * max_tokens))
    return (1 / tokens).expand(len(length)).to(length.device)


@struct.state
class Weights:
    """What a correction makes of each token."""

    w: Tensor  # [n] fp32, the factor of its term; finite, without a gradient
    keep: Tensor  # [n] bool; False: its term is left out
    clipped: Tensor  # [n] bool, whether w is not exp(old - behaviour): cut by C, or at +-LIMIT


def correct(recipe: Recipe, old: Tensor, behaviour: Tensor, advantage: Tensor) -> Weights:
    """The importance weight of every token, w = pi_old / mu as `recipe.correction` wants it. All arguments [n].

    none: 1. The loss is then biased towards what the sampler prefers.
    exact: w. Unbiased per token, given its prefix, wherever mu > 0; the prefixes stay the sampler's.
    clipped: min(w, C) (truncated importance sampling: Ionides 2008; for rollouts, Yao et al. 2025). Under `power` w is
      at most alpha^-k with k candidates at the row, so on a chain a C of 1 / alpha or more changes nothing.
    icepop: w where low <= w <= high, else the token is masked (IcePop, Ling team 2025).
    m2po: w, and `m2po_keep` says which tokens stay (arXiv 2510.01161). One update is made per batch, so that
      pi_theta = pi_old and r = w when the mask is chosen.

    A token whose old or behaviour log-prob is not finite has no weight and is masked, whatever the correction.
    """
    keep = old.isfinite() & behaviour.isfinite()
    log_w = torch.where(keep, old - behaviour, 0.0)
    w = log_w.clamp(-LIMIT, LIMIT).exp()
    clipped = log_w.abs() > LIMIT
    if recipe.correction == "none":
        w, clipped = torch.ones_like(w), torch.zeros_like(clipped)
    elif recipe.correction == "clipped":
        w, clipped = w.clamp_max(recipe.is_clip), clipped | (w > recipe.is_clip)
    elif recipe.correction == "icepop":
        keep = keep & (w >= recipe.icepop_low) & (w <= recipe.icepop_high)
    elif recipe.correction == "m2po":
        keep = keep & m2po_keep(log_w, advantage, keep, recipe.m2po_tau)
    return Weights(w=w.detach(), keep=keep, clipped=clipped & keep)


def m2po_keep(log_r: Tensor, advantage: Tensor, live: Tensor, tau: float) -> Tensor:
    """Which tokens M2PO leaves in [n] bool, r = pi_theta / mu (Zheng et al. 2025, arXiv 2510.01161).

    The tokens that would move the policy further from the sampler's are those with A > 0 and r > 1, or A < 0 and r < 1.
    Among them the largest (log r)^2 are masked until the mean of the others is at most tau; of equal ones the earlier
    go last. All other tokens stay.
    """
    away = live & (((advantage > 0) & (log_r > 0)) | ((advantage < 0) & (log_r < 0)))
    square, order = log_r[away].double().square().sort(stable=True)
    mean = square.cumsum(0) / torch.arange(1, len(square) + 1, device=square.device)
    stay = torch.empty_like(order, dtype=torch.bool).scatter_(0, order, mean <= tau)
    return torch.ones_like(live).masked_scatter(away, stay)


def loss(
    recipe: Recipe,
    logp: Tensor,
    old: Tensor,
    ref_logp: Tensor,
    advantage: Tensor,
    weights: Weights,
    scale: Tensor,
) -> Tensor:
    """The sum over tokens that are kept of scale * w * (beta * rho * k3 - min(rho A, clip(rho, 1 - eps, 1 + eps) A)).

    rho = pi_theta / pi_old. The clipped objective is PPO's (Schulman et al. 2017, arXiv 1707.06347, equation 7), per
    token; under "m2po" nothing is clipped. `k3` estimates KL(pi_theta || pi_0); w and rho make its expectation, and
    rho's gradient makes its gradient, one under pi_theta.

    Args: all [n]; logp is differentiated, ref_logp is that under the reference policy (read if kl_beta > 0),
      scale of `token_scale`.
    """
    live = weights.keep & logp.isfinite() & old.isfinite()
    logp, old = torch.where(live, logp, 0.0), torch.where(live, old, 0.0)
    rho = (logp - old).clamp(-LIMIT, LIMIT).exp()
    gain = rho * advantage
    if recipe.correction != "m2po":
        gain = torch.minimum(gain, rho.clamp(1 - recipe.clip_eps, 1 + recipe.clip_eps) * advantage)
    cost = -gain
    if recipe.kl_beta:
        live = live & ref_logp.isfinite()
        cost = cost + recipe.kl_beta * rho * k3(logp, torch.where(live, ref_logp, logp.detach()))
    return torch.where(live, scale * weights.w * cost, 0.0).sum()


def k3(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """[n] nats, never negative: exp(d) - d - 1 with d = ref_logp - logp.

    Its mean over tokens of `logp`'s own policy is KL(pi || pi_0) (Schulman 2020, "Approximating KL divergence").
    """
    d = (ref_logp - logp).clamp(-LIMIT, LIMIT)
    return d.exp() - d - 1

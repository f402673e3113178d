"""A policy whose optimum is known, trained on tokens of a lossy sampler.

The policy is a Llama whose logits are one table of six numbers, whatever the context, and only they are trained. Its
tokens come from `ns.generate` under rule `power`; the draft is a frozen copy of step 0, so that it always proposes the
likeliest token of then. A completion is one token of the prefill (drawn from the policy itself, not trained on) and
`Study.tokens` drawn by speculative rounds; its reward is the sum of its tokens' rewards r, less beta for every nat of
KL to step 0. The best table is then known: pi* is proportional to pi_0 exp(r / beta).
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import filters, model, struct
from rl import policy_loss

REFERENCE = (0.3, 0.25, 0.15, 0.1, 0.1, 0.1)  # pi_0; the draft proposes token 0
REWARD = (1.0, 0.2, 0.4, 0.6, 0.8, 0.0)  # r; token 0 is the best, so a sampler that prefers it looks like a good policy
BETA = 0.4
PROMPT = [0]
CONTEXT = 64  # of the policy
EMBED = 16  # the stream's width; its entries are all 1
CORRECTIONS = ("none", "exact", "clipped")
SETTLED = 3000  # expected updates, after which another one changes nothing that shows


@dataclass(frozen=True)
class Study:
    """What a run is made from, its seed and correction left out."""

    alpha: float = 0.3
    tokens: int = 1  # of a completion, trained on
    depth: int = 1  # of the draft's chain
    samples: int = 32  # completions a step
    steps: int = 100
    rate: float = 2.0  # step size of plain gradient descent
    is_clip: float = 2.0  # of correction "clipped"


def optimum() -> Tensor:
    """[V] float64: pi*, at which r - beta log(pi / pi_0) is the same for every token."""
    return (torch.tensor(REFERENCE).double().log() + torch.tensor(REWARD).double() / BETA).softmax(0)


def objective(p: Tensor) -> float:
    """What a token of policy p [V] is worth: its expected reward less beta KL(p || pi_0)."""
    reward, reference = torch.tensor(REWARD).double(), torch.tensor(REFERENCE).double()
    return float((p * (reward - BETA * (p / reference).log())).sum())


def distance(p: Tensor, q: Tensor) -> float:
    """Total variation, 0 to 1: the share of tokens that would have to change."""
    return float((p.double() - q.double()).abs().sum() / 2)


def init() -> ns.Model:
    """The policy of step 0: a Llama whose one layer adds nothing to a stream of ones."""
    vocab = len(REFERENCE)
    cfg = model.Config(
        vocab_size=vocab,
        hidden_size=EMBED,
        intermediate_size=EMBED,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=EMBED,
        max_context=CONTEXT,
        gemm="blocked",  # rows that have the same bits in the engine and in the trainer
    )
    zeros, ones = torch.zeros(EMBED, EMBED), torch.ones(EMBED)
    layer = model.Layer(
        attn_norm=ones,
        qkv=zeros.repeat(3, 1),
        qkv_bias=(),
        out=zeros,
        out_bias=(),
        mlp_norm=ones,
        gate_up=zeros.repeat(2, 1),
        gate_up_bias=(),
        down=zeros,
        down_bias=(),
    )
    head = head_of(torch.tensor(REFERENCE).log())
    params = model.Params(embed=torch.ones(vocab, EMBED), layers=(layer,), norm=ones, head=head)
    return ns.Model(cfg, params, name="table")


def head_of(table: Tensor) -> Tensor:
    """[V] logits -> [V, E], the head that gives them on a stream of ones."""
    return (table / EMBED)[:, None].expand(-1, EMBED).contiguous()


def log_probs(policy: ns.Model, table: Tensor) -> Tensor:
    """[V]: the policy's log-probs after any context, by the engine's own forward pass."""
    params = struct.replace(policy.params, head=head_of(table))
    one, off = torch.ones(1), torch.zeros(1, dtype=torch.int32)
    return filters.log_probs(ns.forward(params, policy.cfg, torch.tensor([PROMPT]))[0], one, off, one)[0]


def sizes(study: Study) -> ns.EngineConfig:
    """All of a step's completions at once."""
    return ns.EngineConfig(max_slots=study.samples, max_context=len(PROMPT) + 1 + study.tokens)


def sampling(study: Study, seed: int, step: int) -> list[ns.Sampling]:
    """A step's requests; a draw depends on seed, step and place alone."""
    base = (seed * study.steps + step) * study.samples
    rule = "power" if study.alpha < 1 else "exact"
    one = ns.Sampling(max_tokens=1 + study.tokens, temperature=1.0, rule=rule, alpha=study.alpha)
    return [dataclasses.replace(one, seed=base + i) for i in range(study.samples)]


def gradient(policy: ns.Model, table: Tensor, recipe: policy_loss.Recipe, drawn: Sequence[ns.Completion]) -> Tensor:
    """The gradient [V] of the trainer's loss on completions of one length.

    A completion's advantage is its reward less the mean of the others': a baseline that its own tokens do not enter,
    and no division by a standard deviation, so that the loss's expectation is the objective and the optimum exact.
    """
    tokens = torch.tensor([one.tokens for one in drawn])[:, 1:]
    behaviour = torch.tensor([one.behaviour_logp for one in drawn])[:, 1:].flatten()
    worth, n = torch.tensor(REWARD)[tokens].sum(1), len(drawn)
    advantage = ((worth - worth.mean()) * n / (n - 1)).repeat_interleave(tokens.shape[1])
    ref_logp, tokens = torch.tensor(REFERENCE).log()[tokens].flatten(), tokens.flatten()
    old = log_probs(policy, table)[tokens]
    weights = policy_loss.correct(recipe, old, behaviour, advantage)
    scale = torch.full_like(advantage, 1 / len(advantage))

    def loss(table: Tensor) -> Tensor:
        logp = log_probs(policy, table)[tokens]
        return policy_loss.loss(recipe, logp, old, ref_logp, advantage, weights, scale)

    with torch.enable_grad():
        return torch.func.grad(loss)(table)


@torch.no_grad()
def fit(study: Study, correction: str, seed: int, progress: bool = False) -> dict[str, Any]:
    """Train one policy; its distance to the optimum at every step, and of the mean policy of the last half."""
    policy = init()
    draft, chain = ns.load_draft("frozen", policy), ns.Speculation(top_k=1, depth=study.depth)
    engine = ns.prepare(policy, draft, sizes(study), chain)
    recipe = policy_loss.Recipe(correction=correction, is_clip=study.is_clip, loss="dapo", kl_beta=BETA)
    table, best, path = torch.tensor(REFERENCE).log(), optimum(), []
    average = torch.zeros(len(REFERENCE), dtype=torch.float64)
    for step in tqdm(range(study.steps), desc=f"{correction} {seed}", disable=not progress):
        drawn = ns.generate(policy, [PROMPT] * study.samples, sampling(study, seed, step), engine=engine)
        table = table - study.rate * gradient(policy, table, recipe, drawn)
        # Written into the tensor that the engine serves, as `policy.publish_` does: a captured graph reads that one.
        model.output_head(policy.params).copy_(head_of(table))
        p = table.double().softmax(0)
        path.append(distance(p, best))
        if step >= study.steps // 2:
            average += p / (study.steps - study.steps // 2)
    gap = objective(best) - objective(average)
    ends = {"distance": distance(average, best), "gap": gap, "policy": average.tolist(), "path": path}
    return {"correction": correction, "seed": seed} | ends


def expected_end(study: Study, correction: str) -> Tensor:
    """[V] float64: where the expected update is 0 for completions of one token, by enumerating the sampler's law.

    mu of `power` with the one candidate 0: p^alpha for it, the rest in proportion (docs/promises.md).
    """
    reference, reward = torch.tensor(REFERENCE).double(), torch.tensor(REWARD).double()
    table = reference.log()
    for _ in range(SETTLED):
        p = table.softmax(0)
        mu = p * (1 - p[0] ** study.alpha) / (1 - p[0])
        mu[0] = p[0] ** study.alpha
        w = {"none": torch.ones_like(p), "exact": p / mu, "clipped": (p / mu).clamp_max(study.is_clip)}[correction]
        term = mu * w * (reward - (mu * reward).sum() - BETA * (p / reference).log())
        table = table + study.rate * (term - p * term.sum())
    return table.softmax(0)

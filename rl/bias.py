"""What a lossy sampler does to a policy when nobody corrects for it, on a task whose optimum is known.

`python -m rl.bias --seeds 5 --out FILE.jsonl --picture FILE.png`. The policy is a Llama whose logits are one table of
six numbers, whatever the context, and only they are trained. Its tokens come from `ns.generate` under rule `power`;
the draft is a frozen copy of step 0, so that it always proposes the likeliest token of then. A completion is one token
of the prefill (drawn from the policy itself, not trained on) and `--tokens` drawn by speculative rounds; its reward is
the sum of its tokens' rewards r, less beta for every nat of KL to step 0. The best table is then known: pi* is
proportional to pi_0 exp(r / beta).
"""

import argparse
import dataclasses
import importlib.util
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import arguments, filters, model, struct
from rl import plot, policy_loss, run_files
from rl.train_options import real

FIRST = (0.3, 0.25, 0.15, 0.1, 0.1, 0.1)  # pi_0; the draft proposes token 0
REWARD = (1.0, 0.2, 0.4, 0.6, 0.8, 0.0)  # r; token 0 is the best, so a sampler that prefers it looks like a good policy
BETA = 0.4
PROMPT = [0]
CONTEXT = 64  # of the policy
EMBED = 16  # the stream's width; its entries are all 1


CORRECTIONS = ("none", "exact", "clipped")


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
    return (torch.tensor(FIRST).double().log() + torch.tensor(REWARD).double() / BETA).softmax(0)


def objective(p: Tensor) -> float:
    """What a token of policy p [V] is worth: its expected reward less beta KL(p || pi_0)."""
    reward, first = torch.tensor(REWARD).double(), torch.tensor(FIRST).double()
    return float((p * (reward - BETA * (p / first).log())).sum())


def distance(p: Tensor, q: Tensor) -> float:
    """Total variation, 0 to 1: the share of tokens that would have to change."""
    return float((p.double() - q.double()).abs().sum() / 2)


def init() -> ns.Model:
    """The policy of step 0: a Llama whose one layer adds nothing to a stream of ones."""
    vocab = len(FIRST)
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
    head = head_of(torch.tensor(FIRST).log())
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
    first, tokens = torch.tensor(FIRST).log()[tokens].flatten(), tokens.flatten()
    old = log_probs(policy, table)[tokens]
    weights = policy_loss.correct(recipe, old, behaviour, advantage)
    scale = torch.full_like(advantage, 1 / len(advantage))

    def loss(table: Tensor) -> Tensor:
        logp = log_probs(policy, table)[tokens]
        return policy_loss.loss(recipe, logp, old, first, advantage, weights, scale)

    with torch.enable_grad():
        return torch.func.grad(loss)(table)


@torch.no_grad()
def fit(study: Study, correction: str, seed: int, progress: bool = False) -> dict[str, Any]:
    """Train one policy; its distance to the optimum at every step, and of the mean policy of the last half."""
    policy = init()
    draft, chain = ns.load_draft("frozen", policy), ns.Speculation(top_k=1, depth=study.depth)
    engine = ns.prepare(policy, draft, sizes(study), chain)
    recipe = policy_loss.Recipe(correction=correction, is_clip=study.is_clip, loss="dapo", kl_beta=BETA)
    table, best, path = torch.tensor(FIRST).log(), optimum(), []
    average = torch.zeros(len(FIRST), dtype=torch.float64)
    for step in tqdm(range(study.steps), desc=f"{correction} {seed}", disable=not progress):
        drawn = ns.generate(policy, [PROMPT] * study.samples, sampling(study, seed, step), engine=engine)
        table = table - study.rate * gradient(policy, table, recipe, drawn)
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
    first, reward = torch.tensor(FIRST).double(), torch.tensor(REWARD).double()
    table = first.log()
    for _ in range(3000):
        p = table.softmax(0)
        mu = p * (1 - p[0] ** study.alpha) / (1 - p[0])
        mu[0] = p[0] ** study.alpha
        w = {"none": torch.ones_like(p), "exact": p / mu, "clipped": (p / mu).clamp_max(study.is_clip)}[correction]
        term = mu * w * (reward - (mu * reward).sum() - BETA * (p / first).log())
        table = table + 2.0 * (term - p * term.sum())
    return table.softmax(0)


def header(study: Study, seeds: int) -> dict[str, Any]:
    """The first line of a study's file."""
    task = {"first": FIRST, "reward": REWARD, "beta": BETA, "optimum": optimum().tolist()}
    versions = {"torch": torch.__version__, "python": sys.version.split()[0]}
    return {"header": {"study": asdict(study), "seeds": seeds, "task": task, "versions": versions}}


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of a study's lines: per correction the mean over seeds, and the smallest and largest."""
    study = Study(**lines[0]["header"]["study"])
    rows = ["| correction | seeds | distance to the optimum | by enumeration | objective lost | likeliest token |"]
    rows.append("|" + "---|" * 6)
    for correction in dict.fromkeys(line["correction"] for line in lines[1:]):
        runs = [line for line in lines[1:] if line["correction"] == correction]
        end = f"{distance(expected_end(study, correction), optimum()):.3f}" if study.tokens == 1 else ""
        spreads = [spread([run[key] for run in runs], 4 if key == "gap" else 3) for key in ("distance", "gap")]
        top = spread([run["policy"][0] for run in runs], 3)
        rows.append(f"| {correction} | {len(runs)} | {spreads[0]} | {end} | {spreads[1]} | {top} |")
    return "\n".join([*rows, f"| (the optimum) | | 0 | 0 | 0 | {float(optimum()[0]):.3f} |", ""])


def spread(values: Sequence[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def picture(lines: Sequence[Mapping[str, Any]]) -> Any:
    """A figure: distance to the optimum over steps, a line per seed; and the mean final policy beside the optimum."""
    from matplotlib.figure import Figure

    study = Study(**lines[0]["header"]["study"])
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    corrections = list(dict.fromkeys(line["correction"] for line in lines[1:]))
    width = 0.8 / (len(corrections) + 1)
    ids = range(len(FIRST))
    right.bar([i - 0.4 + width / 2 for i in ids], optimum().tolist(), width, color="0.3", label="the optimum")
    for k, correction in enumerate(corrections):
        runs = [line for line in lines[1:] if line["correction"] == correction]
        for run in runs:
            name = f"correction {correction}, {len(runs)} seeds" if run is runs[0] else None
            left.plot(range(1, len(run["path"]) + 1), run["path"], color=f"C{k}", alpha=0.6, linewidth=1.2, label=name)
        if study.tokens == 1:
            end = distance(expected_end(study, correction), optimum())
            left.axhline(end, color=f"C{k}", linestyle="--", label=f"{correction}, by enumeration: {end:.3f}")
        means = [statistics.fmean(run["policy"][i] for run in runs) for i in ids]
        low = [mean - min(run["policy"][i] for run in runs) for i, mean in enumerate(means)]
        high = [max(run["policy"][i] for run in runs) - mean for i, mean in enumerate(means)]
        place = [i - 0.4 + width * (k + 1.5) for i in ids]
        right.bar(place, means, width, yerr=[low, high], capsize=2, color=f"C{k}", label=f"correction {correction}")
    left.set(xlabel="step (policy updates)", ylabel="total variation distance to the optimum", ylim=(0, None))
    left.set(title=f"Tokens drawn under power, alpha {study.alpha:g}")
    right.set(xlabel="token id (the draft always proposes 0)", ylabel="probability", xticks=list(ids))
    right.set(title="Mean policy of the last half; bars: all seeds")
    for ax in (left, right):
        ax.grid(alpha=0.3, axis="y")
        ax.legend(fontsize=8)
    return figure


def build_parser() -> argparse.ArgumentParser:
    """The options of rl.bias."""
    parser = arguments.Parser(
        prog="python -m rl.bias",
        description="Train a policy with a known optimum on tokens of a lossy sampler, corrected and not.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add, count = parser.add_argument, arguments.positive
    add("--out", type=Path, required=True, metavar="FILE", help="a JSON line per run, after a header")
    add("--picture", type=Path, metavar="FILE.png", help="a picture too; needs matplotlib")
    add("--corrections", nargs="+", choices=CORRECTIONS, default=["none", "exact"], help="one run each, per seed")
    add("--seeds", type=count, default=5, help="runs per correction")
    add("--steps", type=count, default=Study.steps, help="policy updates")
    add("--samples", type=count, default=Study.samples, help="completions a step")
    add("--tokens", type=count, default=Study.tokens, help="tokens of a completion that are trained on")
    add("--depth", type=count, default=Study.depth, help="tokens that the draft proposes a round")
    add("--alpha", type=real(0, 1), default=Study.alpha, help="of rule power; 1 draws from the policy itself")
    add("--quiet", action="store_true", help="no progress bar")
    return parser


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Study:
    """The study that options ask for; what they cannot mean is refused before any work."""
    if args.samples < 2:
        parser.error("argument --samples: at least 2, a baseline is the mean of the others")
    if args.tokens > CONTEXT - len(PROMPT) - 1:
        parser.error(f"argument --tokens: at most {CONTEXT - len(PROMPT) - 1}, got {args.tokens}")
    if len(set(args.corrections)) < len(args.corrections):
        parser.error("argument --corrections: one is named twice")
    for name, path in (("--out", args.out), ("--picture", args.picture)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"argument {name}: {path} is a folder, or in one that does not exist")
    if args.picture is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"argument --picture: {plot.MISSING}")
    study = Study(args.alpha, args.tokens, args.depth, args.samples, args.steps)
    try:
        sizes(study).validate()
        ns.Speculation(depth=study.depth).validate()
        for one in sampling(study, args.seeds, 0)[-1:]:
            one.validate()
    except ValueError as error:
        parser.error(f"these sizes do not fit: {error}")
    return study


def main(argv: list[str] | None = None) -> int:
    """Run the study, write its file and picture, print its table; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    study = check(parser, args)
    lines: list[dict[str, Any]] = [header(study, args.seeds)]
    for seed in range(args.seeds):
        lines += [fit(study, correction, seed, progress=not args.quiet) for correction in args.corrections]
    run_files.write_whole(args.out, "".join(arguments.json_line(line) + "\n" for line in lines).encode())
    if args.picture:
        run_files.write_whole(args.picture, plot.png(picture(lines)))
    print(table(lines), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())

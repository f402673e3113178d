"""What the engine is compared with: tiny models, a loop that recomputes everything, and drafts that follow a script.

`next_token` is the oracle: one pass over all the tokens, alone, without a cache. Everything here is plain Python over
public functions and shares no code with the steps.
"""

import functools
import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanospec_fn import draft_model, sampling, trees
from nanospec_fn.draft import Draft, Nothing, Speculation, State
from nanospec_fn.filters import log_probs, target_tokens
from nanospec_fn.model import Model, forward
from nanospec_fn.sampling import Sampling
from nanospec_fn.slots import Slots
from nanospec_fn.trees import Tree
from tests import tiny

VOCAB = 64
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 96, "eos_token_id": [62, 63]}


@functools.cache
def target() -> Model:
    """Three layers, hidden 32, vocabulary 64, context 96."""
    return tiny.model("llama-3.1-8b", num_hidden_layers=3, **SIZES)


@functools.cache
def model_draft(name: str) -> Draft | None:
    """ "none", "ngram", "frozen", "model" (one random layer) or "eagle" (a random head over half of the vocabulary)."""
    if name == "model":
        other = tiny.model("llama-3.1-8b", seed=1, num_hidden_layers=1, **SIZES)
        return Draft(draft_model.LlamaDraft(other.cfg), other.params)
    if name == "eagle":
        cfg, params, _ = tiny.head(tiny.config("llama-3.1-8b", num_hidden_layers=3, **SIZES), target())
        return Draft(draft_model.Eagle3(cfg), params)
    return draft_model.load_draft(name, target())


def prompt(length: int, seed: int) -> tuple[int, ...]:
    """Token ids without the EOS ones; seed 0 repeats itself, so that prompt lookup finds something."""
    dice = random.Random(f"prompt {seed}")
    tokens = [dice.randrange(VOCAB - 4) for _ in range(length)]
    return tuple(tokens[i % 3] for i in range(length)) if seed == 0 else tuple(tokens)


Control = tuple[int, float, int, float]  # rng key, temperature, top-k, top-p, as the device holds them


def control(request: Sampling) -> Control:
    return row_control(sampling.controls([request]), 0)


def row_control(controls: sampling.Controls, row: int) -> Control:
    return tuple(getattr(controls, name)[row].item() for name in ("key", "temperature", "top_k", "top_p"))


@functools.cache
def next_token(model: Model, tokens: tuple[int, ...], control: Control) -> tuple[int, float]:
    """The token that follows and its log-prob, from one pass over the whole sequence."""
    logits = forward(model.params, model.cfg, torch.tensor([tokens]))[0, -1:]
    key, temperature, top_k, top_p = (torch.tensor([x]) for x in control)
    logp = log_probs(logits, temperature, top_k, top_p)
    token = int(target_tokens(logits, logp, key, temperature, torch.tensor([len(tokens)])))
    return token, float(logp[0, token])


@dataclass(frozen=True)
class Answer:
    """What a request has to become."""

    tokens: list[int]
    target_logp: list[float]  # nats
    behaviour_logp: list[float]  # nats
    reason: str  # "stop" or "length"


def reference(model: Model, prompt: tuple[int, ...], request: Sampling) -> Answer:
    """Plain decoding of one request, alone, the full sequence recomputed for every token."""
    stop_ids = {*request.stop_ids, *(() if request.ignore_eos else model.cfg.eos_ids)}
    tokens: list[int] = []
    logp: list[float] = []
    while len(tokens) < request.max_tokens:
        token, p = next_token(model, (*prompt, *tokens), control(request))
        tokens.append(token)
        logp.append(p)
        if token in stop_ids:
            return Answer(tokens, logp, logp, "stop")
    return Answer(tokens, logp, logp, "length")


def continuation(model: Model, prefix: tuple[int, ...], control: Control, n: int) -> list[int]:
    """The next n tokens, stop ids ignored."""
    tokens: list[int] = []
    for _ in range(min(n, model.cfg.max_context - len(prefix))):
        tokens.append(next_token(model, (*prefix, *tokens), control)[0])
    return tokens


@dataclass(frozen=True)
class Scripted(Nothing):
    """Right for exactly pattern[total % len] tokens of the reference continuation, then wrong.

    A chain, or a tree in which the right path takes random ranks among wrong siblings and wrong branches. With `absent`
    the tree ends after the first wrong token, and some of the other nodes are missing.
    """

    pattern: tuple[int, ...] = (1,)
    absent: bool = False

    def right(self, total: int, depth: int) -> int:
        """How many tokens are right in the round that starts with `total` known tokens; -1 with `absent`: no draft."""
        return min(depth, self.pattern[total % len(self.pattern)])

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Any, put: Any
    ) -> tuple[State, Tree]:
        if not spec.depth:
            return state, trees.init_all(len(live), 0, live.device)
        rows = [self._tree(s, row, spec) if live[row] else trees.init(spec.nodes) for row in range(len(live))]
        names = ("token", "parent", "depth", "logp", "score")
        return state, Tree(*(torch.stack([getattr(row, name) for row in rows]) for name in names))

    def _tree(self, s: Slots, row: int, spec: Speculation) -> Tree:
        total = int(s.total[row])
        prefix = tuple(s.tokens[row, :total].tolist())
        truth = continuation(target(), prefix, row_control(s.controls, row), spec.depth)
        truth += [0] * (spec.depth - len(truth))  # past the context; the request ends before it gets there
        dice = random.Random(f"{self.pattern} {prefix}")
        right, k = self.right(total, spec.depth), spec.top_k
        token, parent, depth = ([x] * (k * spec.depth) for x in (Tree.NONE, Tree.ROOT, 0))
        logp, score = ([-torch.inf] * (k * spec.depth) for _ in range(2))
        above: list[int] = [Tree.ROOT]  # nodes of the level above, rank 0 first
        on_path: int | None = Tree.ROOT  # the one of them that is right so far
        for d in range(1, spec.depth + 1):
            if self.absent and d > right + 1:
                break
            place = dice.randrange(k) if d <= right else None  # the rank of the right token
            if place is not None and on_path != above[0]:
                place = max(place, 1)  # rank 0 continues the greedy chain, which has left the right path
            level, path, siblings = [], None, {(on_path, truth[d - 1])}
            for rank in range(k):
                if self.absent and rank and rank != place and dice.random() < 0.3:
                    continue
                node, is_right = (d - 1) * k + rank, rank == place
                of = on_path if is_right else above[0] if rank == 0 else dice.choice(above)
                assert of is not None
                value = truth[d - 1] if is_right else dice.randrange(VOCAB)
                while not is_right and (of, value) in siblings:
                    value = (value + 1) % VOCAB
                siblings.add((of, value))
                token[node], parent[node], depth[node], logp[node] = value, of, d, -0.25 * (rank + 1)
                score[node] = logp[node] + (0 if of == Tree.ROOT else score[of])
                level.append(node)
                path = node if is_right else path
            above, on_path = level, path
        ints = [torch.tensor(x, dtype=torch.int32) for x in (token, parent, depth)]
        tree = Tree(ints[0], ints[1], ints[2], torch.tensor(logp), torch.tensor(score))
        return trees.prune(tree, spec.nodes, k)

"""Drafts that know the answer: every pattern of acceptance without hunting for prompts. And what they are run against.

The reference is transformers: a greedy loop that recomputes the whole sequence for each token.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

import nanospec_fn as ns
from nanospec_fn import draft, pages
from nanospec_fn.attention import Attend
from nanospec_fn.pages import Write
from nanospec_fn.slots import Slots
from nanospec_fn.trees import Tree
from tests import tiny

CHANGES = {"num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "rope_scaling": None}
CHANGES |= {"eos_token_id": None}
RAW = tiny.config("llama-3.2-1b", **CHANGES)
DEPTH = 4
CHAIN = ns.Speculation(top_k=1, depth=DEPTH)
TREE = ns.Speculation(top_k=3, depth=DEPTH)


@functools.cache
def target() -> ns.Model:
    """Two layers, hidden 64, 4 query and 2 KV heads of 16, vocabulary 128, no EOS."""
    return tiny.model("llama-3.2-1b", **CHANGES)


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, 128, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@functools.cache
def hf() -> Any:
    return tiny.llama(RAW)


@functools.cache
def greedy(tokens: tuple[int, ...], n: int) -> tuple[int, ...]:
    """The n tokens that transformers' model continues a prompt with."""
    sequence = list(tokens)
    for _ in range(n):
        sequence.append(int(hf()(torch.tensor([sequence])).logits[0, -1].argmax()))
    return tuple(sequence[len(tokens) :])


def right_for(a: int) -> Callable[[int, int], int]:
    """A draft that is right for exactly `a` tokens of every round."""
    return lambda sequence, total: a


ALL = right_for(99)


@dataclass(frozen=True)
class Scripted(draft.Nothing):
    """Drafts along known sequences. In a tree the right node moves from rank to rank, so that commits move KV.

    sequences: prompt and continuation of each request; a request is recognised by how it begins.
    right: (index of the sequence, tokens known) -> how many tokens of this round's draft are right.
    levels: likewise -> how many levels are drafted at all; None: all of them.
    wrong: what a wrong token of a chain is; None: something near the right one.
    calls: (index of the sequence, tokens known, pages owned) of every live row drafted for.
    """

    name: ClassVar[str] = "scripted"

    sequences: tuple[tuple[int, ...], ...] = ()
    right: Callable[[int, int], int] = ALL
    levels: Callable[[int, int], int] | None = None
    wrong: int | None = None
    vocab: int = 128
    calls: list[tuple[int, int, int]] = field(default_factory=list, compare=False)

    def propose(
        self, params: Any, state: draft.State, s: Slots, live: Tensor, spec: ns.Speculation, attend: Attend, put: Write
    ) -> tuple[draft.State, Tree]:
        rows = []
        for b, alive in enumerate(live.tolist()):
            known = s.tokens[b, : int(s.total[b])].tolist()
            rows.append(self._tree(known, spec) if alive else [ABSENT] * spec.nodes)
            if alive:
                self.calls.append((self._find(known), len(known), int(s.num_pages[b])))
        return state, as_tree(rows)

    def _find(self, known: list[int]) -> int:
        found = [i for i, s in enumerate(self.sequences) if list(s[: len(known)]) == known]
        assert found, f"what was emitted is in no script: {known}"
        return found[0]

    def _tree(self, known: list[int], spec: ns.Speculation) -> list[tuple[int, int, int, float]]:
        index, total, k = self._find(known), len(known), spec.top_k
        levels = spec.depth if self.levels is None else self.levels(index, total)
        nodes = []
        above = Tree.ROOT
        for depth in range(1, spec.depth + 1):
            place = total + depth - 1
            known_token = self.sequences[index][place] if place < len(self.sequences[index]) else 0
            good = (total + depth) % k  # the rank of the right node
            for rank in range(k):
                token = (known_token + 1 + rank) % self.vocab if self.wrong is None else self.wrong
                if rank == good and depth <= self.right(index, total):
                    token = known_token
                nodes.append((token, above, depth, -1.0 - rank) if depth <= levels else ABSENT)
            above = (depth - 1) * k + good
        return nodes


ABSENT = (Tree.NONE, Tree.ROOT, 0, -torch.inf)  # token, parent, depth, logp


def as_tree(rows: list[list[tuple[int, int, int, float]]]) -> Tree:
    """Nodes (token, parent, depth, logp) of each slot -> Tree [b, N]; scores are sums along the path."""
    score = []
    for nodes in rows:
        sums: list[float] = []
        for _, parent, _, logp in nodes:
            sums.append(logp + (sums[parent] if parent >= 0 else 0.0))
        score.append(sums)
    n = len(rows[0]) if rows else 0
    columns = [torch.tensor([[node[i] for node in nodes] for nodes in rows]).view(len(rows), n) for i in range(4)]
    token, parent, depth = (c.to(torch.int32) for c in columns[:3])
    return Tree(token, parent, depth, columns[3].float(), torch.tensor(score).view(len(rows), n).float())


def scripted(
    prompts: Sequence[Sequence[int]], n: int, right: Callable[[int, int], int] = ALL, **changes: Any
) -> ns.Draft:
    """A `Scripted` draft along transformers' greedy continuations of `n` tokens."""
    sequences = tuple((*p, *greedy(tuple(p), n)) for p in prompts)
    return ns.Draft(Scripted(sequences=sequences, right=right, **changes))


def watch(engine: ns.Engine) -> ns.Engine:
    """Check promise G4 after every step of an engine."""
    run = engine.run

    def checked(*args: Any) -> Any:
        result = run(*args)
        assert pages.check(engine.state.pages, engine.state.slots.page_table) == ""
        return result

    engine.run = checked
    return engine


def assert_empty(engine: ns.Engine) -> None:
    """Every page is back in the pool and every slot is empty."""
    assert pages.check(engine.state.pages, engine.state.slots.page_table) == ""
    assert int(engine.state.pages.num_free) == engine.program.pool.num_pages
    assert not engine.state.slots.active.any()

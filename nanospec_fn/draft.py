"""Where drafted tokens come from: what every method has in common, and the methods without a model.

A method is a hashable value; weights are passed in, its state is carried in `step.State`. Its KV, if it has any, lives
in pools of its own under the target's page ids. draft_model.py has the methods that run a model.

Shapes: B slots, R rows of a slot, N nodes, k top_k, D depth, W = D + 1, F feature width.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from nanospec_fn import kernels, model, pages, slots, trees
from nanospec_fn.attention import Attend, Rows
from nanospec_fn.pages import Write
from nanospec_fn.slots import Slots
from nanospec_fn.struct import put, replace, rewritten, state
from nanospec_fn.trees import Tree

MAX_NODES = 1024  # of a tree: each is a row as wide as the vocabulary


@dataclass(frozen=True)
class Speculation:
    """The shape of the draft tree.

    top_k: nodes per level, the best by cumulative draft log-prob, the greedy chain always among them; 1 is a chain.
    depth: levels.
    num_nodes: drafted nodes that are verified, the root not counted; None: all of them, top_k * depth.
    coupled: proposals share the target's noise (exact rule only).
    """

    top_k: int = 1
    depth: int = 5
    num_nodes: int | None = None
    coupled: bool = False

    def validate(self) -> None:
        """Errors: ValueError naming the field that is out of range."""
        for name in ("top_k", "depth") + (() if self.num_nodes is None else ("num_nodes",)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 256:
                raise ValueError(f"{name} must be an integer from 1 to 256, got {value!r}")
        if self.top_k * self.depth > MAX_NODES:
            raise ValueError(f"top_k * depth is {self.top_k * self.depth}, at most {MAX_NODES} nodes are drafted")
        if not isinstance(self.coupled, bool):
            raise ValueError(f"coupled must be True or False, got {self.coupled!r}")
        if self.num_nodes is not None and not self.depth <= self.num_nodes <= self.lookahead:
            raise ValueError(
                f"num_nodes is {self.num_nodes}: it must hold the greedy chain of depth {self.depth} and at most "
                f"top_k * depth = {self.lookahead} nodes"
            )

    @property
    def lookahead(self) -> int:
        """Storage positions past the pending token that a round may write: every drafted node, before pruning."""
        return self.top_k * self.depth

    @property
    def nodes(self) -> int:
        """Nodes that are verified."""
        return self.lookahead if self.num_nodes is None else self.num_nodes


@state
class State:
    """What a draft carries between steps. A step of the target's alone leaves it as it is: behind, for good."""

    pools: tuple[Tensor, ...] = rewritten()  # its KV, a layer each, [P + 1, 2, S, K, D]
    feature: Tensor  # [B, W, F] the target's features of the newest `slots.unseen` positions, oldest first


@dataclass(frozen=True)
class Draft:
    """What `load_draft` returns: a hashable method and its weights."""

    method: "Method"
    params: Any = ()


class Method(Protocol):
    """A way to draft. `params` is step.Params: a head may borrow the target's embedding."""

    name: ClassVar[str]  # in traces: "ngram", "model", "eagle3"; "none" is plain decoding

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose inputs are wanted."""

    def check(self, spec: Speculation, target: model.Config) -> None:
        """Errors: ValueError for a tree that this method cannot draft, or a target that it is not for."""

    def init(self, shape: "PoolShape", num_slots: int, width: int) -> State:
        """Empty pools and features [num_slots, width, F]."""

    def fuse(self, params: Any, taps: Tensor) -> Tensor:
        """The tapped streams [n, taps * E] of a target pass -> features [n, F]."""

    def prefill(
        self, params: Any, state: State, rows: Rows, features: Tensor, s: Slots, attend: Attend, put: Write
    ) -> State:
        """Follow the target over a chunk of prompt: rows [B, R], features [B * R, F]; `s` is from before the chunk."""

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Attend, put: Write
    ) -> tuple[State, Tree]:
        """Catch up with the emitted tokens and draft a Tree [B, spec.nodes]; with spec.depth 0 only catch up."""


@dataclass(frozen=True)
class PoolShape:
    """What the pools of target and draft have in common."""

    num_pages: int
    page_size: int
    dtype: torch.dtype
    device: torch.device

    def pools(self, cfg: model.Config, layers: int) -> tuple[Tensor, ...]:
        """Empty pools for a model's `layers` layers."""
        size = (self.num_pages, self.page_size, cfg.num_kv_heads, cfg.head_dim)
        return pages.init_pools(layers, *size, self.dtype, self.device)

    def features(self, num_slots: int, width: int, size: int) -> Tensor:
        return torch.zeros(num_slots, width, size, dtype=self.dtype, device=self.device)


def take(state: State, slot: Tensor | None) -> State:
    """The carried rows of `slot` [b]; the pools stay whole."""
    return state if slot is None else replace(state, feature=state.feature[slot])


def put_back(state: State, slot: Tensor | None, taken: State, put: Write = put) -> State:
    """The inverse of `take`."""
    return taken if slot is None else replace(taken, feature=put(state.feature, (slot,), taken.feature))


def owed(state: State, unseen: int | None) -> State:
    """What a catch-up reads where no slot has more than `unseen` tokens that the draft has not been run on."""
    return state if unseen is None else replace(state, feature=state.feature[:, :unseen])


def observe(state: State, features: Tensor, path: Tensor, live: Tensor) -> State:
    """Keep the target's features of the root and the accepted path for the next catch-up, where live [B].

    Args: features [B, R, F], row 0 the root, or F = 0 where there are none; path [B, D] node index per depth, -1 past
      the accepted ones.
    """
    if not features.shape[2]:
        return state
    if kernels.on_device(features):
        from nanospec_fn.kernels import rows  # needs Triton

        return replace(state, feature=rows.keep_path(features, path, live, state.feature))
    kept = kernels.rows_at(features, torch.nn.functional.pad(path + 1, (1, 0)))
    missing = state.feature.shape[1] - kept.shape[1]
    kept = torch.nn.functional.pad(kept, (0, 0, 0, missing))
    # A slot that sits this round out, such as one whose prompt is not prefilled yet, keeps what it carries.
    return replace(state, feature=torch.where(live[:, None, None], kept, state.feature))


@dataclass(frozen=True)
class Nothing:
    """Plain decoding: nothing is carried and every tree is empty."""

    name: ClassVar[str] = "none"
    taps: ClassVar[tuple[int, ...]] = ()

    def check(self, spec: Speculation, target: model.Config) -> None:
        pass

    def init(self, shape: PoolShape, num_slots: int, width: int) -> State:
        return State(pools=(), feature=shape.features(num_slots, width, 0))

    def fuse(self, params: Any, taps: Tensor) -> Tensor:
        return taps

    def prefill(
        self, params: Any, state: State, rows: Rows, features: Tensor, s: Slots, attend: Attend, put: Write
    ) -> State:
        return state

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Attend, put: Write
    ) -> tuple[State, Tree]:
        return state, trees.init_all(len(live), spec.nodes, live.device)


@dataclass(frozen=True)
class Ngram(Nothing):
    """Prompt lookup: what followed the latest earlier occurrences of the newest tokens.

    The top_k best matches, longest first and then latest, give a chain each; chains that begin alike are merged.
    Source: prompt lookup decoding (Saxena 2023).
    """

    name: ClassVar[str] = "ngram"

    longest: int = 3  # tokens to match; shorter suffixes count too, down to 1

    def check(self, spec: Speculation, target: model.Config) -> None:
        if spec.coupled:
            raise ValueError("coupled proposals need a draft with logits; ngram has none")

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Attend, put: Write
    ) -> tuple[State, Tree]:
        if not spec.depth:
            return state, trees.init_all(len(live), 0, live.device)
        newest = s.total[:, None] - 1
        position = torch.arange(s.tokens.shape[1] - 1, dtype=torch.int32, device=live.device).expand(len(live), -1)
        alike = live[:, None] & (position < newest)
        length = torch.zeros_like(position)
        for back in range(self.longest):
            same = slots.tokens_at(s, position - back) == slots.tokens_at(s, newest - back)
            alike = alike & same & (position >= back)
            length = length + alike
        rank = torch.where(length > 0, length * position.shape[1] + position, 0)
        rank = torch.nn.functional.pad(rank, (0, max(0, spec.top_k - rank.shape[1])))
        best, at = rank.topk(spec.top_k, dim=1)
        follow = at[:, :, None] + torch.arange(1, spec.depth + 1, device=live.device)
        found = (best[:, :, None] > 0) & (follow <= newest[:, :, None])
        chains = slots.tokens_at(s, follow.flatten(1)).view(follow.shape)
        return state, torch.func.vmap(lambda c: merge(c, spec))(torch.where(found, chains, Tree.NONE))


def merge(chains: Tensor, spec: Speculation) -> Tree:
    """One slot's chains [k, D] of tokens, NONE past their ends, best first -> a Tree of spec.nodes.

    A node belongs to the first chain that reaches it. Log-probs only rank: a chain starts with minus its rank.
    """
    k, depth = chains.shape
    alike = (chains[:, None] == chains[None]).to(torch.int32).cumprod(-1).bool()  # [k, k, D] the same up to here
    owner = torch.where(alike, torch.arange(k, device=chains.device)[None, :, None], k).amin(1)
    rank = torch.arange(k, device=chains.device)[:, None]
    own = (owner == rank) & (chains != Tree.NONE)
    starts = own & ~torch.nn.functional.pad(own, (1, 0))[:, :-1]
    logp = torch.where(starts, -rank, 0).float()
    above = torch.nn.functional.pad(owner, (1, 0))[:, :-1] + (torch.arange(depth, device=chains.device) - 1) * k
    parent = torch.where(torch.arange(depth, device=chains.device) == 0, Tree.ROOT, above)
    score = logp.gather(0, owner.clamp_max(k - 1)).cumsum(1)
    level = torch.arange(1, depth + 1, device=chains.device).expand(k, -1)

    def by_level(x: Tensor, absent: float) -> Tensor:
        return torch.where(own, x, absent).t().flatten()

    tree = Tree(
        token=by_level(chains, Tree.NONE).to(torch.int32),
        parent=by_level(parent, Tree.ROOT).to(torch.int32),
        depth=by_level(level, 0).to(torch.int32),
        logp=by_level(logp, -torch.inf),
        score=by_level(score, -torch.inf),
    )
    return trees.prune(tree, spec.nodes, k)

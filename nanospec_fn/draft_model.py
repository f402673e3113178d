"""Drafting with a model: an EAGLE-3 head, or another Llama. `grow` is the loop that both share.

Shapes: B slots, R rows of a slot, m rows of a level, k top_k, F feature width, Vd draft vocabulary.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import attention, draft, eagle, kernels, model, rng, trees, weights
from nanospec_fn.attention import DEAD, Attend, Rows
from nanospec_fn.draft import Draft, PoolShape, Speculation, State
from nanospec_fn.model import Model
from nanospec_fn.pages import Write
from nanospec_fn.slots import Slots
from nanospec_fn.struct import replace
from nanospec_fn.trees import Tree


class Recurrent(Protocol):
    """A draft model with KV of its own, as `grow` drives it."""

    shift: ClassVar[int]  # the row that takes in the token of position t stands at position t - shift

    def run(
        self, params: Any, state: State, rows: Rows, feature: Tensor, s: Slots, attend: Attend, put: Write
    ) -> tuple[State, Tensor]:
        """One pass: rows [B, R], feature [B, R, F] -> state, and the recurrent feature [B, R, F']."""

    def logits(self, params: Any, hidden: Tensor) -> Tensor:
        """[n, F'] of `run` -> [n, Vd] fp32."""

    def target_id(self, params: Any) -> Tensor | tuple[()]:
        """[Vd] int64, the target's token for each draft token; () for the identity."""


def grow(
    method: Recurrent,
    params: Any,
    state: State,
    s: Slots,
    live: Tensor,
    spec: Speculation,
    attend: Attend,
    put: Write,
) -> tuple[State, Tree]:
    """Run the draft over the newest tokens, with true features, then draft level by level. See `Method.propose`."""
    b, k = len(live), spec.top_k
    rows, last = attention.newest(s, live, state.feature.shape[1], method.shift)
    state_, hidden = method.run(params, state, rows, state.feature, s, attend, put)
    if not spec.depth:
        return state_, trees.init_all(b, 0, live.device)
    hidden = kernels.rows_at(hidden, last[:, None])

    base = s.total - method.shift  # where the rows of depth-1 nodes stand
    tree = trees.init_all(b, k * spec.depth, live.device)
    for depth in range(1, spec.depth + 1):
        token, logp = _candidates(method, params, hidden, s, depth, spec)
        if depth == spec.depth:
            tree = trees.expand_all(tree, depth, token, logp)
            break
        tree, rows, parent = next_level(tree, depth, token, logp, base, live)
        feature = kernels.rows_at(hidden, parent) if k > 1 else hidden
        state_, hidden = method.run(params, state_, rows, feature, s, attend, put)
    if spec.nodes < k * spec.depth:
        tree = torch.func.vmap(lambda t: trees.prune(t, spec.nodes, k))(tree)
    return state_, tree


def next_level(
    tree: Tree, depth: int, token: Tensor, logp: Tensor, base: Tensor, live: Tensor
) -> tuple[Tree, Rows, Tensor]:
    """`trees.expand_all`, the new level's nodes as rows, and the row of the level above that each continues [B, k]."""
    k = token.shape[2]
    if kernels.on_device(logp) and k <= trees.WIDEST:
        from nanospec_fn.kernels import tree as kernel  # needs Triton

        old = (tree.token, tree.parent, tree.depth, tree.logp, tree.score)
        new, (name, position, store, ancestors, parent) = kernel.expand(old, depth, token, logp, base, live)
        path: Tensor | tuple[()] = ancestors if k > 1 else ()
        rows = Rows(token=name, position=position, store=store, base=base, path=path, span=depth * k)
        return Tree(*new), rows, parent
    tree = trees.expand_all(tree, depth, token, logp)
    level = pytree.tree_map(lambda x: x[:, (depth - 1) * k : depth * k], tree)
    return tree, _level_rows(tree, level, depth, base, live, k), trees.parent_row(level, depth, k)


def _level_rows(tree: Tree, level: Tree, depth: int, base: Tensor, live: Tensor, k: int) -> Rows:
    """The nodes of one level as rows; node i keeps its KV at base + i."""
    path: Tensor | tuple[()] = ()
    node = torch.arange((depth - 1) * k, depth * k, dtype=torch.int32, device=live.device)
    if k > 1:
        path = base[:, None, None] + trees.paths_all(tree, (depth - 1) * k, k, depth).clamp_min(0)
    return Rows(
        token=level.token.clamp_min(0),
        position=torch.where(live[:, None] & (level.token != Tree.NONE), base[:, None] + depth - 1, DEAD),
        store=base[:, None] + node,
        base=base,
        path=path,
        span=depth * k,
    )


def _candidates(
    method: Recurrent, params: Any, hidden: Tensor, s: Slots, depth: int, spec: Speculation
) -> tuple[Tensor, Tensor]:
    """The top_k continuations of every row of a level: hidden [B, m, F'] -> target ids, log-probs [B, m, k]."""
    b, m, _ = hidden.shape
    target_id = method.target_id(params)
    logits = method.logits(params, hidden.flatten(0, 1))
    if spec.coupled:
        logits = logits.view(b, m, -1)
        key = rng.draw_key(s.controls.key, s.total + depth - 1, rng.TARGET)
        ids = torch.arange(logits.shape[2], device=logits.device) if isinstance(target_id, tuple) else target_id
        noise = rng.gumbel_at(key[:, None], ids)[:, None]
        temperature = s.controls.temperature[:, None, None]
        greedy = temperature == 0
        logits = torch.where(greedy, logits, logits / torch.where(greedy, 1.0, temperature) + noise).flatten(0, 1)
    logp, token = kernels.top(logits, spec.top_k, target_id)
    return token.view(b, m, -1), logp.view(b, m, -1)


@dataclass(frozen=True)
class LlamaDraft:
    """Another Llama of the same vocabulary drafts, from tokens alone."""

    name: ClassVar[str] = "model"
    taps: ClassVar[tuple[int, ...]] = ()
    shift: ClassVar[int] = 0

    cfg: model.Config

    def check(self, spec: Speculation, target: model.Config) -> None:
        check_top_k(spec, self.cfg.vocab_size)
        check_alike("vocabulary", self.cfg.vocab_size, target.vocab_size)

    def init(self, shape: PoolShape, num_slots: int, width: int) -> State:
        pools = shape.pools(self.cfg, self.cfg.num_layers)
        return State(pools=pools, feature=shape.features(num_slots, width, 0))

    def fuse(self, params: Any, taps: Tensor) -> Tensor:
        return taps

    def prefill(
        self, params: Any, state: State, rows: Rows, features: Tensor, s: Slots, attend: Attend, put: Write
    ) -> State:
        return self.run(params, state, rows, state.feature, s, attend, put)[0]

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Attend, put: Write
    ) -> tuple[State, Tree]:
        return grow(self, params, state, s, live, spec, attend, put)

    def run(
        self, params: Any, state: State, rows: Rows, feature: Tensor, s: Slots, attend: Attend, put: Write
    ) -> tuple[State, Tensor]:
        pools, layer = attention.through(attend, self.cfg, rows, s.page_table, state.pools, put)
        token, position = rows.token.flatten(), rows.position.flatten()
        x, _ = model.hidden(params.draft, self.cfg, token, position, layer)
        return replace(state, pools=tuple(pools)), x.view(*rows.token.shape, -1)

    def logits(self, params: Any, hidden: Tensor) -> Tensor:
        return model.logits(params.draft, self.cfg, hidden)

    def target_id(self, params: Any) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class Eagle3:
    """An EAGLE-3 head: the row of token t + 1 takes the target's feature t and stands at position t."""

    name: ClassVar[str] = "eagle3"
    shift: ClassVar[int] = 1

    cfg: eagle.HeadConfig

    @property
    def taps(self) -> tuple[int, ...]:
        return self.cfg.taps

    def check(self, spec: Speculation, target: model.Config) -> None:
        check_top_k(spec, self.cfg.draft_vocab_size)
        check_alike("vocabulary", self.cfg.vocab_size, target.vocab_size)
        check_alike("target's hidden size", self.cfg.target_hidden_size, target.hidden_size)
        if max(self.taps) > target.num_layers:
            raise ValueError(f"draft: the head taps layer {max(self.taps)}, the target has {target.num_layers} layers")

    def init(self, shape: PoolShape, num_slots: int, width: int) -> State:
        feature = shape.features(num_slots, width, self.cfg.hidden_size)
        return State(pools=shape.pools(self.cfg, 1), feature=feature)

    def fuse(self, params: Any, taps: Tensor) -> Tensor:
        return eagle.fuse(params.draft, self.cfg, taps)

    def prefill(
        self, params: Any, state: State, rows: Rows, features: Tensor, s: Slots, attend: Attend, put: Write
    ) -> State:
        features = features.view(*rows.token.shape, -1)
        # The chunk's tokens complete the pairs of the positions before theirs; the last position's pair waits.
        shifted = torch.cat((state.feature[:, :1], features[:, :-1]), dim=1)
        live = rows.position != DEAD
        live = torch.cat((live[:, :1] & (s.unseen > 0)[:, None], live[:, 1:]), dim=1)
        position = torch.where(live, rows.position - self.shift, DEAD)
        pairs = replace(rows, position=position, store=position, base=rows.base - self.shift)
        new, _ = self.run(params, state, pairs, shifted, s, attend, put)
        count = (rows.position != DEAD).sum(1, keepdim=True)
        last = kernels.rows_at(features, (count - 1).clamp_min(0))
        first = torch.where(count[:, :, None] > 0, last, state.feature[:, :1])
        return replace(new, feature=torch.cat((first, state.feature[:, 1:]), dim=1))

    def propose(
        self, params: Any, state: State, s: Slots, live: Tensor, spec: Speculation, attend: Attend, put: Write
    ) -> tuple[State, Tree]:
        return grow(self, params, state, s, live, spec, attend, put)

    def run(
        self, params: Any, state: State, rows: Rows, feature: Tensor, s: Slots, attend: Attend, put: Write
    ) -> tuple[State, Tensor]:
        pools, layer = attention.through(attend, self.cfg, rows, s.page_table, state.pools, put)
        out = eagle.advance(
            params.draft,
            self.cfg,
            params.target.embed,
            rows.token.flatten(),
            feature.flatten(0, 1),
            rows.position.flatten(),
            partial(layer, 0),
        )
        return replace(state, pools=tuple(pools)), out.view(*rows.token.shape, -1)

    def logits(self, params: Any, hidden: Tensor) -> Tensor:
        return eagle.logits(params.draft, self.cfg, hidden, model.output_head(params.target))

    def target_id(self, params: Any) -> Tensor:
        return params.draft.target_id


def check_top_k(spec: Speculation, vocab: int) -> None:
    if spec.top_k > vocab:
        raise ValueError(f"top_k is {spec.top_k}, the draft's vocabulary has {vocab} tokens")


def check_alike(what: str, mine: int, target: int) -> None:
    if mine != target:
        raise ValueError(f"draft: it was loaded for another target: its {what} is {mine}, this target's {target}")


@dataclass(frozen=True)
class DraftName:
    """What the name of a draft says: "none", "ngram", "frozen", "eagle", "eagle:X" or "model:X"."""

    ALONE: ClassVar[tuple[str, ...]] = ("none", "ngram", "frozen", "eagle")
    FROM: ClassVar[tuple[str, ...]] = ("eagle", "model")

    kind: str  # of ALONE without a source, of FROM with one
    source: str = ""  # X, a folder or hub id

    @classmethod
    def parse(cls, text: str) -> "DraftName":
        """Errors: ValueError for a name outside of the grammar."""
        kind, colon, source = text.partition(":")
        if kind not in (cls.FROM if colon else cls.ALONE) or bool(source) != bool(colon):
            raise ValueError(
                'draft must be "none", "ngram", "frozen", "eagle", "model:PATH_OR_ID" or "eagle:PATH_OR_ID", '
                f"got {text!r}"
            )
        return cls(kind, source)

    def __str__(self) -> str:
        return f"{self.kind}:{self.source}" if self.source else self.kind


def bundled_head(name: str) -> Path | None:
    """The folder of the head that this package brings for a model of this name, None where it brings none."""
    found = (Path(__file__).parent / "heads").glob("*/config.json")
    return next((config.parent for config in found if config.parent.name == name), None)


def load_draft(name: str, model: Model) -> Draft | None:
    """A draft for a target.

    Args:
      name: "none" (returns None), "ngram", "frozen" (a copy of the model's weights as they are now), "model:X" or
        "eagle:X", X a folder or hub id as for `load`; "eagle": the head that this package brings for the model, if any.
    Errors: ValueError for an unknown name, or a draft that does not fit the target; FileNotFoundError.
    """
    if not isinstance(name, str):
        raise ValueError(f"draft must be a name, got {name!r}")
    named = DraftName.parse(name)
    if named.kind == "none":
        return None
    if named.kind == "ngram":
        return Draft(draft.Ngram())
    if named.kind == "frozen":
        return Draft(LlamaDraft(model.cfg), pytree.tree_map(lambda x: x.clone(), model.params))
    if named.kind == "model":
        device, dtype = model.params.embed.device, model.params.embed.dtype
        other = weights.load(named.source, device=str(device), dtype=str(dtype).removeprefix("torch."))
        if other.cfg.vocab_size != model.cfg.vocab_size:
            raise ValueError(
                f"draft {named.source} has a vocabulary of {other.cfg.vocab_size}, the target of {model.cfg.vocab_size}"
            )
        return Draft(LlamaDraft(other.cfg), other.params)
    head = named.source or bundled_head(model.name)
    if head is None:
        raise ValueError(f'draft "eagle": no head comes with model {model.name!r}; pass "eagle:PATH_OR_ID"')
    cfg, params = weights.load_eagle(head, model)
    return Draft(Eagle3(cfg), params)

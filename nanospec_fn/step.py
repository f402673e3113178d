"""The engine as pure steps. Read this file first.

    state, info = program.prefill(params, state)     one bounded chunk for every slot with prompt left
    state, info = program.decode(params, state)      one token for every running slot
    state, info = program.speculate(params, state)   one round: draft, verify, accept, commit, emit

`decode` is a round without a tree. A round drafts first: then the tree depends on the emitted prefix alone, and a
request that was preempted and recomputed meets the same trees as one that never was.

Shapes: B slots (or the b slots that take part), R rows of a slot, N drafted nodes, W = depth + 1, V vocab, E hidden.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanospec_fn import attention, draft, model, pages, sampling, slots, trees
from nanospec_fn.attention import DEAD, Attend, Rows, Sdpa
from nanospec_fn.draft import Draft, Nothing, PoolShape, Speculation
from nanospec_fn.pages import Pages, Write
from nanospec_fn.sampling import Sampling, Verdict
from nanospec_fn.slots import Slots
from nanospec_fn.struct import put, replace, state
from nanospec_fn.trees import Tree


@state
class Params:
    """Weights of target and draft, `()` for a draft without any."""

    target: model.Params
    draft: Any


@state
class State:
    """All that the engine carries from step to step."""

    pages: Pages
    pools: tuple[Tensor, ...]  # the target's KV, L x [P + 1, 2, S, K, D]
    slots: Slots
    draft: draft.State


@state
class Info:
    """What a step did; b rows, those of its `slot` argument."""

    tokens: Tensor  # [b, W] int32, emitted, padded -1
    target_logp: Tensor  # [b, W] fp32, nats
    behaviour_logp: Tensor  # [b, W] fp32, nats
    count: Tensor  # [b] int32, tokens emitted
    accepted: Tensor  # [b] int32, of them drafted ones
    done: Tensor  # [b] int32: slots.RUNNING, STOP or LENGTH
    ok: Tensor  # [b] bool; False: no pages were left and the slot did nothing
    left: Tensor  # [b] int32, prompt tokens still to prefill
    tree: Tree  # [b, N] the nodes that were verified


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and backends of an engine."""

    max_slots: int = 8  # requests that run at once
    num_pages: int | None = None  # the sink left out; None: max_slots sequences of at most DEFAULT_TOKENS tokens
    page_size: int = 16  # positions; divides 64
    attend: str = "auto"  # "sdpa"; "canonical" and "flashinfer" need CUDA
    capture: str = "auto"  # "on": one CUDA graph per step and shape; "off": eager, the state donated; "auto": "on"
    prefill_chunk: int = 512  # most prompt tokens per slot and step

    def validate(self) -> None:
        """Errors: ValueError naming the field that is out of range."""
        for name, low, high in (("max_slots", 1, 4096), ("num_pages", 1, 2**30), ("prefill_chunk", 1, 2**20)):
            value = getattr(self, name)
            if name == "num_pages" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name} must be an integer from {low} to {high}, got {value!r}")
        if self.page_size not in PAGE_SIZES or isinstance(self.page_size, bool):
            raise ValueError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {self.page_size!r}")
        for name, known in (("attend", ATTEND), ("capture", ("auto", "on", "off"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")


PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
ATTEND = ("auto", "sdpa", "canonical", "flashinfer")
DEFAULT_TOKENS = 2048
PLAIN = Speculation(depth=0)  # the shape of no tree


def lookahead(draft: Draft | None, speculation: Speculation | None) -> int:
    """Storage positions past the pending token that a round may write."""
    spec = (speculation or Speculation()) if draft else PLAIN
    return spec.top_k * spec.depth


def build(
    model: model.Model,
    draft: Draft | None = None,
    engine: EngineConfig | None = None,
    speculation: Speculation | None = None,
) -> "Program":
    """Bind an engine's hashable statics. Weights and state are arguments of its steps.

    Errors: ValueError naming the parameter that is out of range, or what cannot be combined.
    """
    engine = engine or EngineConfig()
    engine.validate()
    if draft is None and speculation is not None:
        raise ValueError("speculation needs a draft; pass draft=, or no speculation for plain decoding")
    spec = (speculation or Speculation()) if draft else PLAIN
    device, cfg = model.params.embed.device, model.cfg
    if draft:
        spec.validate()
        draft.method.check(spec)
    if engine.attend in ("canonical", "flashinfer"):
        raise ValueError(f"attend={engine.attend!r} is not there yet; this version has sdpa")
    num_pages = engine.num_pages
    if num_pages is None:
        tokens = min(cfg.max_context, DEFAULT_TOKENS) + lookahead(draft, speculation)
        num_pages = engine.max_slots * -(-tokens // engine.page_size)
    return Program(
        cfg=cfg,
        method=draft.method if draft else Nothing(),
        speculation=spec,
        attend=Sdpa(engine.page_size),
        max_slots=engine.max_slots,
        prefill_chunk=engine.prefill_chunk,
        pool=PoolShape(num_pages, engine.page_size, model.params.embed.dtype, device),
    )


@dataclass(frozen=True)
class Program:
    """The hashable statics of an engine, and its steps; `build` makes it. Every step is pure unless `put` mutates."""

    cfg: model.Config
    method: draft.Method
    speculation: draft.Speculation
    attend: Attend
    max_slots: int
    prefill_chunk: int
    pool: PoolShape

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def lookahead(self) -> int:
        """Storage positions past the pending token that a round may write."""
        return self.speculation.top_k * self.speculation.depth

    @property
    def capacity(self) -> int:
        """Most tokens of one request, prompt included: by the context, and by a round with the pool to itself."""
        return min(self.cfg.max_context, self.pool.num_pages * self.page_size - self.lookahead + 1)

    def init(self) -> State:
        """Empty slots over an empty pool."""
        table = -(-(self.capacity + self.lookahead) // self.page_size)
        return State(
            pages=pages.init(self.pool.num_pages, self.pool.device),
            pools=self.pool.pools(self.cfg, self.cfg.num_layers),
            slots=slots.init(self.max_slots, self.capacity, table, self.pool.device),
            draft=self.method.init(self.pool, self.max_slots, self.speculation.depth + 1),
        )

    def fits(self, tokens: int) -> str:
        """Why a prompt of so many tokens can never run here, or ""."""
        if tokens >= self.cfg.max_context:
            return f"its {tokens} tokens leave no room in the model's context of {self.cfg.max_context}"
        need = -(-(tokens + 1 + self.lookahead) // self.page_size)
        if need > self.pool.num_pages:
            return (
                f"its {tokens} tokens need {need} pages of {self.page_size} with a look-ahead of {self.lookahead}, "
                f"the pool has {self.pool.num_pages}"
            )
        return ""

    def insert(
        self,
        state: State,
        slot: int,
        tokens: list[int],
        request: Sampling,
        emitted: int = 0,
        share: int | None = None,
        put: Write = put,
    ) -> State:
        """Put a request into an empty slot; `prefill` then works on it.

        Args:
          tokens: the prompt, followed by the `emitted` tokens of an earlier stay (nothing is emitted for these again).
          share: a slot whose prompt is the same and prefilled: its full pages are shared, the last one is copied.
        Errors: ValueError for an occupied slot, a token out of range, a request that can never fit.
        """
        prompt = self._check(state, slot, tokens, request, emitted)
        stop_ids = request.stop_ids + (() if request.ignore_eos else self.cfg.eos_ids)
        limit = min(prompt + request.max_tokens, self.capacity)
        state = replace(
            state, slots=slots.insert(state.slots, slot, tokens, emitted, limit, tuple(stop_ids), request)
        )
        return state if share is None else self._share(state, slot, share, prompt - 1, put)

    def check_request(self, request: Sampling) -> None:
        """Errors: ValueError for sampling parameters that are out of range or that this engine cannot serve."""
        request.validate()
        ids = len(request.stop_ids) + len(self.cfg.eos_ids)
        if ids > slots.MAX_STOP_IDS:
            raise ValueError(f"stop_ids and the model's EOS ids are {ids}, at most {slots.MAX_STOP_IDS} fit")
        if self.speculation.coupled and request.rule != "exact":
            raise ValueError(f"rule {request.rule!r} has no closed form with coupled proposals; use coupled=False")

    def _check(self, state: State, slot: int, tokens: list[int], request: Sampling, emitted: int) -> int:
        self.check_request(request)
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot is {slot}, the engine has {self.max_slots}")
        if bool(state.slots.active[slot]):
            raise ValueError(f"slot {slot} holds a request; evict it first")
        if emitted < 0 or len(tokens) - emitted < 1:
            raise ValueError(f"a prompt is empty: {len(tokens)} tokens of which {emitted} emitted")
        wrong = [t for t in tokens if not 0 <= t < self.cfg.vocab_size]
        if wrong:
            raise ValueError(f"tokens holds {wrong[0]}, the vocabulary has {self.cfg.vocab_size}")
        if reason := self.fits(len(tokens) - emitted):
            raise ValueError(f"the prompt can never fit: {reason}")
        return len(tokens) - emitted

    def _share(self, state: State, slot: int, donor: int, tokens: int, put: Write) -> State:
        """Take over the KV of the donor's first `tokens` positions: whole pages by reference, the rest as a copy."""
        whole, rest = divmod(tokens, self.page_size)
        row = state.slots.page_table[donor]
        ids = row[:whole]
        free = pages.share(state.pages, ids)
        # The last page is about to be written, by this slot and by the donor: copy it now, or recompute if none is left.
        free, page_id, ok = pages.alloc(free, torch.full_like(row[:1], int(rest > 0)), 1)
        copied = ok[0] & (page_id[0, 0] > pages.SINK)
        source = torch.where(copied, row[whole], pages.SINK)
        dest = torch.where(copied, page_id[0, 0], pages.SINK)
        s = state.slots
        s = replace(
            s,
            page_table=put_row(s.page_table, slot, torch.cat((ids, dest[None], row[whole + 1 :] * 0))),
            num_pages=put_row(s.num_pages, slot, copied + whole),
            length=put_row(s.length, slot, torch.where(copied, tokens, whole * self.page_size)),
        )
        return State(
            pages=free,
            pools=tuple(pages.copy_page(pool, source, dest, put) for pool in state.pools),
            slots=s,
            draft=replace(
                state.draft, pools=tuple(pages.copy_page(pool, source, dest, put) for pool in state.draft.pools)
            ),
        )

    def evict(self, state: State, slot: int, put: Write = put) -> State:
        """Empty a slot and drop its references to pages."""
        if not 0 <= slot < self.max_slots:
            raise ValueError(f"slot is {slot}, the engine has {self.max_slots}")
        s, held = slots.evict(state.slots, slot)
        return replace(state, slots=s, pages=pages.free(state.pages, held))

    def prefill(
        self, params: Params, state: State, slot: Tensor | None = None, chunk: int | None = None, put: Write = put
    ) -> tuple[State, Info]:
        """One chunk of prompt for every slot that has some left; the last chunk emits the first token.

        Args: slot: [b] distinct slots that take part, None for all; chunk: most tokens per slot, None: prefill_chunk.
        """
        chunk = self.prefill_chunk if chunk is None else chunk
        s, carried = slots.take(state.slots, slot), draft.take(state.draft, slot)
        n = torch.where(slots.prefilling(s), (s.prefill_to - s.length).clamp_max(chunk), 0)
        free, s, ok = slots.reserve(
            state.pages, s, torch.where(n > 0, s.length + n, 0), self.page_size, chunk // self.page_size + 2
        )
        n = torch.where(ok, n, 0)
        lane = torch.arange(chunk, dtype=torch.int32, device=n.device)
        rows = attention.chain(slots.tokens_at(s, s.length[:, None] + lane), s.length, n)
        pools, x, features = self._target(params, state.pools, rows, s, put)
        carried = self.method.prefill(params, carried, rows, features, s, self.attend, put)

        last = x.view(*rows.token.shape, -1).gather(1, (n - 1).clamp_min(0).long()[:, None, None].expand(-1, 1, x.shape[-1]))
        s = replace(s, length=s.length + n, unseen=torch.where(n > 0, 1, s.unseen))
        first = (n > 0) & (s.length == s.prefill_to) & ~s.silent
        logits = model.logits(params.target, self.cfg, last[:, 0])[:, None]
        verdict = sampling.accept(logits, draft.empty_trees(len(n), 0, n.device), s.controls, s.total, depth=0)
        tree = draft.empty_trees(len(n), self.speculation.nodes, n.device)
        return self._emit(replace(state, pages=free, pools=pools), slot, s, carried, verdict, first, ok, tree)

    def decode(
        self, params: Params, state: State, slot: Tensor | None = None, put: Write = put
    ) -> tuple[State, Info]:
        """One token for every running slot. The draft keeps up, so that drafting can resume at any round."""
        return self._round(params, state, slot, put, replace(self.speculation, depth=0, num_nodes=None))

    def speculate(
        self, params: Params, state: State, slot: Tensor | None = None, put: Write = put
    ) -> tuple[State, Info]:
        """One round for every running slot: draft a tree, verify it in one pass, emit accepted tokens and one more.

        Args: slot: [b] distinct slots that take part, None for all.
        """
        return self._round(params, state, slot, put, self.speculation)

    def _round(
        self, params: Params, state: State, slot: Tensor | None, put: Write, spec: Speculation
    ) -> tuple[State, Info]:
        s, carried = slots.take(state.slots, slot), draft.take(state.draft, slot)
        live = slots.running(s)
        ahead = spec.top_k * spec.depth
        free, s, ok = slots.reserve(
            state.pages, s, torch.where(live, s.total + ahead, 0), self.page_size, ahead // self.page_size + 2
        )
        live = live & ok
        carried, tree = self.method.propose(params, carried, s, live, spec, self.attend, put)
        rows = verify_rows(s, tree, live, spec)
        pools, x, features = self._target(params, state.pools, rows, s, put)
        logits = model.logits(params.target, self.cfg, x).view(*rows.token.shape, -1)
        verdict = sampling.accept(logits, tree, s.controls, s.total, spec.depth)
        if spec.top_k > 1 and spec.depth:
            pools = self._commit(pools, s, verdict, live, put)
        carried = draft.observe(carried, features.view(*rows.token.shape, -1), verdict.path)
        if not spec.depth:
            tree = draft.empty_trees(len(live), self.speculation.nodes, live.device)
        return self._emit(replace(state, pages=free, pools=pools), slot, s, carried, verdict, live, ok, tree)

    def _target(
        self, params: Params, pools: tuple[Tensor, ...], rows: Rows, s: Slots, put: Write
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
        """Run the target over rows: pools with their KV, x [b * R, E], and the draft's features [b * R, F]."""
        pools, attend = attention.through(self.attend, rows, s.page_table, pools, put)
        x, taps = model.hidden(
            params.target, self.cfg, rows.token.flatten(), rows.position.clamp_min(0).flatten(), attend, self.method.taps
        )
        return tuple(pools), x, self.method.fuse(params, taps)

    def _commit(self, pools: tuple[Tensor, ...], s: Slots, verdict: Verdict, live: Tensor, put: Write) -> tuple[Tensor, ...]:
        """Move the accepted path's KV to the positions that follow the root's."""
        first = s.length[:, None] + 1
        path = torch.where(live[:, None], verdict.path, -1)
        source = torch.where(path < 0, DEAD, first + path)
        dest = torch.where(path < 0, DEAD, first + torch.arange(path.shape[1], dtype=torch.int32, device=path.device))
        return tuple(pages.move(pool, s.page_table, source, dest, self.page_size, put) for pool in pools)

    def _emit(
        self, state: State, slot: Tensor | None, s: Slots, carried: draft.State, verdict: Verdict, live: Tensor, ok: Tensor, tree: Tree
    ) -> tuple[State, Info]:
        """Append the verdict's tokens up to a stop id or the cap, and report."""
        s, count = slots.emit(s, verdict.tokens, torch.where(live, verdict.count, 0))
        lane = torch.arange(self.speculation.depth + 1, device=count.device)
        wide = self.speculation.depth + 1 - verdict.tokens.shape[1]

        def trim(x: Tensor, filler: float) -> Tensor:
            x = torch.nn.functional.pad(x, (0, wide))
            return torch.where(lane < count[:, None], x, filler)

        info = Info(
            tokens=trim(verdict.tokens, -1),
            target_logp=trim(verdict.target_logp, 0.0),
            behaviour_logp=trim(verdict.behaviour_logp, 0.0),
            count=count,
            accepted=torch.minimum(count, verdict.accepted),
            done=s.done,
            ok=ok,
            left=s.prefill_to - s.length,
            tree=tree,
        )
        state = replace(
            state, slots=slots.put_back(state.slots, slot, s), draft=draft.put_back(state.draft, slot, carried)
        )
        return state, info


def verify_rows(s: Slots, tree: Tree, live: Tensor, spec: Speculation) -> Rows:
    """Root (the pending token) and nodes as rows of the verify pass; node i keeps its KV at length + 1 + i."""
    root = slots.tokens_at(s, s.length[:, None])
    depth = torch.cat((torch.zeros_like(root), tree.depth), dim=1)
    present = torch.cat((torch.ones_like(root, dtype=torch.bool), tree.token != Tree.NONE), dim=1)
    lane = torch.arange(depth.shape[1], dtype=torch.int32, device=depth.device)
    path: Tensor | tuple[()] = ()
    if spec.top_k > 1 and spec.depth:
        nodes = torch.func.vmap(lambda t: trees.ancestors(t, spec.depth))(tree)
        nodes = torch.nn.functional.pad(nodes, (0, 0, 1, 0), value=-1)  # the root has none
        first = s.length[:, None, None]
        path = torch.cat((first.expand(-1, nodes.shape[1], 1), first + 1 + nodes.clamp_min(0)), dim=2)
    return Rows(
        token=torch.cat((root, tree.token.clamp_min(0)), dim=1),
        position=torch.where(live[:, None] & present, s.length[:, None] + depth, DEAD),
        store=s.length[:, None] + lane,
        base=s.length,
        path=path,
    )


def put_row(x: Tensor, slot: int, value: Tensor) -> Tensor:
    """x [B, ...] with row `slot` replaced."""
    return x.index_put((torch.tensor([slot], device=x.device),), value.to(x.dtype)[None])

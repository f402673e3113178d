"""A program: the hashable statics of an engine bound to the steps, and how requests come and go."""

import inspect
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanospec_fn import acceptance, admission, flashinfer, kernels, pages, slots, step
from nanospec_fn.admission import Admission
from nanospec_fn.attention import Attend, Canonical, Sdpa
from nanospec_fn.draft import Draft, Nothing, PoolShape, Speculation
from nanospec_fn.flashinfer import FlashInfer
from nanospec_fn.model import Config, Model
from nanospec_fn.pages import Write
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import Info, Params, State, Static
from nanospec_fn.struct import put, replace

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)
ATTEND = ("auto", "sdpa", "canonical", "flashinfer")
CAPTURE = ("auto", "on", "off")
VARIANTS = ("fixed", "auto")
DEFAULT_TOKENS = 2048  # of a sequence, where nothing says how long they get
PLAIN = Speculation(depth=0)  # the shape of no tree


@dataclass(frozen=True)
class EngineConfig:
    """Sizes and backends of an engine."""

    max_slots: int = 8  # requests that run at once
    num_pages: int | None = None  # the sink left out; None: max_slots sequences of at most DEFAULT_TOKENS tokens
    page_size: int = 16  # positions; divides 64
    attend: str = "auto"  # "sdpa"; "canonical" and "flashinfer" need CUDA
    capture: str = "auto"  # "on": one CUDA graph per step and shape; "off": eager, the state donated; "auto": "on"
    prefill_chunk: int = 512  # most prompt tokens per slot and step
    max_context: int | None = None  # most tokens of a request, prompt included; None, or more: the model's context
    # "fixed": every round has the given tree; "auto": the host picks among smaller ones, by measured time.
    variants: str = "fixed"

    def validate(self) -> None:
        """Errors: ValueError naming the field that is out of range."""
        bounds = {"max_slots": 4096, "num_pages": 2**30, "prefill_chunk": 2**20, "max_context": 2**30}
        for name, high in bounds.items():
            value = getattr(self, name)
            if name in ("num_pages", "max_context") and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise ValueError(f"{name} must be an integer from 1 to {high}, got {value!r}")
        if type(self.page_size) is not int or self.page_size not in PAGE_SIZES:
            raise ValueError(f"page_size must be one of {', '.join(map(str, PAGE_SIZES))}, got {self.page_size!r}")
        for name, known in (("attend", ATTEND), ("capture", CAPTURE), ("variants", VARIANTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")


def check_parts(
    target: Config, draft: Draft | None, engine: EngineConfig | None, speculation: Speculation | None
) -> None:
    """Errors: ValueError naming the argument that is of another class or out of range, or what cannot be combined."""
    parts = (("draft", draft, Draft), ("engine", engine, EngineConfig), ("speculation", speculation, Speculation))
    for name, value, kind in parts:
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be of class {kind.__name__}, got {value!r}")
    (engine or EngineConfig()).validate()
    if draft is None and speculation is not None:
        raise ValueError("speculation needs a draft; pass draft=, or no speculation for plain decoding")
    if draft:
        spec = speculation or Speculation()
        spec.validate()
        draft.method.check(spec, target)


def check_rule(decide: acceptance.Rule) -> None:
    """Errors: ValueError for what cannot be called as an acceptance rule is."""
    try:
        inspect.signature(decide).bind(*("evidence", "tree", "controls", "depth"))
    except TypeError:
        needed = "decide must be a function of (evidence, tree, controls, depth)"
        raise ValueError(f"{needed}, got {decide!r}; Sampling.rule names the built-in ones") from None


def tree_shape(draft: Draft | None, speculation: Speculation | None) -> Speculation:
    """The speculation that runs: the default one where none is given, that of no tree without a draft."""
    return (speculation or Speculation()) if draft else PLAIN


def pages_for(lengths: Iterable[int], page_size: int, lookahead: int, max_slots: int) -> int:
    """Pages with which nothing is preempted: those of the longest `max_slots` requests at once.

    Args: lengths: tokens of each request at its end, prompt included; lookahead: see `Speculation.lookahead`.
    """
    longest = sorted(lengths, reverse=True)[:max_slots]
    return max(1, sum(-(-(n + lookahead) // page_size) for n in longest))


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Errors: ValueError for what is no list or tuple, or holds what is not a token id of the vocabulary."""
    if not isinstance(tokens, list | tuple):
        raise ValueError(f"tokens must be a list of token ids, got {tokens!r}")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise ValueError(f"token {token!r} is not in the vocabulary of {vocab_size}")


def build(
    model: Model,
    draft: Draft | None = None,
    engine: EngineConfig | None = None,
    speculation: Speculation | None = None,
    record: bool = False,
    decide: acceptance.Rule = acceptance.decide,
) -> "Program":
    """Bind an engine's hashable statics. Weights and state are arguments of its steps.

    Args:
      record: gather evidence for rules that no request uses too, so that a round can be judged under others.
      decide: the acceptance rule, in place of the built-in ones that `Sampling.rule` chooses from; see
        `acceptance.judge`.
    Errors: ValueError naming the parameter that is out of range, or what cannot be combined.
    """
    check_parts(model.cfg, draft, engine, speculation)
    check_rule(decide)
    kernels.check(model.cfg.gemm, model.cfg.bmm)
    engine = engine or EngineConfig()
    spec = tree_shape(draft, speculation)
    max_context = min(model.cfg.max_context, engine.max_context or model.cfg.max_context)
    num_pages = engine.num_pages
    if num_pages is None:
        lengths = [min(max_context, DEFAULT_TOKENS)] * engine.max_slots
        num_pages = pages_for(lengths, engine.page_size, spec.lookahead, engine.max_slots)
    static = Static(
        cfg=model.cfg,
        method=draft.method if draft else Nothing(),
        speculation=spec,
        attend=pick_attend(engine, model),
        page_size=engine.page_size,
        prefill_chunk=engine.prefill_chunk,
        record=record,
        decide=decide,
    )
    check_memory(model, num_pages, engine.page_size)
    pool = PoolShape(num_pages, engine.page_size, model.params.embed.dtype, model.params.embed.device)
    return Program(static=static, max_slots=engine.max_slots, max_context=max_context, pool=pool)


def check_memory(model: Model, num_pages: int, page_size: int) -> None:
    """Errors: ValueError for a pool of the target's KV that is larger than the device's memory."""
    cfg, weight = model.cfg, model.params.embed
    size = num_pages * page_size * 2 * cfg.num_layers * cfg.num_kv_heads * cfg.head_dim * weight.element_size()
    if weight.is_cuda:
        memory = torch.cuda.mem_get_info(weight.device)[1]
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size > memory:
        raise ValueError(
            f"num_pages: {num_pages} pages of {page_size} take {size / 2**30:.1f} GiB, "
            f"the device has {memory / 2**30:.1f} GiB"
        )


def pick_attend(engine: EngineConfig, model: Model) -> Attend:
    """The attention backend: "auto" is canonical where the model's products are, else sdpa.

    Errors: ValueError for a backend that this model's device cannot run.
    """
    if engine.attend == "flashinfer":
        flashinfer.check(model.params.embed.dtype, model.params.embed.device)
        return FlashInfer(engine.page_size)
    if engine.attend == "canonical" and model.cfg.gemm != "canonical":
        raise ValueError(
            f"attend='canonical' needs a model on CUDA with gemm 'canonical', this one is on "
            f"{model.params.embed.device} with gemm {model.cfg.gemm!r}"
        )
    canonical = model.cfg.gemm == "canonical" and engine.attend != "sdpa"
    return Canonical(engine.page_size) if canonical else Sdpa(engine.page_size, model.cfg.bmm)


@dataclass(frozen=True)
class Program:
    """An engine's statics with its steps; holds no state but FlashInfer's plans, where that is the backend.

    Every step is pure unless `put` mutates.
    """

    static: Static
    max_slots: int
    max_context: int  # tokens of one request, prompt included
    pool: PoolShape

    @property
    def page_size(self) -> int:
        return self.pool.page_size

    @property
    def lookahead(self) -> int:
        """Storage positions past the pending token that a round may write."""
        return self.static.speculation.lookahead

    @property
    def capacity(self) -> int:
        """Most tokens of one request, prompt included: by the context, and by a round with the pool to itself."""
        return max(0, min(self.max_context, self.pool.num_pages * self.page_size - self.lookahead + 1))

    def check_shape(self, shape: Speculation) -> None:
        """Errors: ValueError for a round's tree that the program's own does not cover, naming the field."""
        own = self.static.speculation
        if not isinstance(shape, Speculation):
            raise ValueError(f"shape must be of class Speculation, got {shape!r}")
        if shape.depth:
            shape.validate()
        if shape.coupled != own.coupled:
            raise ValueError(f"a round's coupled is {shape.coupled}, the program's {own.coupled}")
        for name in ("depth", "lookahead"):
            mine, most = getattr(shape, name), getattr(own, name)
            if not 0 <= mine <= most:
                raise ValueError(f"a round's {name} is {mine}, the program's own tree has {most}")

    def shapes(self) -> tuple[Speculation, ...]:
        """The rounds that the host may choose from: no tree, a short and a long chain, the program's own tree."""
        own = self.static.speculation
        depths = sorted({0, (own.depth + 1) // 2, own.depth})
        chains = [replace(own, top_k=1, depth=depth, num_nodes=None) for depth in depths]
        return (*chains, own) if own.top_k > 1 else tuple(chains)

    def init(self) -> State:
        """Empty slots over an empty pool."""
        table = -(-(self.capacity + self.lookahead) // self.page_size)
        return State(
            pages=pages.init(self.pool.num_pages, self.pool.device),
            pools=self.pool.pools(self.static.cfg, self.static.cfg.num_layers),
            slots=slots.init(self.max_slots, self.capacity, table, self.pool.device),
            draft=self.static.method.init(self.pool, self.max_slots, self.static.speculation.depth + 1),
        )

    def clear(self, state: State, put: Write = put) -> State:
        """`init` over the buffers of a state: its pools stay as they are, since nothing refers to their pages."""
        table = state.slots.page_table
        return State(
            pages=pages.init(self.pool.num_pages, self.pool.device),
            pools=state.pools,
            slots=slots.init(self.max_slots, self.capacity, table.shape[1], self.pool.device),
            draft=replace(state.draft, feature=torch.zeros_like(state.draft.feature)),
        )

    def misfit(self, tokens: int) -> str | None:
        """Why a prompt of so many tokens can never run here; None where it can."""
        if tokens >= self.max_context:
            return f"its {tokens} tokens leave no room in the context of {self.max_context}"
        need = -(-(tokens + 1 + self.lookahead) // self.page_size)
        if need > self.pool.num_pages:
            return (
                f"its {tokens} tokens need {need} pages of {self.page_size} with a look-ahead of {self.lookahead}, "
                f"the pool has {self.pool.num_pages}"
            )
        return None

    def insert(
        self,
        state: State,
        slot: int,
        tokens: list[int],
        sampling: Sampling,
        emitted: int = 0,
        share: int | None = None,
        put: Write = put,
    ) -> State:
        """Put a request into an empty slot; `prefill` then works on it.

        Args:
          tokens: the prompt, followed by the `emitted` tokens of an earlier stay (nothing is emitted for these again).
          share: a slot whose prompt is the same and prefilled: its full pages are shared, the last one is copied.
        Errors: ValueError for an occupied slot, a token out of range, a request that can never fit or has nothing left
          to do, a `share` that does not hold the prompt's KV.
        """
        return self.insert_all(state, [Admission(slot, tokens, sampling, emitted, share)], put)

    def insert_all(self, state: State, coming: Sequence[Admission], put: Write = put) -> State:
        """`insert` for many requests, in a few launches for all of them. Errors: those of `insert`."""
        coming = [*coming]
        for one in coming:
            self._check(one)
        _check_distinct([one.slot for one in coming])
        if not coming:
            return state
        admission.check(state, coming)
        ends = [self.ends(one.prompt, one.sampling) for one in coming]
        return admission.insert(state, coming, ends, self.page_size, put)

    def ends(self, prompt: int, sampling: Sampling) -> slots.End:
        """Where a request with a prompt of so many tokens ends."""
        stop_ids = (*sampling.stop_ids, *(() if sampling.ignore_eos else self.static.cfg.eos_ids))
        return slots.End(min(prompt + sampling.max_tokens, self.capacity), stop_ids)

    def check_sampling(self, sampling: Sampling) -> None:
        """Errors: ValueError for sampling parameters that are out of range or that this engine cannot serve."""
        if not isinstance(sampling, Sampling):
            raise ValueError(f"sampling must be of class Sampling, got {sampling!r}")
        sampling.validate()
        for token in sampling.stop_ids:
            if token >= self.static.cfg.vocab_size:
                raise ValueError(f"stop_ids: {token} is not in the vocabulary of {self.static.cfg.vocab_size}")
        ids = len(sampling.stop_ids) + len(self.static.cfg.eos_ids)
        if ids > slots.MAX_STOP_IDS:
            raise ValueError(f"stop_ids and the model's EOS ids are {ids}, at most {slots.MAX_STOP_IDS} fit")
        if self.static.speculation.coupled and sampling.rule != "exact":
            raise ValueError(f"rule {sampling.rule!r} has no closed form with coupled proposals; use coupled=False")

    def _check_slot(self, slot: int, name: str = "slot") -> None:
        if type(slot) is not int or not 0 <= slot < self.max_slots:
            raise ValueError(f"{name} must be an integer from 0 to {self.max_slots - 1}, got {slot!r}")

    def _check(self, one: Admission) -> None:
        if not isinstance(one, Admission):
            raise ValueError(f"a request to insert must be of class Admission, got {one!r}")
        self.check_sampling(one.sampling)
        self._check_slot(one.slot)
        if one.share is not None:
            self._check_slot(one.share, "share")
        check_tokens(one.tokens, self.static.cfg.vocab_size)
        if type(one.emitted) is not int:
            raise ValueError(f"emitted must be an integer, got {one.emitted!r}")
        if one.emitted < 0 or one.prompt < 1:
            raise ValueError(f"a prompt is empty: {len(one.tokens)} tokens of which {one.emitted} emitted")
        if reason := self.misfit(one.prompt):
            raise ValueError(f"the prompt can never fit: {reason}")
        if (limit := self.ends(one.prompt, one.sampling).limit) <= len(one.tokens):
            raise ValueError(f"emitted: with {one.emitted} tokens the request has all of its {limit - one.prompt}")

    def evict(self, state: State, slot: int, put: Write = put) -> State:
        """Empty a slot and drop its references to pages."""
        return self.evict_all(state, [slot], put)

    def evict_all(self, state: State, going: Sequence[int], put: Write = put) -> State:
        """`evict` for many slots, distinct ones, in a few launches for all of them."""
        going = [*going]
        for slot in going:
            self._check_slot(slot)
        _check_distinct(going)
        return admission.evict(state, going, put)

    def prefill(
        self, params: Params, state: State, slot: Tensor | None = None, chunk: int | None = None, put: Write = put
    ) -> tuple[State, Info]:
        """`step.prefill`: one chunk of prompt for every slot that has some left. Errors: ValueError for a bad chunk."""
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"chunk must be a positive integer, got {chunk!r}")
        return step.prefill(self.static, params, state, slot, chunk, put)

    def decode(
        self,
        params: Params,
        state: State,
        slot: Tensor | None = None,
        put: Write = put,
    ) -> tuple[State, Info]:
        """`step.decode`: one token for every running slot."""
        return step.decode(self.static, params, state, slot, put)

    def speculate(
        self,
        params: Params,
        state: State,
        slot: Tensor | None = None,
        shape: Speculation | None = None,
        put: Write = put,
    ) -> tuple[State, Info]:
        """`step.speculate`: one round for every running slot; shape: of its tree, None: the program's own.

        Errors: ValueError for a tree that does not fit into the state of the program's own.
        """
        if shape is not None:
            self.check_shape(shape)
        return step.speculate(self.static, params, state, slot, shape, put)


def _check_distinct(places: Sequence[int]) -> None:
    seen: set[int] = set()
    for slot in places:
        if slot in seen:
            raise ValueError(f"slot {slot} is given twice")
        seen.add(slot)

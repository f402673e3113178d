"""A prepared engine and the host loop over it: policy is schedule.py's, arithmetic is step.py's, this connects them."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import acceptance, reports, schedule, slots, step, trace, variants
from nanospec_fn.admission import Admission
from nanospec_fn.capture import capture, donate, shared_pool
from nanospec_fn.draft import Draft, Nothing, Speculation
from nanospec_fn.model import Model
from nanospec_fn.program import EngineConfig, build
from nanospec_fn.reports import Landed, Report, Update
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import Params
from nanospec_fn.variants import Choice

PREFILL_ROWS = 8192  # most rows of a prefill step: what they need beside the pool stays under 2 GiB for an 8B model


@dataclass(frozen=True)
class Request:
    """A prompt's token ids and how to complete it."""

    tokens: Sequence[int]
    sampling: Sampling


class Engine:
    """A program, its state and its captured steps, kept between calls. Not for use by two threads at once.

    Attributes:
      behind: whether a step's results are read when the next one already runs; on CUDA.
      stats: times and acceptance of the variants, where the host picks among them.
      backlog: how far the draft may be behind in each slot, likewise.
    """

    def __init__(
        self,
        model: Model,
        draft: Draft | None,
        config: EngineConfig | None,
        speculation: Speculation | None,
        record: bool = False,
        decide: acceptance.Rule = acceptance.decide,
    ):
        config = config or EngineConfig()
        self.model, self.draft = model, draft
        self.program = build(model, draft=draft, engine=config, speculation=speculation, record=record, decide=decide)
        self.params = Params(target=model.params, draft=draft.params if draft else ())
        self.behind = self.program.pool.device.type == "cuda"
        wrap: Callable[..., Any] = donate
        if config.capture != "off":
            wrap = partial(capture, pool=shared_pool() if self.behind else None, lend=True)
        self.prefill = wrap(reports.packed(self.program.prefill, record))
        self.round = wrap(reports.packed(self.program.speculate, record))
        self.follow = wrap(reports.packed(partial(step.decode_after, self.program.static), record))
        # Over the same state, without the draft, which keeps holes where it was left out: no bit of rule `exact`
        # depends on them, the law of a lossy rule does. Hence not for users: see `choose`.
        alone = replace(self.program.static, method=Nothing())
        self.prefill_alone = wrap(reports.packed(partial(step.prefill, alone), record))
        self.round_alone = wrap(reports.packed(partial(step.decode_after, alone), record))
        self.insert = donate(self.program.insert_all)
        self.evict = donate(self.program.evict_all)
        self.clear = donate(self.program.clear)
        # A trace has one shape of tree for all its rounds, and what a rule from outside emits may depend on the tree.
        self.picks = config.variants == "auto" and draft is not None and not record and decide is acceptance.decide
        self.shapes = self.program.shapes() if self.picks else (self.program.static.speculation,)
        self.choices = variants.Config(tuple(variants.Variant(s.top_k, s.depth, s.nodes + 1) for s in self.shapes))
        self.stats = variants.Stats()
        self.backlog = variants.Backlog(self.program.static.speculation.depth + 1)
        self.serving = False
        self.state = self.program.init()
        self._buffers = pytree.tree_flatten(self.state)
        widest = self.program.static.speculation.depth + 1
        self._lanes = reports.lanes(self.program.pool.device, self.program.max_slots, widest)
        self._rows: tuple[list[int], Tensor | None] = ([], None)  # the newest ones that a step took, on the device

    def check_idle(self) -> None:
        """Errors: ValueError while another call is being served."""
        if self.serving:
            raise ValueError("engine still serves another call: finish or close its stream first, or prepare another")

    def reset(self) -> None:
        """Drop whatever runs. The buffers stay, so that captured graphs stay valid."""
        self.backlog = variants.Backlog(self.backlog.most)
        # An interrupted step may have consumed self.state in part; its tensors are still these.
        leaves, spec = self._buffers
        self.state = self.clear(pytree.tree_unflatten(leaves, spec))

    def seat(self, plan: schedule.Plan, requests: Sequence[Request], emitted: Sequence[Sequence[int]]) -> None:
        """Let requests go and come. Args: emitted: each request's tokens so far."""
        if plan.evict:
            self.state = self.evict(self.state, plan.evict)
        if plan.insert:
            coming = []
            for new in plan.insert:
                request = requests[new.request]
                tokens = [*request.tokens, *emitted[new.request]]
                coming.append(Admission(new.slot, tokens, request.sampling, new.emitted, new.share))
            self.state = self.insert(self.state, coming)
            if self.picks:
                self.backlog = variants.seated(self.backlog, {new.slot: new.share for new in plan.insert})

    def run(self, requests: dict[int, int], bucket: int, chunk: int, choice: Choice, number: int) -> Report:
        """Issue one prefill step (chunk > 0) or round for these requests, by slot.

        The batch is padded to `bucket` with slots that have nothing to do in such a step.
        """
        rows, slot = self._rows_for(requests, bucket)
        lane = next(self._lanes)
        lane.start()
        shape = self.shapes[choice.variant]
        call: Callable[..., Any]
        size: int | Speculation | None
        if chunk:
            call, size = self.prefill_alone if choice.alone else self.prefill, chunk
        elif choice.alone:
            call, size = self.round_alone, None
        elif not shape.depth and self.draft and variants.kept_up(self.backlog, requests):
            call, size = self.follow, 1
        else:
            call, size = self.round, shape
        if self.picks:
            self.backlog = variants.issued(self.backlog, requests, 1 if chunk else shape.depth + 1)
            if choice.alone and self.state.draft.pools:  # a draft without KV misses nothing
                self.backlog = variants.left_out(self.backlog, requests)
        self.state, table, evidence = call(self.params, self.state, slot, size)
        evidence = reports.to_host(evidence) if evidence else ()
        return Report(
            number, rows, requests, chunk > 0, bucket, choice.variant, lane.bring(table), evidence, lane.clock
        )

    def _rows_for(self, requests: dict[int, int], bucket: int) -> tuple[list[int], Tensor | None]:
        """The slots of a step's rows, and the same on the device; None for all slots."""
        everyone = range(self.program.max_slots)
        if bucket == len(everyone):
            return [*everyone], None
        others = (slot for slot in everyone if slot not in requests)
        rows = sorted([*requests, *islice(others, bucket - len(requests))])
        if rows != self._rows[0]:
            device = self.program.pool.device
            self._rows = rows, slots.column(rows, torch.int64, device)
        return self._rows

    def choose(self, plan: schedule.Plan, running: int, *, lossy_step: bool, lossy_call: bool) -> Choice:
        """`variants.choose` for a planned step, where the host picks; else the program's own tree.

        Args: running: requests in slots; lossy_step, lossy_call: whether one of the step, of the call has a lossy rule.
        """
        if not self.picks or lossy_step:  # the law of a lossy rule depends on the tree
            return Choice(len(self.shapes) - 1)
        everyone = schedule.bucket(running, self.program.max_slots)
        rounding = plan.round, plan.bucket
        return variants.choose(self.choices, self.stats, self.backlog, *rounding, everyone, may_leave=not lossy_call)

    def observe(self, report: Report, landed: Landed, lossy: bool) -> None:
        """Take in a step, where the host picks: of a round without a lossy rule its time and acceptance too."""
        if not self.picks:
            return
        emitted = dict(landed.events.emitted)
        by_slot = {slot: emitted[i] for slot, i in report.requests.items() if i in emitted}
        self.backlog = variants.landed(self.backlog, by_slot)
        if not report.prefill and not lossy:
            self.stats = variants.observe(
                self.choices, self.stats, report.bucket, report.variant, landed.milliseconds, landed.accepted
            )


def prepare(
    model: Model,
    draft: Draft | None = None,
    engine: EngineConfig | None = None,
    speculation: Speculation | None = None,
    record: bool = False,
    decide: acceptance.Rule = acceptance.decide,
) -> Engine:
    """An engine to pass to `generate` or `stream` again and again: its pool and graphs are made once.

    Args: record: gather what a trace needs; decide: the acceptance rule, in place of those of `Sampling.rule`.
    Errors: ValueError naming the parameter that is out of range or cannot be combined.
    """
    return Engine(model, draft, engine, speculation, record, decide)


def trace_header(engine: Engine, requests: Sequence[Request], prompt: Sequence[int], file: trace.File) -> trace.Header:
    """The first line of a trace. Args: prompt: each request's index among the prompts of its call."""
    program, draft = engine.program, engine.draft
    static, pool = program.static, program.pool
    recorded = []
    for index, request in zip(prompt, requests, strict=True):
        end = program.ends(len(request.tokens), request.sampling)
        recorded.append(trace.Request(index, len(request.tokens), end.limit, sorted({*end.stop_ids}), request.sampling))
    sizes: dict[str, int | str] = {
        "max_slots": program.max_slots,
        "num_pages": pool.num_pages,
        "page_size": pool.page_size,
        "variants": "fixed",  # whatever the config says: see Engine
    }
    attend, dtype = type(static.attend).__name__, str(pool.dtype).removeprefix("torch.")
    return trace.Header(
        format=trace.FORMAT,
        version=trace.VERSION,
        model=engine.model.name,
        config=trace.fingerprint(static.cfg),
        draft=draft.method.name if draft else None,
        speculation=static.speculation if draft else None,
        engine=sizes
        | {"prefill_chunk": static.prefill_chunk, "attend": attend, "dtype": dtype}
        | {"gemm": static.cfg.gemm, "bmm": static.cfg.bmm}
        | trace.arithmetic(pool.device),
        policy_version=file.policy_version,
        draft_version=file.draft_version,
        requests=recorded,
    )


def serve(engine: Engine, requests: Sequence[Request]) -> Generator[Update, None, None]:
    """Run requests to their end, yielding what each step did. Leaves the engine empty, however it is left.

    Where the engine reads behind, the next step is issued before the last one is read, unless someone comes or goes:
    see schedule.py.

    Errors: ValueError for an engine whose last call is not done.
    """
    engine.check_idle()
    program = engine.program
    config = schedule.Config(program.max_slots, program.static.prefill_chunk, PREFILL_ROWS)
    lossy = {i for i, r in enumerate(requests) if r.sampling.rule != "exact"}
    limit = [program.ends(len(r.tokens), r.sampling).limit - len(r.tokens) for r in requests]
    emitted: list[list[int]] = [[] for _ in requests]
    host, events = schedule.HostState(), schedule.Events(arrived=_arrivals(requests))
    flying: Report | None = None
    number = 0
    engine.serving = True
    try:
        while True:
            planned, plan = schedule.plan(config, host, events)
            working = {*plan.prefill, *plan.round}
            now = {r.slot: r.request.index for r in planned.running if r.slot in working}
            due, told = flying, events
            if flying and (plan.evict or plan.insert or _surely_over(flying, now, emitted, limit)):
                flying = None  # its results come first, then another plan from the same state
            else:
                host, told = planned, schedule.Events()
                engine.seat(plan, requests, emitted)
                if not working:
                    return
                here = not lossy.isdisjoint(now.values())
                choice = engine.choose(plan, len(planned.running), lossy_step=here, lossy_call=bool(lossy))
                issued = engine.run(now, plan.bucket, plan.chunk, choice, number)
                number += 1
                due, flying = (flying, issued) if engine.behind else (issued, None)
            facts = schedule.Events()
            if due:
                landed = reports.read(due)
                facts = landed.events
                engine.observe(due, landed, not lossy.isdisjoint(due.requests.values()))
                for update in landed.updates:
                    emitted[update.request] += update.tokens
                    yield update
            events = told.then(facts)
            if flying and flying.prefill:
                events = events.then(schedule.expected(host, facts, plan))
    finally:
        engine.serving = False
        if not host.idle:  # left early: by an error, ctrl-C, or a caller that stopped listening
            engine.reset()


def _arrivals(requests: Sequence[Request]) -> tuple[schedule.Request, ...]:
    first: dict[tuple[int, ...], int] = {}
    group = [first.setdefault(tuple(r.tokens), i) for i, r in enumerate(requests)]
    return tuple(schedule.Request(i, len(r.tokens), group[i]) for i, r in enumerate(requests))


def _surely_over(flying: Report, now: dict[int, int], emitted: Sequence[Sequence[int]], limit: Sequence[int]) -> bool:
    """Whether all who would take part in the next step reach their limit in the round that still runs."""
    running = set() if flying.prefill else set(flying.requests.values())
    return all(index in running and len(emitted[index]) + 1 >= limit[index] for index in now.values())

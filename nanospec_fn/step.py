"""The engine as pure steps. Read this file first.

    state, info = program.prefill(params, state)     one bounded chunk for every slot with prompt left
    state, info = program.decode(params, state)      one token for every running slot
    state, info = program.speculate(params, state)   one round: draft, verify, accept, commit, emit

`decode` is a round without a tree. A round drafts first: then the tree depends on the emitted prefix alone, and a
request that was preempted and recomputed meets the same trees as one that never was.

Shapes: B slots, b of them that take part, R rows of a slot, n = b * R, N drafted nodes, W = depth + 1, V vocabulary,
E hidden, F feature width of the draft.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanospec_fn import acceptance, attention, draft, kernels, model, pages, slots, trees
from nanospec_fn.acceptance import Evidence, Verdict
from nanospec_fn.attention import Attend, Rows
from nanospec_fn.draft import Speculation
from nanospec_fn.pages import Pages, Write
from nanospec_fn.slots import Slots
from nanospec_fn.struct import put, replace, rewritten, state
from nanospec_fn.trees import Tree


@dataclass(frozen=True)
class Static:
    """What a step is specialised to: everything hashable that its arithmetic depends on."""

    cfg: model.Config
    method: draft.Method
    speculation: Speculation
    attend: Attend
    page_size: int
    prefill_chunk: int
    record: bool
    decide: acceptance.Rule = acceptance.decide


@state
class Params:
    """Weights of target and draft, `()` for a draft without any."""

    target: model.Params
    draft: Any


@state
class State:
    """All that the engine carries from step to step."""

    pages: Pages
    pools: tuple[Tensor, ...] = rewritten()  # the target's KV, L x [P + 1, 2, S, K, D]
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
    tree: Tree  # [b, N] the nodes that were verified; N is 0 for prefill and decode
    evidence: Evidence  # [b, N], [b, N + 1], what the verdict rests on; all of it if `Static.record`


def prefill(
    static: Static,
    params: Params,
    state: State,
    slot: Tensor | None = None,
    chunk: int | None = None,
    put: Write = put,
) -> tuple[State, Info]:
    """One chunk of prompt for every slot that has some left; the last chunk emits the first token.

    Args: slot: [b] distinct slots that take part, None for all; chunk: most tokens per slot, None: prefill_chunk.
    """
    chunk = static.prefill_chunk if chunk is None else chunk
    s, carried = slots.take(state.slots, slot), draft.take(state.draft, slot)
    n = torch.where(slots.prefilling(s), (s.prefill_to - s.length).clamp_max(chunk), 0)
    free, s, ok = _reserve(static, state.pages, s, torch.where(n > 0, s.length + n, 0), chunk)
    n = torch.where(ok, n, 0)

    lane = torch.arange(chunk, dtype=torch.int32, device=n.device)
    rows = attention.chain(slots.tokens_at(s, s.length[:, None] + lane), s.length, n)
    pools, x, features = _run_target(static, params, state.pools, rows, s, put)
    carried = static.method.prefill(params, carried, rows, features, s, static.attend, put)

    s = replace(s, length=s.length + n, unseen=torch.where(n > 0, 1, s.unseen))
    first = (n > 0) & (s.length == s.prefill_to) & ~s.silent
    last = kernels.rows_at(x.view(*rows.token.shape, -1), (n - 1).clamp_min(0)[:, None])
    logits = model.logits(params.target, static.cfg, last[:, 0])[:, None]
    tree = trees.init_all(len(n), 0, n.device)
    evidence, verdict = _judge(static, logits, tree, s, depth=0)
    s, info = _emit(static, s, tree, evidence, verdict, first, ok, put)
    return _put_back(replace(state, pages=free, pools=pools), slot, s, carried, put), info


def decode(
    static: Static,
    params: Params,
    state: State,
    slot: Tensor | None = None,
    put: Write = put,
) -> tuple[State, Info]:
    """One token for every running slot. The draft keeps up, so that drafting can resume at any round.

    Args: slot: [b] distinct slots that take part, None for all.
    """
    return decode_after(static, params, state, slot, None, put)


def decode_after(
    static: Static,
    params: Params,
    state: State,
    slot: Tensor | None = None,
    unseen: int | None = None,
    put: Write = put,
) -> tuple[State, Info]:
    """`decode` for a host that knows what came before, and so how little the draft has to catch up on.

    Args: unseen: the most tokens that the draft of any slot has not been run on: 1 after a prefill or another `decode`,
      None: as many as a round emits. With fewer than there are the draft goes wrong, and a lossy rule's law with it.
    """
    plain = dataclasses.replace(static.speculation, depth=0, num_nodes=None)
    return _round(static, params, state, slot, plain, put, unseen)


def speculate(
    static: Static,
    params: Params,
    state: State,
    slot: Tensor | None = None,
    shape: Speculation | None = None,
    put: Write = put,
) -> tuple[State, Info]:
    """One round for every running slot: draft a tree, verify it in one pass, emit accepted tokens and one more.

    Args: slot: [b] distinct slots that take part, None for all; shape: of this round's tree, no deeper and of no more
      nodes than static.speculation's (depth 0: no tree); None: that one.
    """
    return _round(static, params, state, slot, shape or static.speculation, put)


def _round(
    static: Static,
    params: Params,
    state: State,
    slot: Tensor | None,
    spec: Speculation,
    put: Write,
    unseen: int | None = None,
) -> tuple[State, Info]:
    s, carried = slots.take(state.slots, slot), draft.take(state.draft, slot)
    free, s, live, ok = slots.reserve_round(state.pages, s, spec.lookahead, static.page_size, put)

    owed = draft.owed(carried, unseen)
    drafted, tree = static.method.propose(params, owed, s, live, spec, static.attend, put)  # draft
    carried = replace(carried, pools=drafted.pools)
    rows = verify_rows(s, tree, live, spec)
    pools, x, features = _run_target(static, params, state.pools, rows, s, put)  # verify
    logits = model.logits(params.target, static.cfg, x).view(*rows.token.shape, -1)
    evidence, verdict = _judge(static, logits, tree, s, spec.depth)  # accept
    if spec.top_k > 1 and spec.depth:  # a chain's nodes stand where they belong
        pools = pages.commit(pools, s.page_table, s.length, verdict.path, live, static.page_size, put)
    carried = draft.observe(carried, features.view(*rows.token.shape, -1), verdict.path, live)
    s, info = _emit(static, s, tree, evidence, verdict, live, ok, put)
    return _put_back(replace(state, pages=free, pools=pools), slot, s, carried, put), info


def _reserve(static: Static, free: Pages, s: Slots, upto: Tensor, most: int) -> tuple[Pages, Slots, Tensor]:
    """Pages for storage positions below upto [b], at most `most` + 1 past what is held; see `slots.reserve`."""
    return slots.reserve(free, s, upto, static.page_size, most // static.page_size + 2)


def _run_target(
    static: Static, params: Params, pools: tuple[Tensor, ...], rows: Rows, s: Slots, put: Write
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Run the target over rows: pools with their KV, x [n, E], and the draft's features [n, F]."""
    after, attend = attention.through(static.attend, static.cfg, rows, s.page_table, pools, put)
    token, position = rows.token.flatten(), rows.position.flatten()
    x, tapped = model.hidden(params.target, static.cfg, token, position, attend, static.method.taps)
    return tuple(after), x, static.method.fuse(params, tapped)


def _judge(static: Static, logits: Tensor, tree: Tree, s: Slots, depth: int) -> tuple[Evidence, Verdict]:
    """The program's rule on logits [b, R, V] of the root and of tree [b, N]."""
    rule, full = static.decide, static.record
    return acceptance.judge(logits, tree, s.controls, s.total, depth, rule=rule, full=full)


def _emit(
    static: Static, s: Slots, tree: Tree, evidence: Evidence, verdict: Verdict, live: Tensor, ok: Tensor, put: Write
) -> tuple[Slots, Info]:
    """Append the verdict's tokens up to a stop id or the cap, and report."""
    s, emitted = slots.append(s, verdict, live, static.speculation.depth + 1, put)
    return s, Info(
        tokens=emitted.tokens,
        target_logp=emitted.target_logp,
        behaviour_logp=emitted.behaviour_logp,
        count=emitted.count,
        accepted=emitted.accepted,
        done=emitted.done,
        ok=ok,
        left=emitted.left,
        tree=tree,
        evidence=evidence,
    )


def _put_back(state: State, slot: Tensor | None, s: Slots, carried: draft.State, put: Write) -> State:
    whole, kept = slots.put_back(state.slots, slot, s, put), draft.put_back(state.draft, slot, carried, put)
    return replace(state, slots=whole, draft=kept)


def verify_rows(s: Slots, tree: Tree, live: Tensor, spec: Speculation) -> Rows:
    """Root (the pending token) and nodes as rows of the verify pass; node i keeps its KV at length + 1 + i."""
    return attention.verify(s, tree, live, spec.depth if spec.top_k > 1 else 0)

"""Failures that engines of this kind have had (docs/promises.md), part one: C01, C03, C04, C05, C06, C07.

docs/promises.md says where the others are.
"""

import dataclasses
import itertools

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import struct
from nanospec_fn.draft_model import Eagle3
from nanospec_fn.slots import Slots
from tests import tiny
from tests.scripted import (
    CHAIN,
    DEPTH,
    TREE,
    Scripted,
    assert_empty,
    greedy,
    prompt,
    right_for,
    scripted,
    target,
    watch,
)

pytestmark = pytest.mark.usefixtures("one_thread")
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])


def with_eos(*ids: int) -> ns.Model:
    model = target()
    return dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, eos_ids=ids))


@SHAPES
def test_c01_eos_inside_the_accepted_draft(shape):
    """Catches a stop check that looks at the last token of an accepted block only."""
    start = prompt(5)
    expected = list(greedy(tuple(start), 24))
    firsts = [j for j in range(24) if expected.index(expected[j]) == j]
    assert len({j % (DEPTH + 1) for j in firsts}) == DEPTH + 1  # every place in a block
    for j in firsts:
        draft = scripted([start], 40)
        (out,) = ns.generate(with_eos(expected[j]), [start], ns.Sampling(max_tokens=24), draft=draft, speculation=shape)
        assert out.tokens == expected[: j + 1]
        assert out.finish_reason == "stop"
        assert len(out.target_logp) == len(out.behaviour_logp) == len(out.origin) == j + 1
        # No draft, and so no verify, after the round that ended it.
        assert [total for _, total, _ in draft.method.calls] == [
            len(start) + 1 + (DEPTH + 1) * i for i in range(-(-j // (DEPTH + 1)))
        ]


def test_c01_rejected_eos_does_not_end_the_request():
    start = prompt(5)
    expected = list(greedy(tuple(start), 12))
    eos = next(t for t in range(128) if t not in expected)
    draft = scripted([start], 24, right_for(2), wrong=eos)
    (out,) = ns.generate(with_eos(eos), [start], ns.Sampling(max_tokens=12), draft=draft, speculation=CHAIN)
    assert (out.tokens, out.finish_reason) == (expected, "length")
    assert out.accepted == [2, 2, 2, 2]  # the cap takes the last round's own token


def test_c01_stop_ids_and_ignore_eos():
    """ignore_eos leaves out the model's ids and keeps the request's."""
    start = prompt(5)
    expected = list(greedy(tuple(start), 24))
    eos, stop = expected[3], next(t for t in expected[5:] if t not in expected[:5])
    model, end = with_eos(eos), expected.index(stop) + 1
    for sampling, want, reason in (
        (ns.Sampling(max_tokens=24), expected[:4], "stop"),
        (ns.Sampling(max_tokens=24, ignore_eos=True), expected, "length"),
        (ns.Sampling(max_tokens=24, ignore_eos=True, stop_ids=(stop,)), expected[:end], "stop"),
        (ns.Sampling(max_tokens=24, ignore_eos=True, stop_ids=[stop]), expected[:end], "stop"),
        (ns.Sampling(max_tokens=24, stop_ids=(stop,)), expected[:4], "stop"),
        (ns.Sampling(max_tokens=4), expected[:4], "stop"),  # a stop token exactly at the cap is "stop"
        (ns.Sampling(max_tokens=3), expected[:3], "length"),
    ):
        (out,) = ns.generate(model, [start], sampling, draft=scripted([start], 32), speculation=CHAIN)
        assert (out.tokens, out.finish_reason) == (want, reason), sampling


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_c03_page_boundaries_with_drafts(page_size, top_k):
    """Catches a look-ahead that is not reserved: wrong output when fewer than K places are left in the last page."""
    lengths = sorted({n for n in (m * page_size + d for m in (1, 2) for d in (-1, 0, 1)) if n > 0})
    for depth in range(1, 7):
        cases = list(itertools.product(lengths, range(depth + 1)))
        # Distinct prompts, so that each is served with its own number of right tokens.
        starts = [prompt(n, seed=100 * a + n) if n > 2 else [a + 10] * n for n, a in cases]
        draft = scripted(starts, 10, lambda i, total, cases=cases: cases[i][1])
        engine = ns.prepare(
            target(),
            draft,
            ns.EngineConfig(max_slots=len(cases), num_pages=3000, page_size=page_size),
            ns.Speculation(top_k=top_k, depth=depth),
        )
        out = ns.generate(target(), starts, ns.Sampling(max_tokens=10), engine=engine)
        for (n, a), start, one in zip(cases, starts, out, strict=True):
            assert one.tokens == list(greedy(tuple(start), 10)), (n, a, depth)
            full = [a] * (9 // (a + 1)) + ([9 % (a + 1)] if 9 % (a + 1) else [])
            assert one.accepted == full, (n, a, depth)
        nodes = top_k * depth
        assert {held * page_size >= total + nodes for _, total, held in draft.method.calls} == {True}
        assert_empty(engine)


def test_c04_request_that_can_never_fit():
    """Catches a scheduler that waits for ever for pages that the pool does not have."""
    config = ns.EngineConfig(max_slots=2, num_pages=8, page_size=4)
    starts = [prompt(40), prompt(5)]
    with pytest.raises(
        ValueError, match=r"prompt 0 can never fit: its 40 tokens need 11 pages of 4 .*, the pool has 8"
    ):
        ns.generate(target(), starts, ns.Sampling(max_tokens=6), engine=config)
    first, second = ns.generate(target(), starts, ns.Sampling(max_tokens=6), engine=config, on_error="return")
    assert (first.tokens, first.finish_reason) == ([], "error")
    assert "11 pages" in first.error
    assert (second.tokens, second.finish_reason) == (list(greedy(tuple(starts[1]), 6)), "length")
    chunks = list(ns.stream(target(), starts, ns.Sampling(max_tokens=6), engine=config, on_error="return"))
    assert [(c.index, c.finish_reason) for c in chunks if c.finish_reason] == [(0, "error"), (1, "length")]


def test_c04_lookahead_counts():
    """A prompt that fits without a draft and not with one."""
    config, start = ns.EngineConfig(max_slots=1, num_pages=4, page_size=4), prompt(12)
    assert len(ns.generate(target(), [start], ns.Sampling(max_tokens=2), engine=config)[0].tokens) == 2
    with pytest.raises(ValueError, match=r"need 7 pages of 4 with a look-ahead of 12, the pool has 4"):
        ns.generate(
            target(), [start], ns.Sampling(max_tokens=2), draft=scripted([start], 2), speculation=TREE, engine=config
        )


@pytest.mark.parametrize("draft", [None, "frozen"])
def test_c04_ends_at_the_limit(draft):
    """A prompt that fits, with more tokens asked for than fit: "length" at the pool's limit or the context's."""
    model = target()
    draft = ns.load_draft(draft, model) if draft else None
    spec = ns.Speculation(depth=3) if draft else None
    start = prompt(9)
    engine = ns.prepare(model, draft, ns.EngineConfig(max_slots=2, num_pages=4, page_size=4), spec)
    (out,) = ns.generate(model, [start], ns.Sampling(max_tokens=1000), engine=engine)
    limit = 16 - 3 + 1 if draft else 17
    assert (len(start) + len(out.tokens), out.finish_reason) == (limit, "length")
    assert out.tokens == list(greedy(tuple(start), len(out.tokens)))
    assert_empty(engine)

    small = dataclasses.replace(model, cfg=dataclasses.replace(model.cfg, max_context=12))
    (out,) = ns.generate(small, [start], ns.Sampling(max_tokens=1000), draft=draft, speculation=spec)
    assert (out.tokens, out.finish_reason) == (list(greedy(tuple(start), 3)), "length")
    for length in (12, 13, 100):
        with pytest.raises(ValueError, match=f"prompt 0 can never fit: its {length} tokens leave no room .* of 12"):
            ns.generate(small, [prompt(length)], ns.Sampling(max_tokens=1), draft=draft, speculation=spec)


def test_c05_no_prompts():
    for draft in (None, ns.load_draft("ngram", target())):
        assert ns.generate(target(), [], draft=draft) == []
        assert list(ns.stream(target(), [], draft=draft)) == []


@SHAPES
def test_c05_all_finish_in_one_step_then_a_new_one(shape):
    starts = [prompt(6, seed) for seed in range(3)]
    draft = scripted(starts, 16)
    engine = watch(ns.prepare(target(), draft, ns.EngineConfig(max_slots=3, num_pages=60, page_size=4), shape))
    for batch in (starts, starts[1:2], starts):
        out = ns.generate(target(), batch, ns.Sampling(max_tokens=6), engine=engine)
        assert [o.tokens for o in out] == [list(greedy(tuple(s), 6)) for s in batch]
        assert [o.accepted for o in out] == [[4]] * len(batch)
        assert_empty(engine)


@SHAPES
def test_c05_steps_over_empty_slots_and_rows_without_a_draft(shape):
    """A step on nothing at all, one where all rows prefill, one where a row has no draft and its neighbour K."""
    starts = [prompt(6, seed) for seed in range(2)]
    draft = scripted(starts, 30, levels=lambda i, total: 0 if i == 0 else DEPTH)
    program = ns.build(target(), draft, ns.EngineConfig(max_slots=3, num_pages=40, page_size=4, prefill_chunk=4), shape)
    params, state = ns.Params(target=target().params, draft=()), program.init()
    for step in (program.prefill, program.decode, program.speculate):
        after, info = step(params, state)
        assert not info.count.any()
        assert bool(info.ok.all())
        assert struct.bytes_equal(written(after.slots), written(state.slots))
        assert struct.bytes_equal(after.pages, state.pages)
    for i, start in enumerate(starts):
        state = program.insert(state, i, start, ns.Sampling(max_tokens=30))
    state, info = program.speculate(params, state)  # every row still has prompt left
    assert not info.count.any()
    emitted: list[list[int]] = [[], []]
    for step in (program.prefill, program.prefill, program.speculate, program.speculate):
        state, info = step(params, state)
        for i in range(2):
            emitted[i] += info.tokens[i, : int(info.count[i])].tolist()
    assert info.accepted.tolist() == [0, DEPTH, 0]
    assert [len(e) for e in emitted] == [3, 11]
    for start, tokens in zip(starts, emitted, strict=True):
        assert tokens == list(greedy(tuple(start), 30))[: len(tokens)]


def test_c06_no_page_leaks_one_after_another():
    """200 requests, each ending by a stop inside a block, by the cap, or by being dropped."""
    starts = [prompt(3 + i % 7, seed=i) for i in range(10)]
    draft = scripted(starts, 24, lambda i, total: (total * 7 + i * 3) % (DEPTH + 1))
    engine = watch(ns.prepare(target(), draft, ns.EngineConfig(max_slots=2, num_pages=24, page_size=4), CHAIN))
    for i in range(200):
        start = starts[i % 10]
        expected = greedy(tuple(start), 24)
        sampling = ns.Sampling(max_tokens=1 + i % 9, stop_ids=(expected[4],) if i % 3 == 0 else ())
        stream = ns.stream(target(), [start], sampling, engine=engine)
        if i % 5 == 0:
            next(stream)
            stream.close()
        else:
            tokens = [t for chunk in stream for t in chunk.tokens]
            assert tokens == list(expected[: len(tokens)])
        assert_empty(engine)


@SHAPES
def test_c06_no_page_leaks_concurrently(shape):
    """50 at once in a pool that is too small for them; no page has two owners at any step."""
    starts = [prompt(2 + i % 9, seed=i) for i in range(50)]
    draft = scripted(starts, 24, lambda i, total: (total * 5 + i * 3) % (DEPTH + 1))
    engine = watch(ns.prepare(target(), draft, ns.EngineConfig(max_slots=8, num_pages=36, page_size=4), shape))
    expected = [greedy(tuple(s), 24) for s in starts]
    sampling = [ns.Sampling(max_tokens=1 + i % 11, stop_ids=(expected[i][3],) if i % 4 == 0 else ()) for i in range(50)]
    out = ns.generate(target(), starts, sampling, engine=engine)
    for one, want, s in zip(out, expected, sampling, strict=True):
        assert one.tokens == list(want[: len(one.tokens)])
        assert one.finish_reason == "stop" or len(one.tokens) == s.max_tokens
    assert {one.finish_reason for one in out} == {"stop", "length"}
    assert_empty(engine)


def written(slots: Slots) -> Slots:
    """Slots without the column that takes the writes of padding."""
    return struct.replace(slots, tokens=slots.tokens[:, :-1])


@pytest.fixture(scope="module")
def eagle_pair():
    raw = tiny.config("smollm2-135m", eos_token_id=None)
    model = tiny.model("smollm2-135m", eos_token_id=None)
    cfg, params, _ = tiny.head(raw, model)
    return model, ns.Draft(Eagle3(cfg), params)


@SHAPES
@pytest.mark.parametrize("padding", ["empty", "done", "prefilling"])
def test_c07_padding_rows_write_only_the_sink(eagle_pair, shape, padding):
    """Three requests in a bucket of four, every page owned: the whole state but the sink is as without padding.

    Catches a pad index of -1 (the last page) or 0 (a live one), in the target's KV, the draft's, or the features.
    """
    model, draft = eagle_pair
    ahead = shape.top_k * shape.depth
    # A random head is right for no token: after three rounds 7 + 1 + 2 tokens and the look-ahead fill the pool.
    full = 3 * -(-(10 + ahead) // 4) + (2 if padding == "done" else 0)
    config = ns.EngineConfig(max_slots=8, num_pages=full, page_size=4)
    program = ns.build(model, draft, config, shape)
    params = ns.Params(target=model.params, draft=draft.params)
    states = []
    for slots in ([0, 2, 3], [0, 2, 3, 5]):
        state = program.init()
        if padding != "empty":
            state = program.insert(state, 5, prompt(6, seed=9), ns.Sampling(max_tokens=1))
        if padding == "done":
            state, info = program.prefill(params, state)
            assert int(info.done[5]) != 0
        for i in (0, 2, 3):
            state = program.insert(state, i, prompt(7, seed=i), ns.Sampling(max_tokens=40))
        rows = torch.tensor(slots)
        state, info = program.prefill(params, state, torch.tensor([0, 2, 3]), 8)
        for step in (program.speculate, program.decode, program.speculate):
            state, info = step(params, state, rows)
            assert info.count[:3].all()
            assert bool(info.ok.all())
        states.append(state)
    alone, padded = states
    assert int(alone.pages.num_free) == 0
    for a, b in zip((*alone.pools, *alone.draft.pools), (*padded.pools, *padded.draft.pools), strict=True):
        assert torch.equal(a[1:], b[1:])
    live = torch.tensor([0, 2, 3])
    assert torch.equal(alone.draft.feature[live], padded.draft.feature[live])
    assert struct.bytes_equal(written(alone.slots), written(padded.slots))
    assert struct.bytes_equal(alone.pages, padded.pages)


def test_c07_buckets_serve_the_same_bytes(eagle_pair):
    """1 to 8 requests in buckets of 1, 2, 4 and 8 give what each gives alone."""
    model, draft = eagle_pair
    starts = [prompt(4 + i, seed=i) for i in range(8)]
    engine = watch(ns.prepare(model, draft, ns.EngineConfig(max_slots=8, num_pages=80, page_size=4), TREE))
    alone = [ns.generate(model, [s], ns.Sampling(max_tokens=7), draft=draft, speculation=TREE)[0] for s in starts]
    for n in (1, 3, 5, 8):
        out = ns.generate(model, starts[:n], ns.Sampling(max_tokens=7), engine=engine)
        assert out == alone[:n]


def test_scripted_drafts_are_hashable_statics():
    """A test double that could not be a method would test something else."""
    assert hash(Scripted()) == hash(Scripted())

"""A round's bookkeeping in Triton, against the torch functions that it stands in for, under Triton's interpreter.

Bytes are compared; of the lossy rules, whose logarithms are the device's own, the decisions and values to 1e-5.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import needs

if reason := needs.no_interpreter():
    pytest.skip(reason, allow_module_level=True)

import nanospec_fn as ns
from nanospec_fn import acceptance, attention, draft, draft_model, kernels, model, pages, sampling, slots, struct, trees
from nanospec_fn.kernels import gemm
from nanospec_fn.struct import put_, replace
from tests import interpreted, scripted
from tests.interpreted import on_device
from tests.rounds import REQUESTS, SIZE, B, candidates, integers, random_tree, some_slots, some_verdict

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("free", [0, 3, 9])
@pytest.mark.parametrize("seed", range(4))
def test_pages_are_reserved_as_torch_reserves_them(seed, free):
    """Bugs: a page handed out twice; a refused slot that gets some; slots after it served out of order."""
    for ahead in (0, 5, 12):
        want = slots.reserve_round(*some_slots(seed, free), ahead, SIZE)
        with on_device():
            pure = slots.reserve_round(*some_slots(seed, free), ahead, SIZE)
            given = some_slots(seed, free)
            owned = slots.reserve_round(*given, ahead, SIZE, put_)
        assert struct.bytes_equal(pure, want)
        assert struct.bytes_equal(owned, want)
        assert owned[1].page_table is given[1].page_table, "a step that owns its state copies nothing"
        assert pages.check(owned[0], owned[1].page_table) == ""


def test_a_pure_reservation_leaves_its_arguments_alone():
    given, before = some_slots(0), some_slots(0)
    with on_device():
        slots.reserve_round(*given, 9, SIZE)
    assert struct.bytes_equal(given, before)


@pytest.mark.parametrize("shift", [0, 1])
def test_rows_of_unseen_tokens(shift):
    """Bugs: a slot that is not live runs; the rows of an EAGLE head not one position early."""
    _, s = some_slots(3)
    live = torch.tensor([True, False, True, True, True])
    want = attention.newest(s, live, 6, shift)
    with on_device():
        assert struct.bytes_equal(attention.newest(s, live, 6, shift), want)


@pytest.mark.parametrize("k, depth", [(1, 5), (3, 3), (4, 2)])
def test_verify_rows_and_paths(k, depth):
    """Bugs: a node under the wrong ancestor; an absent node that is seen; a row too far."""
    _, s = some_slots(4)
    live = torch.tensor([True, False, True, True, True])
    tree = random_tree(k, B, k, depth)
    for levels in (0, depth):
        want = attention.verify(s, tree, live, levels)
        with on_device():
            assert struct.bytes_equal(attention.verify(s, tree, live, levels), want), levels
    nothing = trees.init_all(B, 0)
    want = attention.verify(s, nothing, live, 0)
    with on_device():
        assert struct.bytes_equal(attention.verify(s, nothing, live, 0), want)


@pytest.mark.parametrize("k", [1, 3])
def test_next_level_gives_tree_and_rows(k):
    """Bug: the rows of a level read before the level is written, or its parents named by node and not by row."""
    base, live = integers(torch.Generator().manual_seed(k), 0, 20, B), torch.tensor([True, True, False, True, True])
    tree = other = trees.init_all(B, k * 3)
    for depth in (1, 2, 3):
        token, logp = candidates(depth, B, k, depth)
        tree, rows, parent = draft_model.next_level(tree, depth, token, logp, base, live)
        with on_device():
            other, got, above = draft_model.next_level(other, depth, token, logp, base, live)
        assert struct.bytes_equal(other, tree)
        assert struct.bytes_equal(got, rows)
        assert torch.equal(above, parent.to(torch.int32))


@pytest.mark.parametrize("seed", range(6))
def test_tokens_are_emitted_up_to_a_stop_or_the_limit(seed):
    """Bugs: a stop id inside the block passed over; the cap missed by one; a slot that sits out changed."""
    _, s = some_slots(seed)
    verdict = some_verdict(seed)
    if seed % 2:  # else most stop at once
        s = replace(s, stop_ids=torch.full_like(s.stop_ids, -1), limit=s.limit + 3)
    live = torch.tensor([True, True, True, False, True])
    want_s, want = slots.append(s, verdict, live, 7)
    with on_device():
        got_s, got = slots.append(s, verdict, live, 7)
        mine = struct.replace(s, **{n: getattr(s, n).clone() for n in ("tokens", "total", "length", "done", "unseen")})
        owned, _ = slots.append(mine, verdict, live, 7, put_)
    assert struct.bytes_equal(got, want)
    for after in (got_s, owned):  # the last column of `tokens` takes the writes of padding, where there are any
        trimmed = [replace(x, tokens=x.tokens[:, :-1]) for x in (after, want_s)]
        assert struct.bytes_equal(*trimmed)
    assert want.count.tolist() != verdict.count.tolist(), "some slot is to be cut short"


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 2**20), shape=st.sampled_from([(0, 0), (1, 4), (3, 3), (4, 2)]), sharp=st.sampled_from([1, 4])
)
def test_a_verdict_is_the_one_of_torch(seed, shape, sharp):
    """Bugs: another order of candidates; an absent node accepted; the mass of rejected ones lost from a log-prob."""
    k, depth = shape
    b = len(REQUESTS)
    vocab = 12  # few tokens: many are accepted, and candidates may cover the whole distribution
    tree = random_tree(seed, b, k, depth, vocab) if depth else trees.init_all(b, 0)
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(b, k * depth + 1, vocab, generator=g) * sharp
    controls = sampling.controls(REQUESTS)
    evidence = acceptance.weigh(logits, tree, controls, torch.arange(b) + seed % 50, full=True)
    want = acceptance.decide(evidence, tree, controls, depth)
    with on_device():
        got = acceptance.decide(evidence, tree, controls, depth)
    exact = controls.rule == sampling.EXACT
    for name in ("tokens", "count", "accepted", "path"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    for name in ("target_logp", "behaviour_logp"):
        mine, right = getattr(got, name), getattr(want, name)
        assert struct.bytes_equal(mine[exact], right[exact]), name
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=2e-6, msg=name)


def test_features_of_the_accepted_path_are_kept():
    """Bugs: a slot that sits out loses its features; the root left out."""
    g = torch.Generator().manual_seed(0)
    old, features = torch.randn(3, 5, 7, generator=g), torch.randn(3, 6, 7, generator=g)
    path = torch.tensor([[0, 3, -1], [2, -1, -1], [1, 4, 5 - 1]], dtype=torch.int32)
    live = torch.tensor([True, False, True])
    state = draft.State(pools=(), feature=old)
    want = draft.observe(state, features, path, live)
    with on_device():
        assert struct.bytes_equal(draft.observe(state, features, path, live), want)
        row = torch.tensor([[1, 0], [5, 5], [2, 3]], dtype=torch.int32)
        assert torch.equal(kernels.rows_at(features, row), features.gather(1, row.long()[..., None].expand(-1, -1, 7)))


def test_row_functions_joined_have_the_bits_of_the_parts():
    """Bugs: halves swapped; the table read at the row and not at its token; an angle of the wrong frequency."""
    from nanospec_fn.kernels import kv, rows

    g = torch.Generator().manual_seed(0)
    table, x = torch.randn(20, 24, generator=g), torch.randn(3, 24, generator=g)
    mine, theirs = torch.randn(24, generator=g), torch.randn(24, generator=g)
    token = torch.tensor([4, 0, 19], dtype=torch.int32)
    both = rows.embed_beside(table, token, mine, x, theirs, 1e-5)
    assert torch.equal(both, torch.cat((rows.rms_norm(table[token], mine, 1e-5), rows.rms_norm(x, theirs, 1e-5)), 1))
    position, freq = torch.tensor([0, 7, 900], dtype=torch.int32), model.inv_freq(model.Rope(), 24, table.device)
    cos, sin = rows.angles(position, freq)
    phase = position.double()[:, None] * freq.double()
    torch.testing.assert_close(cos.double(), phase.cos(), rtol=0, atol=1e-4)
    torch.testing.assert_close(sin.double(), phase.sin(), rtol=0, atol=1e-4)

    qkv = torch.randn(3, 8, 24, generator=g)  # 4 query heads, 2 of keys, 2 of values
    store = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    seen = torch.tensor([[5, -1, 6]], dtype=torch.int32)
    pages_of = torch.tensor([[2, 1]], dtype=torch.int32)
    want, got = torch.zeros(3, 2, 4, 2, 24), torch.zeros(3, 2, 4, 2, 24)
    turned = rows.rope(qkv[:, :6], cos, sin)
    kv.write(want, turned[:, 4:], qkv[:, 6:], store, seen, pages_of)
    q, arrived = kv.turn_and_write(qkv, cos, sin, got, store, seen, pages_of)
    assert torch.equal(q, turned[:, :4])
    assert torch.equal(got, want)
    assert not arrived.any()


@pytest.fixture
def target(monkeypatch) -> ns.Model:
    """Products in torch, each noted as one launch; tests/test_triton_interpret.py has their kernels."""

    def product(x, w, residual=None, dtype=None, tile=None, gated=False):
        with interpreted.one_launch("linear"):
            y = x @ w.t()
            if gated:
                gate, up = y.chunk(2, dim=-1)
                y = gate / (1 + torch.exp(-gate)) * up
            y = y if residual is None else residual + y
        return y if dtype is None else y.to(dtype)

    monkeypatch.setattr(gemm, "linear", product)
    return interpreted.canonical(scripted.target())


def run(target: ns.Model, tree: ns.Speculation | None, rounds: int = 2):
    """Donated rounds over a greedy and a warm request: their infos, and the launches of the last one."""
    drafter = draft.Draft(draft_model.LlamaDraft(target.cfg), target.params) if tree else None
    engine = ns.EngineConfig(max_slots=2, num_pages=4)
    program = ns.build(target, draft=drafter, engine=engine, speculation=tree)
    params = ns.Params(target=target.params, draft=drafter.params if drafter else ())
    state = program.init()
    for slot in range(2):
        request = ns.Sampling(max_tokens=30, temperature=float(slot), seed=slot)
        state = program.insert(state, slot, scripted.prompt(4, slot), request)
    state, _ = program.prefill(params, state, None, 4)
    step = ns.capture(program.speculate if drafter else program.decode, donate=("state",))
    infos = []
    for _ in range(rounds):
        with interpreted.Launches() as launches:
            state, info = step(params, state)
        infos.append(info)
    return infos, launches


TREES = (None, ns.Speculation(top_k=1, depth=2), ns.Speculation(top_k=2, depth=2))


@pytest.mark.parametrize("tree", TREES, ids=["plain", "chain", "tree"])
def test_whole_rounds_emit_what_the_cpus_engine_emits(target, tree):
    """Bug: a kernel that is right by itself and wrong in the round. And how many launches a round is."""
    want, _ = run(scripted.target(), tree)
    with on_device():
        got, launches = run(target, tree)
    for mine, right in zip(got, want, strict=True):
        assert torch.equal(mine.tokens, right.tokens)
        torch.testing.assert_close(mine.target_logp, right.target_logp, rtol=0, atol=1e-4)
    passes, layers = 1 + (tree.depth if tree else 0), target.cfg.num_layers
    assert launches.triton["_turn_and_store"] == layers * passes
    assert launches.triton["linear"] == 4 * layers * passes + passes  # a head for each pass
    assert launches.triton["_rms_norm"] == 2 * layers * passes + passes
    shared = launches.triton["_attend"] - layers * passes  # trees read what their rows share in a launch of its own
    assert shared == (layers * (passes - 1) if tree and tree.top_k > 1 else 0)
    outside = launches.triton.total() + launches.torch.total() - 8 * layers * passes - shared
    assert outside <= 13 + 10 * passes, (launches.torch, launches.triton)

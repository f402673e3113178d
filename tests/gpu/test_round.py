"""A round's bookkeeping in Triton on a GPU: the bytes of the torch functions that it stands in for, run on a CPU."""

import pytest
import torch
from torch.utils import _pytree as pytree

from nanospec_fn import acceptance, attention, draft, draft_model, pages, sampling, slots, struct, trees
from nanospec_fn.struct import put, put_, replace
from tests.rounds import REQUESTS, SIZE, candidates, random_tree, some_slots, some_verdict

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]


def cuda(x):
    return pytree.tree_map(lambda t: t.cuda(), x)


def same(got, want) -> bool:
    return struct.bytes_equal(pytree.tree_map(lambda t: t.cpu(), got), want)


@pytest.mark.parametrize("slots_held", [5, 200])
@pytest.mark.parametrize("free", [0, 3, 9])
def test_pages(free, slots_held):
    for seed in range(4):
        for ahead in (0, 5, 12):
            pool, s = some_slots(seed, free, slots_held)
            want = slots.reserve_round(pool, s, ahead, SIZE)
            assert same(slots.reserve_round(cuda(pool), cuda(s), ahead, SIZE, put_), want)
            assert same(slots.reserve_round(cuda(pool), cuda(s), ahead, SIZE, put), want)


def test_rows_and_levels():
    _, s = some_slots(3)
    live = torch.tensor([True, False, True, True, True])
    for shift in (0, 1):
        assert same(attention.newest(cuda(s), live.cuda(), 6, shift), attention.newest(s, live, 6, shift))
    for k, depth in ((1, 5), (3, 3), (4, 5)):
        tree = random_tree(k, 5, k, depth)
        for levels in (0, depth):
            want = attention.verify(s, tree, live, levels)
            assert same(attention.verify(cuda(s), cuda(tree), live.cuda(), levels), want)
        mine = other = trees.init_all(5, k * 3)
        other = cuda(other)
        for level in (1, 2, 3):
            token, logp = candidates(level, 5, k, level)
            mine, *want = draft_model.next_level(mine, level, token, logp, s.total, live)
            other, *got = draft_model.next_level(other, level, token.cuda(), logp.cuda(), s.total.cuda(), live.cuda())
            assert same(other, mine)
            assert same(got[0], want[0])
            assert torch.equal(got[1].cpu().long(), want[1].long())


def test_tokens():
    for seed in range(6):
        _, s = some_slots(seed)
        verdict, live = some_verdict(seed), torch.tensor([True, True, True, False, True])
        want_s, want = slots.append(s, verdict, live, 7)
        got_s, got = slots.append(cuda(s), cuda(verdict), live.cuda(), 7)
        assert same(got, want)
        assert same(replace(got_s, tokens=got_s.tokens[:, :-1]), replace(want_s, tokens=want_s.tokens[:, :-1]))


@pytest.mark.parametrize("shape", [(0, 0), (1, 5), (4, 5), (6, 3)])
def test_verdicts(shape):
    k, depth = shape
    b, vocab, controls = len(REQUESTS), 12, sampling.controls(REQUESTS)
    exact = controls.rule == sampling.EXACT
    for seed in range(6):
        tree = random_tree(seed, b, k, depth, vocab) if depth else trees.init_all(b, 0)
        logits = torch.randn(b, k * depth + 1, vocab, generator=torch.Generator().manual_seed(seed)) * (1 + seed)
        evidence = acceptance.weigh(logits, tree, controls, torch.arange(b) + seed, full=True)
        want = acceptance.decide(evidence, tree, controls, depth)
        got = acceptance.decide(cuda(evidence), cuda(tree), cuda(controls), depth)
        for name in ("tokens", "count", "accepted", "path"):
            assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        for name in ("target_logp", "behaviour_logp"):
            mine, right = getattr(got, name).cpu(), getattr(want, name)
            assert struct.bytes_equal(mine[exact], right[exact]), name
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=2e-6)


def test_features_and_commits():
    g = torch.Generator().manual_seed(0)
    old, features = torch.randn(3, 5, 7, generator=g), torch.randn(3, 6, 7, generator=g)
    path = torch.tensor([[0, 3, -1], [2, -1, -1], [1, 4, 4]], dtype=torch.int32)
    live = torch.tensor([True, False, True])
    want = draft.observe(draft.State(pools=(), feature=old), features, path, live)
    got = draft.observe(draft.State(pools=(), feature=old.cuda()), features.cuda(), path.cuda(), live.cuda())
    assert same(got, want)
    pools = torch.randn(3, 13, 2, 4, 2, 16, generator=g)
    table = torch.tensor([[3, 7, 1, 9], [2, 8, 5, 6], [4, 10, 11, 12]], dtype=torch.int32)
    length = torch.tensor([3, 7, 1], dtype=torch.int32)
    want = pages.commit(pools.unbind(0), table, length, path, live, 4, put)
    for given in (pools.cuda().unbind(0), tuple(x.cuda() for x in pools.unbind(0))):
        got = pages.commit(given, table.cuda(), length.cuda(), path.cuda(), live.cuda(), 4, put_)
        assert all(torch.equal(a.cpu()[1:], b[1:]) for a, b in zip(got, want, strict=True))

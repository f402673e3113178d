"""Promise G1's ground: a row's bits depend on that row alone. And C15, C16, C17: what the numbers say.

docs/numerics.md explains; the tests here are its evidence. "Beside" is any number of other rows, "place" any position
among them.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import acceptance, filters, model
from nanospec_fn.kernels import cpu
from nanospec_fn.struct import replace
from tests import tiny
from tests.scripted import CHAIN, CHANGES, TREE, Scripted, greedy, prompt, scripted, target

ROWS = (1, 2, 3, 4, 5, 8, 13, 31, 64)
WIDTHS = (1, 3, 64, 97, 576, 1536)
GEMMS = tuple(g for g in ("onednn", "blocked") if g != "onednn" or cpu._has_onednn(torch.float32))
BMM = cpu.pick_bmm()
BMMS = cpu.BMMS[cpu.BMMS.index(BMM) :]  # what another machine would fall back to works on this one too


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rows_stand_alone(function: Callable[..., Tensor], *rows: Tensor) -> None:
    """function(rows) [n, ...] gives each row's bits for any slice of the rows."""
    whole = function(*rows)
    for n in ROWS:
        for first in (0, 3, len(rows[0]) - n):
            part = function(*(x[first : first + n].contiguous() for x in rows))
            assert torch.equal(part, whole[first : first + n]), f"{n} rows from {first}"


@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("inner, outer", [(64, 96), (96, 200), (576, 1536), (1536, 576), (97, 33), (72, 128)])
def test_linear_rows_stand_alone(gemm, inner, outer):
    w = noise(outer, inner, seed=1)
    assert_rows_stand_alone(lambda x: cpu.linear(x, w, gemm), noise(80, inner))


def test_the_library_product_is_why():
    """F.linear at one row has other bits than among many on the CPUs that were seen; the loader's choice has not."""
    gemm = target().cfg.gemm
    assert gemm in GEMMS
    assert cpu.pick_gemm() == gemm
    w, x = noise(576, 1536, seed=1), noise(80, 1536)
    assert torch.equal(cpu.linear(x[:1], w, gemm), cpu.linear(x, w, gemm)[:1])
    torch.testing.assert_close(cpu.linear(x, w, gemm), torch.nn.functional.linear(x, w), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gemm", GEMMS)
def test_linear_gradients_are_the_librarys(gemm):
    with torch.enable_grad():
        x, w = noise(5, 12).double().requires_grad_(), noise(7, 12, seed=1).double().requires_grad_()
        if gemm == "onednn":
            x, w = x.detach().float().requires_grad_(), w.detach().float().requires_grad_()
        grads = []
        for kind in (gemm, "library"):
            (cpu.linear(x, w, kind) ** 2).sum().backward()
            grads.append((x.grad, w.grad))
            x.grad = w.grad = None
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("width", [*WIDTHS, 49152])
def test_row_functions_stand_alone(width):
    weight = noise(width, seed=2)
    x = 4 * noise(70 if width > 2000 else 80, width)
    assert_rows_stand_alone(lambda x: cpu.rms_norm(x, weight, 1e-5), x)
    assert_rows_stand_alone(cpu.log_softmax, x)
    if width % 2 == 0:
        assert_rows_stand_alone(cpu.silu_mul, x)


@pytest.mark.parametrize("nodes", [1, 3, 25])
def test_functions_of_a_trees_nodes_stand_alone(nodes):
    """Catches the scalar code that takes what is left over of a CPU's last vector, to other bits (see `cpu._whole`)."""
    x, y, terms = -noise(80, nodes).abs(), noise(80, nodes, seed=1), noise(80, nodes, nodes + 1, seed=2)
    assert_rows_stand_alone(cpu.exp, x)
    assert_rows_stand_alone(cpu.log_add_exp, x, y)
    assert_rows_stand_alone(cpu.log_one_minus_exp, x)
    assert_rows_stand_alone(cpu.log_sum_exp_few, terms)
    exact = torch.log(-torch.expm1(x.double()))
    torch.testing.assert_close(cpu.log_one_minus_exp(x).double(), exact, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(cpu.log_add_exp(x, y).double(), torch.logaddexp(x.double(), y.double()))


@pytest.mark.parametrize("temperature, top_k, top_p", [(0.0, 0, 1.0), (0.7, 0, 1.0), (1.3, 5, 1.0), (1.0, 40, 0.8)])
def test_sampled_distribution_rows_stand_alone(temperature, top_k, top_p):
    def logp(x: Tensor) -> Tensor:
        n = len(x)
        return filters.log_probs(
            x, torch.full((n,), temperature), torch.full((n,), top_k, dtype=torch.int32), torch.full((n,), top_p)
        )

    for width in (3, 97, 2500):
        assert_rows_stand_alone(logp, 3 * noise(70, width))


@pytest.mark.parametrize("head_dim", [2, 6, 16, 64])
def test_rope_rows_stand_alone(head_dim):
    position = torch.randint(0, 4000, (80,), generator=torch.Generator().manual_seed(3))

    def rotate(x: Tensor, position: Tensor) -> Tensor:
        return cpu.rope(x, *model.angles(model.Rope(theta=500000.0), head_dim, position))

    assert_rows_stand_alone(rotate, noise(80, 3, head_dim), position)


def attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, bmm: str, padding: int = 0) -> Tensor:
    """Rows q [R, D] at `position` [R] over keys k, v [T, D], padded by whole blocks that hold anything."""
    t = len(k)
    extra = -t % cpu.KV_BLOCK + padding * cpu.KV_BLOCK
    k = torch.cat((k, 1e4 * noise(extra, k.shape[1], seed=8)))[None]
    v = torch.cat((v, 1e4 * noise(extra, v.shape[1], seed=9)))[None]
    mask = torch.arange(k.shape[1]) <= position[:, None]
    return cpu.attention(q[None], [(k, v, cpu.hide(mask[None], 1, 1))], q.shape[1] ** -0.5, bmm)[0]


@pytest.mark.parametrize("bmm", BMMS)
@pytest.mark.parametrize("head_dim", [8, 12, 16, 64, 80, 128])
def test_attention_rows_stand_alone(head_dim, bmm):
    """Rows beside, their place, the keys of longer neighbours and padding change no bit of a row."""
    t = 200
    q, k, v = noise(80, head_dim), noise(t, head_dim, seed=1), noise(t, head_dim, seed=2)
    position = torch.randint(0, t, (80,), generator=torch.Generator().manual_seed(3))
    assert_rows_stand_alone(lambda q, p: attend(q, k, v, p, bmm), q, position)
    whole = attend(q, k, v, position, bmm)
    for padding in (1, 3):
        assert torch.equal(attend(q, k, v, position, bmm, padding), whole)
    for row in range(0, 80, 7):  # only the keys that the row sees
        n = int(position[row]) + 1
        assert torch.equal(attend(q[row : row + 1], k[:n], v[:n], position[row : row + 1], bmm)[0], whole[row])


@pytest.mark.parametrize("bmm", BMMS)
@pytest.mark.parametrize("base", [0, 1, 5, 63, 64, 65, 130])
@pytest.mark.parametrize("rows", [1, 2, 5, 12])
def test_attention_over_a_tail_is_attention_by_position(base, rows, bmm):
    """Tree rows: a shared prefix in whole blocks, then each row's own last block; bits as when all keys stand in order.

    Catches sums that begin where a part begins rather than at a multiple of KV_BLOCK.
    """
    d, depth = 16, 4
    q, prefix = noise(rows, d), (noise(base, d, seed=1), noise(base, d, seed=2))
    own = noise(rows, depth, d, seed=3), noise(rows, depth, d, seed=4)
    length = torch.randint(1, depth + 1, (rows,), generator=torch.Generator().manual_seed(5))
    start = base // cpu.KV_BLOCK * cpu.KV_BLOCK
    width = -(-(cpu.KV_BLOCK - 1 + depth) // cpu.KV_BLOCK) * cpu.KV_BLOCK

    expected, tails = [], []
    for i in range(rows):
        n = int(length[i])
        k, v = (torch.cat((p, o[i, :n])) for p, o in zip(prefix, own, strict=True))
        expected.append(attend(q[i : i + 1], k, v, torch.tensor([base + n - 1]), bmm)[0])
        tails.append([torch.nn.functional.pad(x[start:], (0, 0, 0, width - len(x[start:]))) for x in (k, v)])
    shared = [torch.nn.functional.pad(x[:start], (0, 0, 0, cpu.KV_BLOCK if not start else 0))[None] for x in prefix]
    tail_k, tail_v = (torch.stack(x) for x in zip(*tails, strict=True))
    column = torch.arange(width) + start
    parts = [
        (*shared, cpu.hide(torch.full((1, rows, shared[0].shape[1]), start > 0), 1, 1)),
        (tail_k, tail_v, cpu.hide((column < base + length[:, None])[None], 1, 1)),
    ]
    assert torch.equal(cpu.attention(q[None], parts, d**-0.5, bmm)[0], torch.stack(expected))


@pytest.mark.parametrize("bmm", BMMS)
def test_attention_against_float64(bmm):
    d, t, rows = 64, 500, 40
    q, k, v = noise(rows, d), noise(t, d, seed=1), noise(t, d, seed=2)
    position = torch.arange(rows) * 12
    scores = (q.double() @ k.double().t()) * d**-0.5
    scores = scores.masked_fill(torch.arange(t) > position[:, None], -torch.inf)
    exact = scores.softmax(-1) @ v.double()
    torch.testing.assert_close(attend(q, k, v, position, bmm).double(), exact, rtol=1e-5, atol=2e-6)


def test_a_row_that_sees_nothing_gives_zero():
    zeros, hidden = torch.zeros(1, cpu.KV_BLOCK, 8), torch.ones(1, 1, 2, cpu.KV_BLOCK, dtype=torch.bool)
    for bmm in BMMS:
        part = (noise(1, cpu.KV_BLOCK, 8), zeros, hidden)
        assert torch.equal(cpu.attention(noise(1, 2, 8), [part], 1.0, bmm), zeros[:, :2])


@contextmanager
def machine_of(broken: Callable[[int], bool]) -> Iterator[None]:
    """A CPU whose bmm has other bits for products of `broken` row counts, and for no others, whatever CPU this is."""

    def other(a: Tensor, b: Tensor) -> Tensor:
        product = cpu._multiply(a, b, "ordered")
        return product * (1 + 2**-22) if broken(a.shape[1]) else product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "bmm", other)
        yield


def test_a_machine_whose_attention_depends_on_the_rows_falls_back():
    """Bugs: a test at load that such a machine passes; a fallback that is named and not taken, by engine or forward."""
    with machine_of(lambda rows: rows > 16):
        assert [cpu._attends_invariantly(bmm, 128, torch.float32) for bmm in cpu.BMMS] == [False, True, True]
        assert cpu.pick_bmm() == "tiles"
        test_attention_rows_stand_alone(128, "tiles")
        model = tiny.model("llama-3.2-1b", **CHANGES)
        assert model.cfg.bmm == "tiles"
        start, sampling = prompt(70), ns.Sampling(max_tokens=6)
        (one,) = ns.generate(model, [start], sampling)
        tree = ns.generate(model, [start] * 3, sampling, draft=ns.load_draft("frozen", model), speculation=TREE)
        assert [(x.tokens, x.target_logp) for x in tree] == [(one.tokens, one.target_logp)] * 3
        assert ns.score(model, start, one.tokens, sampling) == one.target_logp
    with machine_of(lambda rows: rows in (8, 12)):
        assert cpu.pick_bmm() == "tiles"
    calls = iter(range(10**9))
    with machine_of(lambda _: next(calls) % 3 == 0):  # no product can be trusted
        assert cpu.pick_bmm() == "ordered"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_attends_invariantly", lambda *_: False)
        with pytest.raises(RuntimeError, match="no row-invariant attention on this CPU"):
            cpu.pick_bmm()


def test_the_choice_at_load_is_quick():
    """It is made at every load: in processor time, so that other work on the machine does not count."""
    took = []
    for _ in range(3):
        begun = time.process_time()
        cpu.pick_bmm()
        took.append(time.process_time() - begun)
    assert min(took) < 0.05


@pytest.mark.parametrize("width", [64, 576, 4096])
def test_row_functions_against_float64(width):
    x, weight = 3 * noise(9, width), 1 + 0.2 * noise(width, seed=1)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    torch.testing.assert_close(cpu.rms_norm(x, weight, 1e-5).double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(cpu.log_softmax(x).double(), wide.log_softmax(-1), rtol=1e-6, atol=2e-6)
    gate, up = wide.chunk(2, -1)
    torch.testing.assert_close(cpu.silu_mul(x).double(), gate * gate.sigmoid() * up, rtol=2e-6, atol=1e-6)


def test_rope_against_float64():
    """Within fp32's rounding of the angle: position * 2^-24 radians at most."""
    x, position = noise(6, 2, 64), torch.tensor([0, 1, 17, 500, 2000, 8000])
    freq = 500000.0 ** (-torch.arange(0, 64, 2).double() / 64)
    phase = position.double()[:, None] * freq
    a, b = x.double().chunk(2, -1)
    cos, sin = phase.cos()[:, None], phase.sin()[:, None]
    exact = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    got = cpu.rope(x, *model.angles(model.Rope(theta=500000.0), 64, position)).double()
    torch.testing.assert_close(got[:4], exact[:4], rtol=0, atol=3e-4)
    torch.testing.assert_close(got, exact, rtol=0, atol=4e-3)


@pytest.fixture
def recorded(monkeypatch) -> list[tuple[Tensor, Any, Tensor]]:
    """(logits [B, R, V], tree, position [B]) of every verdict that the engine asks for."""
    seen: list[tuple[Tensor, Any, Tensor]] = []
    weigh = acceptance.weigh

    def record(logits: Tensor, tree: Any, controls: Any, position: Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((logits.clone(), tree, position.clone()))
        return weigh(logits, tree, controls, position, *args, **kwargs)

    monkeypatch.setattr(acceptance, "weigh", record)
    return seen


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", [None, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("length", [3, 62])
def test_prefill_decode_and_verify_rows_are_forwards(shape, length, recorded):
    """C09, the target's half: each node's logits are the bits of a plain forward over prefix and path, in fp32.

    So are prefill's rows whatever the chunk. Catches a tree row that reads a sibling's KV, and every function that is
    not row-canonical. A prompt of 62 crosses from the first block of keys into the second.
    """
    starts = [prompt(length, 1), prompt(length + 3, 2), prompt(max(length - 2, 1), 3)]
    draft = scripted(starts, 16, lambda i, total: (total + i) % 5) if shape else None
    config = ns.EngineConfig(max_slots=4, num_pages=80, page_size=4, prefill_chunk=8)
    out = ns.generate(target(), starts, ns.Sampling(max_tokens=10), draft=draft, speculation=shape, engine=config)
    texts = [[*s, *o.tokens] for s, o in zip(starts, out, strict=True)]
    checked = 0
    for logits, tree, position in recorded:
        for b, total in enumerate(position.tolist()):
            matches = [t for t in texts if len(t) >= total > 0]
            nodes = [i for i, depth in enumerate(tree.depth[b].tolist()) if depth > 0]
            if tree.token.shape[1] and not nodes:
                continue  # a slot that takes no part
            known = [t for t in matches if is_row(t[:total], logits[b, 0])]
            if not known:
                assert not nodes, "a verified root differs from the plain forward over its prefix"
                continue
            checked += 1
            for i in nodes:
                path, at = [], i
                while at >= 0:
                    path, at = [int(tree.token[b, at]), *path], int(tree.parent[b, at])
                assert is_row([*known[0][:total], *path], logits[b, i + 1]), (total, path)
    rounds = sum(len(o.accepted) for o in out)
    assert checked >= rounds + len(starts)  # every round and every prefill's own token


def is_row(tokens: list[int], logits: Tensor) -> bool:
    return torch.equal(ns.forward(target().params, target().cfg, torch.tensor([tokens]))[0, -1], logits)


@pytest.mark.usefixtures("one_thread")
def test_forward_rows_do_not_depend_on_the_batch():
    tokens = torch.tensor([prompt(70, seed) for seed in range(5)])
    whole = ns.forward(target().params, target().cfg, tokens)
    for n in (1, 2, 63, 64, 65, 70):
        assert torch.equal(ns.forward(target().params, target().cfg, tokens[1:3, :n]), whole[1:3, :n])


@pytest.mark.usefixtures("one_thread")
def test_threads_change_no_bit_of_a_request():
    """Two threads may split the work of many rows otherwise than of one: generate's bits are score's all the same."""
    torch.set_num_threads(2)
    starts, sampled = [prompt(n, n) for n in (1, 30, 66)], ns.Sampling(max_tokens=5, temperature=1.0, top_p=0.9)
    for draft, shape in ((None, None), (ns.load_draft("frozen", target()), TREE)):
        for start, one in zip(
            starts, ns.generate(target(), starts, sampled, draft=draft, speculation=shape), strict=True
        ):
            assert ns.score(target(), start, one.tokens, sampled) == one.target_logp


def constant_logits(values: list[float]) -> ns.Model:
    """A model whose logits are `values` whatever came before: every layer adds zero to equal embeddings."""
    base = target()
    size = base.cfg.hidden_size
    layers = tuple(replace(w, out=w.out * 0, down=w.down * 0) for w in base.params.layers)
    head = torch.tensor(values)[:, None].expand(-1, size) / size
    params = replace(
        base.params, embed=torch.ones(len(values), size), layers=layers, norm=torch.ones(size), head=head.contiguous()
    )
    return dataclasses.replace(
        base, cfg=dataclasses.replace(base.cfg, vocab_size=len(values), tied=False), params=params
    )


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", [None, CHAIN, ns.Speculation(top_k=2, depth=4)], ids=["plain", "chain", "tree"])
def test_c15_log_probs_are_of_the_distribution_sampled_from(shape):
    """Logits (2, 1, 0) at T = 0.5: token 0 has -0.1429; raw logits give -0.4076, dividing by T gives -0.8152."""
    right = dict(enumerate((-0.1429, -2.1429, -4.1429)))
    seen: dict[str, set[int]] = {"prefill": set(), "accepted": set(), "corrected": set(), "bonus": set()}
    fake = constant_logits([2.0, 1.0, 0.0])
    for seed in range(12):
        sampling = ns.Sampling(max_tokens=14, temperature=0.5, seed=seed)
        (plain,) = ns.generate(fake, [[0, 1]], sampling)
        draft = None
        if shape:
            method = Scripted(
                sequences=((0, 1, *plain.tokens, *[0] * 8),), right=lambda i, t, seed=seed: (3 * t + seed) % 5, vocab=3
            )
            draft = ns.Draft(method)
        (out,) = ns.generate(fake, [[0, 1]], sampling, draft=draft, speculation=shape)
        assert (out.tokens, out.target_logp) == (plain.tokens, plain.target_logp)
        assert out.behaviour_logp == out.target_logp
        assert out.target_logp == pytest.approx([right[t] for t in out.tokens], abs=1e-4)
        # A trainer's recomputation: the same bits.
        assert ns.score(fake, [0, 1], out.tokens, sampling) == out.target_logp
        kinds = ["prefill"]
        for n in out.accepted:
            kinds += ["accepted"] * n + ["bonus" if n == 4 else "corrected"]
        for token, kind in zip(out.tokens, kinds, strict=False):
            seen[kind].add(token)
    assert all(seen[kind] for kind in (seen if shape else ("prefill", "corrected")))
    assert set.union(*seen.values()) >= {0, 1}
    (raw,) = ns.generate(fake, [[0, 1]], ns.Sampling(max_tokens=3))
    assert (raw.tokens, raw.target_logp) == ([0, 0, 0], pytest.approx([-0.4076] * 3, abs=1e-4))


@pytest.fixture(scope="module")
def tied_rows() -> tuple[ns.Model, int, int]:
    """A model whose output head has two equal rows, one of a token that it likes, and their ids in order."""
    base = target()
    text = [t for seed in range(8) for t in greedy(tuple(prompt(4 + seed, seed)), 24)]
    often = max(set(text), key=text.count)
    twin = next(t for t in range(128) if t not in text)
    head = base.params.embed.clone()
    head[twin] = head[often]
    cfg = dataclasses.replace(base.cfg, tied=False)
    return dataclasses.replace(base, cfg=cfg, params=replace(base.params, head=head)), *sorted((often, twin))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_c16_ties_break_the_same_way_everywhere(tied_rows, shape):
    """Exact ties between two tokens: plain, chain and tree, alone and eight at once, all take the lower id."""
    fake, low, high = tied_rows
    starts = [prompt(4 + seed, seed) for seed in range(8)]
    sampling = ns.Sampling(max_tokens=24)
    plain = [ns.generate(fake, [s], sampling)[0] for s in starts]
    tokens = [t for one in plain for t in one.tokens]
    assert low in tokens
    assert high not in tokens
    assert ns.generate(fake, starts, sampling) == plain
    draft = ns.load_draft("frozen", fake)
    for depth in range(1, 8):
        out = ns.generate(
            fake,
            starts,
            sampling,
            draft=draft,
            speculation=ns.Speculation(top_k=1 if shape == "chain" else 3, depth=depth),
        )
        for one, want in zip(out, plain, strict=True):
            assert (one.tokens, one.target_logp) == (want.tokens, want.target_logp)


@pytest.mark.usefixtures("one_thread")
def test_c16_greedy_text_of_a_real_model(smollm2):
    """What "the same bytes" covers on a CPU: fp32, sdpa, tokens and target log-probs. A real model and lookup."""
    text = "One two three one two three one two"
    sampling = ns.Sampling(max_tokens=10)
    (plain,) = ns.generate(smollm2, [text], sampling)
    (fast,) = ns.generate(
        smollm2, [text], sampling, draft=ns.load_draft("ngram", smollm2), speculation=ns.Speculation(top_k=2, depth=3)
    )
    assert (fast.tokens, fast.target_logp, fast.text) == (plain.tokens, plain.target_logp, plain.text)
    assert sum(fast.accepted) > 0


@pytest.mark.usefixtures("one_thread")
def test_c17_weights_updated_in_place_are_seen():
    """Three updates of a prepared engine's weights, each equal to a fresh engine; no parameter moves.

    Catches a buffer derived from a weight at load (fused, cast, tied) that an update leaves behind.
    """
    base = target()
    params = pytree.tree_map(lambda x: x.clone(), base.params)
    live = dataclasses.replace(base, params=params)
    engine = ns.prepare(live, ns.load_draft("ngram", live), ns.EngineConfig(max_slots=1, num_pages=20), CHAIN)
    before = [leaf.data_ptr() for leaf in pytree.tree_leaves(params)]
    start, sampling = prompt(3) * 4, ns.Sampling(max_tokens=8)
    texts = []
    for seed in range(4):
        other = tiny.model("llama-3.2-1b", seed=seed, **CHANGES)
        for leaf, new in zip(pytree.tree_leaves(params), pytree.tree_leaves(other.params), strict=True):
            leaf.copy_(new)
        (want,) = ns.generate(other, [start], sampling)
        (got,) = ns.generate(live, [start], sampling, engine=engine)
        assert (got.tokens, got.target_logp) == (want.tokens, want.target_logp)
        texts.append(tuple(want.tokens))
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(params)] == before
    assert len(set(texts)) == 4

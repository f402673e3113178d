"""The Triton kernels at sizes that no test's tensors fill: CUDA's bounds on a grid, and offsets past 2^31 elements.

Grids are recorded, not run. Offsets are run in Triton's interpreter over memory that is reserved and, but for the last
rows or pages, never touched. An offset that wraps is numpy's overflow warning, or a crash.
"""

import ast
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests import needs

if reason := needs.no_interpreter():
    pytest.skip(reason, allow_module_level=True)

from nanospec_fn import kernels, trees
from nanospec_fn.kernels import attend, gemm, head, kv, round, rows, tree, verdict, vocab
from tests.interpreted import last_programs, recorded

pytestmark = pytest.mark.usefixtures("one_thread")
MOST_X, MOST_YZ = 2**31 - 1, 65535  # programs of a CUDA grid
# A prefill of 512 slots x 512 tokens, decoding slots, pages, Gemma's vocabulary; widths of Llama-3.1-405B, every query
# head with keys of its own, as in Llama-2.
N, SLOTS, PAGES, VOCAB, WIDTH, INNER, HEADS, D = 2**18, 4096, 2**20, 2**18, 16384, 53248, 128, 128
NODES, DEPTH, CONTEXT, SIZE = 60, 8, 2**17, 16


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.int32)


def reals(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.float32)


def bools(*shape: int) -> Tensor:
    return meta(*shape, dtype=torch.bool)


def kernels_launched() -> set[str]:
    """The names of the Triton functions that no other one calls."""
    found, called = set(), set()
    for path in Path(kernels.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in node.decorator_list):
                found.add(node.name)
                calls = [n.func for n in ast.walk(node) if isinstance(n, ast.Call)]
                called |= {f.id for f in calls if isinstance(f, ast.Name)}
    return found - called


def launch_rows() -> None:
    wide, weight = meta(N, WIDTH), meta(WIDTH)
    rows.rms_norm(wide, weight, 1e-5)
    rows.embed_beside(meta(VOCAB, WIDTH), ints(N), weight, wide, weight, 1e-5)
    rows.silu_mul(meta(N, 2 * INNER))
    rows.rope(meta(N, HEADS, D), reals(N, D // 2), reals(N, D // 2))
    rows.angles(ints(N), reals(D // 2))
    rows.rows_at(meta(SLOTS, NODES + 1, 3 * WIDTH), ints(SLOTS, NODES))
    taps = meta(SLOTS, NODES + 1, 3 * WIDTH)
    rows.keep_path(taps, ints(SLOTS, DEPTH), bools(SLOTS), meta(SLOTS, DEPTH + 1, 3 * WIDTH))


def launch_products() -> None:
    for n in (1, 40, 64, 500, N):
        for dtype in (torch.bfloat16, torch.float32):
            x = meta(n, WIDTH, dtype=dtype)
            gemm.linear(x, meta(VOCAB, WIDTH, dtype=dtype))
            gemm.linear(x, meta(2 * INNER, WIDTH, dtype=dtype), gated=True)


def launch_vocabulary() -> None:
    vocab.log_sum_exp(reals(N, VOCAB))
    vocab.top(reals(N, VOCAB), 8)
    head.log_probs(reals(N, VOCAB), reals(N), ints(N), reals(N))
    request = head.Request(reals(SLOTS), ints(SLOTS), reals(SLOTS), ints(SLOTS), ints(SLOTS), ints(SLOTS))
    nodes = [ints(SLOTS, NODES) for _ in range(3)]
    head.weigh(reals(SLOTS, NODES + 1, VOCAB), request, (1, 2), True, *nodes)


def launch_bookkeeping() -> None:
    slot, table = [ints(SLOTS) for _ in range(5)], ints(SLOTS, CONTEXT // SIZE)
    live, tokens = bools(SLOTS), ints(SLOTS, CONTEXT)
    nodes = [ints(SLOTS, NODES) for _ in range(3)] + [reals(SLOTS, NODES) for _ in range(2)]
    round.reserve(slot, table, slot[0], [ints(PAGES + 1), ints(PAGES), ints()], NODES, SIZE, 8)
    round.newest(tokens, *slot[:2], live, DEPTH + 1, 1)
    round.verify(tokens, slot[0], live, nodes[:3], DEPTH)
    block = [ints(SLOTS, DEPTH + 1), reals(SLOTS, DEPTH + 1), reals(SLOTS, DEPTH + 1), slot[0]]
    round.emit(block, live, [slot[0], ints(SLOTS, 4), slot[0]], [tokens, *slot[:4]], DEPTH + 1, (1, 2))
    tree.expand(nodes, 2, ints(SLOTS, 8, 8), reals(SLOTS, 8, 8), slot[0], live)
    tree.paths(*nodes[1:3], 0, NODES, DEPTH)
    of_rows = [ints(SLOTS, NODES + 1), reals(SLOTS, NODES + 1)]
    evidence = [reals(SLOTS, NODES), ints(SLOTS, NODES), reals(SLOTS, NODES), *of_rows, *of_rows, of_rows[1]]
    controls = [slot[0], reals(SLOTS), slot[0], reals(SLOTS)]
    verdict.decide(evidence, nodes[:4], controls, DEPTH, (0, 1))


def launch_attention() -> None:
    pool = meta(PAGES + 1, 2, SIZE, HEADS, D)
    for b, r in ((1, 1), (1, N), (512, 512), (SLOTS, 1)):
        q, at, table = meta(b * r, HEADS, D), ints(b, r), ints(b, CONTEXT // SIZE)
        for split in (None, True, False):
            attend.attend(pool, q, at, table, split=split)
        kv.write(pool, q, q, at, at, table)
        kv.turn_and_write(meta(b * r, 3 * HEADS, D), reals(b * r, D // 2), reals(b * r, D // 2), pool, at, at, table)
    q, at, table = meta(SLOTS * (NODES + 1), HEADS, D), ints(SLOTS, NODES + 1), ints(SLOTS, CONTEXT // SIZE)
    attend.attend(pool, q, at, table, ints(SLOTS), ints(SLOTS, NODES + 1, DEPTH + 1))
    kv.commit([pool], table, ints(SLOTS), ints(SLOTS, DEPTH), bools(SLOTS))


def test_grids_stay_within_cudas_bounds():
    """Bugs: rows, or slots times heads, along y, where CUDA takes 65535 at most; a kernel that is not looked at."""
    with recorded() as seen:
        launch_rows()
        launch_products()
        launch_vocabulary()
        launch_bookkeeping()
        launch_attention()
    assert {name for name, _ in seen} == kernels_launched()
    for name, (x, *others) in seen:
        assert 0 < x <= MOST_X, name
        assert all(0 < y <= MOST_YZ for y in others), (name, others)


LAST = 3  # rows or slots at the end that are looked at


def reserved(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """A tensor of which only the last rows are written, so that the others cost no memory."""
    out = torch.empty(shape, dtype=dtype)
    out[-LAST:] = torch.randn(LAST, *shape[1:], generator=torch.Generator().manual_seed(seed)).to(dtype)
    return out


def assert_last_rows(function, *tensors: Tensor) -> None:
    """function(tensors) at its last rows is function(last rows), whose offsets are small."""
    with last_programs(LAST):
        got = function(*tensors)
    want = function(*(x[-LAST:].contiguous() for x in tensors))
    for mine, right in zip(*((x if isinstance(x, tuple | list) else (x,)) for x in (got, want)), strict=True):
        assert torch.equal(mine[-LAST:], right)


def test_rows_past_two_to_the_31():
    """Bug: row * width in 32 bits. 262200 rows of a prefill, 8192 wide."""
    n, e = 2**18 + 56, 8192
    x, weight = reserved(n, e), reserved(LAST, e, seed=1)[0].contiguous()
    assert x[-LAST:].storage_offset() > 2**31
    assert_last_rows(lambda x: rows.rms_norm(x, weight, 1e-5), x)
    assert_last_rows(rows.silu_mul, x)
    token = torch.arange(n, dtype=torch.int32) % LAST  # of a table whose rows are far too
    token[-LAST:] = torch.arange(n - LAST, n)
    table = torch.zeros_like(token)
    table[-LAST:] = torch.arange(LAST)
    with last_programs(LAST):
        got = rows.embed_beside(x, token, weight, x, weight, 1e-5)
    near = x[-LAST:].contiguous()
    assert torch.equal(got[-LAST:], rows.embed_beside(near, table[-LAST:], weight, near, weight, 1e-5))


def test_heads_past_two_to_the_31():
    n, heads, d = 2**18 + 56, 64, 128
    angle = torch.rand(LAST, d // 2)
    cos, sin = (torch.cat((torch.empty(n - LAST, d // 2), x)) for x in (angle.cos(), angle.sin()))
    assert_last_rows(rows.rope, reserved(n, heads, d), cos, sin)
    # Heads that stand further apart than rows do.
    whole = torch.empty(3, 2**30 // d + LAST, d, dtype=torch.float16)
    beside = whole[:, -LAST:]
    beside.copy_(torch.randn(3, LAST, d))
    turned = rows.rope(beside.transpose(0, 1), cos[-LAST:], sin[-LAST:])
    assert torch.equal(turned, rows.rope(beside.transpose(0, 1).contiguous(), cos[-LAST:], sin[-LAST:]))


def test_features_past_two_to_the_31():
    b, r, f = 4200, 60, 8704
    x, row = reserved(b, r, f), torch.zeros(b, 2, dtype=torch.int32)
    row[-LAST:] = torch.tensor([[59, 0], [3, 58], [1, 59]])
    with last_programs(2 * LAST):
        got = rows.rows_at(x, row)
    assert torch.equal(got[-LAST:], rows.rows_at(x[-LAST:].contiguous(), row[-LAST:]))
    path, live = torch.full((b, 1), 58, dtype=torch.int32), torch.ones(b, dtype=torch.bool)
    live[-1] = False
    with last_programs(2 * LAST):
        got = rows.keep_path(x, path, live, x[:, :2])
    near = x[-LAST:].contiguous()
    assert torch.equal(got[-LAST:], rows.keep_path(near, path[-LAST:], live[-LAST:], near[:, :2]))


TILES = (
    gemm.Tile(16, 32, 32, 1, 1),
    gemm.Tile(128, 32, 32, 1, 1),
    gemm.Tile(128, 32, 32, 1, 1, "tma"),
)


@pytest.mark.parametrize("tile", TILES, ids=["few rows", "many rows", "copied"])
def test_products_past_two_to_the_31(tile):
    """Bug: row * N of a prefill's logits, row * K of its inputs or the weights' row * K in 32 bits."""
    whole = 512  # of which the last program's tile is the last rows and columns
    for n, outer, inner in ((2**18 + whole, 128, 8192), (128, 2**18 + whole, 8192), (16768 + whole, 128256, 32)):
        x = torch.empty(n, inner, dtype=torch.float16)
        w = torch.empty(outer, inner, dtype=torch.float16)
        g = torch.Generator().manual_seed(0)
        x[-128:] = torch.randint(-2, 3, (128, inner), generator=g)
        w[-32:] = torch.randint(-2, 3, (32, inner), generator=g)
        assert max(n * outer, n * inner, outer * inner) > 2**31
        with last_programs(1):
            got = gemm.linear(x, w, tile=tile)[-tile.rows :, -32:]
        assert torch.equal(got, (x[-tile.rows :].double() @ w[-32:].double().t()).half())


def test_logits_past_two_to_the_31():
    """Bug: row * V in 32 bits: as of 16800 rows of a vocabulary of 128256, a long prompt that is scored."""
    logits = reserved(174600, 12304, dtype=torch.float32)
    assert_last_rows(vocab.log_sum_exp, logits)
    assert_last_rows(lambda x: vocab.top(x, 2), logits)
    n = len(logits)
    warm, counts, tops = torch.full((n,), 0.7), torch.tensor([0, 3, 0], dtype=torch.int32), torch.ones(n)
    assert_last_rows(head.log_probs, logits, warm, counts.repeat(n // LAST), tops)


# A kernel with a program a slot reaches slots of which no row was run: it computes with what memory held there.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_verdicts_past_two_to_the_31():
    b, r, v = 58200, 3, 12304
    logits = reserved(b, r, v, dtype=torch.float32)
    g = torch.Generator().manual_seed(1)
    token = torch.randint(0, v, (b, 2), generator=g).to(torch.int32)
    parent, depth = (torch.tensor([x], dtype=torch.int32).expand(b, 2) for x in ((-1, 0), (1, 2)))
    slot = torch.arange(b)
    request = head.Request(slot % 2 * 0.8, slot * 0, torch.ones(b), slot, slot, slot * 0)
    with last_programs(r * LAST):
        got = head.weigh(logits, request, (1, 2), True, token, parent, depth)
    of_last = head.Request(*(x[-LAST:] for x in request))
    want = head.weigh(logits[-LAST:].contiguous(), of_last, (1, 2), True, *(x[-LAST:] for x in (token, parent, depth)))
    for mine, right in zip(got, want, strict=True):
        assert torch.equal(mine[-LAST:], right)


def far_and_near(table: Tensor) -> list[tuple[Tensor, Tensor]]:
    """A pool of more than 2^31 elements whose table names its last pages, each as large as an 8B's; and a small one."""
    pools = []
    for total in (65600, int(table.max()) + 1):
        pool = torch.empty(total, 2, 64, 2, 128, dtype=torch.float16)
        pool[-int(table.max()) - 1 :] = 0
        pools.append((pool, table + total - int(table.max()) - 1))
    return pools


def test_pages_past_two_to_the_31():
    """Bug: page * stride in 32 bits: of an 8B model a pool of 65536 pages is past it, 8 GiB of the 140 there are."""
    b, r = 2, 4
    table = torch.randperm(4, generator=torch.Generator().manual_seed(0)).to(torch.int32).view(2, 2)
    g = torch.Generator().manual_seed(1)
    qkv = torch.randn(b * r, 4 + 2 * 2, 128, generator=g).half()
    at = torch.tensor([[62, 63, 64, 65], [0, 1, 2, 3]], dtype=torch.int32)
    cos, sin = torch.rand(2, b * r, 64, generator=g)
    nodes, live = torch.tensor([[1, 2], [2, -1]], dtype=torch.int32), torch.ones(b, dtype=torch.bool)
    found = []
    for pool, pages in far_and_near(table):
        mine = pool[-4:]
        q, _ = kv.turn_and_write(qkv, cos, sin, pool, at, at, pages)
        first = mine.clone()
        kv.write(pool, qkv[:, :2], qkv[:, 2:4], at, at, pages)
        second = mine.clone()
        out = [attend.attend(pool, q, at, pages, split=split) for split in (False, True)]
        base = at[:, 0].contiguous()
        path = at[:, None].expand(b, r, r)  # a chain, as a tree
        out += [attend.attend(pool, q, at, pages, base, path, split=split) for split in (False, True)]
        kv.commit([pool], pages, at[:, 0].contiguous() - 1, nodes, live)
        found.append([first, second, *out, mine])
    for far, near in zip(*found, strict=True):
        assert torch.equal(far, near)
    assert not torch.equal(found[0][0], found[0][1])
    assert not torch.equal(found[0][1], found[0][-1])


def test_page_tables_and_token_buffers_past_two_to_the_31():
    """Bug: slot * width in 32 bits. 4200 slots with a context of 2^19 tokens, page size 1."""
    b, width = 4200, 2**19
    table = torch.empty(b, width, dtype=torch.int32)
    table[-LAST:, :8] = torch.arange(LAST * 8, dtype=torch.int32).view(LAST, 8) % 20 + 1
    near = table[-LAST:, :8].contiguous()
    position = torch.full((b, 1), -1, dtype=torch.int32)
    position[-LAST:] = torch.tensor([[7], [3], [5]])
    q, (k, v) = reserved(b, 2, 16, seed=1), torch.randn(2, 21, 1, 16).half()
    pool = torch.stack((k, v), 1)[:, :, None].contiguous()
    with last_programs(LAST):
        kv.write(pool, q[:, :1], q[:, 1:], position, position, table)
        got = attend.attend(pool, q, position, table, split=False)
    assert torch.equal(got[-LAST:], attend.attend(pool, q[-LAST:].contiguous(), position[-LAST:], near, split=False))
    assert torch.equal(pool[near[0, 7].long(), 0, 0, 0], q[-LAST, 0])
    before, live, path = pool.clone(), torch.ones(b, dtype=torch.bool), torch.ones(b, 1, dtype=torch.int32)
    with last_programs(LAST):
        kv.commit([pool], table, torch.zeros(b, dtype=torch.int32), path, live)
    assert torch.equal(pool[near[:, 1].long()], before[near[:, 2].long()])

    tokens, count = table, torch.full((b,), 6, dtype=torch.int32)
    with last_programs(LAST):
        token, *_ = round.newest(tokens, count, count - 3, live, 3, 0)
        root = round.verify(tokens, count, live, [x.token for x in [trees.init_all(b, 0)]] * 3, 0)[0]
    assert torch.equal(token[-LAST:], near[:, 3:6])
    assert torch.equal(root[-LAST:, 0], near[:, 6])

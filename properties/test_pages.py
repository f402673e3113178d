"""The page allocator against a plain Python model, by random sequences of alloc, share, free and whole evictions."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanospec_fn import pages, struct
from nanospec_fn.capture import donate
from nanospec_fn.pages import NONE, SINK

SLOTS = 3
WIDTH = 4


class Model:
    """What the pool has to be: who holds which pages. Slots hold lists of page ids; a page may be held by several."""

    def __init__(self, num_pages: int):
        self.total = num_pages
        self.held: list[list[int]] = [[] for _ in range(SLOTS)]

    @property
    def refs(self) -> Counter[int]:
        return Counter(page for row in self.held for page in row)

    @property
    def free(self) -> int:
        return self.total - len(self.refs)

    def table(self) -> torch.Tensor:
        width = max(1, *map(len, self.held))
        return torch.tensor([row + [SINK] * (width - len(row)) for row in self.held], dtype=torch.int32)

    def agrees(self, pool: pages.Pages) -> None:
        refs = self.refs
        assert pages.check(pool, self.table()) == ""
        assert int(pool.num_free) == self.free
        assert pool.refs.tolist() == [refs[page] for page in range(self.total + 1)]
        stack = pool.stack[: self.free].tolist()
        assert sorted([*stack, *refs]) == list(range(1, self.total + 1)), "a page is lost, or both free and owned"


needs = st.lists(st.integers(0, WIDTH), min_size=SLOTS, max_size=SLOTS)
slot = st.integers(0, SLOTS - 1)
operations = st.one_of(
    st.tuples(st.just("alloc"), needs),
    st.tuples(st.just("share"), st.tuples(slot, slot, st.integers(0, WIDTH))),
    st.tuples(st.just("evict"), slot),
)


def alloc(pool: pages.Pages, model: Model, need: list[int]) -> pages.Pages:
    left, before = model.free, model.refs
    pool, page_id, ok = pages.alloc(pool, torch.tensor(need, dtype=torch.int32), WIDTH)
    out: list[int] = []
    wanted = 0
    for row, n in enumerate(need):
        wanted += n
        granted = [page for page in page_id[row].tolist() if page != NONE]
        assert bool(ok[row]) == (n == 0 or wanted <= left), "all or nothing, in slot order"
        assert len(granted) == (n if ok[row] else 0)
        assert page_id[row, len(granted) :].tolist() == [NONE] * (WIDTH - len(granted))
        out += granted
        model.held[row] = model.held[row] + granted
    assert len(set(out)) == len(out), "a page was handed out twice"
    assert SINK not in out, "the sink was handed out"
    assert not set(out) & set(before), "a page in use was handed out"
    return pool


def run(num_pages: int, steps: list[tuple[str, Any]]) -> tuple[pages.Pages, Model]:
    pool, model = pages.init(num_pages), Model(num_pages)
    model.agrees(pool)
    for name, what in steps:
        if name == "alloc":
            pool = alloc(pool, model, what)
        elif name == "share":
            giver, taker, n = what
            if giver == taker or model.held[taker]:
                continue
            ids = model.held[giver][:n]
            # Padded as a page-table row is; padding is skipped.
            pool = pages.share(pool, torch.tensor([*ids, SINK, NONE], dtype=torch.int32))
            model.held[taker] = ids
        else:
            ids, model.held[what] = model.held[what], []
            pool = pages.free(pool, torch.tensor([*ids, SINK, SINK, NONE], dtype=torch.int32))
        model.agrees(pool)
    return pool, model


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 12), st.lists(operations, max_size=25))
def test_any_sequence_agrees_with_the_model(num_pages, steps):
    """free + owned == P, references right, no page handed out twice; catches a free that forgets another owner."""
    pool, model = run(num_pages, steps)
    for row in range(SLOTS):
        ids, model.held[row] = model.held[row], []
        pool = pages.free(pool, torch.tensor([*ids, SINK], dtype=torch.int32))
    model.agrees(pool)
    assert int(pool.num_free) == num_pages


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 12), st.lists(operations, max_size=10), needs, slot)
def test_donated_equals_pure(num_pages, steps, need, gone):
    """Catches a result whose buffers alias the given ones: `num_free` or a reference would be stale."""
    pool, model = run(num_pages, steps)
    rows = torch.tensor([*model.held[gone], SINK], dtype=torch.int32)

    def step(state: pages.Pages, put=struct.put) -> pages.Pages:
        state, page_id, _ = pages.alloc(state, torch.tensor(need, dtype=torch.int32), WIDTH)
        state = pages.share(state, page_id.flatten())
        return pages.free(state, rows)

    given_away = struct.replace(pool, **{name: getattr(pool, name).clone() for name in ("refs", "stack", "num_free")})
    pure = step(pool)
    assert struct.bytes_equal(donate(step)(given_away), pure)
    model.agrees(pool)  # the pure step left its argument alone


def test_refusal_leaves_the_pool_alone():
    """Three free pages, wants of 2, 2 and 1: the second is refused, and the last with it."""
    pool = pages.init(3)
    after, page_id, ok = pages.alloc(pool, torch.tensor([2, 2, 0, 1], dtype=torch.int32), 2)
    assert ok.tolist() == [True, False, True, False]
    assert page_id.tolist() == [[1, 2], [NONE, NONE], [NONE, NONE], [NONE, NONE]]
    assert int(after.num_free) == 1


def test_check_names_what_is_wrong():
    """The checker of every other property can itself fail: each broken invariant gives its sentence."""
    pool, _, _ = pages.alloc(pages.init(3), torch.tensor([1], dtype=torch.int32), 1)
    table = torch.tensor([[1, SINK]], dtype=torch.int32)
    assert pages.check(pool, table) == ""
    assert "references differ" in pages.check(pool, torch.zeros_like(table))
    assert "references differ" in pages.check(pool, torch.tensor([[1, 1]], dtype=torch.int32))
    twice = struct.replace(pool, stack=torch.tensor([3, 3, 1, 0], dtype=torch.int32))
    assert "twice" in pages.check(twice, table)
    lost = struct.replace(pool, num_free=pool.num_free - 1)
    assert "1 free + 1 owned pages are not the pool's 3" in pages.check(lost, table)


def test_dead_and_outside_positions_go_to_the_sink():
    """C07: -1 is not an index; in Python it would be the last page."""
    table = torch.tensor([[5, 7, SINK]], dtype=torch.int32)
    page, offset = pages.locate(table, torch.tensor([[-1, 0, 3, 4, 8, 12, 999]]), 4)
    assert page.tolist() == [[SINK, 5, 5, 7, SINK, SINK, SINK]]
    assert offset[0, 1:4].tolist() == [0, 3, 0]


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(
    st.sampled_from((1, 2, 4)), st.lists(st.tuples(st.integers(-1, 11), st.integers(-1, 11)), min_size=1, max_size=5)
)
def test_move_reads_everything_before_it_writes(page_size, pairs):
    """Moving a path left by one is a move of overlapping rows: a loop that copies in place repeats the first row."""
    pairs = [pair for i, pair in enumerate(pairs) if pair[1] not in [p[1] for p in pairs[:i]]]
    num_pages = 12 // page_size
    table = torch.arange(num_pages, 0, -1, dtype=torch.int32)[None]
    pool = torch.arange(2 * (num_pages + 1) * page_size, dtype=torch.float32).view(num_pages + 1, 2, page_size, 1, 1)
    source, dest = (torch.tensor([x], dtype=torch.int32) for x in zip(*pairs, strict=True))
    moved = pages.move(pool, table, source, dest, page_size, struct.put)

    def at(x: torch.Tensor, position: int) -> list[float]:
        return x[num_pages - position // page_size, :, position % page_size].flatten().tolist()

    new = {d: at(pool, s) for s, d in pairs if s >= 0 and d >= 0}
    for position in range(12):
        assert at(moved, position) == new.get(position, at(pool, position))

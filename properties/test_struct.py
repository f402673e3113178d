"""Random nested states: flattening, donation and byte comparison hold for all of them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from nanospec_fn import struct
from nanospec_fn.capture import donate
from nanospec_fn.struct import DonatedError, bytes_equal, replace, state, static

SETTINGS = settings(max_examples=80, deadline=None, derandomize=True, database=None)


@state
class Leaf:
    """Tensors and a static."""

    x: torch.Tensor
    y: torch.Tensor
    size: int = static(default=0)


@state
class Node:
    """A state of states."""

    first: Leaf
    rest: tuple[Leaf, ...]


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Of any dtype that a state holds; NaN, infinities and both zeros among the floats."""
    shape = draw(st.lists(st.integers(0, 3), max_size=2))
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool)))
    values = (0, 1, 2, -3) if not dtype.is_floating_point else (0.0, -0.0, 1.5, float("nan"), float("inf"))
    n = torch.Size(shape).numel()
    return torch.tensor(draw(st.lists(st.sampled_from(values), min_size=n, max_size=n)), dtype=dtype).view(shape)


leaves = st.builds(Leaf, x=tensors(), y=tensors(), size=st.integers(0, 2))
nodes = st.builds(Node, first=leaves, rest=st.lists(leaves, max_size=2).map(tuple))


def copy(node: Node) -> Node:
    return pytree.tree_map(torch.clone, node)


@SETTINGS
@given(nodes)
def test_flatten_and_back_is_the_same_bytes_and_statics(node):
    """Catches statics reset to their defaults by unflattening, as torch's register_dataclass does."""
    values, spec = pytree.tree_flatten(node)
    assert bytes_equal(pytree.tree_unflatten(values, spec), node)
    assert pytree.tree_unflatten(values, spec).first.size == node.first.size
    assert len(struct.leaf_names(node)) == len(values) == 2 + 2 * len(node.rest)
    assert struct.leaf_names(node)[:2] == [".first.x", ".first.y"]


@SETTINGS
@given(nodes, st.data())
def test_bytes_equal_sees_every_bit(node, data):
    """NaN equals itself, 0 differs from -0: as bytes, not as numbers. One changed bit or static anywhere differs."""
    assert bytes_equal(node, copy(node))
    values, spec = pytree.tree_flatten(copy(node))
    full = [i for i, value in enumerate(values) if value.numel()]
    if full:
        i = data.draw(st.sampled_from(full))
        raw = values[i].view(-1).view(torch.uint8)
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1
        assert not bytes_equal(node, pytree.tree_unflatten(values, spec))
    other = replace(node, first=replace(node.first, size=node.first.size + 1))
    assert not bytes_equal(node, other)
    assert not bytes_equal(node, replace(node, first=replace(node.first, x=node.first.x[None])))
    wider = torch.float64 if node.first.x.dtype != torch.float64 else torch.float32
    assert not bytes_equal(node, replace(node, first=replace(node.first, x=node.first.x.to(wider))))


@SETTINGS
@given(nodes, st.permutations(range(6)), st.integers(0, 3))
def test_donated_equals_pure_however_the_leaves_move(node, order, shift):
    """A step may hand leaves on in other places: catches a copy back that overwrites what it has yet to read."""
    same = replace(node, rest=(node.first, node.first))  # six leaves, of two kinds

    def step(state: Node, put=struct.put) -> Node:
        xs = [state.first.x, *(leaf.x for leaf in state.rest)]
        moved = [xs[order[i] % 3] for i in range(3)]
        ys = [leaf.y.roll(shift) for leaf in (state.first, *state.rest)]
        new = [replace(leaf, x=x, y=y) for leaf, x, y in zip((state.first, *state.rest), moved, ys, strict=True)]
        return Node(first=new[0], rest=tuple(new[1:]))

    distinct = copy(same)
    values, spec = pytree.tree_flatten(distinct)
    values = [torch.full_like(v, i % 2 if v.dtype == torch.bool else i + 1) for i, v in enumerate(values)]
    distinct = pytree.tree_unflatten(values, spec)
    pure = copy(step(distinct))
    pointers = [v.data_ptr() for v in values]
    after = donate(step)(distinct)
    assert bytes_equal(after, pure)
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(after)] == pointers


@SETTINGS
@given(nodes)
def test_a_consumed_state_raises_wherever_it_is_read(node):
    """Catches a nested state or a tuple's member that stays readable over buffers that are no longer its own."""
    parts = [node, node.first, *node.rest]
    struct.consume(node)
    for part in parts:
        for field in dataclasses.fields(part):
            with pytest.raises(DonatedError, match=f"{type(part).__name__}.{field.name}"):
                getattr(part, field.name)
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        parts[0].other  # noqa: B018


@SETTINGS
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True))
def test_put_is_pure_and_put_in_place_agrees(rows):
    """Catches a `put` that writes into its argument, which would make every pure step a donated one."""
    dest = torch.arange(15.0).view(5, 3)
    before, index = dest.clone(), (torch.tensor(rows),)
    value = -torch.arange(3.0 * len(rows)).view(-1, 3).double()  # cast to dest's dtype
    new = struct.put(dest, index, value)
    assert torch.equal(dest, before)
    expected = before.clone()
    for row, line in zip(rows, value, strict=True):
        expected[row] = line.float()
    assert bytes_equal(new, expected)
    assert struct.put_(dest, index, value) is dest
    assert bytes_equal(dest, expected)


def test_states_are_frozen():
    leaf = Leaf(x=torch.zeros(1), y=torch.zeros(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        leaf.x = torch.ones(1)

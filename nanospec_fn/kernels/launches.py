"""How the kernels of products and attention are launched on a GPU, by size: of no consequence for any bit.

Host policy without Triton: tests/test_launches.py holds it beside what an H200 measured.
"""

import functools
from typing import NamedTuple

import torch

SMS = 132  # of an H100 and an H200
L2_BYTES, MULTIPLY_ADDS = 64, 2048  # per SM and clock, at most; of 16-bit operands
ENDS = 1280  # clocks of a tile's beginning and end


class Tile(NamedTuple):
    """A launch's shape: rows, columns and depth of a program's tile, and how it runs."""

    rows: int
    cols: int
    depth: int
    warps: int
    stages: int
    copies: str = "threads"  # who brings operands in: "threads", or "tma", the copy engine, for more than 64 rows
    # With the copy engine only:
    programs: int = 0  # that take tiles one after another; 0: one for each tile
    more: int = 0  # rows of a second dot on the same weights, so that 192 = 128 + 64 rows are one tile
    overlap: bool = False  # the next tile's operands come in while this one is stored


# Tiles for more than 64 rows, one program an SM that stays.
COPIED = (
    Tile(64, 64, 64, 4, 12, "tma", SMS),
    Tile(64, 128, 64, 4, 8, "tma", SMS),
    Tile(128, 128, 64, 4, 6, "tma", SMS, overlap=True),
    Tile(128, 256, 64, 8, 4, "tma", SMS, overlap=True),
    Tile(128, 64, 64, 4, 6, "tma", SMS, more=64),
    Tile(128, 128, 64, 4, 5, "tma", SMS, more=64),
    Tile(128, 256, 64, 8, 3, "tma", SMS, more=64),
)


def clocks(tile: Tile, n: int, outer: int, inner: int) -> float:
    """Clocks that the busiest SM needs at least for x [n, inner] @ w [outer, inner]^T of 16-bit numbers.

    Source: beside an H200's times for 96 to 1024 rows, tests/test_launches.py.
    """
    rows, waves = tile.rows + tile.more, _ceil(outer, tile.cols)
    waves = _ceil(waves * _ceil(n, rows), SMS)
    return waves * (inner * max((rows + tile.cols) * 2 / L2_BYTES, rows * tile.cols / MULTIPLY_ADDS) + ENDS)


@functools.lru_cache(maxsize=4096)  # an eager pass asks for every product
def pick_tile(n: int, outer: int, inner: int, dtype: torch.dtype) -> Tile:
    """The launch for x [n, inner] @ w [outer, inner]^T of a dtype; of no consequence for the bits.

    Source: up to 64 rows swept on an H200 over the shapes of Llama-3.1-8B (docs/performance.md); beyond, `clocks`.
    """
    if dtype == torch.float32:  # twice the bytes, and no tensor core: small tiles
        return Tile(16, 32, 32, 4, 2) if n <= 64 else Tile(64, 64, 32, 4, 2)
    if n > 64:
        # Two parts are for rounds, whose last tile of rows would be half empty; beyond them they were not quicker.
        suited = [tile for tile in COPIED if n <= 1024 or not tile.more]
        # Of equals the smaller tile: its programs are as many or more, and each multiplies less that is thrown away.
        return min(suited, key=lambda tile: (clocks(tile, n, outer, inner), (tile.rows + tile.more) * tile.cols))
    narrow, many = outer <= 4096, outer >= 16384
    if n > 32 and many:
        return Tile(64, 128, 64, 8, 5)
    rows = 16 if n <= 16 else 32 if n <= 32 or narrow else 64
    if many:
        return Tile(rows, 64, 128, 4, 4)
    # Seven stages leave no room beside them: programs that are fewer than processors have one each, and the next
    # kernel's, which come early, spread likewise. With 64 rows five do the same.
    return Tile(rows, 64, 128, 4, 5 if rows == 64 else 7)


SMALL = 16  # rows of the smallest tile that a dot takes
FULL = 256  # tiles of attention that keep a device busy; fewer are cut, so that a block of keys has a program to itself
FEW = 16  # tiles whose programs, when they are cut, still have a processor each


class Launch(NamedTuple):
    """How a tile of queries is worked on, of no consequence for the bits."""

    rows: int  # of a tile
    warps: int
    fold_stages: int = 1  # of the loop that folds what was cut


def is_cut(pairs: int, r: int, groups: int, tree: bool) -> bool:
    """Whether pairs of slot and KV head, of R rows each, leave a device idle if a tile is one program's work."""
    return pairs * (r if tree else _ceil(r * groups, SMALL)) < FULL


def pick_launch(queries: int, pairs: int, cut: bool, tree: bool, most: int) -> Launch:
    """The launch for so many queries of each pair of slot and KV head; of a tree, over what its rows share.

    Args: most: rows of a tile that fit the registers.
    Source: swept on an H200 (docs/performance.md).
    """
    if queries > 128:
        return Launch(most, plain_warps(most))
    if cut:  # no more rows than a dot takes: a tile's time is that of its loads, and more programs hide it
        if pairs * _ceil(queries, SMALL) <= FEW:
            return Launch(SMALL, 4)
        return Launch(SMALL, 2, fold_stages=3 if queries > SMALL else 1)
    if pairs > FULL and not tree:  # busy by itself: smaller tiles share a processor's memory better
        return Launch(min(most, 32), 2)
    # However few rows live: with 64 Hopper's own instruction reads keys and values where they arrive.
    return Launch(min(most, 64), plain_warps(min(most, 64)))


def pick_own_launch(groups: int, cut: bool) -> Launch:
    """The same over what each row of a tree has for itself: its query heads of a KV head are one tile."""
    return Launch(max(SMALL, 1 << (groups - 1).bit_length()), 2 if cut else 1)


def most_rows(dtype: torch.dtype, head_dim: int) -> int:
    """Rows of attention's tile that fit the registers."""
    if dtype == torch.float32:
        return SMALL
    return 128 if head_dim <= 128 else 64


def plain_warps(rows: int) -> int:
    """Warps of a tile of attention that is not cut."""
    return 8 if rows >= 128 else 4 if rows >= 64 else 2


def _ceil(a: int, b: int) -> int:
    return -(-a // b)

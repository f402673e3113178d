"""The tree that a smaller depth or top_k would have drafted, as far as a recorded round tells.

A level keeps the top_k best of its candidates, so the record of a wide tree holds a narrower one only where none of the
narrower one's nodes was displaced by a child of a node that the narrower one does not have, or pruned.
"""

import dataclasses
import math
from typing import Any

import torch

from nanospec_fn import recorded, rng
from nanospec_fn.draft import Speculation
from nanospec_fn.trace import Header, Nodes, Round
from nanospec_fn.trees import Tree

BY_CHAIN, BY_LEVEL = ("ngram",), ("model", "eagle3")  # how a drafting method fills its tree


def check(header: Header, depth: int | None, top_k: int | None) -> Speculation:
    """The smaller tree's shape; None leaves a size as recorded.

    Errors: ValueError for a tree that is not smaller, and for a draft whose smaller trees are not known.
    """
    spec = header.speculation
    if spec is None or header.draft is None:
        raise ValueError("the trace was recorded without a draft, so there is no tree to narrow")
    if depth is not None and depth > spec.depth:
        raise ValueError(f"depth {depth} is not in the record: its trees have {spec.depth} levels")
    if top_k is not None and top_k > spec.top_k:
        raise ValueError(f"top_k {top_k} is not in the record: its trees have {spec.top_k} nodes a level")
    if header.draft not in (*BY_CHAIN, *BY_LEVEL):
        raise ValueError(f"how the draft {header.draft} fills a smaller tree is not known")
    depth, top_k = depth or spec.depth, top_k or spec.top_k
    return dataclasses.replace(spec, depth=depth, top_k=top_k, num_nodes=min(spec.nodes, depth * top_k))


def nodes(drafted: Nodes, header: Header, smaller: Speculation) -> set[int] | None:
    """The recorded nodes that make up the smaller tree; None where it has nodes that were not recorded."""
    spec = header.speculation
    assert spec is not None  # check() saw to that
    present = [i for i, d in enumerate(drafted.depth) if d > 0]
    unpruned = spec.nodes == spec.top_k * spec.depth or len(present) < spec.nodes
    whole = unpruned
    if smaller.top_k == spec.top_k:
        found = present
    elif header.draft in BY_CHAIN:
        found = [i for i in present if _chain_of(drafted, i) < smaller.top_k]
    else:
        found, whole = _levels(drafted, spec, smaller, unpruned)
    found = [i for i in found if drafted.depth[i] <= smaller.depth]
    return set(found) if whole or len(found) == smaller.nodes else None


def _chain_of(drafted: Nodes, node: int) -> int:
    """The rank of the matched chain that a node of `draft.merge` belongs to: where a chain starts, minus its rank."""
    while node != Tree.ROOT:
        if drafted.draft_logp[node] < 0:
            return int(-drafted.draft_logp[node])
        node = drafted.parent[node]
    return 0


def _levels(drafted: Nodes, spec: Speculation, smaller: Speculation, unpruned: bool) -> tuple[list[int], bool]:
    """The nodes that `trees.expand` would have kept of a narrower beam, and whether these are all of them."""
    found: list[int] = []
    above: list[int] = [Tree.ROOT]  # in order of rank
    chain: int | None = Tree.ROOT  # the greedy chain's node, None once it has ended
    for depth in range(1, smaller.depth + 1):
        level, longer = [], None
        for rank, parent in enumerate(above):
            siblings = recorded.candidates(drafted, parent + 1)
            best, left_out = siblings[: smaller.top_k], siblings[smaller.top_k :]
            if left_out and drafted.draft_logp[left_out[0]] == drafted.draft_logp[best[-1]]:
                return found, False  # which of equals a narrower search would have met is not recorded
            if parent == chain and best:
                longer = best[0]
            level += [(i != longer, -drafted.score[i], rank, drafted.token[i], i) for i in best]
        chain = longer
        room = smaller.top_k - (chain is None)  # rank 0 is the chain's
        above = [i for *_, i in sorted(level)][:room]
        found += above
        seen = drafted.depth.count(depth)
        if len(above) < room and not (unpruned and seen < spec.top_k - (chain is None)):
            return found, False
    return found, True


def apply(record: Round, kept: set[int]) -> Round:
    """A round as it were had only these of its nodes been drafted.

    A row's probability outside its candidates grows by what was removed, and its draw outside them is made again, with
    the noise of the request's key; both to rounding.
    """
    n, rows = record.nodes, record.rows
    gone = [i for i, d in enumerate(n.depth) if d > 0 and i not in kept]
    rest, rest_logp, rest_mass = list(rows.rest), list(rows.rest_logp), list(rows.rest_mass)
    for row in {n.parent[i] + 1 for i in gone}:
        removed = [i for i in gone if n.parent[i] == row - 1]
        token = [*(n.token[i] for i in removed), *([rest[row]] if rest_mass[row] > -math.inf else [])]
        logp = [*(n.target_logp[i] for i in removed), *([rest_logp[row]] if rest_mass[row] > -math.inf else [])]
        position = torch.tensor(record.position + (n.depth[row - 1] if row else 0))
        key = rng.draw_key(rng.key(torch.tensor(record.seed)), position, rng.RESIDUAL)
        noisy = (torch.tensor(logp) + rng.gumbel_at(key, torch.tensor(token))).tolist()
        _, rest[row], rest_logp[row] = min((-x, t, p) for x, t, p in zip(noisy, token, logp, strict=True))
        outside = torch.tensor([rest_mass[row], *(n.target_logp[i] for i in removed)], dtype=torch.float64)
        rest_mass[row] = float(outside.logsumexp(0))
    absent = {"token": Tree.NONE, "parent": Tree.ROOT, "depth": 0, "draft_logp": -math.inf, "score": -math.inf}
    columns: dict[str, Any] = {
        name: [x if i in kept else value for i, x in enumerate(getattr(n, name))] for name, value in absent.items()
    }
    return dataclasses.replace(
        record,
        nodes=dataclasses.replace(n, **columns),
        rows=dataclasses.replace(rows, rest=rest, rest_logp=rest_logp, rest_mass=rest_mass),
    )

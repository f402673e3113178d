"""Draft trees. The logic is that of ONE slot, without data-dependent shapes: batch it with `torch.func.vmap`.

N nodes, k = top_k nodes per level, D levels. Nodes are ordered by level and by rank within it, so that parents
precede their children. The greedy chain (the best child of the best child ...) has rank 0 at every level it reaches.
"""

from typing import ClassVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from nanospec_fn import kernels
from nanospec_fn.filters import lowest_argmax
from nanospec_fn.struct import replace, state

WIDEST = 8  # nodes per level that the GPU's kernel takes: it compares all pairs of k * k candidates


@state
class Tree:
    """One slot's draft tree; an absent node has token NONE, parent ROOT, depth 0 and both log-probs -inf.

    `logp` is at most 0 and orders a row's candidates. A model draft's is its log-prob of the token given its path; with
    coupled proposals and a temperature it is the log-softmax of the tempered logits plus the target's Gumbel noise;
    ngram has no probabilities: minus the match's rank where its chain starts, 0 further down.
    """

    NONE: ClassVar[int] = -1  # in `token`
    ROOT: ClassVar[int] = -1  # in `parent`: the slot's last committed token, which is not a node

    token: Tensor  # [N] int32, target vocabulary
    parent: Tensor  # [N] int32, node
    depth: Tensor  # [N] int32, 1 for the root's children
    logp: Tensor  # [N] fp32, nats, ranks siblings; what it is depends on the draft, see above
    score: Tensor  # [N] fp32, nats, the sum of logp along the path


def init(num_nodes: int, device: torch.device | str = "cpu") -> Tree:
    """A tree without nodes, with room for `num_nodes`."""

    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((num_nodes,), value, dtype=dtype, device=device)

    return Tree(
        token=full(Tree.NONE, torch.int32),
        parent=full(Tree.ROOT, torch.int32),
        depth=full(0, torch.int32),
        logp=full(-torch.inf, torch.float32),
        score=full(-torch.inf, torch.float32),
    )


def init_all(b: int, num_nodes: int, device: torch.device | str = "cpu") -> Tree:
    """`init` for a batch: [b, num_nodes]."""
    return pytree.tree_map(lambda x: x.expand(b, -1), init(num_nodes, device))


def expand(tree: Tree, depth: int, token: Tensor, logp: Tensor) -> Tree:
    """Fill level `depth` with the best k continuations of the level above, by cumulative score.

    Ties go to the parent of lower rank, then to the lower token id. The greedy chain's continuation is kept whatever
    its score, at rank 0; where the chain has ended, rank 0 stays absent.

    Args:
      tree: unpruned, D * k nodes, filled above `depth`.
      depth: the level to fill, from 1.
      token: [m, k] integer, candidates for each node of the level above in order of rank; m = 1 at depth 1, else k.
        The tokens of one row are distinct. NONE marks an absent candidate.
      logp: [m, k], nats, at most 0; -inf marks an absent candidate too.
    Returns: the tree with nodes (depth - 1) * k .. depth * k - 1 replaced. A level node's row in `token` is
      `parent_row(the level's nodes, depth, top_k)`.
    """
    m, k = token.shape
    first = (depth - 2) * k  # of the level above
    if depth == 1:
        above = logp.new_zeros(1, dtype=torch.float32)
    else:
        above = tree.score[first : first + k]
    token, by_id = token.to(torch.int32).sort(dim=-1, stable=True)
    logp = logp.float().gather(-1, by_id)
    score = above[:, None] + logp
    present = (token != Tree.NONE) & (score > -torch.inf)
    score = score.masked_fill(~present, -torch.inf).flatten()
    greedy = lowest_argmax(logp[0].masked_fill(~present[0], -torch.inf))
    is_greedy = torch.arange(m * k, device=token.device) == greedy
    best = score.masked_fill(is_greedy, torch.inf).sort(descending=True, stable=True).indices[:k]

    kept = present.flatten()[best]
    # Which row a candidate came from is which node of the level above it continues.
    parent = torch.full_like(best, Tree.ROOT) if depth == 1 else first + best // k
    new = Tree(
        token=torch.where(kept, token.flatten()[best], Tree.NONE),
        parent=torch.where(kept, parent, Tree.ROOT).to(torch.int32),
        depth=torch.where(kept, depth, 0).to(torch.int32),
        logp=logp.flatten()[best].masked_fill(~kept, -torch.inf),
        score=score[best],
    )
    low, high = (depth - 1) * k, depth * k
    return pytree.tree_map(lambda old, part: torch.cat((old[:low], part, old[high:])), tree, new)


def parent_row(nodes: Tree, depth: int, top_k: int) -> Tensor:
    """[k] int64: which row of the level above each of the level's nodes continues; 0 at depth 1 and where absent."""
    first = (depth - 2) * top_k if depth > 1 else 0
    return (nodes.parent.long() - first).clamp_min(0)


def prune(tree: Tree, num_nodes: int, top_k: int) -> Tree:
    """The best `num_nodes` nodes of an unpruned tree, in the same order, absent ones last.

    The greedy chain comes first whatever its score (its upper part, where it is longer than `num_nodes`), then the
    score decides, ties to the earlier and so the shallower node. As scores never grow along a path, what is kept is
    closed under parents.
    """
    n = tree.token.shape[0]
    order = torch.arange(n, device=tree.token.device)
    present = tree.depth > 0
    value = tree.score.masked_fill(present & (order % top_k == 0), torch.inf)
    best = value.sort(descending=True, stable=True).indices[:num_nodes]
    best = torch.where(present[best], best, n).sort().values  # n: absent, after every node
    kept = best < n
    old = best.clamp_max(n - 1)
    pruned: Tree = pytree.tree_map(lambda x: x[old], tree)
    # A parent is kept, so its new index is its rank among the kept ones.
    parent = (best[None, :] < pruned.parent[:, None]).sum(-1)
    parent = torch.where(pruned.parent == Tree.ROOT, Tree.ROOT, parent).to(torch.int32)
    none = init(best.shape[0], tree.token.device)
    return pytree.tree_map(lambda x, absent: torch.where(kept, x, absent), replace(pruned, parent=parent), none)


def path(tree: Tree, node: Tensor, depth: int) -> Tensor:
    """The nodes from depth 1 down to `node`.

    Args:
      node: [...] integer, Tree.ROOT for the root.
      depth: D, at least the tree's.
    Returns: [..., D] int32, padded with -1; all -1 for the root or an absent node.
    """
    columns = []
    for d in range(depth, 0, -1):
        here = (node >= 0) & (tree.depth[node.clamp_min(0).long()] == d)
        columns.append(torch.where(here, node, -1))
        node = torch.where(here, tree.parent[node.clamp_min(0).long()].to(node.dtype), node)
    return torch.stack(columns[::-1], dim=-1).to(torch.int32)


def expand_all(tree: Tree, depth: int, token: Tensor, logp: Tensor) -> Tree:
    """`expand` for a batch: tree [B, N], candidates [B, m, k]."""
    if kernels.on_device(token) and token.shape[2] <= WIDEST:
        from nanospec_fn.kernels import tree as kernel  # needs Triton

        old = (tree.token, tree.parent, tree.depth, tree.logp, tree.score)
        return Tree(*kernel.expand(old, depth, token, logp)[0])
    return torch.func.vmap(lambda t, i, p: expand(t, depth, i, p))(tree, token, logp)


def paths_all(tree: Tree, first: int, count: int, depth: int) -> Tensor:
    """`path` of nodes first .. first + count - 1 for a batch: tree [B, N] -> [B, count, depth]."""
    if kernels.on_device(tree.token):
        from nanospec_fn.kernels import tree as kernel  # needs Triton

        return kernel.paths(tree.parent, tree.depth, first, count, depth)
    node = torch.arange(first, first + count, dtype=torch.int32, device=tree.token.device)
    return torch.func.vmap(lambda t: path(t, node, depth))(tree)

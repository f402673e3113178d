"""The exact law of one round, measured on `acceptance.judge` as a black box.

Target and draft are Markov chains over a tiny vocabulary, so that a round depends on its root token alone. The law is
found by forcing the named draws, never by repeating a rule's formula:
- the probability that a candidate is accepted is the threshold of its ACCEPT draw, found by bisection; a rule that
  uses the draw in another way is refused;
- a row's Gumbel draw is integrated by the odds of each pair of tokens, the noise difference at which the winner
  changes, found by bisection too (that the argmax then has these odds is the Gumbel-max theorem).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from nanospec_fn import acceptance, sampling, trees
from nanospec_fn.acceptance import Draws, Verdict
from nanospec_fn.sampling import Controls, Sampling
from nanospec_fn.trees import Tree

FAR = 1e6  # noise that no log-prob outweighs
STEPS = 52  # of bisection
PROBES = 64  # draws at which a rule of one's own must accept just below the threshold that was found

Block = tuple[int, ...]


@dataclass(frozen=True)
class Outcome:
    """A block that a round may emit."""

    tokens: Block
    probability: float  # measured
    behaviour: tuple[float, ...]  # reported by the rule
    target: tuple[float, ...]  # reported by the rule
    candidates: tuple[int, ...]  # at the row of each token


@dataclass(frozen=True)
class World:
    """A Markov target and the draft trees for each last token."""

    logits: Tensor  # [V, V] float64, the target's row after each token
    tree: Tree  # [V, N], the draft tree after each token
    depth: int
    request: Sampling
    rule: acceptance.Rule | None = None  # None: the built-in ones

    @property
    def rows(self) -> Tensor:
        """[V, R, V]: the target's rows at the root and the nodes of each tree."""
        root = torch.arange(len(self.logits))[:, None]
        return self.logits[torch.cat((root, self.tree.token.clamp_min(0).long()), dim=1)]


def draft_trees(draft_logp: Tensor, top_k: int, depth: int, num_nodes: int) -> Tree:
    """The trees [V, N] that a Markov draft [V, V] gives after each token; -inf marks what it never proposes."""
    size = len(draft_logp)
    tree: Tree = tree_map(lambda x: x.expand(size, -1), trees.init(top_k * depth))
    tokens = torch.arange(size)[:, None]
    for d in range(1, depth + 1):
        logp, candidate = draft_logp[tokens.clamp_min(0).long()].topk(top_k)
        tree = torch.func.vmap(lambda t, c, p, d=d: trees.expand(t, d, c, p))(tree, candidate, logp)
        tokens = tree.token[:, (d - 1) * top_k : d * top_k]
    return torch.func.vmap(lambda t: trees.prune(t, num_nodes, top_k))(tree)


def round_law(world: World) -> list[list[Outcome]]:
    """Every outcome of a round, for each root token."""
    return [_outcomes(world, *measured) for measured in _measure(world)]


class _Slot:
    """One root token's tree in plain Python."""

    def __init__(self, world: World, root: int) -> None:
        self.root = root
        self.token, self.parent, self.logp = (
            x[root].tolist() for x in (world.tree.token, world.tree.parent, world.tree.logp)
        )
        self.nodes = [i for i, t in enumerate(self.token) if t != Tree.NONE]

    def children(self, row: int) -> list[int]:
        mine = [i for i in self.nodes if self.parent[i] == row - 1]
        return sorted(mine, key=lambda i: (-self.logp[i], self.token[i]))

    def path(self, row: int) -> list[int]:
        return [] if row == 0 else [*self.path(self.parent[row - 1] + 1), row - 1]

    def force(self, world: World, row: int) -> Draws:
        """Draws that accept the path to `row` and nothing else by the ACCEPT draws; [N], [R, V]."""
        accept = torch.ones(len(self.token), dtype=torch.float64)
        gumbel = torch.zeros(len(self.token) + 1, len(world.logits), dtype=torch.float64)
        for node in self.path(row):
            accept[node] = 0
            gumbel[self.parent[node] + 1, self.token[node]] = FAR
        return Draws(accept=accept, gumbel=gumbel)


def _run(world: World, roots: list[int], draws: Draws) -> Verdict:
    index = torch.tensor(roots)
    one = sampling.controls([world.request])
    many: Controls = tree_map(lambda x: x.expand(len(roots)), one)
    tree = tree_map(lambda x: x[index], world.tree)
    return acceptance.judge(world.rows[index], tree, many, torch.zeros_like(index), world.depth, draws, world.rule)[1]


def _stack(draws: list[Draws]) -> Draws:
    return Draws(torch.stack([d.accept for d in draws]), torch.stack([d.gumbel for d in draws]))


Measured = tuple[_Slot, dict[int, float], dict[int, dict[int, float]]]


def _measure(world: World) -> list[Measured]:
    """Per root: the slot, each node's acceptance probability, each row's token probabilities after rejection."""
    slots = [_Slot(world, root) for root in range(len(world.logits))]
    threshold = _thresholds(world, slots)
    odds = _odds(world, slots)
    return [(slot, threshold[slot.root], odds[slot.root]) for slot in slots]


def _thresholds(world: World, slots: list[_Slot]) -> list[dict[int, float]]:
    lanes = [(slot, node) for slot in slots for node in slot.nodes]
    found: list[dict[int, float]] = [{} for _ in slots]
    if not lanes:
        return found
    draws = _stack([slot.force(world, slot.parent[node] + 1) for slot, node in lanes])
    lane, nodes = torch.arange(len(lanes)), torch.tensor([node for _, node in lanes])
    parents, tokens = (torch.tensor(x) for x in zip(*((s.parent[n] + 1, s.token[n]) for s, n in lanes), strict=True))
    # Under `exact` the noise accepts; here it is kept from doing so, as that is counted with the row's own draw.
    draws.gumbel[lane, parents, tokens] = -FAR
    low, high = torch.zeros(len(lanes), dtype=torch.float64), torch.ones(len(lanes), dtype=torch.float64)
    for _ in range(STEPS):
        middle = (low + high) / 2
        draws.accept[lane, nodes] = middle
        path = _run(world, [slot.root for slot, _ in lanes], draws).path
        taken = (path == nodes[:, None]).any(1)
        low, high = torch.where(taken, middle, low), torch.where(taken, high, middle)
    low = torch.where(high == 1, 1.0, low)  # accepted by every draw below 1
    if world.rule:
        _check_thresholds(world, lanes, draws, low)
    for (slot, node), t in zip(lanes, low.tolist(), strict=True):
        found[slot.root][node] = t
    return found


def _check_thresholds(world: World, lanes: list[tuple[_Slot, int]], draws: Draws, threshold: Tensor) -> None:
    """Refuse a rule for which the chance of acceptance is no threshold of its draw: bisection sees one edge only."""
    lane, nodes = torch.arange(len(lanes)), torch.tensor([node for _, node in lanes])
    for draw in (torch.arange(PROBES, dtype=torch.float64) + 0.5) / PROBES:
        draws.accept[lane, nodes] = draw
        taken = (_run(world, [slot.root for slot, _ in lanes], draws).path == nodes[:, None]).any(1)
        if bool((taken != (draw < threshold)).any()):
            raise AssertionError(f"the rule does not accept below a threshold of its draw, see {float(draw):.3f}")


def _odds(world: World, slots: list[_Slot]) -> list[dict[int, dict[int, float]]]:
    size = len(world.logits)
    lanes = [(slot, row, v) for slot in slots for row in (0, *(i + 1 for i in slot.nodes)) for v in range(size)]
    draws = _stack([slot.force(world, row) for slot, row, _ in lanes])
    depth = torch.tensor([len(slot.path(row)) for slot, row, _ in lanes])
    lane, rows, tokens = torch.arange(len(lanes)), *(torch.tensor([x[i] for x in lanes]) for i in (1, 2))

    def wins(noise: torch.Tensor | float) -> Tensor:
        draws.gumbel[lane, rows, tokens] = noise
        return _run(world, [slot.root for slot, _, _ in lanes], draws).tokens[lane, depth] == tokens

    draws.gumbel[lane, rows] = -FAR
    alone = wins(0.0).tolist()
    reference: dict[tuple[int, int], int] = {}
    for (slot, row, v), reachable in zip(lanes, alone, strict=True):
        if reachable:
            reference.setdefault((slot.root, row), v)
    against = torch.tensor([reference.get((slot.root, row), v) for slot, row, v in lanes])
    draws.gumbel[lane, rows, against] = 0.0
    low = torch.full((len(lanes),), -400.0, dtype=torch.float64)
    high = -low
    for _ in range(STEPS):
        middle = (low + high) / 2
        won = wins(middle)
        low, high = torch.where(won, low, middle), torch.where(won, middle, high)
    found: list[dict[int, dict[int, float]]] = [{} for _ in slots]
    for (slot, row, v), ok, r, gap in zip(lanes, alone, against.tolist(), low.tolist(), strict=True):
        if ok:
            found[slot.root].setdefault(row, {})[v] = 0.0 if v == r else -gap
    return [{row: _softmax(odds) for row, odds in rows_of.items()} for rows_of in found]


def _softmax(odds: dict[int, float]) -> dict[int, float]:
    weights = torch.softmax(torch.tensor(list(odds.values()), dtype=torch.float64), 0)
    return dict(zip(odds, weights.tolist(), strict=True))


def _outcomes(
    world: World, slot: _Slot, threshold: dict[int, float], odds: dict[int, dict[int, float]]
) -> list[Outcome]:
    ends: list[tuple[int, int, float]] = []  # row, token, probability

    def visit(row: int, probability: float) -> None:
        for node in slot.children(row):
            if threshold[node] > 0:
                visit(node + 1, probability * threshold[node])
            probability *= 1 - threshold[node]
        ends.extend((row, v, probability * q) for v, q in odds.get(row, {}).items() if probability > 0)

    # The noise may accept a child as well (`exact`): such an end is replaced by the ends below the child.
    visit(0, 1.0)
    outcomes: list[Outcome] = []
    while ends:
        draws = _stack([slot.force(world, row) for row, _, _ in ends])
        for lane, (row, v, _) in enumerate(ends):
            draws.gumbel[lane, row] = -FAR
            draws.gumbel[lane, row, v] = 0
        verdict = _run(world, [slot.root] * len(ends), draws)
        done, ends = ends, []
        for i, (row, v, probability) in enumerate(done):
            path, accepted = slot.path(row), int(verdict.accepted[i])
            if accepted > len(path):
                visit(int(verdict.path[i, len(path)]) + 1, probability)
                continue
            tokens = tuple(verdict.tokens[i, : accepted + 1].tolist())
            expected = (*(slot.token[node] for node in path), v)
            if tokens == expected:
                rows = [0, *(node + 1 for node in path)]
                outcomes.append(
                    Outcome(
                        tokens,
                        probability,
                        tuple(verdict.behaviour_logp[i, : accepted + 1].tolist()),
                        tuple(verdict.target_logp[i, : accepted + 1].tolist()),
                        tuple(len(slot.children(r)) for r in rows),
                    )
                )
            elif probability > 1e-12:
                raise AssertionError(f"draws that should emit {expected} gave {tokens}")
    return outcomes

"""Narrower trees out of a recorded one, by hand; test_replay.py has them against the engine."""

import math

import nanospec_fn as ns
from nanospec_fn import narrow, trace
from nanospec_fn.draft import Ngram
from nanospec_fn.draft_model import Eagle3, LlamaDraft


def by_hand(nodes):
    """Nodes (token, parent, depth, score) in the order of `trees.expand`; depth 0: absent."""
    token, parent, depth, score = (list(column) for column in zip(*nodes, strict=True))
    above = [score[p] if p >= 0 else 0.0 for p in parent]
    logp = [x - y if d else -math.inf for x, y, d in zip(score, above, depth, strict=True)]
    return trace.Nodes(token, parent, depth, logp, score, logp, [0] * len(token), [0.5] * len(token))


def test_a_displaced_node_is_not_guessed():
    """Bug: what a level had no room for is taken for never drafted. Level 2 of three: B's children lost to C's two, and
    a tree of two nodes a level, A and B, would have had one of them."""
    wide = ns.Speculation(top_k=3, depth=2)
    header = trace.Header(trace.FORMAT, trace.VERSION, "m", "c", "eagle3", wide, {}, 0, 0, [])
    smaller = narrow.check(header, None, 2)
    level = [(10, -1, 1, -0.1), (11, -1, 1, -2.0), (12, -1, 1, -2.1)]
    absent = (-1, -1, 0, -math.inf)
    a, b, c, d = (20, 0, 2, -0.2), (21, 1, 2, -3.0), (22, 2, 2, -2.2), (23, 2, 2, -2.3)
    assert narrow.nodes(by_hand([*level, a, c, d]), header, smaller) is None
    assert narrow.nodes(by_hand([*level, a, c, b]), header, smaller) == {0, 1, 3, 5}
    assert narrow.nodes(by_hand([*level, a, c, absent]), header, smaller) == {0, 1, 3}  # room was left: no B's child
    # The greedy chain ended at A, and its place stays empty: one node a level is left.
    assert narrow.nodes(by_hand([*level, absent, c, b]), header, smaller) == {0, 1, 5}
    assert narrow.nodes(by_hand([*level, absent, c, d]), header, smaller) is None
    # Which of two equals a search for two would have met is not known.
    tied = [level[0], (11, -1, 1, -2.0), (12, -1, 1, -2.0)]
    assert narrow.nodes(by_hand([*tied, a, c, b]), header, smaller) is None
    assert narrow.nodes(by_hand([*tied, a, c, b]), header, narrow.check(header, 1, 3)) == {0, 1, 2}


def test_every_drafting_method_is_known_by_its_name():
    """Bug: a method that was renamed, so that its traces can no longer be narrowed."""
    assert {method.name for method in (Ngram, LlamaDraft, Eagle3)} == {*narrow.BY_CHAIN, *narrow.BY_LEVEL}

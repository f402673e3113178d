"""One recorded round as a person reads it: its tree with probabilities and verdicts, and that tree as text.

A round's tree here is the root (the last token that was known), the drafted nodes in the order in which they are tried,
and the token that the target emitted on its own after the accepted path. Probabilities are the record's: the target's
after temperature, top-k and top-p, the draft's own untempered ones.
"""

import math
import os
import unicodedata
from dataclasses import dataclass
from typing import Any, TextIO

from nanospec_fn import recorded
from nanospec_fn.trace import Round, Trace
from nanospec_fn.trees import Tree

MOST = 60  # nodes of a tree that are shown
DIM, RESET = "\033[2m", "\033[0m"
COLOURS = tuple(f"\033[{code}m" for code in (32, 36, 34, 35, 33, 31))  # draft depths 1, 2, ...; the last for all deeper
STYLE = {"accepted": "\033[1;32m", "own": "\033[1;36m", "root": "", "rejected": DIM}
MARK = {"accepted": "*", "own": "+", "root": " ", "rejected": " "}
UNICODE, ASCII = ("├─ ", "└─ ", "│  ", "   "), ("|- ", "`- ", "|  ", "   ")  # a child, the last one, below these


@dataclass(frozen=True)
class Node:
    """A place in a round's tree."""

    kind: str  # "root"; "accepted" or "rejected", drafted; "own", what the target emitted after the accepted path
    token: int | None  # None: a root that the record does not name
    parent: int  # index in View.nodes, before this node's; -1 above the root
    draft: float | None  # probability; None: not drafted, or by a draft whose scores are no probabilities
    target: float | None  # probability; None for the root


@dataclass(frozen=True)
class View:
    """A round's tree, each node followed by all that is below it."""

    title: str
    nodes: list[Node]
    left_out: int  # drafted nodes that are not shown, the least likely by the draft


def pick(found: Trace, request: int, number: int | None) -> Round:
    """A request's round by number, the prefill not counted; None: the first of those that accepted the most.

    Errors: ValueError naming a request or round that the trace does not have.
    """
    if not 0 <= request < len(found.header.requests):
        raise ValueError(f"request {request} is not in the trace, which has {len(found.header.requests)}")
    rounds = rounds_of(found, request)
    if not rounds:
        raise ValueError(f"request {request} has no round in the trace")
    if number is None:
        return max(rounds, key=lambda r: (len(r.path), any(r.nodes.depth)))
    if not 0 <= number < len(rounds):
        raise ValueError(f"round {number} is not in the trace: request {request} has rounds 0 to {len(rounds) - 1}")
    return rounds[number]


def rounds_of(found: Trace, request: int) -> list[Round]:
    """A request's rounds in order, its prefill left out."""
    return [r for r in found.rounds if r.request == request and not r.prefill]


def of(found: Trace, record: Round) -> View:
    """The tree of one of a trace's rounds, of at most MOST drafted nodes."""
    n, shown = record.nodes, _shown(record)
    spec, sampling = found.header.speculation, found.header.requests[record.request].sampling
    noisy = spec is not None and spec.coupled and sampling.temperature > 0
    scored = found.header.draft != "ngram" and not noisy
    earlier = [r for r in found.rounds if r.request == record.request and r.position < record.position]
    nodes = [Node("root", earlier[-1].tokens[-1] if earlier else None, -1, None, None)]
    last = record.path[-1] if record.path else Tree.ROOT

    def add(node: int, parent: int) -> None:
        kind = "accepted" if node in record.path else "rejected"
        draft = math.exp(n.draft_logp[node]) if scored else None
        nodes.append(Node(kind, n.token[node], parent, draft, math.exp(n.target_logp[node])))
        below(node, len(nodes) - 1)

    def below(node: int, parent: int) -> None:
        for child in recorded.candidates(n, node + 1):
            if child in shown:
                add(child, parent)
        if node == last and len(record.tokens) > len(record.path):
            nodes.append(Node("own", record.tokens[-1], parent, None, math.exp(record.target_logp[-1])))

    below(Tree.ROOT, 0)
    drafted = sum(d > 0 for d in n.depth)
    number = rounds_of(found, record.request).index(record)
    title = (
        f"request {record.request}, round {number}, position {record.position}: "
        f"{len(record.path)} of {drafted} drafted tokens accepted, {len(record.tokens)} emitted"
    )
    return View(title, nodes, drafted - len(shown))


def _shown(record: Round) -> set[int]:
    """The accepted nodes and the best others by score, with each node its parent, MOST in all."""
    n = record.nodes
    present = [i for i, d in enumerate(n.depth) if d > 0]
    shown: set[int] = set()
    for i in sorted(present, key=lambda i: (i not in record.path, -n.score[i], i)):
        if len(shown) < MOST and (n.parent[i] == Tree.ROOT or n.parent[i] in shown):
            shown.add(i)
    return shown


def label(token: int | None, tokenizer: Any) -> str:
    """A token's text in quotes, with what cannot be printed escaped; its id where it has no text of its own."""
    if token is None:
        return "..."
    known = tokenizer is not None and token < len(tokenizer)
    text = tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False) if known else ""
    return repr(text) if text and "\ufffd" not in text else f"#{token}"


def columns(text: str) -> int:
    """How many columns of a terminal or of a fixed-width font a text takes."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else int(not unicodedata.combining(c)) for c in text)


def percent(probability: float | None) -> str:
    """A probability in at most four characters, "-" for none."""
    if probability is None:
        return "-"
    return f"{probability:.0%}" if probability >= 0.005 or probability == 0 else "<1%"


def printable(text: str) -> str:
    """A file's own words, without what a terminal would obey or XML cannot hold."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def lines(view: View, tokenizer: Any, colour: bool, encoding: str = "utf-8") -> list[str]:
    """A tree as text: a line per node with both probabilities, `*` at accepted ones, `+` at the target's own token.

    Args:
      colour: use a terminal's colours too.
      encoding: of what the text goes to; where it lacks line-drawing characters, ASCII ones are used.
    """
    try:
        "".join(UNICODE).encode(encoding)
        child, last, through, blank = UNICODE
    except (UnicodeEncodeError, LookupError):
        child, last, through, blank = ASCII
    below = [[j for j, node in enumerate(view.nodes) if node.parent == i] for i in range(len(view.nodes))]
    indent = [""] * len(view.nodes)  # what stands before a node's children
    out = [view.title, "  draft target"]
    for i, node in enumerate(view.nodes):
        branch = ""
        if node.parent >= 0:
            ends = below[node.parent][-1] == i
            branch = indent[node.parent] + (last if ends else child)
            indent[i] = indent[node.parent] + (blank if ends else through)
        style, reset = (STYLE[node.kind], RESET) if colour and STYLE[node.kind] else ("", "")
        figures = f"{MARK[node.kind]} {percent(node.draft):>5} {percent(node.target):>6}" if i else " " * 14
        out.append(f"{style}{figures}  {branch}{label(node.token, tokenizer)}{reset}")
    if view.left_out:
        out.append(f"  and {view.left_out} less likely nodes")
    return out


def coloured(out: TextIO) -> bool:
    """Whether to colour what goes to a stream: NO_COLOR says no, FORCE_COLOR yes, else a terminal decides."""
    return not os.environ.get("NO_COLOR") and (bool(os.environ.get("FORCE_COLOR")) or out.isatty())


def legend(view: View) -> str:
    """What the marks of `lines` mean, as far as the tree has them."""
    words = {"accepted": "* accepted", "own": "+ the target's own token"}
    return ", ".join(text for kind, text in words.items() if any(node.kind == kind for node in view.nodes))

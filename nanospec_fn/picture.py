"""Pictures as SVG, written here without a plotting library: a round's tree, and bars of acceptance.

A picture is one self-contained XML document on a background of its own, light or dark as the reader prefers. What
colour says, shape says too: accepted nodes have thick outlines, the target's own token a dashed one.
"""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from nanospec_fn import tally, view
from nanospec_fn.tally import Share
from nanospec_fn.view import View

LIGHT = {"paper": "#ffffff", "ink": "#1f2328", "faint": "#59636e", "line": "#8c959f", "box": "#f1f3f5"}
LIGHT |= {"good": "#116329", "good-box": "#d2f4d9", "own": "#0550ae", "own-box": "#dbeafe"}
DARK = {"paper": "#0d1117", "ink": "#e6edf3", "faint": "#9ea7b3", "line": "#6e7681", "box": "#21262d"}
DARK |= {"good": "#7ee787", "good-box": "#12361f", "own": "#79c0ff", "own-box": "#10294a"}
FITS = 16  # columns of a token's text in its box
MARGIN, HEAD = 16, 46  # around a picture; above its first row
BOX_WIDTH, BOX_HEIGHT, GAP, ROW = 132, 36, 38, 44  # of a tree
NOTES = {"accepted": "thick: accepted", "own": "dashed: the token that the target emitted on its own"}
BAR_WIDTH, BAR_STEP, PLOT = 34, 62, 150  # of bars; the height of 100%


def tree(shown: View, tokenizer: Any) -> str:
    """A round's tree from left to right; the child that is tried first stands level with its parent.

    Args: tokenizer: gives tokens their text; None: ids.
    """
    level, row, rows = [0], [0], 0
    for i, node in enumerate(shown.nodes[1:], 1):
        first = node.parent == i - 1  # nodes come parent first, so the next one is the first child
        rows += not first
        level.append(level[node.parent] + 1)
        row.append(row[node.parent] if first else rows)
    edges, boxes = [], []
    for i, node in enumerate(shown.nodes):
        x, y = MARGIN + level[i] * (BOX_WIDTH + GAP), HEAD + row[i] * ROW
        if node.parent >= 0:
            left, high = x - GAP, HEAD + row[node.parent] * ROW + BOX_HEIGHT / 2
            middle, low = x - GAP / 2, y + BOX_HEIGHT / 2
            edges.append(_path(f"M{left:g} {high:g}C{middle:g} {high:g} {middle:g} {low:g} {x:g} {low:g}", node.kind))
        boxes += _box(x, y, node.kind, clip(view.label(node.token, tokenizer), FITS), _figures(node))
    kinds = {node.kind for node in shown.nodes}
    notes = [text for kind, text in NOTES.items() if kind in kinds]
    if shown.left_out:
        notes.append(f"{shown.left_out} less likely nodes are left out")
    height = HEAD + (rows + 1) * ROW + 8
    width = MARGIN + (max(level) + 1) * (BOX_WIDTH + GAP)
    foot = _text(MARGIN, height + 4, "; ".join(notes), "faint")
    head = _text(MARGIN, 26, shown.title, "title")
    return _document(max(width, 700), height + 20, shown.title, [head, *edges, *boxes, foot])


def _figures(node: view.Node) -> str:
    if node.kind == "root":
        return "last known token"
    if node.kind == "own":
        return f"target's own · {view.percent(node.target)}"
    return f"draft {view.percent(node.draft)} · target {view.percent(node.target)}"


def _box(x: float, y: float, kind: str, label: str, figures: str) -> list[str]:
    size = f'width="{BOX_WIDTH}" height="{BOX_HEIGHT}"'
    return [
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" {size} rx="5"/>',
        _text(x + BOX_WIDTH / 2, y + 15, label, f"token {kind}-text"),
        _text(x + BOX_WIDTH / 2, y + 29, figures, "figures"),
    ]


def acceptance(title: str, panels: Mapping[str, Sequence[Share]]) -> str:
    """Bars of the share that was accepted, with counts and Wilson intervals, a panel below the other.

    Args: panels: what a panel's positions are -> shares.
    """
    parts, top = [_text(MARGIN, 26, title, "title")], 50
    width = max(len(shares) for shares in panels.values()) * BAR_STEP + MARGIN * 2 + 40
    for name, shares in panels.items():
        parts += _panel(name, shares, top)
        top += PLOT + 100
    note = f"below each bar: accepted / tried; whiskers: {tally.CONFIDENCE:.0%} Wilson interval"
    parts.append(_text(MARGIN, top - 8, note, "faint"))
    return _document(max(width, 640), top + 8, title, parts)


def _panel(name: str, shares: Sequence[Share], top: float) -> list[str]:
    base, left = top + 30 + PLOT, MARGIN + 40
    right = left + len(shares) * BAR_STEP
    parts = [_text(MARGIN, top + 6, name, "name")]
    for share in (0, 0.5, 1):
        y = base - share * PLOT
        parts += [_path(f"M{left} {y:g}H{right}", "grid"), _text(left - 6, y + 4, f"{share:.0%}", "axis")]
    for i, s in enumerate(shares):
        middle = left + (i + 0.5) * BAR_STEP
        parts += [
            _text(middle, base + 15, s.name, "position"),
            _text(middle, base + 29, f"{s.accepted}/{s.tried}", "figures"),
        ]
        if not s.tried:
            continue
        share, (low, high) = s.accepted / s.tried, s.interval
        x, height = middle - BAR_WIDTH / 2, share * PLOT
        parts.append(f'<rect class="bar" x="{x:g}" y="{base - height:.1f}" width="{BAR_WIDTH}" height="{height:.1f}"/>')
        ends = [base - bound * PLOT for bound in (low, high)]
        across = "".join(f"M{middle - 5:g} {y:.1f}h10" for y in ends)
        parts.append(_path(f"M{middle:g} {ends[0]:.1f}V{ends[1]:.1f}{across}", "whisker"))
        parts.append(_text(middle, ends[1] - 4, view.percent(share), "share"))
    return parts


def clip(text: str, width: int) -> str:
    """A text of at most so many columns, its middle left out where it is longer."""
    if view.columns(text) <= width:
        return text
    head, tail = text[: width // 2], text[-(width // 2 - 1) :]
    while view.columns(head + tail) > width - 1:
        head, tail = head[:-1], tail[1:]
    return f"{head}…{tail}"


def _path(d: str, kind: str) -> str:
    return f'<path class="edge {kind}-edge" d="{d}"/>'


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _document(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """An SVG document of one size, with a title that screen readers give."""

    def palette(colours: Mapping[str, str]) -> str:
        # Written out for each class: not every reader of SVG knows CSS variables.
        fill = {"paper": ".paper", "ink": "text", "faint": ".faint,.figures,.axis", "good": ".accepted-text,.share"}
        fill |= {"own": ".own-text", "box": ".root,.rejected", "good-box": ".accepted,.bar", "own-box": ".own"}
        line = {"line": ".root,.rejected,.edge", "good": ".accepted,.bar,.accepted-edge", "own": ".own,.own-edge"}
        line |= {"ink": ".whisker-edge"}
        rules = [f"{where}{{fill:{colours[name]}}}" for name, where in fill.items()]
        return "".join(rules + [f"{where}{{stroke:{colours[name]}}}" for name, where in line.items()])

    style = (
        "text{font:12px sans-serif}.title,.name{font-weight:bold}.title{font-size:14px}"
        ".token,.figures,.position,.share{text-anchor:middle}.axis{text-anchor:end}.token{font:12px monospace}"
        ".figures,.axis{font-size:10.5px}.share{font-size:11px}.edge{fill:none}.accepted-edge{stroke-width:3}"
        ".accepted{stroke-width:2.5}.own{stroke-width:1.5;stroke-dasharray:5 3}.own-edge{stroke-dasharray:5 3}"
        ".grid-edge{stroke-dasharray:1 3}.accepted-text{font-weight:bold}"
    )
    dark = f"@media(prefers-color-scheme:dark){{{palette(DARK)}}}"
    box = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}" xml:space="preserve"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {box} role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}{palette(LIGHT)}{dark}</style>",
            '<rect class="paper" width="100%" height="100%" rx="8"/>',
            *parts,
            "</svg>\n",
        ]
    )

"""Pictures of a trace: what they show against a hand-made trace, as text and as parsed SVG, and `generate --show`."""

import dataclasses
import io
import itertools
import math
import os
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

import nanospec_fn as ns
from nanospec_fn import __main__, picture, tally, trace, view
from nanospec_fn.commands import picture as command
from tests import tiny
from tests.scripted import prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
SVG = "{http://www.w3.org/2000/svg}"
LN = math.log
LIMIT = 60_000  # bytes of a picture
# Two nodes below the root and one below each of these; the target's probabilities are 1/2, 1/4, 1/2, 1/2.
TREE = trace.Nodes(
    token=[10, 11, 12, 13],
    parent=[-1, -1, 0, 1],
    depth=[1, 1, 2, 2],
    draft_logp=[LN(0.6), LN(0.3), LN(0.5), LN(0.9)],
    score=[LN(0.6), LN(0.3), LN(0.3), LN(0.27)],
    target_logp=[LN(0.5), LN(0.25), LN(0.5), LN(0.5)],
    rank=[0, 1, 0, 0],
    accept=[0.5] * 4,
)
NOTHING = trace.Nodes([-1] * 4, [-1] * 4, [0] * 4, [-math.inf] * 4, [-math.inf] * 4, [-1.0] * 4, [0] * 4, [0.5] * 4)
NO_NODES = trace.Nodes([], [], [], [], [], [], [], [])


def rows(n: int, mass: list[float]) -> trace.Rows:
    return trace.Rows([5] * n, [LN(0.2)] * n, [5] * n, [LN(0.2)] * n, mass)


def record(position, nodes, path, tokens, end=None, request=0, **changes):
    """A round; the target's own token has probability 1/5, an accepted one 1/2."""
    mass = [0.0] * (len(nodes.token) + 1)
    if any(nodes.depth):
        mass = [LN(0.25), LN(0.5), LN(0.5), 0.0, 0.0]
    logp = [LN(0.5)] * len(path) + [LN(0.2)] * (len(tokens) - len(path))
    origin = [*range(1, len(path) + 1), *[0] * (len(tokens) - len(path))]
    fields = {"step": position, "request": request, "prefill": nodes is NO_NODES, "seed": 0, "position": position}
    fields |= {"nodes": nodes, "rows": rows(len(mass), mass), "path": path, "tokens": tokens, "target_logp": logp}
    fields |= {"behaviour_logp": logp, "origin": origin, "finish_reason": end, "ms": {"step": 1.0}}
    return trace.Round(**(fields | {"policy_version": 0, "draft_version": 0} | changes))


def header(draft="model", speculation=ns.Speculation(top_k=2, depth=2), requests=2):  # noqa: B008
    asked = ns.Sampling(temperature=1.0)
    listed = [trace.Request(i, 3, 50, [12], asked) for i in range(requests)]
    return trace.Header(trace.FORMAT, trace.VERSION, "made", "0" * 16, draft, speculation, {}, 0, 0, listed)


ROUNDS = [
    record(3, NO_NODES, [], [7]),
    record(4, TREE, [0, 2], [10, 12, 5]),
    record(7, TREE, [1], [11, 6]),
    record(9, TREE, [], [4]),
    record(10, NOTHING, [], [4]),
    record(11, TREE, [0, 2], [10, 12], "stop"),  # the stop token ends the round inside its path
    record(3, NO_NODES, [], [8], request=1),
    record(4, TREE, [0], [10], "length", request=1),  # the limit does
]


def write(path, head=None, rounds=ROUNDS):
    file = trace.File(path)
    trace.create(file, head or header())
    with trace.Writer(file) as out:
        for r in rounds:
            out.write(r)
    return str(path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return write(tmp_path_factory.mktemp("picture") / "made.jsonl")


@pytest.fixture(autouse=True)
def _plain(monkeypatch):
    for name in ("NO_COLOR", "FORCE_COLOR", "NANOSPEC_MODEL", "NANOSPEC_EAGLE", "NANOSPEC_MAX_NEW"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *argv):
    """Exit code, stdout, stderr of a call in this process."""
    try:
        code = __main__.main([*argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def kinds(root: ET.Element, tag: str, kind: str) -> list[ET.Element]:
    return [e for e in root.iter(SVG + tag) if kind in e.get("class", "").split()]


def tree_of(number, tokenizer=None, found=None, request=0):
    found = found or trace.Trace(header(), ROUNDS, cut=False)
    return view.of(found, view.pick(found, request, number)), tokenizer


def named(**texts):
    """A tokenizer that knows some tokens' texts, by id."""
    table = {int(name[1:]): text for name, text in texts.items()}

    class Tokenizer:
        def __len__(self):
            return 100

        def decode(self, ids, **_):
            return table.get(ids[0], "")

    return Tokenizer()


def test_a_tree_as_text_is_this(made, capsys):
    """Bugs: probabilities of another node; the draft's and the target's swapped; an accepted node unmarked."""
    code, out, err = run(capsys, "picture", made, "--round", "1")
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "request 0, round 1, position 7: 1 of 4 drafted tokens accepted, 2 emitted",
        "  draft target",
        "                #5",  # the last token of the round before
        "    60%    50%  ├─ #10",
        "    50%    50%  │  └─ #12",
        "*   30%    25%  └─ #11",
        "    90%    50%     ├─ #13",
        "+     -    20%     └─ #6",
        "* accepted, + the target's own token",
    ]


def test_the_round_that_accepted_most_is_the_default(made, capsys):
    """Bugs: the prefill counted as round 0; a cut round given a token that was not emitted."""
    assert "round 0, position 4: 2 of 4 drafted tokens accepted, 3 emitted" in run(capsys, "picture", made)[1]
    cut = run(capsys, "picture", made, "--round", "4")[1]
    assert "round 4, position 11: 2 of 4 drafted tokens accepted, 2 emitted" in cut
    assert not [line for line in cut.splitlines() if line.startswith("+ ")]
    other = run(capsys, "picture", made, "--request", "1")[1]
    assert other.startswith("request 1, round 0, position 4: 1 of 4 drafted tokens accepted, 1 emitted\n")
    assert other.splitlines()[2].endswith("  #8")


def test_a_round_without_a_tree_has_root_and_own_token(made, capsys):
    """Bug: absent nodes (token -1) drawn, or an index error."""
    shown, _ = tree_of(3)
    assert [(n.kind, n.token) for n in shown.nodes] == [("root", 4), ("own", 4)]
    root = ET.fromstring(picture.tree(shown, None))
    assert len(kinds(root, "rect", "own")) == 1
    assert not kinds(root, "rect", "rejected")
    assert run(capsys, "picture", made, "--round", "3")[0] == 0


def test_scores_that_are_no_probabilities_are_not_shown_as_such():
    """Bug: ngram's ranks, or coupled scores with noise in them, shown as the draft's probabilities."""
    assert [n.draft for n in tree_of(0)[0].nodes] == pytest.approx([None, 0.6, 0.5, None, 0.3, 0.9])
    coupled = ns.Speculation(top_k=2, depth=2, coupled=True)
    for head in (header(draft="ngram"), header(speculation=coupled)):
        found = trace.Trace(head, ROUNDS, cut=False)
        assert {n.draft for n in tree_of(0, found=found)[0].nodes} == {None}


def test_a_tree_as_svg_has_the_same_nodes(made, tmp_path, capsys):
    """Bugs: a path highlighted beside the accepted one; boxes that overlap or leave the picture; a document that is
    not XML, not self-contained, or large."""
    file = tmp_path / "tree.svg"
    assert run(capsys, "picture", made, "--round", "0", "--out", str(file)) == (0, f"{file}\n", "")
    text = file.read_text()
    root = ET.fromstring(text)
    assert root.tag == f"{SVG}svg"
    assert len(text.encode()) < LIMIT
    assert not re.search(r"href|url\(|@import|<script|<image", text)
    labels = [e.text for e in kinds(root, "text", "token")]
    assert labels == ["#7", "#10", "#12", "#5", "#11", "#13"]
    assert [e.text for e in kinds(root, "text", "accepted-text")] == ["#10", "#12"]
    assert [e.text for e in kinds(root, "text", "own-text")] == ["#5"]
    assert [e.text for e in kinds(root, "text", "figures")] == [
        "last known token",
        "draft 60% · target 50%",
        "draft 50% · target 50%",
        "target's own · 20%",
        "draft 30% · target 25%",
        "draft 90% · target 50%",
    ]
    assert [len(kinds(root, "path", f"{kind}-edge")) for kind in ("accepted", "own", "rejected")] == [2, 1, 2]
    fits(root)


def fits(root: ET.Element) -> None:
    """Boxes lie apart and inside the picture, edges join a box's right side to another's left, text fits its box."""
    width, height = (float(x) for x in root.get("viewBox").split()[2:])
    boxes = [e for e in root.iter(f"{SVG}rect") if e.get("class") in ("root", "accepted", "rejected", "own")]
    spots = [tuple(float(e.get(k)) for k in ("x", "y", "width", "height")) for e in boxes]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in spots)
    for (x, y, w, h), (x2, y2, *_) in itertools.combinations(spots, 2):
        assert abs(x - x2) >= w or abs(y - y2) >= h
    for edge in root.iter(f"{SVG}path"):
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", edge.get("d"))]
        assert any((numbers[0], numbers[1]) == (x + w, y + h / 2) for x, y, w, h in spots)
        assert any((numbers[-2], numbers[-1]) == (x, y + h / 2) for x, y, w, h in spots)
    for text in kinds(root, "text", "token"):
        assert view.columns(text.text) * 7.5 <= picture.BOX_WIDTH  # of a 12 px fixed-width font, 7.2
    for text in root.iter(f"{SVG}text"):
        assert 0 < float(text.get("y")) < height
        if "token" not in text.get("class") and "figures" not in text.get("class"):
            assert float(text.get("x")) + 8 * len(text.text) <= width


def test_text_of_tokens_is_escaped_and_clipped():
    """Bugs: `<` and `&` end the document; a control character, which XML cannot hold; an endless token."""
    texts = {"t7": '<&"', "t10": "\x00\x1b[31m\nab", "t12": "]]>", "t11": "\ud800", "t13": "字" * 40, "t5": "\ufffd"}
    shown, tokenizer = tree_of(0, named(**texts))
    drawn = picture.tree(shown, tokenizer)
    labels = [e.text for e in kinds(ET.fromstring(drawn), "text", "token")]
    assert labels[:4] == ["'<&\"'", r"'\x00\x1…1m\nab'", "']]>'", "#5"]
    assert labels[4] == r"'\ud800'"
    assert labels[5] == "'字字字…字字'"
    assert all(c == "\n" or c.isprintable() for c in drawn)
    assert ET.fromstring(drawn).get("{http://www.w3.org/XML/1998/namespace}space") == "preserve"  # indents are tokens
    fits(ET.fromstring(drawn))
    text = view.lines(shown, tokenizer, colour=False)
    assert text[2].endswith(" '<&\"'")
    assert text[3].endswith(r"'\x00\x1b[31m\nab'")
    assert "\x1b" not in "".join(text)
    assert view.label(200, tokenizer) == "#200"  # past the tokenizer's end
    assert view.label(None, tokenizer) == "..."


def large(top_k=16, depth=16):
    """A round of top_k chains, each less likely than the one before; the last one is accepted to its second node."""
    n = range(top_k * depth)
    logp = [-0.1 - i if d == 0 else -0.1 for d in range(depth) for i in range(top_k)]
    score = [-(0.1 + i) - 0.1 * d for d in range(depth) for i in range(top_k)]
    parent = [i - top_k if i >= top_k else -1 for i in n]
    deep = [i // top_k + 1 for i in n]
    nodes = trace.Nodes([i % 100 for i in n], parent, deep, logp, score, [-1.0] * len(n), [0] * len(n), [0.5] * len(n))
    path = [top_k - 1, 2 * top_k - 1]
    chosen = record(4, TREE, [], [*(nodes.token[i] for i in path), 5])
    chosen = dataclasses.replace(chosen, nodes=nodes, path=path, origin=[1, 2, 0])
    return trace.Trace(header(speculation=ns.Speculation(top_k, depth)), [ROUNDS[0], chosen], cut=False)


def test_a_large_tree_keeps_its_accepted_path_and_its_likely_nodes():
    """Bugs: a picture of hundreds of kilobytes; the accepted path left out; a node without its parent."""
    shown, tokenizer = tree_of(0, named(**{f"t{i}": "&<" * 30 for i in range(100)}), large())
    assert shown.left_out == 256 - view.MOST
    assert [n.kind for n in shown.nodes].count("accepted") == 2
    assert len(shown.nodes) == view.MOST + 2
    assert all(n.parent < i for i, n in enumerate(shown.nodes))
    # The first three chains and 10 nodes of the fourth are the likeliest 58 others.
    starts = [i for i, n in enumerate(shown.nodes) if n.parent == 0]
    assert [shown.nodes[i].token for i in starts] == [0, 1, 2, 3, 15]
    drawn = picture.tree(shown, tokenizer)
    assert len(drawn.encode()) < LIMIT
    assert f"{shown.left_out} less likely nodes are left out" in drawn
    fits(ET.fromstring(drawn))
    assert view.lines(shown, None, colour=False)[-1] == f"  and {shown.left_out} less likely nodes"


def test_acceptance_is_counted_by_position():
    """Bugs: the prefill or the target's own token past a full draft counted; a cut round's unknown end counted as a
    rejection; positions counted from the prompt; a tree that ended early not counted."""
    found = trace.Trace(header(), ROUNDS, cut=False)
    tried = tally.trials(found)
    assert [(s.first, s.accepted, s.tried, s.offered) for s in tally.by_depth(tried)] == [(1, 4, 6, 5), (2, 2, 3, 3)]
    place = [(s.first, s.accepted, s.tried) for s in tally.by_place(tally.trials(found, 0))]
    assert place == [
        *((0, 0, 0), (1, 1, 1), (2, 1, 1), (3, 0, 0), (4, 1, 1), (5, 0, 1)),
        *((6, 0, 1), (7, 0, 1), (8, 1, 1), (9, 1, 1)),
    ]
    assert tally.by_place(tried)[1].tried == 2  # both requests
    assert [(t.depth, t.place, t.accepted) for t in tally.trials(found, 1)] == [(1, 1, True)]


@pytest.mark.parametrize("spec", [ns.Speculation(depth=3), ns.Speculation(top_k=3, depth=3, num_nodes=5)])
def test_counts_are_the_completions(spec, tmp_path):
    """Bug: a definition that fits the hand-made trace alone. The oracle is what generate returns."""
    draft = ns.load_draft("frozen", target())
    asked = [ns.Sampling(max_tokens=20, temperature=1.0, seed=s) for s in range(3)]
    prompts = [prompt(5 + s, seed=s) for s in range(3)]
    out = ns.generate(target(), prompts, asked, draft=draft, speculation=spec, trace=tmp_path / "t")
    found = trace.read(tmp_path / "t")
    shares = tally.by_depth(tally.trials(found))
    accepted = [a for o in out for a in o.accepted]
    assert [s.accepted for s in shares] == [sum(a >= d for a in accepted) for d in range(1, len(shares) + 1)]
    assert shares[0].tried == len(accepted)
    for i, o in enumerate(out):
        places = {t.place: t.accepted for t in tally.trials(found, i)}
        assert {p for p, yes in places.items() if yes} == {p for p, d in enumerate(o.origin) if d}


def test_wilson_interval():
    """Bug: the normal interval, which is a point at 0 and 1; another level. The oracle solves its equation."""
    assert tally.wilson(8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    for k, n in ((0, 7), (7, 7), (1, 3), (500, 1000)):
        z2, p = 1.959963984540054**2, k / n
        roots = sorted(np.roots([1 + z2 / n, -(2 * p + z2 / n), p * p]).real)
        assert tally.wilson(k, n) == pytest.approx(roots, abs=1e-9)
    assert tally.wilson(0, 0) == (0.0, 1.0)


def test_positions_are_binned_whole():
    """Bugs: a trial lost at a bin's border; more bins than fit; bins of unequal width."""
    for span in (1, 15, 16, 17, 32, 33, 1000):
        tried = [tally.Trial(1, p, p % 3 == 0, True) for p in range(span)]
        shares = tally.by_place(tried)
        assert len(shares) <= tally.BINS
        assert sum(s.tried for s in shares) == span
        assert len({s.last - s.first for s in shares}) == 1
        assert [s.accepted for s in shares] == [
            sum(p % 3 == 0 for p in range(s.first, min(s.last + 1, span))) for s in shares
        ]
    assert tally.by_place(tried)[1].name == "64-127"


def test_acceptance_as_text(made, capsys):
    code, out, err = run(capsys, "picture", made, "--acceptance")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[:6] == [
        "model draft, top_k 2, depth 2, 4 nodes: acceptance of 9 tokens",
        "",
        "accepted by draft position",
        "position    accepted / tried  undrafted   share   95% interval",
        "1                      4 / 6          1   66.7%    30.0% to  90.3%   #############",
        "2                      2 / 3          0   66.7%    20.8% to  93.9%   #############",
    ]
    assert "3                      0 / 0          0       -" in lines
    only = run(capsys, "picture", made, "--acceptance", "--request", "1")[1]
    assert "1                      1 / 1          0  100.0%    20.7% to 100.0%" in only


def test_acceptance_as_svg(made, tmp_path, capsys):
    """Bugs: a bar of another height than its share; a whisker that is not the interval; counts that are not there."""
    file = tmp_path / "a.svg"
    assert run(capsys, "picture", made, "--acceptance", "--out", str(file))[0] == 0
    root = ET.fromstring(file.read_text())
    assert [e.text for e in kinds(root, "text", "name")] == list(command.PANELS)
    assert [e.text for e in kinds(root, "text", "figures")][:2] == ["4/6", "2/3"]
    bars, whiskers = kinds(root, "rect", "bar"), kinds(root, "path", "whisker-edge")
    assert len(bars) == len(whiskers) == 2 + 8  # positions 0 and 3 of the answer were not tried
    for bar, whisker, (k, n) in zip(bars, whiskers, [(4, 6), (2, 3)], strict=False):
        assert float(bar.get("height")) == pytest.approx(picture.PLOT * k / n, abs=0.1)
        base = float(bar.get("y")) + float(bar.get("height"))
        ends = re.match(r"M[\d.]+ ([\d.]+)V([\d.]+)", whisker.get("d")).groups()
        assert [(base - float(y)) / picture.PLOT for y in ends] == pytest.approx(tally.wilson(k, n), abs=1e-3)
    width, height = (float(x) for x in root.get("viewBox").split()[2:])
    assert all(0 < float(e.get("y")) < height and 0 < float(e.get("x")) < width for e in root.iter(f"{SVG}text"))
    many = [tally.Trial(d, p, True, True) for d in range(1, 257) for p in range(0, 8192, 100)]
    drawn = picture.acceptance("t", {"a": tally.by_depth(many), "b": tally.by_place(many)})
    assert len(drawn.encode()) < LIMIT
    ET.fromstring(drawn)


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("palette", [picture.LIGHT, picture.DARK], ids=["light", "dark"])
def test_colours_have_contrast(palette):
    """Bug: text that cannot be read on its background. WCAG 2 asks for 4.5 for text and 3 for lines."""

    def contrast(a, b):
        high, low = sorted((luminance(palette[a]), luminance(palette[b])), reverse=True)
        return (high + 0.05) / (low + 0.05)

    texts = [("ink", "paper"), ("faint", "paper"), ("good", "paper"), ("ink", "box"), ("faint", "box")]
    texts += [("good", "good-box"), ("faint", "good-box"), ("own", "own-box"), ("faint", "own-box")]
    assert [pair for pair in texts if contrast(*pair) < 4.5] == []
    assert [name for name in ("line", "good", "own") if contrast(name, "paper") < 3] == []


def test_colour_follows_the_terminal(monkeypatch):
    """Bugs: escape codes in a file; NO_COLOR ignored; a tree whose colours are its only marks."""

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    assert view.coloured(Terminal())
    assert not view.coloured(io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert view.coloured(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not view.coloured(Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    assert view.coloured(Terminal())
    shown, _ = tree_of(1)
    plain, colour = (view.lines(shown, None, colour) for colour in (False, True))
    assert [re.sub(r"\033\[[\d;]*m", "", line) for line in colour] == plain
    assert sum(line.startswith(view.STYLE["accepted"]) for line in colour) == 1
    in_ascii = view.lines(shown, None, False, "ascii")
    assert "".join(in_ascii).isascii()
    assert [len(line) for line in in_ascii] == [len(line) for line in plain]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random target on disk with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("target") / "model"
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    tiny.write(path, raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(path)
    return str(path)


GENERATE = ("generate", "Hello", "--max-tokens", "13", "--draft", "frozen", "--spec-depth", "3", "--spec-topk", "2")


def test_show_prints_the_trees_of_the_first_rounds(folder, tmp_path, capsys):
    """Bugs: another round's tree; all of them at once; the recorded file left behind or --trace not honoured."""
    file = str(tmp_path / "t.jsonl")
    argv = (*GENERATE, "--model", folder, "--show")
    code, out, err = run(capsys, *argv, "--trace", file)
    assert (code, err) == (0, "")
    first, second = (run(capsys, "picture", file, "--round", n, "--model", folder)[1] for n in "01")
    assert first in out
    assert out.count("drafted tokens accepted") == 1
    code, two, _ = run(capsys, *argv, "--show-rounds", "2")
    assert code == 0
    assert two.index(first) < two.index(second) < two.index("tok/s")
    assert two.count("drafted tokens accepted") == 2
    assert "\033" not in two


def test_show_skips_rounds_without_a_tree_and_plain_decoding(folder, capsys):
    """Bug: empty trees of ngram's first rounds, or a crash without a draft."""
    ngram = ("generate", "Hello", "--max-tokens", "4", "--model", folder, "--show", "--draft", "ngram")
    for argv in ((*ngram, "--show-rounds", "9"), (*ngram[:-1], "none")):
        code, out, _ = run(capsys, *argv)
        assert code == 0
        assert ": 0 of 0 drafted" not in out
        assert "tokens: " in out


def refused(capsys, *argv):
    code, out, err = run(capsys, *argv)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    return err


def test_bad_arguments_are_refused_by_name(made, tmp_path, capsys, monkeypatch):
    """Bug: a traceback, or an error after the file has been read or the tokenizer loaded."""
    absent = f"argument --request: {made}: request 2 is not in the trace, which has 2\n"
    for option in ((), ("--acceptance",), ("--round", "0")):
        assert refused(capsys, "picture", made, "--request", "2", *option).endswith(absent)
    rounds = f"argument --round: {made}: round 5 is not in the trace: request 0 has rounds 0 to 4\n"
    assert refused(capsys, "picture", made, "--round", "5").endswith(rounds)
    assert "argument --model" in refused(capsys, "picture", made, "--model", str(tmp_path / "absent"))

    def read(_):
        raise AssertionError("the trace was read before the arguments had been checked")

    monkeypatch.setattr(trace, "read", read)
    for option, value in (("--round", "-1"), ("--request", "x"), ("--request", "9" * 30), ("--model", "")):
        assert f"argument {option}" in refused(capsys, "picture", made, option, value)
    for value in ("", str(tmp_path), str(tmp_path / "absent" / "x.svg"), "a\0b"):
        assert "argument --out" in refused(capsys, "picture", made, "--out", value)
    assert "argument --round" in refused(capsys, "picture", made, "--acceptance", "--round", "1")
    assert "argument --model" in refused(capsys, "picture", made, "--acceptance", "--model", "smollm2")
    assert "--show-rounds: needs --show" in refused(capsys, "generate", "Hi", "--show-rounds", "2")
    assert "argument --show-rounds" in refused(capsys, "generate", "Hi", "--show", "--show-rounds", "0")


def test_a_file_without_what_is_asked_for_is_refused(tmp_path, capsys):
    """Bugs: an empty picture of an empty trace; a broken file that ends in a traceback."""
    empty = write(tmp_path / "empty", rounds=[])
    assert "request 0 has no round in the trace" in refused(capsys, "picture", empty)
    assert "no round has drafted tokens" in refused(capsys, "picture", empty, "--acceptance")
    bare = write(tmp_path / "bare", rounds=[ROUNDS[0], record(4, NOTHING, [], [4])])
    assert "no round has drafted tokens" in refused(capsys, "picture", bare, "--acceptance")
    plain = [record(3, NO_NODES, [], [7]), record(4, NO_NODES, [], [8], prefill=False)]
    undrafted = write(tmp_path / "plain", header(draft=None, speculation=None), plain)
    assert "no round has drafted tokens" in refused(capsys, "picture", undrafted, "--acceptance")
    assert run(capsys, "picture", undrafted)[0] == 0
    whole = (tmp_path / "bare").read_bytes()
    for text, message in ((b"", "header is incomplete"), (b"{}\n", "line 1"), (whole + b"x\n", "line 4")):
        (tmp_path / "broken").write_bytes(text)
        for option in ((), ("--acceptance",), ("--out", str(tmp_path / "x.svg"))):
            assert message in refused(capsys, "picture", str(tmp_path / "broken"), *option)
    assert "no such file" in refused(capsys, "picture", str(tmp_path / "absent"))
    assert not (tmp_path / "x.svg").exists()


def test_a_files_own_words_do_no_harm(tmp_path, capsys):
    """Bugs: a name in a trace that a terminal obeys, that is no XML, or that cannot be written."""
    odd = write(tmp_path / "odd", header(draft="a\x1b[31m\ud800<b"))
    assert __main__.main(["picture", odd, "--acceptance"]) == 0
    assert "a\ufffd[31m\ufffd<b draft" in capsys.readouterr().out
    assert __main__.main(["picture", odd, "--acceptance", "--out", str(tmp_path / "a.svg")]) == 0
    ET.parse(tmp_path / "a.svg")


def test_places_that_look_like_files(made, tmp_path, capsys):
    """Bugs: a link to the trace that is not seen as one; a name that no file can have, in a traceback."""
    link = tmp_path / "link"
    link.symlink_to(made)
    assert "is the trace itself" in refused(capsys, "picture", str(link), "--out", str(made))
    assert __main__.main(["picture", made, "--out", str(tmp_path / ("x" * 300))]) == 1
    assert "cannot be written: File name too long" in capsys.readouterr().err


def test_a_torn_last_line_is_told_of_and_left_out(made, tmp_path, capsys):
    """Bug: a run that was killed is shown as if its last round had not been; or not at all."""
    lines = Path(made).read_bytes().splitlines(keepends=True)
    torn = tmp_path / "torn"
    torn.write_bytes(b"".join(lines[:6]) + lines[6][:-9])
    (tmp_path / "short").write_bytes(b"".join(lines[:6]))
    told = f": {torn}: line 7 is not whole and is left out\n"
    for option in ((), ("--acceptance",), ("--out", str(tmp_path / "x.svg"))):
        code, out, err = run(capsys, "picture", str(torn), *option)
        assert (code, err.count("\n"), err.endswith(told)) == (0, 1, True), err
        assert run(capsys, "picture", str(tmp_path / "short"), *option) == (0, out, "")
    assert refused(capsys, "picture", str(torn), "--request", "1").endswith(
        f"argument --request: {torn}: request 1 has no round in the trace; line 7 is not whole and is left out\n"
    )


def test_a_picture_is_written_whole_or_not_at_all(made, tmp_path, capsys, monkeypatch):
    """Bug: a full disk leaves half a picture, loses the one before, or litters the folder."""
    file = tmp_path / "x.svg"
    file.write_text("older")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, out, err = run(capsys, "picture", made, "--out", str(file))
    assert (code, out) == (1, "")
    assert "x.svg cannot be written: No space left on device" in err
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.svg", "older")]


def test_a_picture_does_not_replace_its_trace(tmp_path, capsys):
    """Bug: `picture X --out X`: the run is gone, and what is left is a picture of it."""
    trace = tmp_path / "run.jsonl"
    trace.write_text("a run\n")
    with pytest.raises(SystemExit, match="2"):
        __main__.main(["picture", str(trace), "--out", str(trace)])
    assert "is the trace itself" in capsys.readouterr().err
    assert trace.read_text() == "a run\n"

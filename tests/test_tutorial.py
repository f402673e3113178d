"""The blocks of docs/tutorial.md run as they stand, in order, on a tiny model."""

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import nanospec_fn as ns
from tests import tiny

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), flags=re.M | re.S)


@pytest.mark.usefixtures("one_thread")
def test_the_blocks_run(monkeypatch):
    """Bugs: a tutorial that a changed signature left behind, a name that no block defines. The blocks assert what they
    claim."""
    monkeypatch.setattr(ns, "load", lambda name: tiny.model())
    names: dict[str, Any] = {"__name__": "tutorial"}
    for block in BLOCKS:
        exec(compile(block, str(PAGE), "exec"), names)
    assert len(names["out"].tokens) == 20


def test_an_example_fits_in_30_lines():
    sizes = [len([line for line in block.splitlines() if line.strip()]) for block in BLOCKS]
    assert len(sizes) == 6
    assert max(sizes) <= 30


@pytest.mark.usefixtures("one_thread")
def test_the_draft_knows_the_most_frequent_follower():
    """Bugs: the last follower for the most frequent one, a pair across tokens; a table of V x V entries."""
    names: dict[str, Any] = {"__name__": "tutorial"}
    exec(BLOCKS[1], names)
    model, text = tiny.model(), [3, 7, 3, 7, 3, 9, 4, 9, 3, 2, 9, 3]
    table = names["bigram"](text, model).params
    assert table.shape == (model.cfg.vocab_size,)
    after: dict[int, list[int]] = {}
    for token, following in pairwise(text):
        after.setdefault(token, []).append(following)
    assert {token: int(table[token]) for token in after} == {t: max(f, key=f.count) for t, f in after.items()}


@pytest.mark.usefixtures("one_thread")
def test_the_rule_is_relaxed_acceptance_of_the_best_k():
    """Bug: log-probs of the tutorial's rule that are not those with which its tokens were emitted."""
    model = tiny.model()
    names: dict[str, Any] = {}
    exec(BLOCKS[3], names)
    draft, chain = ns.load_draft("frozen", model), ns.Speculation(depth=4)
    ruled = ns.build(model, draft=draft, speculation=chain, decide=names["among_the_best"](3))
    built_in = ns.build(model, draft=draft, speculation=chain)
    sampling = ns.Sampling(temperature=1.5, seed=3)
    relaxed = ns.Sampling(temperature=1.5, seed=3, rule="relaxed", accept_top_k=3)
    params, rows = ns.Params(target=model.params, draft=draft.params), []
    for program, request in ((ruled, sampling), (built_in, relaxed)):
        state = program.insert(program.init(), 0, [5, 6, 7], request)
        state, _ = program.prefill(params, state)
        infos = []
        for _ in range(6):
            state, info = program.speculate(params, state)
            infos.append((info.tokens[0].tolist(), info.target_logp[0].tolist(), info.behaviour_logp[0].tolist()))
        rows.append(infos)
    assert rows[0] == rows[1]
    assert any(sum(token >= 0 for token in tokens) > 1 for tokens, _, _ in rows[0])

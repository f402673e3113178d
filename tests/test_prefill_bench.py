"""bench.prefill: its rates from a clock that is told, its step the same work each time, its refusals."""

import json

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from bench import prefill, rounds
from nanospec_fn import struct
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


def test_rates_by_hand(monkeypatch):
    """Bugs: the vocabulary's product or the prompts' count left out or counted twice; seconds for milliseconds."""
    model = tiny.model()
    monkeypatch.setattr(rounds.Clock, "milliseconds", lambda self: [4.0, 2.0, 3.0])
    found = prefill.measure(model, None, prompts=2, tokens=10, repeats=3)
    cfg = model.cfg
    heads, kv = cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    layer = (2 * heads + 2 * kv + 3 * cfg.intermediate_size) * cfg.hidden_size
    assert found["ms"] == found["library_ms"] == 3.0
    assert found["tflops"] == pytest.approx(2 * 20 * cfg.num_layers * layer / 3e-3 / 1e12)
    assert (found["tok_s"], found["of_library"], found["beyond_gib"]) == (pytest.approx(20 / 3e-3), 1.0, None)


@pytest.mark.parametrize("draft", [None, "frozen"])
def test_a_step_is_repeated(draft):
    """Bugs: the second step has nothing left to read, and is fast; it is captured anew, and slow."""
    model = tiny.model()
    drafted = ns.load_draft(draft, model) if draft else None
    program = ns.build(model, drafted, ns.EngineConfig(2, 20, 4, prefill_chunk=16))
    params = ns.Params(model.params, drafted.params if drafted else ())
    once, info = program.prefill(params, rounds.admitted(program, 11))
    want, places = pytree.tree_map(torch.clone, once), [x.data_ptr() for x in pytree.tree_leaves(once)]
    prefill.rewind_(once)
    assert [x.data_ptr() for x in pytree.tree_leaves(once)] == places, "a captured step would be captured again"
    again, same = program.prefill(params, once)
    assert info.count.tolist() == [1, 1]
    assert struct.bytes_equal((info.tokens, info.target_logp), (same.tokens, same.target_logp))
    for name in ("total", "length", "unseen", "num_pages", "done"):
        assert torch.equal(getattr(want.slots, name), getattr(again.slots, name)), name
    assert struct.bytes_equal(want.pools, again.pools)


def test_a_row_is_written(tmp_path, capsys):
    raw = tiny.config()
    tiny.write(tmp_path / "m", raw, tiny.state_of(tiny.llama(raw)))
    argv = ["--model", str(tmp_path / "m"), "--draft", "none", "--device", "cpu", "--prompts", "2", "--tokens", "9"]
    assert prefill.main([*argv, "--out", str(tmp_path / "out")]) == 0
    row = json.loads(capsys.readouterr().out)
    (file,) = (tmp_path / "out").iterdir()
    assert json.loads(file.read_text()) == row
    assert (row["prompts"], row["tokens"], row["gpu"], row["draft"]) == (2, 9, "cpu", "none")
    assert row["library_ms"] > 0
    assert row["of_library"] == pytest.approx(row["library_ms"] / row["ms"])
    with pytest.raises(SystemExit) as refused:
        prefill.main([*argv, "--tokens", "5000", "--out", str(tmp_path / "none")])
    assert refused.value.code == 2
    assert "its 5000 tokens leave no room in the context" in capsys.readouterr().err
    assert not any((tmp_path / "none").iterdir())


def test_a_folder_that_may_not_be_written_is_refused_at_once(tmp_path, monkeypatch, capsys):
    """Bug: the figures are measured and then lost."""
    monkeypatch.setattr(prefill.arguments.os, "access", lambda place, mode: place != tmp_path)
    with pytest.raises(SystemExit):
        prefill.main(["--out", str(tmp_path / "deep" / "down")])
    assert f"argument --out: {tmp_path} may not be written to" in capsys.readouterr().err

"""The noise diagnosis: its unit by hand, its logits against transformers, and a whole run on a tiny model."""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import kernels
from tests import diag_numerics, tiny

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("tinyllama-1.1b")


def test_ulps_by_hand():
    """bf16 keeps 8 bits: between 1 and 2 its steps are 1/128, between 16 and 32 1/8, below 1 they halve."""
    reference = torch.tensor([1.0, 1.9, 2.0, -20.0, 0.75, 16.0])
    got = reference + torch.tensor([1 / 128, -2 / 128, 1 / 64, 1 / 4, 1 / 256, 0.0])
    assert diag_numerics.ulps(got, reference).tolist() == pytest.approx([1, 2, 1, 2, 1, 0], rel=1e-4)
    steps = torch.tensor([1.0, 1.9, 2.0, 20.0, 0.75, 16.0]).bfloat16()
    above = torch.nextafter(steps, torch.full_like(steps, torch.inf))
    assert torch.equal(diag_numerics.ulps(above, steps), torch.ones(6).double())  # torch's own idea of one step


def test_shares_by_hand():
    noise = torch.tensor([0.0, 0.5, 1.0, 1.5, 3.0, 8.0, 9.0, 100.0])
    assert diag_numerics.shares(noise) == {0: 1 / 8, 1: 3 / 8, 2: 4 / 8, 4: 5 / 8, 8: 6 / 8}


def in_bf16(target: ns.Model) -> ns.Model:
    cfg = dataclasses.replace(target.cfg, gemm=kernels.pick_gemm(torch.device("cpu"), torch.bfloat16))
    return dataclasses.replace(target, cfg=cfg, params=pytree.tree_map(torch.Tensor.bfloat16, target.params))


def test_logits_are_those_of_the_emitted_tokens():
    """Bugs: the logit of the row after; a prompt's last position left out; KV at the wrong place."""
    target, tokens = tiny.model("tinyllama-1.1b"), [5, 9, 3, 77, 12, 12, 40, 2]
    want = tiny.llama(RAW)(torch.tensor([tokens])).logits[0]
    for start in (1, 3, 7):
        got = diag_numerics.emitted_logits(target, "sdpa", tokens, start)
        assert torch.allclose(got, want[range(start - 1, 7), tokens[start:]], atol=1e-4)


def test_noise_of_bf16_is_seen_and_a_backend_has_none_against_itself(monkeypatch):
    """Bugs: both sides in one precision; a histogram of nothing."""
    target = in_bf16(tiny.model("tinyllama-1.1b"))
    prompts = [[5, 9, 3], [8, 1]]
    noise = diag_numerics.measure(target, "sdpa", prompts, 6)
    assert noise.shape == (12,)
    assert 0 < noise.mean() < 64  # two layers of bf16: some steps of the last bit, not another number
    monkeypatch.setattr(diag_numerics, "reference_of", lambda same: same)
    assert diag_numerics.measure(target, "sdpa", prompts, 6).count_nonzero() == 0


def test_command(tmp_path, capsys):
    raw = tiny.config("tinyllama-1.1b", vocab_size=258)
    tiny.write(tmp_path / "model", raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("Hello\nYes\n")
    argv = ["--model", str(tmp_path / "model"), "--prompts", str(tmp_path / "prompts.txt"), "--device", "cpu"]
    assert diag_numerics.main([*argv, "--max-tokens", "4"]) == 0
    shown = capsys.readouterr().out
    assert "8 tokens" in shown
    assert [line.split(":")[0] for line in shown.splitlines() if "within" in line] == [
        f"within {n} ulp" for n in (0, 1, 2, 4, 8)
    ]
    with pytest.raises(SystemExit):
        diag_numerics.main([*argv, "--backend", "flashinfer"])
    assert "flashinfer needs a CUDA device" in capsys.readouterr().err

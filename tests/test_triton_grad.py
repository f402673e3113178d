"""Gradients through the Triton kernels under torch.func, in the interpreter: forward theirs, backward the library's."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests import needs

if reason := needs.no_interpreter():
    pytest.skip(reason, allow_module_level=True)

import nanospec_fn as ns
from nanospec_fn import filters, rehearsal, struct
from nanospec_fn import model as llama
from rl import eagle_head
from tests import interpreted, scripted

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = torch.tensor([[3, 5, 7, 2, 9, 4]])


def check(loss, params, on_cpu, on_device):
    """The same value and gradient by the library and by the kernels."""
    with torch.enable_grad():
        grads, value = torch.func.grad_and_value(lambda p: loss(p, on_cpu))(params)
        with interpreted.on_device():
            found, same = torch.func.grad_and_value(lambda p: loss(p, on_device))(params)
    torch.testing.assert_close(same, value, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(pytree.tree_leaves(found), pytree.tree_leaves(grads), rtol=1e-4, atol=1e-4)
    assert all(grad.abs().max() > 0 for grad in pytree.tree_leaves(grads))


def test_the_policys_log_probs():
    """Catches: a kernel that is handed a function transform's wrapper (training on a GPU dies), a constant that got a
    gradient, a backward of another function."""
    model = scripted.target()
    one, off = torch.full((TOKENS.numel(),), 0.7), torch.zeros(TOKENS.numel(), dtype=torch.int32)

    def loss(params, cfg):
        logits = ns.forward(params, cfg, TOKENS)[0]
        return filters.log_probs(logits, one, off, torch.ones_like(one))[:, 5].sum()

    check(loss, model.params, model.cfg, interpreted.canonical(model).cfg)


def test_kernels_read_what_was_first_made_under_a_transform():
    """Bug: a table kept from a gradient's pass is that transform's wrapper, whose memory no later kernel can read."""
    model = interpreted.canonical(scripted.target())
    llama.inv_freq.cache_clear()
    with interpreted.on_device():
        with torch.enable_grad():
            torch.func.grad(lambda p: ns.forward(p, model.cfg, TOKENS)[0].sum())(model.params)
        after = ns.forward(model.params, model.cfg, TOKENS)[0]
        llama.inv_freq.cache_clear()
        assert torch.equal(after, ns.forward(model.params, model.cfg, TOKENS)[0])


def test_a_heads_unrolled_outputs():
    """Catches the same in the head's own kernels: what rl.train_eagle differentiates."""
    model = scripted.target()
    target_id = torch.arange(model.cfg.vocab_size)
    cfg = eagle_head.config_for(model, (1,), len(target_id), 24)
    head = eagle_head.init(cfg, model, target_id, True, 0)
    taps = torch.randn(1, TOKENS.shape[1], cfg.target_hidden_size, generator=torch.Generator().manual_seed(1))

    def loss(params, gemm):
        outs = rehearsal.outputs(params, gemm, model.params.embed, TOKENS, taps, 3)
        return torch.stack(outs).square().sum() + (params.norm.sum() + params.head.sum()) * 0.1

    canonical = interpreted.canonical(ns.Model(cfg, head)).cfg
    check(loss, struct.replace(head, target_id=()), cfg, canonical)

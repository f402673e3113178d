"""The main job on the real model: SmolLM2-135M-Instruct answers MT-Bench questions as transformers does."""

import os

import pytest

import nanospec_fn as ns
from bench import peers, prompts
from nanospec_fn import chat

pytestmark = pytest.mark.smollm2

DRAFTS = {
    "plain": ("none", None),
    "ngram chain": ("ngram", ns.Speculation(top_k=1, depth=5)),
    "ngram tree": ("ngram", ns.Speculation(top_k=3, depth=4, num_nodes=9)),
}


@pytest.fixture(scope="module")
def questions() -> list[str]:
    if not os.environ.get("NANOSPEC_DATA"):
        if os.environ.get("NANOSPEC_GATE") == "1":
            pytest.fail("NANOSPEC_DATA is not set: the MT-Bench questions are read from there")
        pytest.skip("NANOSPEC_DATA is not set: the MT-Bench questions are read from there")
    return prompts.load("mt-bench", 20)


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_equals_transformers(smollm2, questions, name):
    """Bugs: any that changes what a real model says. Oracle: transformers' `generate(do_sample=False)`, one by one."""
    check(smollm2, questions[:4], 48, *DRAFTS[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_equals_transformers_at_length(smollm2, questions, name):
    check(smollm2, questions, 128, *DRAFTS[name])


def check(model: ns.Model, questions: list[str], max_tokens: int, draft: str, speculation: ns.Speculation | None):
    tokens = [chat.encode(model.tokenizer, q) for q in questions]
    expected = [peers.Transformers(model).batch([t], max_tokens)[0][0] for t in tokens]
    sampling = ns.Sampling(max_tokens=max_tokens)
    out = ns.generate(model, questions, sampling, draft=ns.load_draft(draft, model), speculation=speculation)
    assert [o.tokens for o in out] == expected
    assert [o.finish_reason for o in out] == ["stop" if e[-1] in model.cfg.eos_ids else "length" for e in expected]

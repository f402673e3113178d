"""The main job on the real model: SmolLM2-135M-Instruct answers MT-Bench questions as transformers does."""

import functools
import os
from collections.abc import Callable

import pytest

import nanospec_fn as ns
from bench import peers
from nanospec_fn import chat, prompts
from tests import needs

pytestmark = pytest.mark.smollm2

DRAFTS = {
    "plain": ("none", None),
    "ngram chain": ("ngram", ns.Speculation(top_k=1, depth=5)),
    "ngram tree": ("ngram", ns.Speculation(top_k=3, depth=4, num_nodes=9)),
    "eagle tree": ("eagle", ns.Speculation(top_k=4, depth=5)),
}


@pytest.fixture(scope="module")
def questions() -> list[str]:
    if not os.environ.get("NANOSPEC_DATA"):
        needs.lacking("NANOSPEC_DATA is not set: the MT-Bench questions are read from there")
    return prompts.load("mt-bench", 20)


@pytest.fixture(scope="module")
def transformers_says(smollm2) -> Callable[[list[str], int], list[list[int]]]:
    """transformers' `generate(do_sample=False)`, question by question, each asked once."""

    @functools.cache
    def answer(question: str, max_tokens: int) -> list[int]:
        tokens = chat.encode(smollm2.tokenizer, question)
        return peers.Transformers(smollm2).batch([tokens], max_tokens)[0][0]

    return lambda questions, max_tokens: [answer(question, max_tokens) for question in questions]


@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_equals_transformers(smollm2, questions, transformers_says, name):
    """Bugs: any that changes what a real model says."""
    check(smollm2, questions[:3], transformers_says(questions[:3], 32), 32, *DRAFTS[name])


@pytest.mark.deep
@pytest.mark.parametrize("name", DRAFTS)
def test_greedy_equals_transformers_at_length(smollm2, questions, transformers_says, name):
    check(smollm2, questions, transformers_says(questions, 128), 128, *DRAFTS[name])


def check(
    model: ns.Model,
    questions: list[str],
    expected: list[list[int]],
    max_tokens: int,
    draft: str,
    speculation: ns.Speculation | None,
) -> None:
    sampling = ns.Sampling(max_tokens=max_tokens)
    out = ns.generate(model, questions, sampling, draft=ns.load_draft(draft, model), speculation=speculation)
    assert [o.tokens for o in out] == expected
    assert [o.finish_reason for o in out] == ["stop" if e[-1] in model.cfg.eos_ids else "length" for e in expected]

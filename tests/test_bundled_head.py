"""The EAGLE-3 head that comes with SmolLM2-135M-Instruct."""

import json
from pathlib import Path

import pytest

import nanospec_fn as ns
from nanospec_fn import draft_model

FOLDER = Path(ns.__file__).parent / "heads" / "smollm2"
LIMIT = 16 * 2**20  # bytes that the package may carry
PROMPTS = (
    "Explain in simple terms why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A shop sells pens at 3 dollars each. How much do 7 pens cost? Think step by step.",
)


def test_the_folder_is_small_and_says_where_it_comes_from():
    """Catches: a head that no card describes, or one that outgrows the package."""
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= LIMIT
    last = json.loads((FOLDER / "train_log.jsonl").read_text().splitlines()[-1])
    card = (FOLDER / "README.md").read_text()
    assert f"{last['step']} steps" in card
    assert f"{last['tokens'] / 1e6:.0f} M tokens with padding" in card


def test_it_is_found_by_its_models_name_alone():
    """Catches: a head for every model, or a folder outside the package's heads by way of a name."""
    assert draft_model.bundled_head("smollm2") == FOLDER
    assert [draft_model.bundled_head(name) for name in ("", ".", "..", "smollm", "../heads/smollm2", str(FOLDER))] == [
        None
    ] * 6


@pytest.mark.smollm2
def test_a_real_model_accepts_it_and_its_output_is_plain_decodings(smollm2):
    """Catches: features off by one layer, a lost map, a wrong rope: silent mistakes that cost acceptance alone."""
    draft = ns.load_draft("eagle", smollm2)
    sampling = ns.Sampling(max_tokens=40)
    plain = ns.generate(smollm2, PROMPTS, sampling)
    chain = ns.generate(smollm2, PROMPTS, sampling, draft=draft, speculation=ns.Speculation(top_k=1, depth=5))
    for one, other in zip(plain, chain, strict=True):
        assert one.tokens == other.tokens
        assert one.target_logp == other.target_logp
    assert ns.mean_accepted_len(chain) > 2.0

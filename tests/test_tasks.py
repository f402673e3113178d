"""The reinforcement learner's tasks: what an answer is, what a completion is worth, and that it can be learned."""

import dataclasses
import json
import os
from fractions import Fraction
from pathlib import Path

import pytest
import torch

import nanospec_fn as ns
from rl import tasks
from rl.tasks import Problem, Reward
from tests import needs, tiny

# (text, the number that it begins with), by hand
NUMBERS = {
    "18": 18,
    "0": 0,
    "-7": -7,
    "−7": -7,  # a minus sign proper
    "+7": 7,
    "1,234": 1234,
    "1,234,567.50": Fraction(2469135, 2),
    "$80,000": 80000,
    "$18.00": 18,
    "-$5": -5,
    "$-5": -5,
    "18.": 18,
    "18.00.": 18,
    "3.50": Fraction(7, 2),
    ".5": Fraction(1, 2),
    "0.1": Fraction(1, 10),  # no binary rounding: 0.1 is not 0.1000000000000000055
    "007": 7,
    "3/4": Fraction(3, 4),
    "-6/4": Fraction(-3, 2),
    "70%": 70,
    "18 dollars": 18,
    "18kg": 18,
    "1/0": None,
    "12,34": None,  # neither 12 nor 1234
    "1234,567": None,
    "": None,
    "eighteen": None,
    " 18": None,
    "$": None,
    "-": None,
    "٣": None,  # a digit of another script, which int() would take
    "9" * 5000: None,  # which int() would refuse with an error
    "1," + ",".join(["000"] * 2000): None,
}


@pytest.mark.parametrize("text", NUMBERS, ids=lambda text: text[:16] or "empty")
def test_numbers(text):
    """Catches: a comma, sign, dollar, trailing dot or .00 that turns a right answer wrong; an error on huge digits."""
    assert tasks.number(text) == NUMBERS[text]


# text: (the strict answer, the flexible one), by hand
ANSWERS = {
    "She has 3 and 4, so 7.\n#### 7": (7, 7),
    "#### 1,000": (1000, 1000),
    "####12": (12, 12),
    "####\t$12.00.": (12, 12),
    "The answer is 42.": (None, 42),
    "The answer is $1,234.00.": (None, 1234),
    "It is 16 - 3 = 13 apples": (None, 13),
    "10-3": (None, 3),  # a difference, no negative number
    "(4)-3": (None, 3),
    "a temperature of -3": (None, -3),
    "3, 4, 5": (None, 5),
    "3,4,5": (None, 5),
    "#### 5\nNext question: 9 - 2 = 7\n#### 7": (5, 7),  # the first mark counts: more of them are no more chances
    "#### \n18": (None, 18),
    "#### x18": (None, 18),
    "##### 18": (None, 18),
    "### 18": (None, 18),
    "#### 1/0": (None, None),
    "#### 12,34": (None, 34),
    "no number": (None, None),
    "": (None, None),
}


@pytest.mark.parametrize("text", ANSWERS, ids=lambda text: text[:20] or "empty")
def test_strict_and_flexible_answers(text):
    """Catches: the two extractions mixed up, the last mark taken for the first, a minus of a difference as a sign."""
    assert (tasks.strict_answer(text), tasks.flexible_answer(text)) == ANSWERS[text]


@pytest.mark.parametrize(
    "text, worth",
    [
        ("#### 1,234.00", Reward(1.0, True, True, True)),
        ("so 1234", Reward(0.5, True, False, True)),
        ("#### 1234\nor is it 5?", Reward(1.0, True, True, False)),
        ("#### 5", Reward(0.0, False, False, False)),
        ("", Reward(0.0, False, False, False)),
        (None, Reward(0.0, False, False, False)),
    ],
)
def test_gsm8k_reward(text, worth):
    """Catches: a reward for no answer, strict and flexible in each other's place, an answer compared as text."""
    assert tasks.judge_gsm8k(Problem("q", "1,234"), text, []) == worth
    assert tasks.judge_gsm8k(Problem("q", ""), text, []).value == 0  # a problem without an answer is never solved


def test_gsm8k_comes_from_its_files():
    """Catches: a row dropped or unreadable, test questions among those to train on, a question without its form."""
    if not os.environ.get("NANOSPEC_DATA"):
        needs.lacking("NANOSPEC_DATA is not set")
    model = dataclasses.replace(tiny.model(vocab_size=258, eos_token_id=257), tokenizer=tiny.tokenizer())
    one, again, other = (tasks.load("gsm8k", model, seed) for seed in (1, 1, 2))
    assert (len(one.problems), len(one.held_out)) == (7473, 1319)
    assert not {p.prompt for p in one.problems} & {p.prompt for p in one.held_out}
    assert one.problems == again.problems != other.problems
    assert one.held_out == other.held_out
    janet = one.held_out[0]
    assert isinstance(janet.prompt, str)
    assert janet.prompt.startswith("Janet")
    assert "####" in janet.prompt
    assert janet.answer == "18"
    assert all(one.reward(p, f"#### {p.answer}", []).value == 1 for p in one.problems)


def write_split(folder: Path, split: str, *lines: str) -> None:
    (folder / tasks.GSM8K[split]).write_text("\n".join(lines), encoding="utf-8")


GOOD = json.dumps({"question": "Two\u2028and two?", "answer": "It is\n#### 4"}, ensure_ascii=False)


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "gsm8k_train.jsonl:2: not valid JSON"),
        ("[]", 'gsm8k_train.jsonl:2: has no text under "question" and "answer"'),
        ('{"question": "x", "answer": 4}', 'gsm8k_train.jsonl:2: has no text under "question" and "answer"'),
        ('{"question": "x", "answer": "4"}', 'gsm8k_train.jsonl:2: its answer has no "#### N"'),
        ('{"question": "x", "answer": "#### four"}', 'gsm8k_train.jsonl:2: its answer has no "#### N"'),
    ],
)
def test_damaged_data_is_named(tmp_path, monkeypatch, line, message):
    """Catches: a bad row that is skipped, or ends in a traceback without its place."""
    model = dataclasses.replace(tiny.model(vocab_size=258, eos_token_id=257), tokenizer=tiny.tokenizer())
    monkeypatch.setenv("NANOSPEC_DATA", str(tmp_path))
    write_split(tmp_path, "train", GOOD, line)
    write_split(tmp_path, "test", GOOD)
    with pytest.raises(ValueError, match=r"gsm8k_train\.jsonl:2: ") as error:
        tasks.load("gsm8k", model, 0)
    assert message in str(error.value)
    write_split(tmp_path, "train", GOOD, "")
    assert [p.answer for p in tasks.load("gsm8k", model, 0).problems] == ["4"]  # U+2028 ends no line
    write_split(tmp_path, "train", "")
    with pytest.raises(ValueError, match="contains no problems"):
        tasks.load("gsm8k", model, 0)


def test_what_is_missing_is_named_before_a_model_loads(tmp_path, monkeypatch):
    """Catches: an unknown task, or one without its data, that is only found out after a model of gigabytes."""
    with pytest.raises(ValueError, match="task must be one of toy, gsm8k, got 'math'"):
        tasks.check("math")
    tasks.check("toy")
    monkeypatch.setenv("NANOSPEC_DATA", str(tmp_path))
    write_split(tmp_path, "train", GOOD)
    with pytest.raises(FileNotFoundError, match=r"gsm8k_test\.jsonl: no such file \(NANOSPEC_DATA"):
        tasks.check("gsm8k")
    monkeypatch.delenv("NANOSPEC_DATA")
    monkeypatch.setattr(tasks.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="set NANOSPEC_DATA to a folder that holds gsm8k_train"):
        tasks.check("gsm8k")


def test_gsm8k_needs_a_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOSPEC_DATA", str(tmp_path))
    write_split(tmp_path, "train", GOOD)
    write_split(tmp_path, "test", GOOD)
    with pytest.raises(ValueError, match="task gsm8k: its prompts are text, and the model has no tokenizer"):
        tasks.load("gsm8k", tiny.model(), 0)


@pytest.mark.parametrize(
    "tokens, value",
    [
        ([2, 4, 6, 8, 10, 12, 14, 16], 1.0),
        ([2, 4, 6, 8, 1, 3, 5, 7], 0.5),
        ([1] * 16, 0.0),
        ([2, 4], 0.25),  # of eight
        ([2] * 9 + [1], 0.9),
        ([2, 2, 2, 2, 2, 2, 2, 0], 0.875),  # 0 is an end
        ([0], 0.0),
        ([], 0.0),
    ],
)
def test_toy_reward(tokens, value):
    """Catches: odd for even, an early end that pays, an empty completion that divides by zero."""
    task = tasks.load("toy", tiny.model("smollm2-135m"), 0)  # its end is token 0
    worth = task.reward(task.problems[0], None, tokens)
    assert worth == Reward(value, value >= 0.9, value >= 0.9, value >= 0.9)


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_toy_prompts(with_tokenizer):
    """Catches: prompts that a model cannot read, that hold its end, or that do not depend on the seed alone."""
    model = tiny.model("smollm2-135m", vocab_size=258, eos_token_id=1)
    if with_tokenizer:
        model = dataclasses.replace(model, tokenizer=tiny.tokenizer())
    one, again, other = (tasks.load("toy", model, seed) for seed in (1, 1, 2))
    assert one.problems == again.problems != other.problems
    assert one.held_out == again.held_out
    if with_tokenizer:
        assert one.held_out == other.held_out
        assert tiny.tokenizer().decode(one.held_out[0].prompt[1:]) == "About rivers:"  # behind BOS, without a template
    assert len(one.problems) >= 16 <= len(one.problems) + len(one.held_out) == len({*one.problems, *one.held_out})
    assert not {p.prompt for p in one.problems} & {p.prompt for p in one.held_out}
    assert all(1 not in p.prompt for p in one.problems)  # the end
    prompts = [p.prompt for p in one.problems[:3]]
    out = ns.generate(model, prompts, ns.Sampling(max_tokens=4, temperature=1.0))
    assert all(0 <= one.reward(p, o.text, o.tokens).value <= 1 for p, o in zip(one.problems, out, strict=False))


@pytest.mark.parametrize("seed", range(3))
def test_toy_is_learned_by_plain_reinforce(seed):
    """Catches: a reward so flat, or so noisy, that twenty steps of small groups show nothing.

    A table of 128 logits at every position, 4 groups of 4 completions of 16 tokens, the gradient written out. Groups
    whose rewards are all equal teach nothing and must be rare while there is something to learn.
    """
    task = tasks.load("toy", tiny.model("smollm2-135m"), seed)
    generator = torch.Generator().manual_seed(seed)
    table, rewards, flat = torch.randn(128, generator=generator), [], 0
    for step in range(20):
        p = table.softmax(-1)
        tokens = torch.multinomial(p.expand(16, -1), 16, replacement=True, generator=generator)
        found = torch.tensor([task.reward(task.problems[0], None, row).value for row in tokens.tolist()]).view(4, 4)
        flat += int((found.amax(1) == found.amin(1)).sum()) if step < 10 else 0
        advantage = ((found - found.mean(1, keepdim=True)) / (found.std(1, keepdim=True) + 1e-4)).flatten()
        score = torch.nn.functional.one_hot(tokens, 128).float().sum(1) - 16 * p  # d log p / d table
        table += 0.3 * (advantage[:, None] * score).mean(0)
        rewards.append(float(found.mean()))
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
    assert flat <= 8  # of 40

"""What a policy is trained on: problems, and the reward of a completion.

`toy` pays for even token ids, so that a model of any size, with or without a tokenizer, learns it in minutes; `gsm8k`
is grade-school arithmetic (Cobbe et al. 2021), answers compared as numbers.
"""

import importlib.util
import json
import os
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from nanospec_fn import files

NAMES = ("toy", "gsm8k")
SHORTEST = 8  # tokens; a toy completion of fewer is counted as one of so many, so that ending at once does not pay
ENOUGH = 0.9  # a toy reward from which the problem counts as solved


@dataclass(frozen=True)
class Problem:
    """One prompt, text or token ids, and the right answer ("" where the task has none)."""

    prompt: str | tuple[int, ...]
    answer: str = ""


@dataclass(frozen=True)
class Reward:
    """What a completion is worth."""

    value: float  # in [0, 1]
    solved: bool
    strict: bool  # right in the form that was asked for
    flexible: bool  # right wherever it stands


@dataclass(frozen=True)
class Task:
    """Problems to train on and to evaluate on, and their reward."""

    name: str
    problems: Sequence[Problem]
    held_out: Sequence[Problem]
    reward: Callable[[Problem, str | None, Sequence[int]], Reward]  # of a completion: its text, its tokens


def check(name: str) -> None:
    """What can be known of a task before a model is loaded.

    Errors: ValueError for an unknown name; FileNotFoundError naming the file that is missing.
    """
    if name not in NAMES:
        raise ValueError(f"task must be one of {', '.join(NAMES)}, got {name!r}")
    if name == "gsm8k":
        for split in ("train", "test"):
            find_gsm8k(split)


def load(name: str, model: ns.Model, seed: int) -> Task:
    """A task's problems for a model, those to train on in an order that `seed` makes.

    Errors: as `check`; ValueError for a damaged file, naming its line, or for a text task and no tokenizer.
    """
    check(name)
    if name == "toy":
        return toy(model, seed)
    if model.tokenizer is None:
        raise ValueError("task gsm8k: its prompts are text, and the model has no tokenizer")
    train, test = gsm8k("train"), gsm8k("test")
    return Task(name, shuffled(train, seed), test, judge_gsm8k)


def shuffled(problems: Sequence[Problem], seed: int) -> list[Problem]:
    return random.Random(seed).sample(problems, len(problems))


TOPICS = """
rivers bread winter music horses rain gold trains gardens sleep ships glass cats snow bridges tea clocks sand birds
paper stars salt forests wheels honey doors islands wool letters mirrors apples roads mountains books fire shoes kites
"""
HELD_OUT = 8  # of the toy task's prompts


def toy(model: ns.Model, seed: int) -> Task:
    """Openings of a text, or random token ids where there is no tokenizer; even token ids are rewarded.

    About half of what any model writes is even, so a group's rewards differ from the first step on, and a policy can
    gain on every token, whatever the context. The prompts are a few tokens, without the chat template: a step's time
    goes into completions.
    """
    tokenizer: Any = model.tokenizer
    if tokenizer is None:
        draw = random.Random(seed)
        spoken = [token for token in range(model.cfg.vocab_size) if token not in model.cfg.eos_ids]
        prompts = [draw.choices(spoken, k=draw.randint(4, 8)) for _ in TOPICS.split()]
    else:
        prompts = [tokenizer.encode(f"About {topic}:") for topic in TOPICS.split()]
    problems = [Problem(tuple(prompt)) for prompt in prompts]
    ends = frozenset(model.cfg.eos_ids)

    def reward(problem: Problem, text: str | None, tokens: Sequence[int]) -> Reward:
        value = share_of_even(tokens, ends)
        solved = value >= ENOUGH
        return Reward(value, solved, strict=solved, flexible=solved)

    return Task("toy", shuffled(problems[HELD_OUT:], seed), problems[:HELD_OUT], reward)


def share_of_even(tokens: Sequence[int], ends: frozenset[int]) -> float:
    """The share of even ids among a completion's tokens; a token of `ends` counts as odd."""
    even = sum(token % 2 == 0 and token not in ends for token in tokens)
    return even / max(len(tokens), SHORTEST)


INSTRUCTION = 'Think step by step. End with a line that holds the answer alone, as "#### N", N being a number.'


def judge_gsm8k(problem: Problem, text: str | None, tokens: Sequence[int]) -> Reward:
    """1 for the right number behind "####", half of it for the right number as the last one of the text."""
    right, text = number(problem.answer), text or ""
    strict, flexible = (right is not None and found == right for found in (strict_answer(text), flexible_answer(text)))
    return Reward(1.0 if strict else 0.5 if flexible else 0.0, strict or flexible, strict, flexible)


# A sign is one only where no operand precedes it: 10-3 ends with 3. Commas group three digits each or the digits are
# not one number. The digits are few: int() refuses thousands of them, which a model that repeats itself writes.
NUMBER = re.compile(
    r"(?P<sign>(?:(?<![\w)\]])[-+−])?(?:\$[-−]?)?)"
    r"(?<![0-9])(?P<value>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:/(?P<under>[0-9]+))?"
    r"(?![0-9]|,[0-9])"
)
MARK = re.compile(r"(?<!#)####(?!#)[ \t]*")
LONGEST = 40  # characters of a number


def number(text: str) -> Fraction | None:
    """The number that a text begins with, exactly: commas, signs, $, decimals and a/b; None where it begins otherwise.

    >>> number("$1,234.50."), number("-3/4 of it"), number("about 3")
    (Fraction(2469, 2), Fraction(-3, 4), None)
    """
    found = NUMBER.match(text)
    return value_of(found) if found else None


def value_of(found: re.Match[str]) -> Fraction | None:
    value, under = found["value"].replace(",", ""), found["under"] or "1"
    if len(value) + len(under) > LONGEST or not int(under):
        return None
    size = Fraction(value) / int(under)
    return -size if set("-−") & set(found["sign"]) else size


def strict_answer(text: str) -> Fraction | None:
    """The number behind the first "####", as the data set's authors take it; None where there is none."""
    mark = MARK.search(text)
    return number(text[mark.end() :]) if mark else None


def flexible_answer(text: str) -> Fraction | None:
    """The last number of a text, None where there is none."""
    found = list(NUMBER.finditer(text))
    return value_of(found[-1]) if found else None


GSM8K = {"train": "gsm8k_train.jsonl", "test": "gsm8k_test.jsonl"}  # in $NANOSPEC_DATA


def find_gsm8k(split: str) -> Path | None:
    """A split's file, None where the hub has to be asked.

    Errors: FileNotFoundError where NANOSPEC_DATA lacks the file, or is unset and `datasets` is not installed.
    """
    folder = os.environ.get("NANOSPEC_DATA")
    if folder:
        path = Path(folder) / GSM8K[split]
        if not files.is_file(path):
            raise FileNotFoundError(f"task gsm8k: {files.short(path)}: no such file (NANOSPEC_DATA is its folder)")
        return path
    if importlib.util.find_spec("datasets") is None:
        needed = f"set NANOSPEC_DATA to a folder that holds {GSM8K[split]}, or install datasets"
        raise FileNotFoundError(f"task gsm8k: {needed}")
    return None


def gsm8k(split: str) -> list[Problem]:
    """The problems of "train" or "test", in the data set's order."""
    path = find_gsm8k(split)
    if path is None:
        import datasets

        rows: Iterable[Any] = datasets.load_dataset("openai/gsm8k", "main", split=split)
        return [to_problem(dict(row), f"openai/gsm8k {split} row {i}") for i, row in enumerate(rows)]
    problems = []
    for i, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError:
                raise ValueError(f"{path}:{i}: not valid JSON") from None
            problems.append(to_problem(row, f"{path}:{i}"))
    if not problems:
        raise ValueError(f"{path}: contains no problems")
    return problems


def to_problem(row: Any, where: str) -> Problem:
    """A row of the data set: its question with what is asked for, and the number behind its "####"."""
    question, answer = (row.get(key) if isinstance(row, dict) else None for key in ("question", "answer"))
    if not isinstance(question, str) or not isinstance(answer, str) or not question.strip():
        raise ValueError(f'{where}: has no text under "question" and "answer"')
    mark = MARK.search(answer)
    if mark is None or strict_answer(answer) is None:
        raise ValueError(f'{where}: its answer has no "#### N"')
    return Problem(f"{question.strip()}\n{INSTRUCTION}", answer[mark.end() :].strip())

"""A target's own completions, as data to train a draft head on.

Prompts come from a file, from GSM8K train, or from the model itself: what it writes as the user's turn when it is given
its chat template up to there. Test prompts never enter: their files are refused by name.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

import nanospec_fn as ns
from nanospec_fn import chat, files
from nanospec_fn import prompts as prompt_files

TEST_SETS = ("mt_bench_question.jsonl", "gsm8k_test.jsonl")
GSM8K = ("gsm8k_train.jsonl", "openai/gsm8k", "main", "train")
USER_TOKENS = 160  # of a user's turn that the model writes itself; a longer one is dropped


@dataclass(frozen=True)
class Rollouts:
    """n sequences, each a prompt followed by the target's response."""

    tokens: np.ndarray  # [sum of lengths] int32, one sequence after another
    end: np.ndarray  # [n] int64, where each ends
    prompt: np.ndarray  # [n] int32, tokens of its prompt
    temperature: np.ndarray  # [n] fp32

    def __len__(self) -> int:
        return len(self.end)

    def sequence(self, i: int) -> np.ndarray:
        """Tokens of sequence i."""
        return self.tokens[self.end[i - 1] if i else 0 : self.end[i]]

    @property
    def response_tokens(self) -> int:
        return len(self.tokens) - int(self.prompt.sum())


def parse_source(text: str) -> tuple[str, int | None]:
    """ "self:N", "gsm8k[:N]" or "FILE[:N]" -> name and N.

    Errors: ValueError for a bad count, a missing one for "self", or a test set's file.
    """
    name, colon, count = text.rpartition(":")
    if not colon:
        name, count = text, ""
    if colon and (not count.isascii() or not count.isdecimal() or not 1 <= int(count) < 2**31):
        raise ValueError(f"{text!r}: the number of prompts must be an integer from 1")
    if name == "self" and not count:
        raise ValueError(f"{text!r}: self needs a number of prompts, self:N")
    if Path(name).name in TEST_SETS:
        raise ValueError(f"{text!r}: a test set is not for training")
    if name not in ("self", "gsm8k") and not files.is_file(name):
        raise FileNotFoundError(f"{files.short(name)}: no such file (known besides files are self:N and gsm8k)")
    return name, int(count) if count else None


def gather_prompts(
    model: ns.Model, sources: Sequence[str], engine: ns.EngineConfig, seed: int, *, progress: bool = True
) -> list[str]:
    """The prompts of all sources, each text once.

    Args: engine: how to run the model where it writes prompts; seed: of what it writes; progress: draw a bar.
    Errors: as `parse_source`, and for a model without a chat template that is to write its own.
    """
    found: list[str] = []
    for name, count in map(parse_source, sources):
        if name == "self":
            found += write_prompts(model, count or 0, engine, seed, progress=progress)
        elif name == "gsm8k":
            found += gsm8k_train()[:count]
        else:
            found += prompt_files.read(Path(name))[:count]
    return list(dict.fromkeys(found))


def gsm8k_train() -> list[str]:
    """GSM8K's training questions, from $NANOSPEC_DATA or the hub."""
    folder = os.environ.get("NANOSPEC_DATA")
    return prompt_files.read(Path(folder) / GSM8K[0]) if folder else prompt_files.from_hub("gsm8k", *GSM8K)


def write_prompts(model: ns.Model, count: int, engine: ns.EngineConfig, seed: int, progress: bool = True) -> list[str]:
    """At most `count` distinct user turns that the model samples at T = 1 behind its chat template's opening.

    Source: Magpie (Xu et al. 2024).
    """
    opening = user_opening(model)
    requests = [ns.Sampling(max_tokens=USER_TOKENS, temperature=1.0, seed=seed + i) for i in range(count)]
    out = run(model, [opening] * count, requests, engine, progress=progress)
    return list(dict.fromkeys(o.text.strip() for o in out if o.finish_reason == "stop" and o.text and o.text.strip()))


def user_opening(model: ns.Model) -> list[int]:
    """The chat template up to the user's words, as token ids."""
    tokenizer: Any = model.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise ValueError("prompts self:N: the model has no chat template to write a user's turn in")
    mark = "\x00"
    text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return tokenizer.encode(text.partition(mark)[0], add_special_tokens=False)


def complete(
    model: ns.Model,
    prompts: Sequence[str | list[int]],
    temperatures: Sequence[float],
    max_tokens: int,
    max_len: int,
    engine: ns.EngineConfig,
    seed: int,
    *,
    progress: bool = True,
) -> Rollouts:
    """The target's responses to prompts, texts or token ids; prompt i at temperature i mod their number.

    A prompt that leaves no room for a response within `max_len` tokens is left out, and so is an empty response.
    """
    encoded = [chat.encode(model.tokenizer, p) for p in prompts]
    encoded = [p for p in encoded if len(p) < max_len - 1]
    temperature = [temperatures[i % len(temperatures)] for i in range(len(encoded))]
    requests = [
        ns.Sampling(max_tokens=min(max_tokens, max_len - len(p)), temperature=t, seed=seed + i)
        for i, (p, t) in enumerate(zip(encoded, temperature, strict=True))
    ]
    out = run(model, encoded, requests, engine, progress=progress)
    kept = [i for i, o in enumerate(out) if len(o.tokens) > 1]
    sequences = [np.array([*encoded[i], *out[i].tokens], dtype=np.int32) for i in kept]
    return Rollouts(
        tokens=np.concatenate(sequences) if sequences else np.zeros(0, np.int32),
        end=np.cumsum([len(s) for s in sequences], dtype=np.int64),
        prompt=np.array([len(encoded[i]) for i in kept], dtype=np.int32),
        temperature=np.array([temperature[i] for i in kept], dtype=np.float32),
    )


def run(
    model: ns.Model,
    prompts: list[list[int]],
    requests: list[ns.Sampling],
    engine: ns.EngineConfig,
    *,
    progress: bool,
) -> list[ns.Completion]:
    """Complete token ids with a pool and a page table for just these requests.

    Off the CPU attention reads the whole page table, so a short one saves most of the time.
    """
    longest = max((len(p) + r.max_tokens for p, r in zip(prompts, requests, strict=True)), default=1)
    sized = replace(engine, max_context=longest, num_pages=None)
    return ns.generate(model, prompts, requests, engine=sized, progress=progress)


def save(path: Path, rollouts: Rollouts, about: dict[str, Any]) -> None:
    """Write a .npz file, whole or not at all; `about` says what it was made from."""
    arrays = {name: getattr(rollouts, name) for name in ("tokens", "end", "prompt", "temperature")}
    with files.whole(path) as part, part.open("wb") as file:
        np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)


def load(path: Path, vocab_size: int) -> tuple[Rollouts, dict[str, Any]]:
    """Read what `save` wrote.

    Errors: FileNotFoundError, ValueError for a file that holds no rollouts, or tokens outside the vocabulary.
    """
    if not files.is_file(path):
        raise FileNotFoundError(f"{files.short(path)}: no such file")
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            rollouts = Rollouts(*(file[name] for name in ("tokens", "end", "prompt", "temperature")))
            about = json.loads(str(file["about"]))
    except (ValueError, KeyError, OSError, EOFError, BadZipFile) as error:
        raise ValueError(f"{path}: holds no rollouts ({error})") from error
    if not len(rollouts):
        raise ValueError(f"{path}: holds no sequence")
    if rollouts.tokens.min() < 0 or rollouts.tokens.max() >= vocab_size:
        raise ValueError(f"{path}: holds token {rollouts.tokens.max()}, the model's vocabulary has {vocab_size}")
    return rollouts, about

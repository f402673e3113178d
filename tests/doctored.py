"""A tiny target that has learned something to draft, a head that drafts it, and copies of the head with known damages.

The target continues a text of seven letters by one of two permutations of the last but one letter, chosen by the last
one: it takes features to know which, and attention to know what came before. It knows one chat template.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanospec_fn import chat, kernels, rehearsal
from nanospec_fn.doctor import templates
from rl import train_eagle
from tests import tiny

LETTERS, KEYS = "abcdefg", "XY"
LENGTH = 24  # of a continuation
TAPS = (1, 3, 5)
RAW = tiny.config(
    "smollm2-135m", hidden_size=48, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=96, vocab_size=264, eos_token_id=1,
)  # fmt: skip


def tokenizer(template: str | None = templates.KNOWN["ChatML"][0]) -> Any:
    """Bytes, and the marks of ChatML."""
    made = tiny.tokenizer(template)
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    return made


def language() -> list[tuple[str, str]]:
    """Every prompt and its continuation."""
    generator = torch.Generator().manual_seed(0)
    n = len(LETTERS)
    table = torch.stack([torch.randperm(n, generator=generator) for _ in range(len(KEYS) * n)]).view(-1, n, n)
    found = []
    for key in range(len(KEYS)):
        for a in range(n):
            for b in range(n):
                said = [a, b]
                while len(said) < 2 + LENGTH + 4:
                    said.append(int(table[key, said[-1], said[-2]]))
                text = "".join(LETTERS[i] for i in said)
                found.append((KEYS[key] + text[:2], text[2:]))
    return found


def split() -> tuple[list[str], list[str]]:
    """Prompts to train a head on, and others to examine it with."""
    prompts = [prompt for prompt, _ in language()]
    order = torch.randperm(len(prompts), generator=torch.Generator().manual_seed(5)).tolist()
    return [prompts[i] for i in order[:-24]], [prompts[i] for i in order[-24:]]


def make_target(folder: Path, steps: int = 150) -> Path:
    """Train the target with transformers and write it as a checkpoint."""
    speaker = tokenizer()
    spoken = [chat.encode(speaker, p) + speaker.encode(c, add_special_tokens=False) for p, c in language()]
    sequences = torch.tensor(spoken)
    torch.manual_seed(0)
    hf = tiny.llama(RAW).train()
    with torch.no_grad():
        for name, value in hf.named_parameters():
            value.mul_(0.4 if value.dim() > 1 and "embed" not in name else 1)
    optimizer = torch.optim.AdamW(hf.parameters(), lr=1e-2)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    generator = torch.Generator().manual_seed(0)
    with torch.enable_grad():
        for _ in range(steps):
            batch = sequences[torch.randint(len(sequences), (16,), generator=generator)]
            logits = hf(batch).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(hf.parameters(), 1.0)
            optimizer.step()
            rate.step()
    tiny.write(folder, RAW, tiny.state_of(hf))
    speaker.save_pretrained(folder)
    return folder


def train_head(target: Path, out: Path, *more: str) -> Path:
    """Train a head on the target's own completions; the data is made once, beside the target."""
    prompts = target / "train.txt"
    prompts.write_text("\n".join(split()[0]) + "\n")
    options = f"--model {target} --device cpu --out {out} --data {target / 'rollouts.npz'} --prompts {prompts}"
    options += f" --taps {' '.join(map(str, TAPS))} --response-tokens {LENGTH} --max-len 60 --batch 24 --unroll 4"
    options += " --draft-vocab 64 --steps 200 --lr 5e-3 --quiet --keep-features --head-dtype fp32 --held-out 0"
    assert train_eagle.main([*options.split(), *more]) == 0
    for file in ("train.safetensors", "log.jsonl"):
        (out / file).unlink(missing_ok=True)
    return out


def fed_normed(patch: AbstractContextManager[Any]) -> None:
    """Have heads unroll with their outputs normed before they are fed back, as an engine of another mind would."""
    plain = rehearsal.outputs

    def outputs(params, cfg, *rest):
        return plain(params, cfg, *rest, feed=lambda out: kernels.rms_norm(out, params.norm, cfg.rms_eps))

    patch.setattr(rehearsal, "outputs", outputs)


Tensors = dict[str, Tensor]


def damaged(head: Path, out: Path, change: Callable[[dict[str, Any], Tensors], None]) -> Path:
    """A copy of a head after `change(config, tensors)`."""
    raw, tensors = json.loads((head / "config.json").read_text()), load_file(head / "model.safetensors")
    change(raw, tensors)
    out.mkdir()
    (out / "config.json").write_text(json.dumps(raw))
    save_file({key: value.contiguous() for key, value in tensors.items()}, out / "model.safetensors")
    return out


def shift_taps(by: int, taps: tuple[int, ...] = TAPS) -> Callable[[dict[str, Any], Tensors], None]:
    """A config that names layers beside those of the head's training, in a form that counts a layer's output."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        raw["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 + by for tap in taps]}

    return change


def set_theta(theta: float | None) -> Callable[[dict[str, Any], Tensors], None]:
    """None: a config that says nothing of rope, which means 10000."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        raw["rope_theta"] = theta

    return change


def swap_halves(raw: dict[str, Any], tensors: Tensors) -> None:
    for name in "qkv":
        key = f"midlayer.self_attn.{name}_proj.weight"
        embedding, feature = tensors[key].chunk(2, dim=1)
        tensors[key] = torch.cat((feature, embedding), dim=1)


def swap_norms(raw: dict[str, Any], tensors: Tensors) -> None:
    one, other = "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight"
    tensors[one], tensors[other] = tensors[other], tensors[one]


def spread_norms(raw: dict[str, Any], tensors: Tensors) -> None:
    """The same function with norms that differ: what is put on a norm is taken off the columns it feeds.

    A head trained for a minute has norms that are still alike, so that to swap them does nothing.
    """
    generator = torch.Generator().manual_seed(0)
    e = raw["hidden_size"]
    for norm, columns in (("input_layernorm", slice(0, e)), ("hidden_norm", slice(e, 2 * e))):
        scale = torch.exp(torch.randn(e, generator=generator))
        tensors[f"midlayer.{norm}.weight"] = tensors[f"midlayer.{norm}.weight"] * scale
        for name in "qkv":
            tensors[f"midlayer.self_attn.{name}_proj.weight"][:, columns] /= scale


def bring_embedding(raw: dict[str, Any], tensors: Tensors) -> None:
    """An embedding of the head's own that is none."""
    size = (raw["vocab_size"], raw["hidden_size"])
    tensors["embed_tokens.weight"] = torch.randn(size, generator=torch.Generator().manual_seed(0))


def norm_residual(raw: dict[str, Any], tensors: Tensors) -> None:
    raw["norm_before_residual"] = True


def add_noise(scale: float) -> Callable[[dict[str, Any], Tensors], None]:
    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        generator = torch.Generator().manual_seed(2)
        for key, value in tensors.items():
            if value.dim() == 2:
                tensors[key] = value + scale * value.std() * torch.randn(value.shape, generator=generator)

    return change


def drop(*keys: str) -> Callable[[dict[str, Any], Tensors], None]:
    """Tensors that a file has lost."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        for key in keys:
            del tensors[key]

    return change


def forget_map(*lost: str) -> Callable[[dict[str, Any], Tensors], None]:
    """A map of zeros, in a file that may have lost tensors besides."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        drop(*lost)(raw, tensors)
        tensors["d2t"] = torch.zeros_like(tensors["d2t"])

    return change


def as_ids(times: int, *lost: str) -> Callable[[dict[str, Any], Tensors], None]:
    """A map that holds ids (1), or offsets minus indices (-1): what a writer makes who takes offsets for ids."""

    def change(raw: dict[str, Any], tensors: Tensors) -> None:
        drop(*lost)(raw, tensors)
        tensors["d2t"] = tensors["d2t"] + times * torch.arange(len(tensors["d2t"]))

    return change


def damages(taps: tuple[int, ...] = TAPS) -> dict[str, tuple[str, Any]]:
    """What is done to a good head that reads `taps`: by name, the doctor's word for it and the change."""
    return {
        "one layer early": ("taps_early", shift_taps(-1, taps)),
        "one layer late": ("taps_late", shift_taps(1, taps)),
        "map dropped": ("map_dropped", drop("d2t", "t2d")),
        "map dropped, marks left": ("map_dropped", drop("d2t")),
        "map of zeros": ("map_dropped", forget_map("t2d")),
        "map of zeros, marks left": ("map_dropped", forget_map()),
        "map of ids": ("map_absolute", as_ids(1)),
        "map of ids, no marks": ("map_absolute", as_ids(1, "t2d")),
        "map of offsets taken for ids": ("map_absolute", as_ids(-1)),
        "no rope in the config": ("rope_theta", set_theta(None)),
        "a larger theta": ("rope_theta", set_theta(500000.0)),
        "halves swapped": ("halves_swapped", swap_halves),
        "norms swapped": ("norms_swapped", swap_norms),
    }

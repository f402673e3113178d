"""Which chat template a target was trained with, asked of the target itself.

Between the user's words and the answer a template writes a few tokens that are the same in every chat. A target that
was trained with it predicts them almost surely; one that was not is surprised in the middle of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanospec_fn import checkpoint
from nanospec_fn.model import Model, forward

MARGIN = 0.5  # nats a token, by which one template must be preferred
SURE = 1.0  # the same: no more surprised by a template's marks is who was trained with it; others are by several
# name: (template, tokens that the vocabulary must hold)
KNOWN: dict[str, tuple[str, tuple[str, ...]]] = {
    "ChatML": (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>"),
    ),
    "Llama 3": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    ),
    "Zephyr": (
        "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        (),
    ),
}


@dataclass(frozen=True)
class Template:
    """A way to write a user's turn."""

    name: str
    text: str


@dataclass(frozen=True)
class Preference:
    """How well a target predicts what a template writes after the user's words."""

    template: Template
    logp: tuple[float, ...]  # nats a token, by prompt

    @property
    def mean(self) -> float:
        return sum(self.logp) / len(self.logp)

    def beats(self, other: "Preference") -> bool:
        """Whether it is preferred for every prompt, and clearly in the mean."""
        better = all(a > b for a, b in zip(self.logp, other.logp, strict=True))
        return better and self.mean > other.mean + MARGIN


def of(tokenizer: Any) -> Template | None:
    """The template that a target's prompts are written with."""
    text = getattr(tokenizer, "chat_template", None)
    return Template("the target's tokenizer", text) if isinstance(text, str) else None


def beside(folder: Path) -> Template | None:
    """The template that lies in a head's folder, which may be the one of its training."""
    if (folder / "chat_template.jinja").is_file():
        return Template("the head's folder", (folder / "chat_template.jinja").read_text(encoding="utf-8"))
    if (folder / "tokenizer_config.json").is_file():
        text = checkpoint.read_json(folder / "tokenizer_config.json").get("chat_template")
        return Template("the head's folder", text) if isinstance(text, str) else None
    return None


def known(tokenizer: Any) -> list[Template]:
    """The common templates whose marks are in a tokenizer's vocabulary."""
    vocab = tokenizer.get_vocab()
    return [Template(name, text) for name, (text, marks) in KNOWN.items() if all(mark in vocab for mark in marks)]


def write(tokenizer: Any, template: Template, prompt: str) -> str:
    """A user's turn, up to where the answer begins.

    Errors: ValueError for a template that cannot be rendered.
    """
    turn = [{"role": "user", "content": prompt}]
    try:
        text: str = tokenizer.apply_chat_template(
            turn, chat_template=template.text, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # jinja's, of any class
        raise ValueError(f"the chat template of {template.name} cannot be rendered ({error})") from error
    return text


def same(tokenizer: Any, one: Template, other: Template, prompts: Sequence[str]) -> bool:
    """Whether two templates write these prompts alike."""
    return all(write(tokenizer, one, p) == write(tokenizer, other, p) for p in prompts)


def prefer(target: Model, template: Template, prompts: Sequence[str]) -> Preference | None:
    """What the target thinks of the tokens between the prompts and the answers; None where there are none.

    The first of them is left out where there are more: it also depends on whether the prompt could go on.
    """
    tokenizer: Any = target.tokenizer
    found = []
    for prompt in prompts:
        text = write(tokenizer, template, prompt)
        before, _, after = text.rpartition(prompt)
        tail = tokenizer.encode(after, add_special_tokens=False) if after else []
        if not tail:
            return None
        tokens = [*tokenizer.encode(before + prompt, add_special_tokens=False), *tail]
        with torch.no_grad():
            logits = forward(target.params, target.cfg, torch.tensor([tokens[:-1]], device=target.params.embed.device))
        scored = tail[1:] or tail
        logp = logits[0, -len(scored) :].log_softmax(-1)
        found.append(float(logp.gather(1, torch.tensor(scored, device=logp.device)[:, None]).mean()))
    return Preference(template, tuple(found))

"""Text to tokens and back: the tokenizer of a checkpoint, and the one way in which a prompt becomes token ids."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors

from nanospec_fn import checkpoint

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def encode(tokenizer: Any, prompt: str | Sequence[int]) -> list[int]:
    """A prompt's token ids; token ids pass through.

    Text becomes a user turn of the tokenizer's chat template where it has one. A tokenizer that begins sequences with
    BOS begins this one with exactly one, whether the template writes it or not.

    Errors: ValueError for an empty prompt, text that is not Unicode (a lone surrogate), or text without a tokenizer.
    """
    if not len(prompt):
        raise ValueError("prompt is empty")
    if not isinstance(prompt, str):
        return list(prompt)
    if not is_unicode(prompt):
        raise ValueError("prompt is not valid Unicode")
    if tokenizer is None:
        raise ValueError("prompt is text, but the model has no tokenizer: pass token ids")
    if tokenizer.chat_template is not None:
        turn = [{"role": "user", "content": prompt}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
    tokens = tokenizer.encode(prompt, add_special_tokens=False)
    bos = tokenizer.bos_token_id
    # Asked of the tokenizer itself: the flags that should say whether it adds BOS are often wrong.
    if bos is not None and tokenizer.encode("a")[:1] == [bos] and tokens[:1] != [bos]:
        tokens = [bos, *tokens]
    return tokens


def is_unicode(text: str) -> bool:
    """Whether text has an encoding: lone surrogates, as which Python passes on bytes that are not UTF-8, have none."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def decode(tokenizer: Any, tokens: Sequence[int]) -> str | None:
    """The text of tokens, special ones left out; None without a tokenizer."""
    if tokenizer is None:
        return None
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Decoder:
    """The text of a growing sequence, piece by piece, in time linear in its length."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.window: list[int] = []  # tokens that are decoded again: some whose text is whole, then the newer ones
        self.context = 0  # of the window, tokens whose text is whole
        self.shown = 0  # of the window's text, characters returned

    def add(self, tokens: Sequence[int], last: bool) -> str:
        """The text that tokens add, "" without a tokenizer; all pieces together are `decode` of all tokens.

        Args: last: no more will come; until then a character whose bytes are not all there is held back.
        """
        self.window += tokens
        text = decode(self.tokenizer, self.window) or ""
        whole = text if last else text.rstrip("\ufffd")
        piece, self.shown = whole[self.shown :], max(self.shown, len(whole))
        newer = self.window[self.context :]
        if whole == text and (newer_text := decode(self.tokenizer, newer)):
            # The newer tokens stay as context: some decoders treat a sequence's first token differently.
            self.window, self.context, self.shown = newer, len(newer), len(newer_text)
        return piece


def from_folder(folder: Path) -> Any:
    """The Hugging Face tokenizer in a folder, or None where it has none.

    Errors: ValueError naming the file that is damaged, or the folder and what its tokenizer lacks.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer  # takes seconds to import; not needed for token ids alone

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:  # a damaged file ends in an error of any class
        for name in ("tokenizer.json", "tokenizer_config.json"):
            if (folder / name).exists():
                checkpoint.read_json(folder / name)
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ValueError(f"{folder}: the tokenizer's files cannot be read ({reason})") from error


# llama.cpp's names of how text is cut before byte-pair merging.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE_TOKENIZERS: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(LLAMA3_SPLIT), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}
CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


def from_gguf(metadata: dict[str, Any]) -> Any:
    """The byte-level BPE tokenizer in a GGUF file's metadata, or None where it has none.

    transformers' own conversion of SmolLM2 takes half a minute, most of it spent on the weights' file.

    Errors: ValueError naming a tokenizer model or pre-tokenizer other than those above.
    """
    if "tokenizer.ggml.model" not in metadata:
        return None

    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    if get("model") != "gpt2":
        raise ValueError(f"tokenizer.ggml.model {get('model')!r} is not supported (gpt2, byte-level BPE, is)")
    if get("pre") not in PRE_TOKENIZERS:
        raise ValueError(f"tokenizer.ggml.pre {get('pre')!r} is not supported ({', '.join(PRE_TOKENIZERS)} are)")
    from transformers import PreTrainedTokenizerFast  # takes seconds to import; not needed for token ids alone

    llama3, tokens = get("pre") == "llama-bpe", get("tokens")
    merges = [tuple(merge.split(" ")) for merge in get("merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    built = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=llama3))
    built.pre_tokenizer = pre_tokenizers.Sequence(PRE_TOKENIZERS[get("pre")])
    built.decoder = decoders.ByteLevel()
    added = [
        (t, kind) for t, kind in zip(tokens, get("token_type", []), strict=False) if kind in (CONTROL, USER_DEFINED)
    ]
    built.add_tokens([AddedToken(t, special=kind == CONTROL, normalized=False) for t, kind in added])
    named = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}
    special = {f"{name}_token": tokens[get(key)] for name, key in named.items() if get(key) is not None}
    if get("add_bos_token", llama3):
        bos = special["bos_token"]
        built.post_processor = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, vocab[bos])])
    template = metadata.get("tokenizer.chat_template")
    return PreTrainedTokenizerFast(tokenizer_object=built, chat_template=template, **special)

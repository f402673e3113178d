"""Prompts to tokens: chat templates with exactly one BOS (C14), plain text, and tokenizers out of GGUF files."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from tokenizers import pre_tokenizers

from nanospec_fn import chat, weights
from tests import tiny

WITHOUT_BOS = tiny.TEMPLATE.replace("{{ bos_token }}", "")


def rendered(tokenizer, prompt: str) -> list[int]:
    """What transformers gives when it tokenizes inside the template's call."""
    turn = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]


@pytest.mark.parametrize("prompt", ["hello", "two  spaces", "naïve 日本", "<s>"])
@pytest.mark.parametrize("add_bos", [False, True])
def test_c14_template_with_bos_gives_exactly_one(add_bos, prompt):
    """Catches encoding the rendered text with special tokens: it then begins with two BOS."""
    tokenizer = tiny.tokenizer(tiny.TEMPLATE, add_bos)
    tokens = chat.encode(tokenizer, prompt)
    assert tokens == rendered(tokenizer, prompt)
    assert tokens[0] == tokenizer.bos_token_id
    assert tokens[1] != tokenizer.bos_token_id


def test_c14_template_without_bos():
    """A tokenizer that begins sequences with BOS begins this one so, once; another one leaves it out."""
    tokenizer = tiny.tokenizer(WITHOUT_BOS, add_bos=True)
    assert chat.encode(tokenizer, "hello") == [0, *rendered(tokenizer, "hello")]
    tokenizer = tiny.tokenizer(WITHOUT_BOS, add_bos=False)
    assert chat.encode(tokenizer, "hello") == rendered(tokenizer, "hello")
    assert 0 not in chat.encode(tokenizer, "hello")


def test_c14_plain_text():
    tokenizer = tiny.tokenizer(None, add_bos=True)
    assert chat.encode(tokenizer, "hello") == tokenizer.encode("hello")
    assert chat.encode(tokenizer, "hello").count(0) == 1
    assert chat.encode(tokenizer, "<s>hello") == chat.encode(tokenizer, "hello")
    assert 0 not in chat.encode(tiny.tokenizer(None, add_bos=False), "hello")


def test_token_ids_pass_through_and_bad_prompts_are_named():
    assert chat.encode(None, [3, 0, 3]) == [3, 0, 3]
    with pytest.raises(ValueError, match="no tokenizer"):
        chat.encode(None, "text")
    for empty in ("", []):
        with pytest.raises(ValueError, match="prompt is empty"):
            chat.encode(tiny.tokenizer(tiny.TEMPLATE), empty)


@pytest.mark.parametrize("sizes", [(1,), (2,), (3, 1), (40,)])
def test_decoder_pieces_are_the_text(sizes):
    """Bugs: half a character shown; one swallowed at the end; text lost or doubled where the window moves on."""
    tokenizer = tiny.tokenizer()
    whole = tokenizer.encode(
        "h\u00e9llo w\u00f6rld \u65e5\u672c\u8a9e \U0001f600 end \u00e9\u00e9", add_special_tokens=False
    )
    for tokens in (whole, whole[:-1], [*whole[:-1], *whole], [1, *whole, 1, 0, *whole], []):
        decoder, pieces, at = chat.Decoder(tokenizer), [], 0
        for size in itertools.cycle(sizes):
            last = at + size >= len(tokens)
            pieces.append(decoder.add(tokens[at : at + size], last))
            at += size
            if last:
                break
        assert "".join(pieces) == chat.decode(tokenizer, tokens)
        assert not any("\ufffd" in piece for piece in pieces[:-1]) or tokens == [*whole[:-1], *whole]
    assert chat.Decoder(None).add([1, 2], last=True) == ""


def test_decoder_keeps_the_space_that_begins_a_later_word():
    """Bug: a piece decoded by itself, whose leading space decoders of SentencePiece's kind take for the sequence's."""
    words = [" one", " two", "s", " three", "", " four"]

    def decode(tokens: list[int], **_: bool) -> str:
        return "".join(words[t] for t in tokens).removeprefix(" ")

    decoder = chat.Decoder(SimpleNamespace(decode=decode))
    assert [decoder.add([t], last=False) for t in range(6)] == ["one", " two", "s", " three", "", " four"]


def test_decoder_is_linear():
    """Bug: every piece decodes the whole text again."""
    decoded = []

    def decode(tokens: list[int], **_: bool) -> str:
        decoded.append(len(tokens))
        return "x" * len(tokens)

    decoder = chat.Decoder(SimpleNamespace(decode=decode))
    assert "".join(decoder.add([t], last=False) for t in range(500)) == "x" * 500
    assert sum(decoded) < 5 * 500


def test_decode():
    tokenizer = tiny.tokenizer()
    tokens = tokenizer.encode("héllo , wörld !")
    assert chat.decode(tokenizer, [*tokens, 1]) == "héllo , wörld !"
    assert chat.decode(None, tokens) is None


@pytest.mark.parametrize("template", [None, tiny.TEMPLATE])
def test_text_that_is_not_unicode_is_refused(template):
    """Bug: a TypeError from inside the tokenizer."""
    with pytest.raises(ValueError, match="prompt is not valid Unicode"):
        chat.encode(tiny.tokenizer(template), "a\udcff")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "5", "\xff"])
def test_damaged_tokenizer_files_are_named(name, text, tmp_path):
    """Bug: whatever class of error the tokenizer's library happens to raise, without the file."""
    tiny.tokenizer(tiny.TEMPLATE).save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(text.encode("latin1"))
    with pytest.raises(ValueError, match=rf"/{name}: not "):
        chat.from_folder(tmp_path)
    (tmp_path / name).write_text("{}")
    if name == "tokenizer.json":
        with pytest.raises(ValueError, match=rf"{tmp_path}: .*'added_tokens'"):
            chat.from_folder(tmp_path)


def test_folder_with_a_tokenizer(tmp_path):
    raw = tiny.config("tinyllama-1.1b")
    tiny.write(tmp_path, raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer(tiny.TEMPLATE).save_pretrained(tmp_path)
    tokenizer = weights.load(str(tmp_path), device="cpu").tokenizer
    assert chat.encode(tokenizer, "hello") == rendered(tiny.tokenizer(tiny.TEMPLATE), "hello")


def gguf_metadata(**changes) -> dict:
    tokens = ["<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12", "Ġ1"]
    found = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": ["Ġ Ġ", "1 2", "Ġ 1"],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in (found | changes).items()}


def test_gguf_pre_tokenizers():
    """Catches a pre-tokenizer that is ignored: digits then merge, or spaces before a digit do not."""

    def tokens(text: str, **changes) -> list[str]:
        tokenizer = chat.from_gguf(gguf_metadata(**changes))
        return tokenizer.convert_ids_to_tokens(chat.encode(tokenizer, text))

    assert tokens("12  12 1") == ["1", "2", "ĠĠ", "1", "2", "Ġ", "1"]
    assert tokens("12  12 1", pre="gpt-2") == ["12", "Ġ", "Ġ", "12", "Ġ1"]
    assert tokens("12  12 1", pre="llama-bpe") == ["<s>", "12", "Ġ", "Ġ", "12", "Ġ", "1"]
    assert tokens("a</s>", add_bos_token=True) == ["<s>", "a", "</s>"]
    assert chat.from_gguf({"general.architecture": "llama"}) is None
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre 'tekken'"):
        tokens("", pre="tekken")
    with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model 'llama'"):
        tokens("", model="llama")


@pytest.mark.smollm2
def test_smollm2(smollm2):
    """Right values of SmolLM2's own tokenizer: its system turn, single digits, BOS <|im_start|>, EOS <|im_end|>."""
    tokenizer = smollm2.tokenizer
    text = tokenizer.decode(chat.encode(tokenizer, "What is 12 + 1?"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    assert text == (
        f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nWhat is 12 + 1?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert chat.encode(tokenizer, "a")[:3] == [1, 9690, 198]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (1, 2, 0)
    # Two spaces before a digit are one token (256): the split at digits comes first.
    assert tokenizer.encode(".  40 percent") == [30, 256, 36, 32, 1870]
    assert tokenizer.encode("12345") == [33, 34, 35, 36, 37]


@pytest.mark.smollm2
def test_smollm2_round_trip(smollm2):
    questions = Path(__file__).parents[2] / "shared" / "data" / "mt_bench_question.jsonl"
    texts = ["tabs\tand\r\nlines  ", "½ x² ٣ 日本語 🙂 don't I'LL", "a" * 300]
    if questions.is_file():
        texts += [turn for line in questions.read_text().splitlines() for turn in json.loads(line)["turns"]]
    for text in texts:
        tokens = smollm2.tokenizer.encode(text, add_special_tokens=False)
        assert chat.decode(smollm2.tokenizer, tokens) == text

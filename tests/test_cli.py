"""`python -m nanospec_fn generate` on a tiny checkpoint: output, exit codes, and bad values refused before any load."""

import importlib.metadata
import io
import json
import os
import re
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import __main__, jsonl, view
from nanospec_fn.commands import generate
from tests import tiny

HUGE = str(10**30)
VARIABLES = ("NANOSPEC_MODEL", "NANOSPEC_EAGLE", "NANOSPEC_DEVICE", "NANOSPEC_BACKEND", "NANOSPEC_MAX_NEW")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random target on disk with a byte-level tokenizer; "</s>" (1) ends a completion."""
    path = tmp_path_factory.mktemp("cli") / "model"
    raw = tiny.config(vocab_size=258, eos_token_id=1, bos_token_id=0)
    tiny.write(path, raw, tiny.state_of(tiny.llama(raw)))
    tiny.tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """On matrices this small, threads only wait for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(capsys, *argv):
    """Exit code, stdout, stderr of a call in this process."""
    try:
        code = __main__.main(["generate", *argv])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys, monkeypatch, *argv):
    """stderr of a call that must end with code 2 and one line, and load nothing."""

    def load(*_, **__):
        raise AssertionError("a model was loaded before the arguments had been checked")

    monkeypatch.setattr(ns, "load", load)
    code, out, err = run(capsys, *argv)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1, err
    return err


BAD = {
    "--variants": ("", "off", "AUTO"),
    "--max-tokens": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--temperature": ("-1", "nan", "inf", "abc", HUGE, "1e-40"),
    "--top-k": ("-1", "1.5", "nan", "inf", "abc", HUGE),
    "--top-p": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--seed": ("-1", "1.5", "nan", "inf", "abc", HUGE),
    "--rule": ("-1", "0", "abc", "EXACT"),
    "--tau": ("-1", "1.5", "nan", "inf", "abc", HUGE),
    "--accept-topk": ("-1", "1.5", "nan", "inf", "abc", HUGE),
    "--alpha": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--spec-topk": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--spec-depth": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--spec-nodes": ("-1", "0", "1.5", "nan", "inf", "abc", HUGE),
    "--draft": ("-1", "abc", "model:", "eagle:", "ngram:x"),
    "--backend": ("abc", "canonical", "flashinfer"),
    "--device": ("abc", "cuda:99", "meta"),
}


@pytest.mark.parametrize("draft", ["none", "ngram"])
@pytest.mark.parametrize(("option", "value"), [(o, v) for o, values in BAD.items() for v in values])
def test_bad_values_are_refused_by_option(option, value, draft, capsys, monkeypatch):
    """Bug (C20): a bad size passes parsing and dies in an assert later, or is caught on one code path only."""
    # On a machine with a GPU "canonical" is only wrong for the CPU; pass the device for those.
    device = [] if option == "--device" else ["--device", "cpu"]
    draft = [] if option == "--draft" else ["--draft", draft]
    assert f"argument {option}" in refused(capsys, monkeypatch, "Hi", *device, *draft, option, value)


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--tau", "0.5"], "--tau"),
        (["--accept-topk", "2"], "--accept-topk"),
        (["--alpha", "0.5"], "--alpha"),
        (["--rule", "power", "--alpha", "0.5"], "--rule"),  # at T = 0
        (["--rule", "relaxed", "--temperature", "1"], "--rule"),  # accepts nothing
        (["--rule", "power", "--alpha", "0.5", "--temperature", "1", "--tau", "0.5"], "--tau"),
        (["--rule", "power", "--alpha", "0.5", "--temperature", "1", "--coupled"], "--coupled"),
        (["--spec-depth", "4", "--spec-nodes", "3"], "--spec-nodes"),
        (["--spec-depth", "4", "--spec-topk", "2", "--spec-nodes", "9"], "--spec-nodes"),
        (["--json", "--show"], "--show"),
        (["--draft", "ngram", "--coupled"], "--coupled"),
        (["--draft", "none", "--coupled"], "--coupled"),
        (["--draft", "none", "--spec-topk", "1"], "--spec-topk"),  # the defaults too are asked for in vain
        (["--draft", "none", "--spec-depth", "5"], "--spec-depth"),
        (["--draft", "none", "--spec-nodes", "5"], "--spec-nodes"),
        (["--draft", "none", "--rule", "relaxed", "--tau", "0.5", "--temperature", "1"], "--rule"),
        (["--draft", "none", "--rule", "power", "--alpha", "0.5", "--temperature", "1"], "--rule"),
    ],
)
def test_clashes_are_refused_by_option(argv, named, capsys, monkeypatch):
    """Bug (C20): each value is fine alone and the pair is nonsense that runs."""
    assert f"argument {named}" in refused(capsys, monkeypatch, "Hi", *argv)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("NANOSPEC_MAX_NEW", "abc", "NANOSPEC_MAX_NEW"),
        ("NANOSPEC_MAX_NEW", "0", "NANOSPEC_MAX_NEW"),
        ("NANOSPEC_MAX_NEW", "1_0", "NANOSPEC_MAX_NEW"),
        ("NANOSPEC_BACKEND", "abc", "NANOSPEC_BACKEND"),
        ("NANOSPEC_BACKEND", "flashinfer", "NANOSPEC_BACKEND"),
        ("NANOSPEC_DEVICE", "abc", "NANOSPEC_DEVICE"),
    ],
)
def test_bad_environment_is_refused(variable, value, named, capsys, monkeypatch):
    """Bugs: a default out of the environment skips the checks of an argument, or is called an argument."""
    monkeypatch.setenv(variable, value)
    device = ["--device", "cpu"] if variable == "NANOSPEC_BACKEND" else []
    assert f"error: environment variable {named}: " in refused(capsys, monkeypatch, "Hi", *device)


def test_bad_limit_in_the_environment_matters_only_where_it_is_used(folder, capsys, monkeypatch):
    """Bugs: `kl`, which generates nothing, or a run with --max-tokens stopped by it; named for a wrong option."""
    monkeypatch.setenv("NANOSPEC_MAX_NEW", "abc")
    assert run(capsys, "Hello", "--model", folder, "--max-tokens", "2")[0] == 0
    assert __main__.build_parser().parse_args(["kl", "x"]).file == "x"
    err = refused(capsys, monkeypatch, "Hi", "--max-tokens", "0")
    assert "argument --max-tokens: " in err
    assert "NANOSPEC_MAX_NEW" not in err


@pytest.mark.parametrize(
    "option", ["--max-tokens", "--top-k", "--seed", "--accept-topk", "--spec-topk", "--spec-depth"]
)
@pytest.mark.parametrize("value", ["1_000", " 1", "1 ", "+1", "\u0661", "9" * 5000])
def test_integers_are_digits(option, value, capsys, monkeypatch):
    """Bug: int() also takes underscores, spaces and the digits of every script."""
    assert f"argument {option}: " in refused(capsys, monkeypatch, "Hi", option, value)


def test_empty_prompt_and_unknown_options_are_refused(capsys, monkeypatch):
    """Bugs: an empty prompt, bytes that are no text or an empty name get far; `--temp` is taken for `--temperature`."""
    assert "PROMPT: is empty" in refused(capsys, monkeypatch, "")
    assert "PROMPT: is not valid Unicode" in refused(capsys, monkeypatch, "a\udcff")
    assert "--model: model is empty" in refused(capsys, monkeypatch, "Hi", "--model", "")
    assert "--temp" in refused(capsys, monkeypatch, "Hi", "--temp", "1")


def test_unusable_models_end_with_code_2(folder, tmp_path, capsys):
    """Bugs: a traceback for a mistyped path; a half-written checkpoint or a head for another target that runs."""
    half = tmp_path / "half"
    shutil.copytree(folder, half)
    file = half / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    other = tiny.config(hidden_size=32)
    head = tiny.write_head(tmp_path / "head", other, tiny.head_state(other))
    for argv, named in (
        (("--model", str(tmp_path / "absent")), "absent"),
        (("--model", str(half)), "model.safetensors"),
        (("--model", folder, "--draft", f"eagle:{head}"), "head"),
        (("--model", folder, "--draft", f"model:{tmp_path / 'absent'}"), "absent"),
    ):
        code, out, err = run(capsys, "Hi", *argv)
        assert (code, out, len(err.splitlines())) == (2, "", 1), err
        assert named in err


def test_prompt_past_the_context_ends_with_code_2(folder, capsys):
    """Bug: a prompt that can never fit hangs, or is cut without a word."""
    code, out, err = run(capsys, "a" * 1100, "--model", folder)
    assert (code, out) == (2, "")
    assert "can never fit" in err
    assert "1024" in err


def test_streams_text_then_one_line_of_statistics(folder, capsys):
    """Bugs: text lost at chunk borders; the prefill's own token counted as accepted; the bonus token not counted."""
    model = ns.load(folder)
    (want,) = ns.generate(model, ["Hello"], ns.Sampling(max_tokens=13))
    assert want.finish_reason == "length"
    # The target drafts for itself: three rounds of three drafted tokens and a bonus token, after the prefill's one.
    code, out, _ = run(
        capsys, "Hello", "--model", folder, "--max-tokens", "13", "--draft", "frozen", "--spec-depth", "3"
    )
    assert code == 0
    text, line = out.removesuffix("\n").rsplit("\n", 1)
    assert text == want.text
    assert re.fullmatch(
        r"\[13 tokens \(length\), [\d.]+ tok/s, 3 rounds, mean accepted length 4\.00, draft frozen\]", line
    )


def test_json_is_one_strict_line_with_every_field(folder, capsys):
    """Bugs: a progress line in the JSON; a field that lags behind the library's."""
    argv = ("Hello", "--model", folder, "--max-tokens", "9", "--temperature", "1", "--seed", "3", "--draft", "frozen")
    code, out, _ = run(capsys, *argv, "--json")
    (want,) = ns.generate(ns.load(folder), ["Hello"], ns.Sampling(max_tokens=9, temperature=1.0, seed=3))
    got = json.loads(out)
    assert code == 0
    assert out.count("\n") == 1
    for name in ("tokens", "text", "target_logp", "behaviour_logp", "finish_reason"):
        assert got[name] == getattr(want, name), name
    assert sum(got["accepted"]) + len(got["accepted"]) + 1 == 9 == len(got["origin"])


def test_compare_finds_plain_decoding_identical(folder, capsys):
    code, out, _ = run(capsys, "Hello", "--model", folder, "--max-tokens", "9", "--draft", "frozen", "--compare")
    assert code == 0
    assert "equal byte for byte" in out.splitlines()[-1]
    code, out, _ = run(capsys, "Hello", "--model", folder, "--max-tokens", "9", "--compare", "--json")
    assert code == 0
    assert json.loads(out)["identical"] is True


@pytest.mark.parametrize("what", ["token", "bit", "length"])
def test_compare_ends_with_code_1_where_a_byte_differs(what, folder, capsys, monkeypatch):
    """Bug: a comparison that cannot fail, or compares log-probs up to a tolerance."""
    honest = ns.generate

    def changed(*args, **kwargs):
        (plain,) = honest(*args, **kwargs)
        if what == "token":
            plain.tokens[4] += 1
        elif what == "bit":
            plain.target_logp[4] = float(np.nextafter(plain.target_logp[4], 0))
        else:
            plain.tokens.append(7)
        return [plain]

    monkeypatch.setattr(ns, "generate", changed)
    code, out, _ = run(capsys, "Hello", "--model", folder, "--max-tokens", "9", "--compare")
    assert code == 1
    assert f"DIFFERENT {'in their length' if what == 'length' else 'from token 4 on'}" in out.splitlines()[-1]


def test_show_colours_each_token_by_its_origin():
    """Bugs: colours shifted by one token; half a character printed; the last, never completed one swallowed."""
    tokenizer = tiny.tokenizer()
    text = "ab\u00e9cd\u00e9"  # the accented letter is two bytes, so two tokens
    tokens = tokenizer.encode(text, add_special_tokens=False)[:-1]
    origin = [0, 1, 2, 3, 0, 1, 2]
    chunks = [
        SimpleNamespace(
            tokens=t, origin=o, target_logp=[], behaviour_logp=[], text="", finish_reason=end, accepted=None
        )
        for t, o, end in (
            (tokens[:1], origin[:1], None),
            (tokens[1:5], origin[1:5], None),
            (tokens[5:], origin[5:], "length"),
        )
    ]
    shown = "".join(generate.follow(iter(chunks), ns.Completion(), SimpleNamespace(tokenizer=tokenizer)))
    green, blue, end = view.COLOURS[0], view.COLOURS[2], view.RESET
    cyan = view.COLOURS[1]
    assert shown == f"a{green}b{end}{blue}\u00e9{end}c{green}d{end}{cyan}\ufffd{end}"


def test_show_adds_a_legend_and_leaves_the_text(folder, capsys, monkeypatch):
    """Bug: text changed by colouring, or depths counted with the prefill's token among them."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    argv = ("Hello", "--model", folder, "--max-tokens", "13", "--draft", "frozen", "--spec-depth", "3")
    _, plain, _ = run(capsys, *argv)
    code, out, _ = run(capsys, *argv, "--show")
    assert code == 0
    text, legend = re.fullmatch(r"(.*)\n([^\n]*tokens:[^\n]*)\n\nrequest 0, round 0.*", out, flags=re.S).groups()
    assert re.sub(r"\033\[\d*m", "", text) == plain.removesuffix("\n").rsplit("\n", 1)[0]
    assert "the target's own 4" in legend  # the prefill's token and three bonus tokens
    for depth in (1, 2, 3):
        assert generate.paint(f"draft depth {depth}", depth) + " 3" in legend


def test_ctrl_c_keeps_what_there_is(folder, capsys, monkeypatch):
    """Bug: an interrupted answer ends in a traceback, or with exit code 0."""
    honest = ns.stream

    def interrupted(*args, **kwargs):
        yield next(honest(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(ns, "stream", interrupted)
    code, out, _ = run(capsys, "Hello", "--model", folder, "--max-tokens", "9", "--compare")
    assert code == 1
    assert out.splitlines()[-1].startswith("[1 tokens (aborted)")


def test_ctrl_c_while_loading_is_no_traceback(capsys, monkeypatch):
    """Bug: only the answer's own loop catches it."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(ns, "load", interrupted)
    assert run(capsys, "Hello") == (130, "", "")


@pytest.mark.parametrize("argv", [("Hello", "--json"), ("Hello",), ("--help",)])
def test_a_closed_pipe_ends_quietly(argv, folder):
    """Bug: `| true` ends in a traceback, or in one more at exit from what is still buffered."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "nanospec_fn", "generate", *argv]
    environment = {**os.environ, "NANOSPEC_MODEL": folder, "NANOSPEC_MAX_NEW": "4", "PYTHONUNBUFFERED": ""}
    done = subprocess.run(command, env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_text_that_the_terminal_cannot_show_is_replaced(monkeypatch):
    """Bug: UnicodeEncodeError in the middle of an answer under PYTHONIOENCODING=ascii."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    parser = SimpleNamespace(parse_args=lambda _: SimpleNamespace(run=lambda _: print("h\u00e9") or 0))
    monkeypatch.setattr(__main__, "build_parser", lambda: parser)
    assert __main__.main([]) == 0
    assert stdout.buffer.getvalue() == b"h?\n"


def test_environment_is_read_and_arguments_win(folder, capsys, monkeypatch):
    """Bug: a variable that only some code path reads, or one that beats an explicit argument."""
    monkeypatch.setenv("NANOSPEC_MODEL", folder)
    monkeypatch.setenv("NANOSPEC_MAX_NEW", "3")
    monkeypatch.setenv("NANOSPEC_DEVICE", "cpu")
    monkeypatch.setenv("NANOSPEC_BACKEND", "sdpa")
    code, out, _ = run(capsys, "Hello", "--json")
    assert (code, len(json.loads(out)["tokens"])) == (0, 3)
    code, out, _ = run(capsys, "Hello", "--json", "--max-tokens", "5")
    assert (code, len(json.loads(out)["tokens"])) == (0, 5)
    monkeypatch.setenv("NANOSPEC_EAGLE", "/absent/head")
    assert run(capsys, "Hello")[0] == 2
    assert run(capsys, "Hello", "--draft", "ngram")[0] == 0


def test_default_draft_without_a_head_is_ngram(folder, capsys):
    code, out, _ = run(capsys, "Hello", "--model", folder, "--max-tokens", "3")
    assert code == 0
    assert out.endswith("draft ngram]\n")


def test_help_names_every_option(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert [option for option in BAD if option not in out] == []


def test_json_line_is_strict():
    """Bug (C19): NaN and Infinity in a log line, which strict parsers reject; numpy and torch scalars that crash it."""
    record = {
        "mean": float("nan"),
        "logp": [-float("inf"), -0.5],
        "numpy": np.float32("nan"),
        "torch": torch.tensor([1.0, float("inf")]),
        "count": np.int64(3),
        "nested": {"x": torch.tensor(2)},
        "none": None,
        "ok": True,
        "text": "h\u00e9 \u65e5",
    }

    def not_json(constant):
        raise AssertionError(constant)

    line = jsonl.to_line(record)
    assert line.isascii()  # no terminal's encoding can fail on it
    assert json.loads(line, parse_constant=not_json) == {
        "mean": None,
        "logp": [None, -0.5],
        "numpy": None,
        "torch": [1.0, None],
        "count": 3,
        "nested": {"x": 2},
        "none": None,
        "ok": True,
        "text": "h\u00e9 \u65e5",
    }


@pytest.mark.smollm2
def test_module_answers_with_smollm2(smollm2):
    """The main job as a user runs it: a real answer, speculative, the bytes of plain decoding."""
    command = [sys.executable, "-m", "nanospec_fn", "generate", "Name the capital of France.", "--max-tokens", "12"]
    done = subprocess.run([*command, "--compare", "--draft", "ngram"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "equal byte for byte" in done.stdout.splitlines()[-1]


def test_an_option_of_another_spelling_is_told_the_right_one(capsys):
    """Bug: the whole program's name in place of the command's, and no word of the option that is meant."""
    with pytest.raises(SystemExit) as refused:
        __main__.main(["generate", "x", "--spec-top-k", "4"])
    assert refused.value.code == 2
    said = "python -m nanospec_fn generate: error: unrecognized arguments: --spec-top-k 4; did you mean --spec-topk?"
    assert capsys.readouterr().err.strip() == said


def test_version(capsys):
    with pytest.raises(SystemExit) as ended:
        __main__.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("nanospec-fn")


def test_a_name_that_no_file_can_have_is_told_in_a_line(capsys, folder):
    """Bug: the system's "File name too long" as a traceback, or 5000 characters of it."""
    long = "a" * 5000
    for words in (["--model", long], ["--model", folder, "--draft", f"eagle:{long}"]):
        code, out, err = run(capsys, "hi", "--device", "cpu", *words)
        assert (code, out) == (2, "")
        assert err.endswith(f"error: {'a' * 60}...{'a' * 60}: no such folder or .gguf file\n")

"""The doctor names what was done to a good head, and accuses no head of what was not done to it."""

import json
import re
from dataclasses import replace

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import chat
from nanospec_fn.__main__ import main
from nanospec_fn.doctor import diagnosis, examine, head_file, repairs
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.verdict import Report
from tests import doctored, ruined, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

ZEPHYR = "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}</s>\n{% endfor %}<|assistant|>\n"
BRACKETS = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}[assistant] "


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    torch.set_num_threads(1)
    return doctored.make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(target_folder) -> ns.Model:
    return ns.load(str(target_folder), device="cpu")


@pytest.fixture(scope="module")
def head(target_folder, tmp_path_factory):
    """A good head. Its norms differ, as those of a head that trained for long do; see `spread_norms`."""
    folder = tmp_path_factory.mktemp("heads")
    trained = doctored.train_head(target_folder, folder / "trained")
    return doctored.damaged(trained, folder / "head", doctored.spread_norms)


def case(target: ns.Model) -> Case:
    return Case(target, doctored.split()[1], max_tokens=doctored.LENGTH)


def examined(target: ns.Model, folder) -> Report:
    return diagnosis.diagnose(case(target), f"eagle:{folder}")


def test_a_good_head_is_healthy(target, head):
    """Also: the engine's rounds and the rehearsal agree. Catches: any repair that is preferred without a damage."""
    report = examined(target, head)
    assert report.verdict.name == "healthy", report.verdict
    assert not report.damages
    assert report.accepted_length == pytest.approx(report.trials[0].comparison.given)
    draft = ns.load_draft(f"eagle:{head}", target)
    out = ns.generate(target, doctored.split()[1], ns.Sampling(max_tokens=doctored.LENGTH), draft=draft)
    emitted = sum(len(one.tokens) - 1 for one in out)
    assert report.positions == emitted
    assert sum(n for _, n, _ in report.by_position) == sum(len(one.accepted) for one in out)
    assert report.accepted_length > ns.mean_accepted_len(out)  # which takes cut rounds for missed ones
    assert report.rounds >= sum(len(one.accepted) - 1 for one in out)


def test_a_bar_moves_over_every_way(target_folder, head, capsys, tmp_path):
    """Catches: a minute without a sign of life behind the completions' bar; a bar under --json."""
    (tmp_path / "prompts.txt").write_text("\n".join(doctored.split()[1][:3]))
    argv = ["doctor", "--model", str(target_folder), "--draft", f"eagle:{head}", "--device", "cpu"]
    argv += ["--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "24"]
    main([*argv, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(out)
    far = sum(t["how"].endswith(", far apart") for t in report["trials"])
    ways = len(report["trials"]) - far
    main(argv)
    _, err = capsys.readouterr()
    bars = {name: int(total) for name, total in re.findall(r"([a-z ]+): 100%[^\r\n]* (\d+)/\2 \[", err)}
    # The head as it is is run too, beside the ways and beside its inputs from elsewhere.
    expected = {"target": 2, "ways": 1 + ways, "inputs": 1 + len(report["controls"])}
    assert bars == expected | ({"far apart": 1 + far} if far else {})
    assert ways > 1


DAMAGES = doctored.damages() | {"another residual": ("residual_norm", doctored.norm_residual)}


GATED = ("one layer early", "map dropped", "map of ids", "halves swapped")  # the others take minutes


@pytest.mark.parametrize("name", [n if n in GATED else pytest.param(n, marks=pytest.mark.slow) for n in DAMAGES])
def test_a_damage_is_named(target, head, tmp_path, name):
    """Catches: a damage that is taken for another or for a weak head."""
    damage, change = DAMAGES[name]
    report = examined(target, doctored.damaged(head, tmp_path / "damaged", change))
    assert report.verdict.name == damage, report.verdict
    assert [found for found, _ in report.damages] == [damage]


@pytest.mark.slow
def test_post_norm_features_are_named(target, target_folder, tmp_path, monkeypatch):
    """A head that was trained on normed outputs of its own, and is now fed with plain ones."""
    with monkeypatch.context() as patch:
        doctored.fed_normed(patch)
        trained = doctored.train_head(target_folder, tmp_path / "normed", "--steps", "150", "--batch", "16")
    assert examined(target, trained).verdict.name == "post_norm_feature"


@pytest.mark.slow
def test_two_damages_are_both_named(target, head, tmp_path):
    early = doctored.damaged(head, tmp_path / "early", doctored.shift_taps(-1))
    both = doctored.damaged(early, tmp_path / "both", doctored.swap_halves)
    report = examined(target, both)
    assert {damage for damage, _ in report.damages} == {"taps_early", "halves_swapped"}


@pytest.mark.parametrize("name", ["one step", pytest.param("half trained", marks=pytest.mark.slow)])
def test_a_weak_head_is_only_weak(target, target_folder, tmp_path, name):
    """Catches: a cause found where there is none, which a head far from its best invites most."""
    less = {"half trained": "--steps 50", "one step": "--unroll 1 --steps 50 --batch 16"}[name]
    weak = doctored.train_head(target_folder, tmp_path / "weak", *less.split())
    report = examined(target, weak)
    assert report.verdict.name == "weak", report.verdict
    assert not report.damages


RUINED = ("another fc", "midlayer.hidden_norm of zeros")  # in the gate


@pytest.mark.parametrize(
    "name", [n if n in RUINED else pytest.param(n, marks=pytest.mark.slow) for n in [*ruined.ruins(), "drowned"]]
)
def test_a_ruined_head_is_not_called_weak(target, head, tmp_path, name):
    """Catches: exit code 0 for a head that has lost an input, or all it knew. Noise drowns a head of 7 letters."""
    word, change = (ruined.ruins() | {"drowned": ("broken", doctored.add_noise(0.6))})[name]
    report = examined(target, doctored.damaged(head, tmp_path / "ruined", change))
    assert report.verdict.name == word, report.verdict
    assert [found for found, _ in report.damages] == [word] * (word != "broken")


@pytest.mark.slow
def test_a_little_noise_is_no_damage(target, head, tmp_path):
    report = examined(target, doctored.damaged(head, tmp_path / "noisy", doctored.add_noise(0.02)))
    assert report.verdict.name == "healthy", report.verdict


def with_template(target: ns.Model, template: str | None) -> ns.Model:
    return replace(target, tokenizer=doctored.tokenizer(template))


@pytest.mark.parametrize("template", [ZEPHYR, BRACKETS, None], ids=["another", "one of its own", "none"])
@pytest.mark.slow
def test_a_target_prompted_with_another_template_is_told(target, head, template):
    """The target itself knows ChatML; the head is measured with that one."""
    report = examined(with_template(target, template), head)
    assert report.verdict.name == "wrong_template", report.verdict
    assert "ChatML" in report.verdict.reason
    assert report.accepted_length == examined(target, head).accepted_length


def test_few_prompts_do_not_tell_a_template(target, head):
    """Catches: the template blamed on one prompt's word."""
    asked = Case(with_template(target, ZEPHYR), doctored.split()[1][:3], max_tokens=8)
    report = diagnosis.diagnose(asked, f"eagle:{head}")
    assert not report.damages
    assert "on 3 prompts only" in report.doubts[0]
    assert report.verdict.name == "not_enough_evidence"


def test_a_head_that_brings_another_template_is_told(target, head, tmp_path):
    """Catches: a folder's template that is taken for the target's; and no fault in a folder with the right one."""
    copy = doctored.damaged(head, tmp_path / "copy", lambda raw, tensors: None)
    (copy / "chat_template.jinja").write_text(ZEPHYR)
    assert examined(target, copy).verdict.name == "wrong_template"
    (copy / "chat_template.jinja").write_text(target.tokenizer.chat_template)
    assert examined(target, copy).verdict.name == "healthy"


def test_prompts_of_token_ids_are_not_asked_for_a_template(target, head):
    encoded = [target.tokenizer.encode(p) for p in doctored.split()[1]]
    report = diagnosis.diagnose(Case(target, encoded, max_tokens=8), f"eagle:{head}")
    assert dict(report.findings)["template"] == "not judged: the prompts are token ids"


def test_a_draft_model_of_other_tokens_is_told(target, target_folder, tmp_path):
    """Catches: a vocabulary of another size, or of one size with other meanings, that only shows as low acceptance."""
    same = diagnosis.diagnose(case(target), f"model:{target_folder}")
    assert same.verdict.name == "healthy"
    assert [r.share for r in same.by_depth] == [1.0] * 5  # it is the target
    raw = doctored.RAW | {"vocab_size": 200}
    small = tiny.write(tmp_path / "small", raw, tiny.state_of(tiny.llama(raw)))
    assert diagnosis.diagnose(case(target), f"model:{small}").verdict.name == "other_vocabulary"
    other = tiny.write(tmp_path / "other", doctored.RAW, tiny.state_of(tiny.llama(doctored.RAW)))
    moved = tiny.tokenizer(None)
    moved.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "<|im_start|>"]})
    moved.save_pretrained(other)
    verdict, reason = diagnosis.diagnose(case(target), f"model:{other}").verdict
    assert (verdict, "'<|im_start|>'" in reason or "'<|im_end|>'" in reason) == ("other_tokenizer", True)
    bare = tiny.write(tmp_path / "bare", doctored.RAW, tiny.state_of(tiny.llama(doctored.RAW)))
    assert diagnosis.diagnose(case(target), f"model:{bare}").verdict.name == "broken"  # its weights are random


def test_a_head_of_another_target_is_refused_with_the_loaders_words(target, head, tmp_path):
    def widen(raw, tensors):
        raw["target_hidden_size"] = 64

    verdict, reason = examined(target, doctored.damaged(head, tmp_path / "wide", widen)).verdict
    assert verdict == "refused"
    assert "the head is for a target of hidden size 64, this target's is 48" in reason


def test_repairs_undo_themselves(target, head):
    """Every exchange applied twice is the head as it was."""
    file = head_file.open_head(head, target)
    subject = head_file.load(file, target, head_file.readings(file)["offsets"])
    for repair in repairs.layer(subject):
        (again,) = [r.subject for r in repairs.layer(repair.subject) if r.damage == repair.damage]
        assert again.cfg == subject.cfg
        assert again.normed == subject.normed
        assert torch.equal(again.params.layer.qkv, subject.params.layer.qkv)
        assert torch.equal(again.params.layer.attn_norm, subject.params.layer.attn_norm)
        assert torch.equal(again.params.feature_norm, subject.params.feature_norm)


def test_marks_stand_where_drafts_do(target, head):
    """Against the engine's forward on growing contexts. Catches: a row or depth off by one, a response's end passed."""
    prompts = [chat.encode(target.tokenizer, p) for p in doctored.split()[1][:3]]
    out = ns.generate(target, prompts, [ns.Sampling(max_tokens=n) for n in (9, 6, 2)])
    responses = [one.tokens for one in out]
    draft = ns.load_draft(f"eagle:{head}", target)
    view = examine.observe(target, doctored.TAPS, prompts, responses)
    marks = examine.rehearse(examine.Subject(draft.method.cfg, draft.params), target, view, depth=3)
    assert marks.live.sum((0, 2)).tolist() == [8 + 7 + 6, 5 + 4 + 3, 1]
    runs = examine.expected(examine.certain(marks, marks.hit))
    assert runs.sum() > 5
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        for m in range(len(response) - 1):
            # The engine that has just emitted response token m: its next round tells how many drafts were right.
            rest = len(response) - m - 1
            cut = ns.generate(
                target, [[*prompt, *response[:m]]], ns.Sampling(max_tokens=1 + rest), draft=draft,
                speculation=ns.Speculation(depth=3),
            )[0]  # fmt: skip
            assert cut.tokens == response[m:]
            assert cut.accepted[0] == int(runs[b, m])


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_expected_acceptance_of_responses_that_end_early(tokens):
    """Bug: responses shorter than the head is run ahead, which an answer of two tokens gives."""
    p = torch.tensor([0.5, 0.25, 0.2])[:, None, None].expand(-1, 1, tokens)
    marks = examine.Marks(hit=p > 1, logp=p.log(), drafted=torch.zeros_like(p, dtype=torch.int64), live=p > 0)
    whole = [0.5, 0.5 + 0.125, 0.5 + 0.125 + 0.025]
    by_left = [whole[min(left, 3) - 1] for left in range(tokens, 0, -1)]
    torch.testing.assert_close(examine.expected(marks), torch.tensor([by_left]))


def test_sign_test_by_hand():
    assert examine.sign_test(0, 0) == 1
    assert examine.sign_test(3, 0) == 1 / 8
    assert examine.sign_test(2, 1) == 4 / 8


def test_command_line(target_folder, head, tmp_path, capsys):
    """The text ends with the verdict, --json is one object, the exit code is 1 for a damage."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(doctored.split()[1]) + "\n")
    command = ["doctor", "--model", str(target_folder), "--device", "cpu", "--prompts", str(prompts)]
    command += ["--max-tokens", str(doctored.LENGTH)]
    assert main([*command, "--draft", f"eagle:{head}"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("verdict: healthy: ")
    early = doctored.damaged(head, tmp_path / "early", doctored.shift_taps(-1))
    assert main([*command, "--draft", f"eagle:{early}", "--json"]) == 1
    record = json.loads(capsys.readouterr().out)
    assert record["verdict"] == "taps_early"
    assert record["reason"] == record["damages"][0]["reason"]
    assert len(record["by_depth"]) == examine.DEPTH
    assert main([*command, "--draft", "ngram", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["verdict"], record["trials"], record["controls"]) == ("weak", [], [])
    assert main([*command, "--draft", f"eagle:{head}", "--limit", "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("verdict: not_enough_evidence: ")
    assert f"{doctored.LENGTH - 1} positions" in last


BAD = {
    "--draft none": "argument --draft: there is nothing to examine in none",
    "--draft eagle:/nowhere": "/nowhere: no such folder or .gguf file",
    "--draft eagle": "no head comes with model",
    "--prompts /nowhere": "argument --prompts",
    "--limit 0": "argument --limit",
    "--dtype fp7": "dtype 'fp7' is not one of",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_arguments_are_named(target_folder, options, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", "--model", str(target_folder), "--device", "cpu", *options.split()])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert BAD[options] in error


@pytest.mark.parametrize(
    "line",
    [b'{"prompt": 3}', b"[]", b'[1, "a"]', b"nonsense", b"[99999]", b'"\xff"', b"[%s]" % b", ".join([b"9"] * 9000)],
)
def test_bad_lines_of_prompts_are_named(target_folder, line, tmp_path, capsys):
    """Empty lines count: the message has the line of the file, not the prompt's number."""
    file = tmp_path / "p.jsonl"
    file.write_bytes(b'"XYa"\n\n' + line + b"\n")
    with pytest.raises(SystemExit):
        main(["doctor", "--model", str(target_folder), "--device", "cpu", "--draft", "ngram", "--prompts", str(file)])
    error = capsys.readouterr().err
    assert f"argument --prompts: {file}:3: " in error
    assert error.count("\n") == 1

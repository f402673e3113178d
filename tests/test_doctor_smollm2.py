"""The doctor on the head that is shipped: copies with known damages, each to be named. More: tests/test_doctor.py.

The target's completions do not depend on the head, so they are made once.
"""

import copy
from dataclasses import replace

import pytest

import nanospec_fn as ns
from nanospec_fn import draft_model, eagle
from nanospec_fn.doctor import command, diagnosis, examine, head_file, rounds
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.verdict import Report
from tests import doctored, ruined

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

TAPS = eagle.default_taps(30)
LLAMA2 = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def case(smollm2) -> Case:
    return Case(smollm2, command.PROMPTS, max_tokens=64)


@pytest.fixture(scope="module")
def head(smollm2):
    folder = draft_model.bundled_head(smollm2.name)
    assert folder is not None, "the package has lost its head"
    return folder


@pytest.fixture(scope="module")
def said(case) -> list[ns.Completion]:
    return case.complete(None)


def examined(case: Case, folder, said: list[ns.Completion], monkeypatch) -> Report:
    """A report on rounds that are rehearsed; the shipped head's test runs the engine's, and finds them the same."""

    def complete(self: Case, draft: ns.Draft | None) -> list[ns.Completion]:
        if draft is None:
            return said
        subject = examine.Subject(draft.method.cfg, draft.params)
        tokens = [one.tokens for one in said]
        view = examine.observe(self.target, subject.cfg.taps, self.encoded(), tokens)
        hit = examine.rehearse(subject, self.target, view).hit
        found = [rounds.along(hit[:, i : i + 1], [len(one)]) for i, one in enumerate(tokens)]
        pairs = zip(tokens, found, strict=True)
        return [ns.Completion(tokens=one, accepted=[r.accepted for r in theirs]) for one, theirs in pairs]

    monkeypatch.setattr(Case, "complete", complete)
    return diagnosis.diagnose(case, f"eagle:{folder}")


def test_the_shipped_head_is_healthy(case):
    """The engine's rounds are the rehearsal's to the last one."""
    report = diagnosis.diagnose(case, "eagle")
    assert report.verdict.name == "healthy", report.verdict
    assert report.accepted_length == pytest.approx(report.trials[0].comparison.given)


DAMAGES = doctored.damages(TAPS) | {"another embedding": ("embedding", doctored.bring_embedding)}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damage_is_named(case, head, said, tmp_path, monkeypatch, name):
    damage, change = DAMAGES[name]
    report = examined(case, doctored.damaged(head, tmp_path / "damaged", change), said, monkeypatch)
    assert [found for found, _ in report.damages] == [damage], report.verdict


def test_post_norm_features_are_named(case, head, said, monkeypatch):
    """The head run with its outputs normed before they are fed back."""
    load = head_file.load
    monkeypatch.setattr(head_file, "load", lambda *args: replace(load(*args), normed=True))
    report = examined(case, head, said, monkeypatch)
    assert [found for found, _ in report.damages] == ["post_norm_feature"]


@pytest.mark.parametrize("scale, verdict", [(0.1, "healthy"), (0.8, "weak")])
def test_noise_is_no_damage(case, head, said, tmp_path, monkeypatch, scale, verdict):
    report = examined(case, doctored.damaged(head, tmp_path / "noisy", doctored.add_noise(scale)), said, monkeypatch)
    assert report.verdict.name == verdict, report.verdict
    assert not report.damages


@pytest.mark.parametrize("name", ["random", "another fc", "output rows shuffled", "midlayer.input_layernorm of zeros"])
def test_a_ruined_head_is_not_called_weak(case, head, said, tmp_path, monkeypatch, name):
    word, change = ruined.ruins(case.target.params.embed)[name]
    report = examined(case, doctored.damaged(head, tmp_path / "ruined", change), said, monkeypatch)
    assert report.verdict.name == word, report.verdict


def test_one_prompt_is_not_enough(case, head, said, monkeypatch):
    report = examined(replace(case, prompts=case.prompts[:1]), head, said[:1], monkeypatch)
    assert report.verdict.name == "not_enough_evidence", report.verdict


def test_another_template_is_told(case, head, said, monkeypatch):
    tokenizer = copy.copy(case.target.tokenizer)
    tokenizer.chat_template = LLAMA2
    asked = replace(case, target=replace(case.target, tokenizer=tokenizer))
    report = examined(asked, head, said, monkeypatch)
    assert report.verdict.name == "wrong_template", report.verdict

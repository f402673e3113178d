"""The doctor on the head that is shipped: copies with known damages, each to be named. More: tests/test_doctor.py.

The target's completions do not depend on the head, so they are made once.
"""

import copy
from dataclasses import replace

import pytest

import nanospec_fn as ns
from nanospec_fn import draft_model, eagle
from nanospec_fn.doctor import command, diagnosis, head_file
from nanospec_fn.doctor.diagnosis import Case
from nanospec_fn.doctor.verdict import Report
from tests import doctored

pytestmark = [pytest.mark.smollm2, pytest.mark.slow]

TAPS = eagle.default_taps(30)
LLAMA2 = "{% for m in messages %}[INST] {{ m['content'] }} [/INST]{% endfor %}"


@pytest.fixture(scope="module")
def case(smollm2) -> Case:
    return Case(smollm2, command.PROMPTS, max_tokens=64)


@pytest.fixture(scope="module")
def head(smollm2):
    folder = draft_model.bundled_head(smollm2)
    assert folder is not None, "the package has lost its head"
    return folder


@pytest.fixture(scope="module")
def said(case) -> list[ns.Completion]:
    return case.complete(None)


def examined(case: Case, folder, said: list[ns.Completion], monkeypatch) -> Report:
    """A report without the engine's own rounds."""
    monkeypatch.setattr(Case, "complete", lambda self, draft: [ns.Completion(tokens=one.tokens) for one in said])
    return diagnosis.diagnose(case, f"eagle:{folder}")


def test_the_shipped_head_is_healthy(case):
    """The engine's rounds are the rehearsal's to the last one."""
    report = diagnosis.diagnose(case, "eagle")
    assert report.verdict[0] == "healthy", report.verdict
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
def test_noise_is_no_damage(case, head, tmp_path, scale, verdict):
    report = diagnosis.diagnose(case, f"eagle:{doctored.damaged(head, tmp_path / 'noisy', doctored.add_noise(scale))}")
    assert report.verdict[0] == verdict, report.verdict
    assert not report.damages


def test_another_template_is_told(case, head, said, monkeypatch):
    tokenizer = copy.copy(case.target.tokenizer)
    tokenizer.chat_template = LLAMA2
    asked = replace(case, target=replace(case.target, tokenizer=tokenizer))
    report = examined(asked, head, said, monkeypatch)
    assert report.verdict[0] == "wrong_template", report.verdict

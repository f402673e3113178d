"""The bias study: its optimum, its gradient, and that only the corrected run finds what is there to find."""

import json
import math
from pathlib import Path

import pytest
import torch

import nanospec_fn as ns
from rl import bias, bias_report, bias_study, policy_loss
from rl.bias_study import Study

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(autouse=True)
def _one_thread(one_thread):
    """All of these models are tiny."""


def test_the_policy_is_its_table_whatever_the_context():
    """Catches: a policy whose logits depend on the context, so that the optimum is not the one that is claimed."""
    policy = bias_study.init()
    logp = ns.forward(policy.params, policy.cfg, torch.tensor([[0, 5, 3, 1], [4, 4, 0, 2]])).log_softmax(-1)
    torch.testing.assert_close(logp.exp(), torch.tensor(bias_study.REFERENCE).expand_as(logp), rtol=1e-4, atol=0)
    assert torch.equal(logp, logp[:1, :1].expand_as(logp))


def test_the_engine_serves_the_table_that_is_trained():
    """Catches: a served copy that updates do not reach, a draft that moves along, a mu that is not the rule's."""
    policy, study = bias_study.init(), Study(samples=40, tokens=1)
    draft = ns.load_draft("frozen", policy)
    engine = ns.prepare(policy, draft, bias_study.sizes(study), ns.Speculation(top_k=1, depth=study.depth))
    table = torch.tensor([-1.0, 0.5, 0.0, 1.0, -0.5, 0.2])  # token 0, which the draft proposes, is the least likely now
    policy.params.head.copy_(bias_study.head_of(table))
    drawn = ns.generate(policy, [bias_study.PROMPT] * 40, bias_study.sampling(study, 0, 0), engine=engine)
    logp = bias_study.log_probs(policy, table)
    torch.testing.assert_close(logp, table.log_softmax(0), rtol=1e-4, atol=1e-4)
    assert [one.target_logp for one in drawn] == [logp[one.tokens].tolist() for one in drawn]
    p = table.double().softmax(0)
    mu = p * (1 - p[0] ** 0.3) / (1 - p[0])
    mu[0] = p[0] ** 0.3
    for one in drawn:
        assert one.behaviour_logp[0] == one.target_logp[0]  # the prefill's own token
        assert math.exp(one.behaviour_logp[1]) == pytest.approx(float(mu[one.tokens[1]]), rel=1e-4)
        assert (one.origin[1] == 1) == (one.tokens[1] == 0)
    assert {one.tokens[1] for one in drawn} >= {0, 3}


def test_optimum_is_the_best_policy():
    """Catches: a claimed optimum that something else beats; an enumeration that ends elsewhere."""
    best = bias_study.optimum()
    assert float(best.sum()) == pytest.approx(1)
    worth = bias_study.objective(best)
    generator = torch.Generator().manual_seed(0)
    for size in (1e-3, 0.1, 1.0):
        for _ in range(50):
            other = (best.log() + size * torch.randn(6, generator=generator, dtype=torch.float64)).softmax(0)
            assert bias_study.objective(other) < worth
    # The largest value has a closed form: beta log E_0[exp(r / beta)].
    mean = sum(p * math.exp(r / bias_study.BETA) for p, r in zip(bias_study.REFERENCE, bias_study.REWARD, strict=True))
    assert worth == pytest.approx(bias_study.BETA * math.log(mean))

    def off(study: Study, correction: str) -> float:
        return bias_study.distance(bias_study.expected_end(study, correction), best)

    assert off(Study(), "exact") < 1e-6
    assert off(Study(), "none") > 0.1
    assert off(Study(alpha=1.0), "none") < 1e-6
    assert off(Study(is_clip=4.0), "clipped") < 1e-6  # alpha^-1 is below 4


@pytest.mark.parametrize("correction", bias_study.CORRECTIONS)
def test_gradient_is_that_of_the_objective(correction):
    """Catches: a wrong sign, baseline, weight or KL; the prefill's token among those trained on.

    By hand: d/d table = mean over tokens of w (-A + beta log(p / p_0)) (onehot - p), A against the mean of the others.
    """
    table = torch.tensor([0.3, -0.2, 0.5, 0.1, -0.4, 0.0])
    tokens, behaviour = [[2, 0, 4], [1, 5, 5], [0, 0, 3]], [[-1.0, -0.2, -3.0], [-1.0, -4.0, -2.0], [-1.0, -0.1, -1.5]]
    drawn = [ns.Completion(tokens=t, behaviour_logp=b) for t, b in zip(tokens, behaviour, strict=True)]
    p = table.double().softmax(0)
    wanted = torch.zeros(6, dtype=torch.float64)
    worth = [sum(bias_study.REWARD[x] for x in t[1:]) for t in tokens]
    for i in range(3):
        advantage = worth[i] - (sum(worth) - worth[i]) / 2
        for x, mu in zip(tokens[i][1:], behaviour[i][1:], strict=True):
            w = {"none": 1.0, "exact": float(p[x]) / math.exp(mu)}.get(correction, min(float(p[x]) / math.exp(mu), 2.0))
            term = w * (-advantage + bias_study.BETA * math.log(float(p[x]) / bias_study.REFERENCE[x]))
            wanted += term * (torch.eye(6, dtype=torch.float64)[x] - p) / 6
    recipe = policy_loss.Recipe(correction=correction, kl_beta=bias_study.BETA)
    found = bias_study.gradient(bias_study.init(), table, recipe, drawn)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


def test_draws_depend_on_seed_and_step_alone():
    """Catches: two steps, or two seeds, that sample the same completions."""
    study = Study(samples=5, steps=7)
    seeds = [one.seed for seed in range(3) for step in range(7) for one in bias_study.sampling(study, seed, step)]
    assert len(set(seeds)) == 3 * 7 * 5
    assert {one.rule for one in bias_study.sampling(study, 0, 0)} == {"power"}
    assert {one.rule for one in bias_study.sampling(Study(alpha=1.0), 0, 0)} == {"exact"}


def test_only_the_corrected_run_finds_the_optimum():
    """Catches: a correction that does nothing, or too much, on tokens that the real sampler drew.

    The ends lie 0.168 apart. Over 200 seeds of the same process in numpy the corrected run ended within 0.072 of the
    optimum and the uncorrected one no nearer than 0.115.
    """
    study = Study(samples=24, steps=30, rate=4.0)
    none, exact = (bias_study.fit(study, correction, seed=0) for correction in ("none", "exact"))
    assert exact["distance"] < 0.08
    assert none["distance"] > 0.1
    assert bias_study.distance(torch.tensor(none["policy"]), bias_study.expected_end(study, "none")) < 0.08
    assert exact["gap"] < none["gap"]
    assert len(exact["path"]) == 30
    assert exact["path"][0] > 0.15  # both set out from far away


BAD = {
    "--samples 1": "argument --samples: at least 2",
    "--steps 0": "argument --steps: must be an integer from 1",
    "--alpha 0": "argument --alpha: must be a number above 0 and at most 1",
    "--corrections m2po": "argument --corrections: invalid choice",
    "--corrections exact exact": "argument --corrections: one is named twice",
    "--depth 300": "these sizes do not fit: depth must be an integer from 1 to 256",
    "--samples 5000": "these sizes do not fit: max_slots must be",
    "--tokens 63": "argument --tokens: at most 62",
    "--picture nowhere/x.png": "argument --picture: nowhere/x.png is a folder, or in one that does not exist",
    "--out .": "argument --out: . is a folder",
}


@pytest.mark.parametrize("options", BAD)
def test_bad_options_end_before_any_work(options, tmp_path, capsys, monkeypatch):
    """Catches: an option that is only seen to be wrong after the runs are done."""
    monkeypatch.setattr(bias_study, "fit", lambda *a, **k: pytest.fail("a run was begun"))
    with pytest.raises(SystemExit) as stopped:
        bias.main(["--out", str(tmp_path / "x.jsonl"), *options.split()])
    assert stopped.value.code == 2
    assert BAD[options] in capsys.readouterr().err


@pytest.mark.usefixtures("matplotlib")
def test_command_writes_what_it_prints(tmp_path, capsys):
    """Catches: a file that lacks a run or cannot be read back, a picture without labels, a table of other figures."""
    out, picture = tmp_path / "bias.jsonl", tmp_path / "bias.png"
    command = f"--seeds 2 --steps 3 --samples 4 --quiet --out {out} --picture {picture}"
    assert bias.main(command.split()) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["seed"], line["correction"]) for line in lines[1:]] == [
        (s, c) for s in (0, 1) for c in ("none", "exact")
    ]
    assert capsys.readouterr().out == bias_report.table(lines)
    assert lines[0]["header"]["study"]["samples"] == 4
    mean = (lines[2]["distance"] + lines[4]["distance"]) / 2
    assert f"| exact | 2 | {mean:.3f} (" in bias_report.table(lines)
    assert picture.read_bytes().startswith(b"\x89PNG")
    axes = bias_report.picture(lines).axes
    assert all(ax.get_xlabel() and ax.get_ylabel() and ax.get_legend() for ax in axes)
    assert len([line for line in axes[0].lines if line.get_linestyle() == "-"]) == 4


@pytest.mark.parametrize("name", [path.name for path in sorted(DOCS.glob("bias*.jsonl"))])
def test_the_page_has_the_files_figures(name):
    """Catches: figures in the page that its files do not have."""
    lines = [json.loads(line) for line in (DOCS / name).read_text().splitlines()]
    assert bias_report.table(lines) in (DOCS / "rl.md").read_text()

"""GRPO at its edges: completions that say nothing, every rule and correction, learning, refusals before any work."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest
import torch

import nanospec_fn as ns
from nanospec_fn import recorded, trace
from rl import experience, grpo, grpo_options, mismatch, ranks
from rl.experience import Version
from rl.grpo_config import GrpoConfig
from rl.policy_loss import CORRECTIONS, LOSSES
from rl.ranks import Ranks
from rl.tasks import Problem, Reward, Task
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    raw = tiny.config("tinyllama-1.1b")
    return tiny.write(tmp_path_factory.mktemp("target"), raw, tiny.state_of(tiny.llama(raw)))


def run(model: Path, out: Path, more: str, **sizes: int) -> list[dict]:
    sizes = {"steps": 2, "prompts": 2, "group": 3, "max-tokens": 6} | sizes
    text = f"--model {model} --device cpu --out {out} --quiet {more} "
    args = grpo_options.parse([*text.split(), *(x for k, v in sizes.items() for x in (f"--{k}", str(v)))])
    grpo.run(args, Ranks())
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()][1:]


def scripted(rewards: list[float]) -> Task:
    """Two prompts whose completions get these rewards in turn, whatever they are."""
    left = itertools.cycle(rewards)

    def reward(problem: Problem, text: str | None, tokens: list[int]) -> Reward:
        value = next(left)
        return Reward(value, value > 0.5, False, False)

    problems = [Problem((5, 6, 7)), Problem((8, 9, 10, 11))]
    return Task("scripted", problems, problems, reward)


def begin(model: ns.Model, out: Path, task: Task, more: str = "") -> tuple[grpo.Setting, grpo.RunState]:
    text = f"--device cpu --out {out} --prompts 2 --group 2 --max-tokens 5 {more}"
    setting = grpo.begin(model, None, task, grpo_options.parse(text.split()), Ranks())
    return setting, grpo.init(setting)


@pytest.mark.parametrize("group", [1, 2])
def test_groups_without_signal_change_nothing(folder, tmp_path, group):
    """Groups of one, and all-equal rewards. Catches: 0 / 0, a gradient from rounding, a flat group not counted."""
    model = ns.load(str(folder), device="cpu")
    setting, state = begin(model, tmp_path, scripted([0.1]), f"--group {group}")
    before = model.params.embed.clone()
    state, line = grpo.train_step_(setting, state)
    assert (line["groups"], line["groups_with_signal"], line["loss"], line["grad_norm"]) == (2, 0, 0, 0)
    assert torch.equal(model.params.embed, before)
    assert state.step == 1


def test_a_flat_group_stays_in_the_denominator(folder, tmp_path):
    """One of two groups says something. Catches: a denominator of the tokens with signal alone."""
    norms = {}
    for loss in LOSSES:
        model = ns.load(str(folder), device="cpu")
        setting, state = begin(model, tmp_path, scripted([1, 0, 0.5, 0.5]), f"--loss {loss}")
        rollouts = grpo.collect(setting, state)
        lengths = rollouts.lengths
        _, line = grpo.train_step_(setting, state)
        assert line["groups_with_signal"] == 1
        assert line["grad_norm"] > 0
        norms[loss] = line["grad_norm"], lengths
    per_token = {"dapo": 1 / sum(norms["dapo"][1]), "dr_grpo": 1 / (4 * 5)}
    assert norms["dapo"][0] / per_token["dapo"] == pytest.approx(norms["dr_grpo"][0] / per_token["dr_grpo"], rel=1e-4)


def ending(ids: list[int]) -> ns.Model:
    """A model with these EOS ids whose last one it likes: completions of one token, the stop token, are common."""
    model = tiny.model("tinyllama-1.1b", eos_token_id=ids)
    favourite = int(ns.forward(model.params, model.cfg, torch.tensor([[5, 6, 7]]))[0, -1].argmax())
    head = model.params.head.clone()
    head[[favourite, ids[-1]]] = model.params.head[[ids[-1], favourite]] * torch.tensor([[1.0], [1.5]])
    return dataclasses.replace(model, params=dataclasses.replace(model.params, head=head))


@pytest.mark.parametrize("ids", [[2], [0], [2, 9]], ids=["one", "EOS is the padding id", "several"])
def test_completions_that_end_at_once(tmp_path, ids):
    """Empty completions (the stop token alone), EOS = 0, which padding is filled with, and several EOS ids.

    Catches: a stop token that is not trained on, real tokens dropped for looking like padding, an empty sequence's row.
    """
    model = ending(ids)
    setting, state = begin(model, tmp_path, scripted([1, 0, 0, 1, 1, 0, 0, 0]), "--group 16")
    rollouts = grpo.collect(setting, state)
    lengths = rollouts.lengths
    assert min(lengths) == 1 < max(lengths)
    ended = [one for one in rollouts.completions if one.finish_reason == "stop"]
    assert all(one.tokens[-1] in ids for one in ended)
    tokens = experience.tokens_of(rollouts, torch.device("cpu"))
    _, known = grpo.score(setting, rollouts)
    expected = [
        x
        for prompt, one in zip(rollouts.prompts, rollouts.completions, strict=True)
        for x in ns.score(model, prompt, one.tokens, ns.Sampling(temperature=1.0))
    ]
    assert known.old.tolist() == expected == tokens.target.tolist()
    state, line = grpo.train_step_(setting, state)
    assert line["exact_share"] == 1
    assert line["tokens"] == sum(lengths)
    assert line["truncated"] == sum(one.finish_reason == "length" for one in rollouts.completions) / 32
    assert line["grad_norm"] > 0


def test_a_step_whose_completions_are_all_empty_ends_well(folder, tmp_path):
    """No token at all, as where nothing could be served. Catches: a mean of nothing, NaN in the log."""
    model = ns.load(str(folder), device="cpu")
    setting, _ = begin(model, tmp_path, scripted([1, 0]))
    nothing = ns.Completion(finish_reason="error")
    rollouts = experience.Experience(
        [[5, 6]] * 4, [nothing] * 4, [Reward(0, False, False, False)] * 4, 2, Version(0, None)
    )
    tokens = experience.tokens_of(rollouts, torch.device("cpu"))
    scored, known = grpo.score(setting, rollouts)
    assert (scored, len(known.old), len(tokens.target)) == ([], 0, 0)
    line = grpo.grpo_log.of_rollouts(rollouts, [0, 1, 2, 3, 4])
    weights = grpo.policy_loss.correct(setting.recipe, known.old, tokens.behaviour, known.old)
    line |= grpo.grpo_log.of_tokens(setting.config, tokens, known, weights)
    assert (line["mean_length"], line["w_mean"], line["kl_old_0"], line["exact_share"]) == (0, None, None, None)


def test_every_token_carries_the_versions_that_sampled_it(folder, tmp_path):
    model = ns.load(str(folder), device="cpu")
    setting, state = begin(model, tmp_path, scripted([1, 0]))
    state, _ = grpo.train_step_(setting, state)
    tokens = experience.tokens_of(grpo.collect(setting, state), torch.device("cpu"))
    assert set(tokens.policy_version.tolist()) == {1}
    assert set(tokens.draft_version.tolist()) == {-1}


RULES = {
    "power chain": "--draft frozen --acceptance power --alpha 0.3",
    "power tree": "--draft frozen --acceptance power --alpha 0.5 --spec-topk 2 --spec-depth 3",
    "relaxed": "--draft frozen --acceptance relaxed --tau 0.05",
}


@pytest.mark.parametrize("rule", RULES)
def test_rules_are_described_by_their_weights(folder, tmp_path, rule):
    """Catches: weights above their bound, missing mass that is not told, a chi-square where it has no meaning."""
    line = run(folder, tmp_path, RULES[rule], steps=1, group=8)[0]
    assert line["exact_share"] == 1
    assert line["accepted_len"] > 1
    assert line["kl_mu_old"] > 0
    assert line["w_max"] <= {"power chain": 1 / 0.3, "power tree": 0.5**-2, "relaxed": 1}[rule] * (1 + 1e-5)
    assert (line["chi2"] is not None) == (rule == "power chain")
    assert (line["missing_mass"] > 0) == (rule == "relaxed")


def test_chi_square_is_that_of_the_recorded_rows(folder, tmp_path):
    """The closed form from tokens alone, against the evidence of the very rounds. Catches: rows of another round, a
    bonus token taken for a rejection, a wrong alpha."""
    model = ns.load(str(folder), device="cpu")
    draft, file = ns.load_draft("frozen", model), tmp_path / "trace.jsonl"
    for leaf in (draft.params.head, draft.params.layers[1].down):
        leaf += 0.05 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1))
    sampling = [ns.Sampling(max_tokens=12, temperature=1.0, rule="power", alpha=0.3, seed=i) for i in range(8)]
    done = ns.generate(model, [[4, 5, 6]] * 8, sampling, draft=draft, trace=file)
    rollouts = experience.Experience([[4, 5, 6]] * 8, done, [], 8, Version(0, 0))
    tokens = experience.tokens_of(rollouts, torch.device("cpu"))
    expected = []
    for record in trace.read(file).rounds:
        for row in (0, *(node + 1 for node in record.path))[: len(record.tokens)]:
            seen = recorded.row_of(record, row)
            p = math.exp(seen.logp[0]) if seen.logp else 0.0
            expected.append(p ** (2 - 0.3) + (1 - p) ** 2 / (1 - p**0.3) - 1 if 0 < p < 1 else 0.0)
    assert len(expected) == len(tokens.target)
    found = mismatch.chi_square("power", 0.3, 1, tokens.target, tokens.behaviour, tokens.origin)
    assert found == pytest.approx(sum(expected) / len(expected), rel=1e-3)
    assert found > 0.1


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_every_correction_trains_with_every_denominator(folder, tmp_path, correction, loss):
    more = f"{RULES['power chain']} --correction {correction} --loss {loss} --kl-beta 0.1 --lr 1e-3"
    lines = run(folder, tmp_path, more)
    assert all(line["loss"] is not None and line["grad_norm"] > 0 for line in lines)
    if correction in ("none", "exact"):
        assert {line["masked"] for line in lines} == {0}


def test_a_tiny_random_model_learns_the_toy_task(folder, tmp_path):
    """The command of the issue, scaled down: the last five rewards are well above the first five."""
    lines = run(folder, tmp_path, f"{RULES['power chain']} --correction exact --lr 1e-2", steps=20, group=8)
    first, last = ([line["reward"] for line in part] for part in (lines[:5], lines[-5:]))
    assert sum(last) / 5 > sum(first) / 5 + 0.1


BAD = {
    "--steps 0": "argument --steps: must be an integer from 1",
    "--steps 1.5": "argument --steps: must be an integer from 1",
    "--prompts -1": "argument --prompts: must be an integer",
    "--group 0": "argument --group: must be an integer",
    "--max-tokens abc": "argument --max-tokens: must be an integer",
    "--seed -1": "argument --seed: must be an integer from 0 to 2147483647, got '-1'",
    "--seed 99999999999": "argument --seed: must be an integer",
    "--lr 0": "argument --lr: must be a number",
    "--lr nan": "argument --lr: must be a number",
    "--temperature 0": "argument --temperature: must be a number above 0 and at most",
    "--temperature inf": "argument --temperature: must be a number above 0 and at most",
    "--clip-eps 0": "argument --clip-eps: must be a number",
    "--kl-beta -0.1": "argument --kl-beta: must be a number",
    "--loss ppo": "argument --loss: invalid choice",
    "--correction token": "argument --correction: invalid choice",
    "--task chess": "argument --task: task must be one of toy, gsm8k",
    "--device tpu": "argument --device: device 'tpu' is not one of",
    "--dtype fp8": "argument --dtype: invalid choice",
    "--draft medusa": "argument --draft: draft must be one of none, frozen, eagle",
    "--draft eagle:": "argument --draft: draft must be one of",
    "--draft model:/nowhere/at-all": "argument --draft: /nowhere/at-all",
    "--draft eagle --model /nowhere": "argument --draft: eagle: no head comes with model '/nowhere'",
    "--model=": "argument --model: model is empty",
    "--acceptance power": "argument --acceptance: power needs a draft to accept from, got draft none",
    "--draft frozen --alpha 0.3": "argument --alpha: needs acceptance power, got exact",
    "--draft frozen --acceptance power --alpha 0": "argument --alpha: alpha must be a number from 1e-30 to 1",
    "--draft frozen --acceptance power --alpha nan": "argument --alpha: alpha must be a number",
    "--draft frozen --acceptance power --tau 0.5": "argument --tau: needs acceptance relaxed, got power",
    "--draft frozen --acceptance relaxed": "argument --acceptance: acceptance 'relaxed' with tau=1 and --accept-topk=0",
    "--is-clip 3": "argument --is-clip: needs correction clipped, got exact",
    "--icepop-low 0.1": "argument --icepop-low: needs correction icepop, got exact",
    "--correction icepop --icepop-low 2": "argument --icepop-low: must be a number from 0 to 1",
    "--m2po-tau 0.1": "argument --m2po-tau: needs correction m2po, got exact",
    "--draft-refresh 2": "argument --draft-refresh: needs draft frozen, got none",
    "--draft frozen --draft-train": "argument --draft-train: needs draft eagle, got frozen",
    "--spec-depth 3": "argument --spec-depth: needs draft frozen or eagle or model, got none",
    "--draft-lr 1e-4": "argument --draft-lr: needs --draft-train True, got False",
    "--draft eagle --draft-lr 1e-4": "argument --draft-lr: needs --draft-train True, got False",
    "--draft frozen --spec-topk 1 --alpha 1": "argument --alpha: needs acceptance power, got exact",
    "--draft frozen --spec-topk 300": "argument --spec-topk: spec_topk must be an integer from 1 to 256",
    "--slots 5000": "argument --slots: slots must be an integer from 1 to 4096",
    "--correction icepop --icepop-low 1 --icepop-high 0.5": "argument --icepop-high: must be a number",
    "--out=": "argument --out: must be a path, got ''",
    "--out FILE": "argument --out: FILE is a file",
    "--out RUN": "argument --out: RUN holds a run; resume it",
}


@pytest.mark.parametrize("text", BAD)
def test_bad_options_are_refused_by_name_before_any_model_loads(text, tmp_path, monkeypatch, capsys):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ns, "load", load)
    monkeypatch.delenv("NANOSPEC_MODEL", raising=False)
    (tmp_path / "file").write_text("")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/log.jsonl").write_text("")

    def real(x: str) -> str:
        return x.replace("FILE", str(tmp_path / "file")).replace("RUN", str(tmp_path / "run"))

    default = [] if "--out" in text else ["--out", str(tmp_path / "new")]
    try:
        code = grpo.main([*real(text).split(), *default])
    except SystemExit as end:
        code = end.code
    assert code == 2
    said = capsys.readouterr().err
    assert real(BAD[text]) in said
    assert said.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_a_draft_is_refused_where_it_would_name_the_folder(capsys):
    with pytest.raises(SystemExit):
        grpo_options.parse(["--device", "cpu", "--draft", "eagle:"])
    assert "argument --draft: draft must be one of" in capsys.readouterr().err


def test_ranks_must_share_the_prompts_evenly(tmp_path, monkeypatch):
    monkeypatch.delattr(ns, "load")
    with pytest.raises(ValueError, match="prompts: 4 groups cannot be shared evenly by 3 ranks"):
        grpo.run(GrpoConfig(tmp_path, prompts=4), Ranks(0, 3))
    assert ranks.world_size({"WORLD_SIZE": "3"}) == 3


def test_prompts_that_leave_no_room_are_refused_before_the_first_step(folder, tmp_path, capsys):
    text = f"--model {folder} --device cpu --out {tmp_path / 'run'} --max-tokens 1024 --quiet"
    assert grpo.main(text.split()) == 2
    assert "argument --max-tokens: the longest prompt has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_seeds_depend_on_names_and_not_on_ranks():
    """Catches: a seed that repeats between steps, prompts, samples, training and evaluation."""
    seeds = {
        experience.seed_of(0, step, use, i, j)
        for step in range(4)
        for use in (0, 1)
        for i in range(5)
        for j in range(5)
    }
    assert len(seeds) == 4 * 2 * 25
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert experience.seed_of(7, 1, 0, 2, 3) == experience.seed_of(7, 1, 0, 2, 3) != experience.seed_of(8, 1, 0, 2, 3)
    assert [r for size in (1, 2) for rank in range(size) for r in Ranks(rank, size).share(4)] == [
        0,
        1,
        2,
        3,
        0,
        2,
        1,
        3,
    ]


def test_no_step_draws_what_another_drew(folder, tmp_path):
    """Equal weights and problems, step after step. Catches: a seed without the step, or one that all samples share."""
    model = ns.load(str(folder), device="cpu")
    setting, state = begin(model, tmp_path, scripted([0.1]), "--group 3")
    drawn = []
    for _ in range(3):
        drawn += [tuple(one.tokens) for one in grpo.collect(setting, state).completions]
        state, _ = grpo.train_step_(setting, state)
    assert len(set(drawn)) == len(drawn) == 18


def test_problems_come_in_turn():
    problems = [Problem((i,)) for i in range(5)]
    taken = [p.prompt[0] for step in (1, 2, 3) for p in experience.problems_of(problems, step, 3)]
    assert taken == [0, 1, 2, 3, 4, 0, 1, 2, 3]

"""The GRPO trainer: on-policy to the bit, updated in place, killed and resumed, and refused before any work."""

import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn.struct import bytes_equal
from rl import alarm, grpo, grpo_options, policy, run_files
from rl.grpo_config import GrpoConfig
from rl.ranks import Ranks
from rl.tasks import Task
from tests import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("tinyllama-1.1b")
FIELDS = """
step reward solved strict flexible groups_with_signal groups mean_length truncated rollout_s tok_s train_s draft_s
accepted_len w_mean w_max w_min ess chi2 masked clipped missing_mass kl_mu_old kl_old_0 kl_mean_gap exact_share loss
grad_norm lr draft_version draft_age draft_loss policy_version stale tokens prompts group memory_gb eval resumed
"""
TIMES = {"rollout_s", "tok_s", "train_s", "draft_s", "resumed"}  # differ between equal runs
POWER = "--draft frozen --acceptance power --alpha 0.3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target as a folder, for the command line."""
    return tiny.write(tmp_path_factory.mktemp("target"), RAW, tiny.state_of(tiny.llama(RAW)))


def words_of(model: Path, out: Path, more: str = "", steps: int = 3) -> list[str]:
    text = f"--model {model} --device cpu --out {out} --steps {steps} --prompts 2 --group 3 --max-tokens 6 --lr 1e-2"
    return [*text.split(), "--quiet", *more.split()]


def options(model: Path, out: Path, more: str = "", steps: int = 3) -> GrpoConfig:
    return grpo_options.parse(words_of(model, out, more, steps))


def train(model: Path, out: Path, more: str = "", steps: int = 3, on=lambda what, step: None) -> grpo.RunState:
    return grpo.run(options(model, out, more, steps), Ranks(), on)


def lines_of(out: Path) -> list[dict]:
    """The steps of a log, which has to be strict JSON (C19)."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    header, *lines = (json.loads(x, parse_constant=refuse) for x in (out / "log.jsonl").read_text().splitlines())
    assert set(header) == {"header"}
    assert all(set(line) == set(FIELDS.split()) for line in lines)
    return lines


def same(line: dict) -> dict:
    return {name: value for name, value in line.items() if name not in TIMES}


def setting_of(model: Path, out: Path, more: str = "", task: Task | None = None) -> tuple[grpo.Setting, grpo.RunState]:
    """What `grpo.run` makes before the first step."""
    args = options(model, out, more)
    loaded = ns.load(str(model), device="cpu")
    draft = ns.load_draft(args.draft, loaded)
    setting = grpo.begin(loaded, draft, task or grpo.tasks.load(args.task, loaded, args.seed), args, Ranks())
    return setting, grpo.init(setting)


@pytest.mark.parametrize("more", ["", "--draft frozen", "--draft frozen --spec-topk 2 --spec-depth 3"])
def test_under_exact_the_trainer_has_the_engines_bits(folder, tmp_path, more):
    """Catches: other arithmetic, temperature or rows in the trainer; a weight that is not 1; a draft that shows."""
    train(folder, tmp_path / "run", f"{more} --temperature 0.7")
    lines = lines_of(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert (line["exact_share"], line["kl_mean_gap"], line["kl_mu_old"], line["chi2"]) == (1, 0, 0, 0)
        assert (line["w_mean"], line["w_max"], line["w_min"], line["ess"]) == (1, 1, 1, 1)
    if more:
        train(folder, tmp_path / "plain", "--temperature 0.7")
        for mine, theirs in zip(lines, lines_of(tmp_path / "plain"), strict=True):
            for name in ("reward", "tokens", "loss", "grad_norm", "kl_old_0"):
                assert mine[name] == theirs[name]


def test_rows_are_those_of_forward(folder):
    """Catches: a row off by one, padding that is attended, a microbatch whose tokens land at another's places."""
    model = ns.load(str(folder), device="cpu")
    generator = torch.Generator().manual_seed(0)
    lengths = [(3, 9), (5, 5), (2, 12), (4, 7)]  # the second has no completion
    sequences = [torch.randint(3, 96, (n,), generator=generator).tolist() for _, n in lengths]
    reference = pytree.tree_map(lambda x: x * 1.01, model.params)
    found = torch.full((3, 6 + 0 + 10 + 3), math.nan)
    for batch in policy.micro_batches(sequences, [p for p, _ in lengths], [3, 2, 1, 0], 20, torch.device("cpu")):
        assert batch.tokens.numel() <= 20
        scored = policy.score(model, reference, batch, 0.5)
        found[:, batch.index] = torch.stack((scored.logp, scored.ref_logp, scored.kl))
    expected = []
    for (prompt, n), tokens in zip(lengths, sequences, strict=True):
        rows = [
            ns.forward(p, model.cfg, torch.tensor([tokens]))[0, prompt - 1 : n - 1] for p in (model.params, reference)
        ]
        now, before = ((row / 0.5).log_softmax(-1) for row in rows)
        chosen = torch.tensor(tokens[prompt:], dtype=torch.int64)[:, None]
        kl = (now.exp() * (now - before)).sum(-1)
        expected.append(torch.stack((now.gather(1, chosen)[:, 0], before.gather(1, chosen)[:, 0], kl)))
        if n > prompt:
            score = ns.score(model, tokens[:prompt], tokens[prompt:], ns.Sampling(temperature=0.5))
            assert found[0, sum(e.shape[1] for e in expected[:-1]) :][: n - prompt].tolist() == score
    torch.testing.assert_close(found, torch.cat(expected, dim=1), rtol=1e-4, atol=1e-5)


def test_gradient_is_that_of_transformers(folder):
    """Plain autograd through Hugging Face's Llama, all sequences at once. Catches: a microbatch counted twice or lost,
    a gradient that stops at a kernel, a fused weight with its parts swapped."""
    model = ns.load(str(folder), device="cpu")
    generator = torch.Generator().manual_seed(1)
    prompts, lengths = [3, 4, 2], [9, 7, 12]
    sequences = [torch.randint(3, 96, (n,), generator=generator).tolist() for n in lengths]
    weight = torch.randn(6 + 3 + 10, generator=generator)
    batches = list(policy.micro_batches(sequences, prompts, range(3), 12, torch.device("cpu")))
    assert len(batches) == 3
    grads, value = policy.gradient(model, batches, 0.7, lambda logp, at: (weight[at] * logp).sum())
    hf = tiny.llama(RAW)
    with torch.enable_grad():
        total = torch.zeros(())
        at = 0
        for prompt, tokens in zip(prompts, sequences, strict=True):
            rows = hf(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
            chosen = torch.tensor(tokens[prompt:])[:, None]
            logp = (rows / 0.7).log_softmax(-1).gather(1, chosen)[:, 0]
            total = total + (weight[at : at + len(logp)] * logp).sum()
            at += len(logp)
        total.backward()
    torch.testing.assert_close(value, total.detach(), rtol=1e-4, atol=1e-4)
    theirs = {name: p.grad for name, p in hf.named_parameters()}
    layer = "model.layers.1"
    pairs = {
        "embed": (grads.embed, theirs["model.embed_tokens.weight"]),
        "head": (grads.head, theirs["lm_head.weight"]),
        "norm": (grads.norm, theirs["model.norm.weight"]),
        "qkv": (grads.layers[1].qkv, torch.cat([theirs[f"{layer}.self_attn.{x}_proj.weight"] for x in "qkv"])),
        "down": (grads.layers[1].down, theirs[f"{layer}.mlp.down_proj.weight"]),
        "attn_norm": (grads.layers[0].attn_norm, theirs["model.layers.0.input_layernorm.weight"]),
    }
    for name, (mine, expected) in pairs.items():
        torch.testing.assert_close(mine, expected, rtol=2e-3, atol=2e-4 * float(expected.abs().max()), msg=name)


def test_the_update_is_in_place_and_the_engine_serves_it(folder, tmp_path):
    """C17. Catches: weights rebound to other storage, a copy that the engine keeps, a frozen draft that shares storage
    with the policy, a refreshed one that does not follow."""
    setting, state = setting_of(folder, tmp_path, f"{POWER} --draft-refresh 2")
    engine, draft = setting.engine, setting.engine.draft
    leaves = pytree.tree_leaves((engine.model.params, draft.params))
    places, before = [x.data_ptr() for x in leaves], pytree.tree_map(torch.clone, draft.params)
    versions = []
    for step in (1, 2):
        state, line = grpo.train_step_(setting, state)
        versions.append((line["policy_version"], line["draft_version"], line["draft_age"]))
        assert bytes_equal(draft.params, before) == (step == 1)
        assert bytes_equal(draft.params, engine.model.params) == (step == 2)
    assert versions == [(0, 0, 0), (1, 0, 1)]
    assert [x.data_ptr() for x in pytree.tree_leaves((engine.model.params, draft.params))] == places
    assert state.policy.master is engine.model.params  # fp32: no second copy
    assert not bytes_equal(engine.model.params, setting.reference)
    copy = dataclasses.replace(engine.model, params=pytree.tree_map(torch.clone, engine.model.params))
    prompts, sampling = [[5, 6, 7]] * 3, [ns.Sampling(max_tokens=8, temperature=1.0, seed=i) for i in range(3)]
    fresh = ns.generate(copy, prompts, sampling)
    for mine, theirs in zip(ns.generate(engine.model, prompts, sampling, engine=engine), fresh, strict=True):
        assert (mine.tokens, mine.target_logp) == (theirs.tokens, theirs.target_logp)


@pytest.mark.parametrize("which", ["policy", "draft"])
def test_stale_weights_raise_an_alarm(folder, tmp_path, which):
    """Catches: rollouts with weights of another version than the log says."""
    setting, _ = setting_of(folder, tmp_path, POWER)
    wanted = alarm.served(setting.engine)
    alarm.check(setting.engine, setting.ranks, wanted, 0, 0)
    weights = setting.engine.model.params if which == "policy" else setting.engine.draft.params
    weights.layers[0].down[3, 4] += 1e-3
    with pytest.raises(RuntimeError, match=f"step 1: the engine does not serve {which} version 0"):
        alarm.check(setting.engine, setting.ranks, wanted, 0, 0)


def test_an_engine_that_samples_with_old_weights_is_noticed(folder, tmp_path):
    """The alarm that no checksum replaces: the tokens' log-probs are not the trainer's."""
    setting, state = setting_of(folder, tmp_path, "")
    old = dataclasses.replace(setting.engine.model, params=pytree.tree_map(torch.clone, setting.engine.model.params))
    stale = ns.prepare(old, None, ns.EngineConfig(max_slots=6, max_context=20))
    state, _ = grpo.train_step_(setting, state)
    stale.model = setting.engine.model  # says that it serves the policy, and does not
    _, line = grpo.train_step_(dataclasses.replace(setting, engine=stale), state)
    assert line["exact_share"] < 0.5
    with pytest.raises(RuntimeError, match="step 2: the engine sampled with other weights than the trainer's"):
        alarm.check_bits(stale, line)


def test_half_precision_is_trained_through_an_fp32_master(folder, tmp_path):
    """Catches: updates that are lost to rounding, a master that is the served copy, a resume that rounds it."""
    state = train(folder, tmp_path, "--dtype bf16 --lr 1e-4", steps=2)
    served = ns.load(str(folder), device="cpu", dtype="bf16").params
    moved = [
        bool((after - before.float()).abs().amax() > 0)
        for after, before in zip(pytree.tree_leaves(state.policy.master), pytree.tree_leaves(served), strict=True)
    ]
    assert all(moved)
    assert all(x.dtype == torch.float32 for x in pytree.tree_leaves(state.policy.master))
    again = train(folder, tmp_path, "--dtype bf16 --lr 1e-4 --resume", steps=2)
    assert bytes_equal(again, state)


class Killed(Exception):
    """A run that ends where it stands."""


def dying(what: str, step: int):
    def on(*now) -> None:
        if now == (what, step):
            raise Killed

    return on


LIVES = {
    "plain": "",
    "refresh": f"{POWER} --draft-refresh 2 --correction m2po --kl-beta 0.1",
    "bf16": "--dtype bf16 --eval-every 2 --eval-limit 2",
}


@pytest.mark.parametrize("more", LIVES.values(), ids=LIVES)
def test_resume_has_the_same_bits_wherever_it_died(folder, tmp_path, more):
    """Catches: a seed, optimizer state or draft that starts over, lines written twice or left out."""
    more += " --save-every 2"
    whole = train(folder, tmp_path / "whole", more, 5)
    lives = {  # deaths, and the steps whose lines say that their process had restored a checkpoint
        (("rollout", 1),): [],
        (("log", 2), ("checkpoint", 2)): [],
        (("rollout", 4), ("log", 5)): [3, 4, 5],
        (("checkpoint", 5),): [5],
    }
    for deaths, resumed in lives.items():
        out = tmp_path / "-".join(f"{what}{step}" for what, step in deaths)
        for i, death in enumerate(deaths):
            with pytest.raises(Killed):
                train(folder, out, more + " --resume" * bool(i), 5, dying(*death))
        with (out / "log.jsonl").open("a") as file:
            file.write('{"step": 9, "rew')  # a line that was torn
        assert bytes_equal(train(folder, out, f"{more} --resume", 5), whole)
        assert [same(x) for x in lines_of(out)] == [same(x) for x in lines_of(tmp_path / "whole")]
        assert [x["step"] for x in lines_of(out) if x["resumed"]] == resumed


def test_held_out_problems_are_answered_greedily_by_the_updated_policy(folder, tmp_path):
    """Catches: an evaluation of the weights before the update, at the training temperature, or on training problems."""
    args = options(folder, tmp_path, f"{POWER} --eval-every 2 --eval-limit 5", 3)
    grpo.run(args, Ranks())
    evals = [line["eval"] for line in lines_of(tmp_path)]
    assert [None if found is None else found["n"] for found in evals] == [None, 5, 5]
    setting, state = setting_of(folder, tmp_path / "other", f"{POWER} --eval-limit 5")
    for _ in range(3):
        state, _ = grpo.train_step_(setting, state)
    task = setting.task
    done = ns.generate(setting.engine.model, [list(p.prompt) for p in task.held_out[:5]], ns.Sampling(max_tokens=6))
    rewards = [task.reward(p, None, one.tokens).value for p, one in zip(task.held_out, done, strict=False)]
    assert evals[2]["reward"] == pytest.approx(sum(rewards) / 5)


def test_a_longer_run_is_the_same_run_further_on(folder, tmp_path):
    train(folder, tmp_path / "a", POWER, 2)
    longer = train(folder, tmp_path / "a", f"{POWER} --resume", 4)
    assert bytes_equal(longer, train(folder, tmp_path / "b", POWER, 4))
    assert [same(x) for x in lines_of(tmp_path / "a")] == [same(x) for x in lines_of(tmp_path / "b")]


def test_a_kill_signal_leaves_a_run_to_go_on_from(folder, tmp_path):
    """The real thing: SIGKILL at whatever moment, several times, then --resume to the end."""
    text = (
        f"--model {folder} --device cpu --steps 6 --prompts 2 --group 3 --max-tokens 6 --lr 1e-2 --save-every 1 --quiet"
    )
    command = [sys.executable, "-m", "rl.grpo", *text.split(), *POWER.split(), "--resume", "--out"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    log = tmp_path / "a/log.jsonl"
    for wanted in (2, 4):
        process = subprocess.Popen([*command, str(tmp_path / "a")], env=environment)
        while process.poll() is None and not (log.exists() and log.read_text().count("\n") > wanted):
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert grpo.main([*command[3:], str(tmp_path / "a")]) == 0
    assert grpo.main([*command[3:], str(tmp_path / "b")]) == 0
    a, b = ((tmp_path / name / "state.safetensors").read_bytes() for name in "ab")
    assert a == b
    assert [same(x) for x in lines_of(tmp_path / "a")] == [same(x) for x in lines_of(tmp_path / "b")]


def test_resume_refuses_another_run(folder, tmp_path, capsys, monkeypatch):
    """Catches: a state resumed under other options or other weights, whose result no single run would give."""
    model = tiny.write(tmp_path / "model", RAW, tiny.state_of(tiny.llama(RAW)))
    train(model, tmp_path / "run", "", 1)
    tiny.write(model, RAW, tiny.state_of(tiny.llama(RAW, seed=1)))
    with pytest.raises(ValueError, match="belongs to a run with weights"):
        train(model, tmp_path / "run", "--resume")
    monkeypatch.delattr(ns, "load")  # the options are compared before the model is loaded
    for more, said in {
        "--lr 0.5": "lr 0.01, not 0.5",
        "--correction none": "correction 'exact', not 'none'",
        f"--model {folder}": f"model '{model}', not '{folder}'",
    }.items():
        assert grpo.main([*words_of(model, tmp_path / "run", "--resume", 1), *more.split()]) == 2
        said = f"argument --resume: {tmp_path / 'run/state.safetensors'}: belongs to a run with {said}\n"
        assert capsys.readouterr().err.endswith(said)
    (tmp_path / "run/state.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"resume: .*state.safetensors: not a training state"):
        train(model, tmp_path / "run", "--resume")


def test_a_checkpoint_that_dies_in_its_write_leaves_the_old_one(tmp_path, monkeypatch):
    """Every system call of the write is where it dies once. Catches: a file that is written in place, or renamed
    before its bytes are on the disk."""
    path, old, new = tmp_path / "state.safetensors", {"a": torch.zeros(4)}, {"a": torch.ones(4)}

    def killed_at(step: int, name: str, real):
        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == step:
                raise Killed
            return real(*args, **kwargs)

        return call

    for step, left in ((1, old), (2, old), (3, new)):
        calls: list[str] = []
        run_files.save_state(path, old, {})
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", killed_at(step, "fsync", os.fsync))
            patch.setattr(Path, "replace", killed_at(step, "replace", Path.replace))
            with pytest.raises(Killed):
                run_files.save_state(path, new, {})
        assert calls == ["fsync", "replace", "fsync"][:step]
        assert bytes_equal(run_files.load_state(path, old, lambda about: None), left)


def test_a_log_keeps_what_is_whole(tmp_path):
    log = tmp_path / "log.jsonl"
    run_files.append(log, {"step": 1, "x": math.nan, "y": torch.tensor(-math.inf), "z": [math.inf, 1.5]})
    run_files.append(log, {"step": 2})
    with log.open("ab") as file:
        file.write(b'{"step": 3, "x": 0.')
    assert run_files.read_lines(log) == [{"step": 1, "x": None, "y": None, "z": [None, 1.5]}, {"step": 2}]
    run_files.keep_steps(log, 1)
    run_files.append(log, {"step": 2, "again": True})
    assert [line["step"] for line in run_files.read_lines(log)] == [1, 2]
    log.write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log.jsonl:2: not valid JSON"):
        run_files.read_lines(log)

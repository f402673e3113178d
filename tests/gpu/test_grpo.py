"""The GRPO trainer on a GPU: the engine's bits in the trainer, graphs that see updates, and a resume to the bit."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn.struct import bytes_equal
from rl import grpo, grpo_options, policy, run_files, tasks
from rl.ranks import Ranks
from tests import tiny
from tests.gpu.shapes import TINY, random_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]
SIZES = "--device cuda --prompts 4 --group 4 --max-tokens 12 --lr 1e-4 --quiet"
POWER = "--draft frozen --acceptance power --alpha 0.3 --draft-refresh 2"


def begin(out: Path, more: str, seed: int = 0) -> tuple[grpo.Setting, grpo.RunState]:
    args = grpo_options.parse(f"{SIZES} --out {out} {more}".split())
    model = random_model(TINY, seed)
    setting = grpo.begin(model, ns.load_draft(args.draft, model), tasks.load("toy", model, 0), args, Ranks())
    return setting, grpo.init(setting)


@pytest.mark.parametrize("more", ["", POWER, f"{POWER} --spec-topk 2 --spec-depth 3"])
def test_the_trainer_has_the_engines_bits(tmp_path, more):
    """Point 7 of the issue. Catches: a forward pass with other kernels, a graph that serves old weights (C17)."""
    setting, state = begin(tmp_path, more)
    for _ in range(4):
        state, line = grpo.train_step_(setting, state)
        assert (line["exact_share"], line["kl_mean_gap"]) == (1, 0)
        assert line["grad_norm"] > 0
        if not more:
            assert (line["w_min"], line["w_max"]) == (1, 1)
    assert all(x.dtype == torch.float32 for x in pytree.tree_leaves(state.policy.master))


def test_captured_graphs_serve_the_updated_weights(tmp_path):
    """C17: three updates, each followed by the tokens of an engine that was freshly built on the new weights."""
    setting, state = begin(tmp_path, POWER)
    model, prompts = setting.engine.model, [[5, 6, 7, 8]] * 4
    sampling = [ns.Sampling(max_tokens=12, temperature=1.0, seed=i) for i in range(4)]
    seen = []
    for _ in range(3):
        state, _ = grpo.train_step_(setting, state)
        copy = dataclasses.replace(model, params=pytree.tree_map(torch.clone, model.params))
        mine = ns.generate(model, prompts, sampling, engine=setting.engine)
        fresh = ns.generate(copy, prompts, sampling)
        assert [(x.tokens, x.target_logp) for x in mine] == [(x.tokens, x.target_logp) for x in fresh]
        seen.append([x.target_logp for x in mine])
    assert seen[0] != seen[1] != seen[2]


def test_resume_has_the_same_bits_under_deterministic_algorithms(tmp_path):
    """Catches: an atomic sum in a backward pass, a state that is rounded on its way through the file."""
    grpo_options.deterministic()
    try:
        path, states = tmp_path / "state.safetensors", []
        for stop in (4, 2):
            setting, state = begin(tmp_path, POWER)
            for _ in range(stop):
                state, _ = grpo.train_step_(setting, state)
            states.append(state)
        run_files.save_state(path, states[1], {})
        setting, state = begin(tmp_path, POWER)
        loaded = run_files.load_state(path, state, lambda about: None)
        master = policy.publish_(setting.engine.model.params, loaded.policy.master)
        draft = grpo.drafts.restore_(setting.engine.draft, setting.upkeep, loaded.draft)
        state = grpo.RunState(policy=dataclasses.replace(loaded.policy, master=master), draft=draft)
        for _ in range(2):
            state, _ = grpo.train_step_(setting, state)
        assert bytes_equal(state, states[0])
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_are_one_run(tmp_path):
    """NCCL: at equal weights the rollouts of one rank, later steps near them."""
    raw = tiny.config("llama-3.2-1b", hidden_size=128, head_dim=32, num_attention_heads=4, num_key_value_heads=2)
    raw |= {"intermediate_size": 256, "vocab_size": 384}
    model = tiny.write(tmp_path / "model", raw, tiny.state_of(tiny.llama(raw)))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    rows = []
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        command = f"-m rl.grpo --model {model} {SIZES} {POWER} --steps 3 --out {out}"
        subprocess.run([sys.executable, *launch, *command.split()], env=environment, check=True, timeout=300)
        rows.append(run_files.read_lines(out / "log.jsonl")[1:])
    for name in ("reward", "tokens", "mean_length", "accepted_len", "w_mean", "w_max", "exact_share"):
        assert rows[0][0][name] == rows[1][0][name]
    for one, two in zip(*rows, strict=True):
        assert two["exact_share"] == 1
        assert two["loss"] == pytest.approx(one["loss"], rel=0.05, abs=1e-3)

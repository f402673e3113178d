"""Training a draft head: what it sees is what drafting sees, it resumes to the same bits, and its folder loads."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

import nanospec_fn as ns
from nanospec_fn import eagle, model, rehearsal, weights
from nanospec_fn.struct import bytes_equal, replace
from rl import eagle_data, eagle_head, eagle_loss, optimizer, rollouts, train_eagle, train_options
from rl.rollouts import Rollouts
from tests import tiny
from tests.oracle_eagle import Oracle

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("smollm2-135m", num_hidden_layers=6)  # the default taps (2, 3, 3) would meet
TAPS = (1, 3, 5)


@pytest.fixture(scope="module")
def target() -> model.Model:
    return tiny.model("smollm2-135m", num_hidden_layers=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """The target as a folder, for the command line."""
    path = tmp_path_factory.mktemp("target")
    return tiny.write(path, RAW, tiny.state_of(tiny.llama(RAW)))


@pytest.fixture(scope="module")
def data(target) -> Rollouts:
    """Greedy and sampled completions of short random prompts."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, 128, (4 + i % 3,), generator=generator).tolist() for i in range(30)]
    return rollouts.complete(target, prompts, [0.0, 1.0], 16, 32, ns.EngineConfig(max_slots=15), seed=3)


def arguments(out: Path, *more: str):
    out.mkdir(exist_ok=True)
    options = f"--out {out} --prompts self:1 --taps 1 3 5 --max-len 40 --batch 8 --held-out 4 --draft-vocab 96 --quiet"
    return train_options.parse([*options.split(), "--unroll", "3", *more])


def random_head(target, draft_vocab=96, seed=0):
    """A head whose every part shows in its logits, and its tensors by name."""
    cfg = eagle_head.config_for(target, TAPS, draft_vocab, 96)
    state = tiny.head_state(RAW, draft_vocab, seed)
    target_id = torch.arange(draft_vocab) + state.get("d2t", 0)
    params = eagle_head.init(cfg, target, target_id, True, 0)
    qkv = torch.cat([state[f"midlayer.self_attn.{x}_proj.weight"] for x in "qkv"])
    gate_up = torch.cat([state[f"midlayer.mlp.{x}_proj.weight"] for x in ("gate", "up")])
    layer = replace(
        params.layer,
        attn_norm=state["midlayer.input_layernorm.weight"],
        qkv=qkv,
        out=state["midlayer.self_attn.o_proj.weight"],
        mlp_norm=state["midlayer.post_attention_layernorm.weight"],
        gate_up=gate_up,
        down=state["midlayer.mlp.down_proj.weight"],
    )
    top = {"fc": "fc", "norm": "norm", "head": "lm_head", "feature_norm": "midlayer.hidden_norm"}
    return cfg, replace(params, layer=layer, **{k: state[f"{v}.weight"] for k, v in top.items()}), state


def test_unroll_is_what_the_oracle_drafts_at_every_position_and_depth(target):
    """Catches: a feature or token shifted by one, rope positions that lag a step, a path that attends true rows past
    its base, sibling steps' keys, or the wrong step's row of its own path."""
    cfg, params, state = random_head(target)
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(5))
    taps = eagle_loss.observe(target, TAPS, tokens).taps
    outs = rehearsal.outputs(params, cfg, target.params.embed, tokens, taps, 4)
    oracle = Oracle(state, target.params.embed, None, cfg.num_heads, cfg.num_kv_heads, theta=cfg.rope.theta)
    hf = tiny.llama(RAW)(tokens, output_hidden_states=True).hidden_states
    checked = 0
    for b in range(2):
        features = torch.cat([hf[i][b] for i in TAPS], dim=-1)
        torch.testing.assert_close(taps[b], features, rtol=1e-4, atol=1e-4)
        for base in range(8):
            # Context up to the pending token base + 1, then a draft along the sequence's own tokens.
            path = tokens[b, base + 2 : base + 5].tolist()
            expected = oracle.draft(tokens[b, : base + 2].tolist(), features[: base + 1], path)
            mine = eagle.logits(params, cfg, torch.stack([outs[j][b, base + j] for j in range(len(path) + 1)]))
            torch.testing.assert_close(mine, expected, rtol=1e-3, atol=1e-3)
            checked += len(mine)
    assert checked == 2 * 8 * 4


def test_supervision_starts_where_the_engine_drafts(target):
    """Catches: training on the prompt's rows, on padding, or on paths that begin inside the prompt; a target
    distribution taken one row off."""
    length, prompt = torch.tensor([9, 6]), torch.tensor([4, 3])
    row, live = eagle_loss.supervise(length, prompt, 10, 3)
    assert row.tolist() == [3, 4, 5, 6, 9 + 2, 9 + 3]
    assert live.int().tolist() == [[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1], [0, 0, 1, 1, 0, 0]]
    tokens = torch.randint(0, 128, (2, 10), generator=torch.Generator().manual_seed(6))
    ids = torch.arange(20, 60)
    batch = eagle_loss.prepare(target, ids, tokens, eagle_loss.observe(target, TAPS, tokens), row, live)
    logits = ns.forward(target.params, target.cfg, tokens)
    for i, (b, p) in enumerate([(0, 3), (0, 4), (0, 5), (0, 6), (1, 2), (1, 3)]):
        whole = logits[b, p + 1]
        torch.testing.assert_close(batch.target[i], whole[ids].softmax(-1), rtol=1e-3, atol=1e-5)
        assert batch.best[i] == whole.argmax()
        assert batch.known[i] == (20 <= whole.argmax() < 60)


def test_replay_counts_rounds_as_the_engine_does():
    """By hand: two sequences of 6 tokens, prompt 2, chain of depth 2. Catches a round off by one, the prefill's token
    counted, a last round that runs past the end."""
    hit = torch.zeros(2, 2, 5, dtype=torch.bool)
    # Pending 2: base 1 hits at both steps, so 3, 4 and the bonus 5 are emitted: one round of 3.
    hit[0, 0, 1] = hit[1, 0, 2] = True
    # Pending 2: a miss (1 token); pending 3: a hit, then a miss (2 tokens).
    hit[0, 1, 2] = True
    emitted, rounds = rehearsal.accepted_length(hit, torch.tensor([6, 6]), torch.tensor([2, 2]))
    assert (emitted, rounds) == (3 + 3, 1 + 2)


def test_adamw_is_torch_adamw_after_clipping():
    """Catches: a bias correction of the wrong step, decay on vectors, clipping that scales small gradients up."""
    generator = torch.Generator().manual_seed(0)
    params = {"m": torch.randn(3, 4, generator=generator), "v": torch.randn(4, generator=generator)}
    theirs = [p.clone().requires_grad_() for p in params.values()]
    groups = [{"params": theirs[:1], "weight_decay": 0.1}, {"params": theirs[1:], "weight_decay": 0.0}]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    mine = optimizer.adamw(lambda count: torch.tensor(0.01), decay=0.1, clip=2.0)
    adam = mine.init(params)
    for step in range(5):
        grads = {k: torch.randn(p.shape, generator=generator) * (0.1 if step < 2 else 3) for k, p in params.items()}
        for p, g in zip(theirs, grads.values(), strict=True):
            p.grad = g.clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 2.0)
        reference.step()
        params, adam, found = mine.update(grads, adam, params)
        torch.testing.assert_close(found.float(), norm)
        for p, q in zip(theirs, params.values(), strict=True):
            torch.testing.assert_close(p.detach(), q, rtol=1e-5, atol=1e-6)
    rate = optimizer.warmup_cosine(2.0, 110, 10, floor=0.1)
    assert [round(float(rate(torch.tensor(t))), 3) for t in (0, 9, 10, 60, 110)] == [0.2, 2.0, 2.0, 1.1, 0.2]


def test_training_lowers_the_loss_and_raises_the_engines_acceptance(target, data, tmp_path):
    """Catches: gradients that do not reach the head, a trained head whose file is another function, a map or tap order
    that only lowers acceptance. Also the held-out replay against the engine's own count."""
    options = "--steps 60 --lr 5e-3 --log-every 1 --eval-every 60 --head-dtype fp32 --keep-features"
    args = arguments(tmp_path, *options.split())
    train_eagle.fit(target, data, args)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    first, last = (sum(sum(x["loss"]) for x in part) for part in (lines[:5], lines[-5:]))
    assert last < 0.9 * first
    assert [line["step"] for line in lines] == list(range(1, 61))

    trained = ns.load_draft(f"eagle:{tmp_path}", target)
    cfg = trained.method.cfg
    assert (cfg.taps, cfg.draft_vocab_size, cfg.rope) == (TAPS, 96, target.cfg.rope)
    untrained = eagle_head.init(cfg, target, trained.params.target_id, True, 0)
    prompts = [data.sequence(i)[: data.prompt[i]].tolist() for i in range(len(data))]
    sampling = ns.Sampling(max_tokens=16)
    spec = ns.Speculation(depth=3)

    def mean(params: eagle.HeadParams) -> float:
        out = ns.generate(target, prompts, sampling, draft=ns.Draft(trained.method, params), speculation=spec)
        return sum(len(o.tokens) - 1 for o in out) / sum(len(o.accepted) for o in out)

    scale = torch.ones(1)
    before = mean(eagle_loss.assemble(eagle_loss.trainable(untrained), trained.params.target_id, scale, torch.float32))
    after = mean(trained.params)
    assert after > before + 0.1


def test_replayed_acceptance_is_the_engines(target, data, tmp_path):
    """The held-out figure is exact: greedy sequences replayed give the engine's mean accepted length."""
    _, _, state = random_head(target)
    path = tiny.write_head(
        tmp_path / "h", RAW, state, "sglang", rope_theta=100000, max_position_embeddings=1024,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [t - 1 for t in TAPS]},
    )  # fmt: skip
    draft = ns.load_draft(f"eagle:{path}", target)
    greedy = [i for i in range(len(data)) if not data.temperature[i]]
    prompts = [data.sequence(i)[: data.prompt[i]].tolist() for i in greedy]
    lengths = [len(data.sequence(i)) - len(p) for i, p in zip(greedy, prompts, strict=True)]
    out = ns.generate(
        target, prompts, [ns.Sampling(max_tokens=n) for n in lengths], draft=draft, speculation=ns.Speculation(depth=3)
    )
    tokens, length, prompt = eagle_data.collate(data, greedy, 64, torch.device("cpu"))
    row, live = eagle_loss.supervise(length, prompt, tokens.shape[1], 3)
    seen = eagle_loss.observe(target, TAPS, tokens)
    batch = eagle_loss.prepare(target, draft.params.target_id, tokens, seen, row, live)
    hit = eagle_loss.drafted(draft.params, draft.method.cfg, target.params.embed, (), batch)
    emitted, rounds = rehearsal.accepted_length(hit, length, prompt)
    assert emitted == sum(len(o.tokens) - 1 for o in out)
    assert rounds == sum(len(o.accepted) for o in out)
    assert sum(sum(o.accepted) for o in out) > 0


def run_until(target, data, out: Path, steps: int, stop: int | None = None, *more: str):
    """Train; `stop`: die before that step, as a kill would."""

    class Killed(Exception):
        pass

    def on_step(step: int) -> None:
        if step == stop:
            raise Killed

    options = f"--steps {steps} --save-every 2 --log-every 1 --eval-every 3 --short-steps 4"
    args = arguments(out, *options.split(), *more)
    try:
        return train_eagle.fit(target, data, args, on_step)[1]
    except Killed:
        return None


def test_resume_has_the_same_bits_wherever_it_died(target, data, tmp_path):
    """Catches: a data order, learning rate or optimizer state that starts over, and log lines written twice."""
    whole = run_until(target, data, tmp_path / "whole", 9)
    for stop in ((1,), (2,), (3, 4), (5, 8, 8)):
        out = tmp_path / "-".join(map(str, stop))
        for step in stop:
            assert run_until(target, data, out, 9, step) is None
            assert not (out / "config.json").exists()
        assert bytes_equal(run_until(target, data, out, 9), whole)
        assert (out / "model.safetensors").read_bytes() == (tmp_path / "whole/model.safetensors").read_bytes()
        lines = [[json.loads(x) for x in (f / "log.jsonl").read_text().splitlines()] for f in (out, tmp_path / "whole")]
        for mine, theirs in zip(*lines, strict=True):
            assert {k: mine[k] for k in ("step", "loss", "lr")} == {k: theirs[k] for k in ("step", "loss", "lr")}
            assert mine.get("held_out") == theirs.get("held_out")


def test_resume_refuses_another_recipe(target, data, tmp_path):
    """Catches: a state resumed under another learning rate, seed or length, whose result no single run would give."""
    run_until(target, data, tmp_path, 4, 3)
    with pytest.raises(ValueError, match=r"train.safetensors: belongs to a run with lr 0.001, not 0.5"):
        run_until(target, data, tmp_path, 4, None, "--lr", "0.5")
    with pytest.raises(ValueError, match="belongs to a run with steps 4, not 5"):
        run_until(target, data, tmp_path, 5)


def test_a_killed_write_leaves_no_head_that_loads(target, tmp_path, monkeypatch):
    """Catches: weights of the new head beside the config of the old, a half-written file under the real name, a
    rename before the bytes are on the disk. Every system call of the write is where it dies once."""
    cfg, params, _ = random_head(target)
    other = replace(params, fc=params.fc * 2)

    class Killed(BaseException):
        pass

    def killed_at(step: int, name: str, real):
        def call(*args, **kwargs):
            seen.append(name)
            if len(seen) == step:
                raise Killed
            return real(*args, **kwargs)

        return call

    for step in range(1, 20):
        seen: list[str] = []
        folder = tmp_path / str(step)
        folder.mkdir()
        eagle_head.write_folder(folder, params, cfg, target, torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", killed_at(step, "fsync", os.fsync))
            patch.setattr(Path, "replace", killed_at(step, "replace", Path.replace))
            patch.setattr(Path, "unlink", killed_at(step, "unlink", Path.unlink))
            try:
                eagle_head.write_folder(folder, other, cfg, target, torch.float32)
            except Killed:
                pass
            else:
                break
        try:
            _, found = weights.load_eagle(folder, target)
        except FileNotFoundError:
            continue
        # It died before the first call had its effect, or after the last file was in its place.
        assert torch.equal(found.fc, params.fc if step == 1 else other.fc)
        assert step in (1, 7)
    assert step == 8  # unlink, then fsync, replace, fsync for each of the two files


def test_a_kill_signal_leaves_a_state_to_go_on_from(target, data, folder, tmp_path):
    """The real thing: the command is killed while it trains, and the same command ends with an uninterrupted head."""
    made = tmp_path / "data.npz"
    rollouts.save(made, data, {})
    options = f"--model {folder} --device cpu --data {made} --taps 1 3 5 --max-len 40 --batch 8 --held-out 4 --unroll 3"
    options += " --draft-vocab 96 --quiet --steps 14 --save-every 1 --log-every 1"
    command = [sys.executable, "-m", "rl.train_eagle", *options.split()]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([*command, "--out", str(tmp_path / "a")], env=environment)
    log = tmp_path / "a/log.jsonl"
    while process.poll() is None and not (log.exists() and log.read_text().count("\n") >= 4):
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "a/config.json").exists()
    assert train_eagle.main([*command[3:], "--out", str(tmp_path / "a")]) == 0
    assert train_eagle.main([*command[3:], "--out", str(tmp_path / "b")]) == 0
    assert (tmp_path / "a/model.safetensors").read_bytes() == (tmp_path / "b/model.safetensors").read_bytes()


@pytest.mark.parametrize("form", ["own", "target-rows", "full vocabulary", "llama3 rope"])
def test_folder_loads_as_what_was_written(form, tmp_path):
    """Catches: a map written as ids in place of offsets, aux layers off by one, q, k and v or gate and up swapped, a
    rope that the config does not say, target rows in another order than the map's."""
    shape = "llama-3.1-8b" if form == "llama3 rope" else "smollm2-135m"
    target = tiny.model(shape, num_hidden_layers=6)
    vocab = target.cfg.vocab_size
    size = vocab if form == "full vocabulary" else 50
    ids = torch.randperm(vocab, generator=torch.Generator().manual_seed(3))[:size].sort().values
    cfg = eagle_head.config_for(target, TAPS, size, 40)
    params = eagle_head.init(cfg, target, ids, form != "target-rows", 7)
    eagle_head.write_folder(tmp_path, params, cfg, target, torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    assert raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 4]
    found_cfg, found = weights.load_eagle(tmp_path, target)
    assert replace(found_cfg, eos_ids=(), bos_id=None) == cfg
    rows = eagle_loss.output_rows(target, ids)
    assert bytes_equal(found, replace(params, head=rows) if form == "target-rows" else params)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) == (form != "target-rows")  # noqa: SIM118
        if size < vocab:
            assert torch.equal(file.get_tensor("d2t") + torch.arange(size), ids)
            assert file.get_tensor("t2d").nonzero()[:, 0].tolist() == ids.tolist()


def test_target_rows_are_asked_for_by_name_only(target, tmp_path):
    """Catches: a head whose lm_head got lost that loads all the same, and a flag that overrides a head's own rows."""
    cfg, params, _ = random_head(target)
    eagle_head.write_folder(tmp_path, replace(params, head=()), cfg, target, torch.float32)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert raw.pop("lm_head") == "target_rows"
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=r"'lm_head\.weight' is missing"):
        weights.load_eagle(tmp_path, target)
    for flag, head in (("other", ()), ("target_rows", params.head)):
        eagle_head.write_folder(tmp_path, replace(params, head=head), cfg, target, torch.float32)
        (tmp_path / "config.json").write_text(json.dumps(raw | {"lm_head": flag}))
        with pytest.raises(ValueError, match="lm_head must be absent, or 'target_rows'"):
            weights.load_eagle(tmp_path, target)


def test_draft_vocabulary_is_the_most_frequent_of_responses():
    """Catches: prompts counted, ties broken by chance."""
    tokens = np.array([9, 9, 9, 4, 4, 2, 9, 9, 2, 5], dtype=np.int32)
    data = Rollouts(tokens, np.array([6, 10]), np.array([3, 2], np.int32), np.zeros(2, np.float32))
    assert eagle_data.most_frequent(data, [0, 1], 12, 2).tolist() == [2, 4]
    assert eagle_data.most_frequent(data, [0, 1], 12, 3).tolist() == [2, 4, 5]
    assert eagle_data.most_frequent(data, [1], 12, 3).tolist() == [0, 2, 5]


def test_batches_cover_an_epoch_once_and_depend_on_the_seed_alone():
    """Catches: a sequence seen twice an epoch, held-out ones among them, an order that depends on what ran before."""
    train, held = eagle_data.split(50, 9, seed=4)
    assert sorted(train + held) == list(range(50))
    assert len(held) == 5
    lengths = [10 + i % 7 for i in range(45)]
    for epoch in range(3):
        made = eagle_data.batches(lengths, 8, 1, epoch)
        assert sorted(i for batch in made for i in batch) == sorted({i for batch in made for i in batch})
        assert [len(batch) for batch in made] == [8] * 5
        assert made == eagle_data.batches(lengths, 8, 1, epoch) != eagle_data.batches(lengths, 8, 2, epoch)


def test_kept_features_are_those_of_a_fresh_pass(target, data):
    """Catches: a batch that recalls another sequence's features."""
    kept, start = eagle_data.observe_all(target, TAPS, data, [3, 8, 5, 1], 2, 30)
    tokens, length, _ = eagle_data.collate(data, [5, 3, 8], 30, torch.device("cpu"))
    known, fresh = (
        eagle_data.recall(kept, [start[i] for i in (5, 3, 8)], tokens),
        eagle_loss.observe(target, TAPS, tokens),
    )
    for b, n in enumerate(length.tolist()):
        torch.testing.assert_close(known.taps[b, :n], fresh.taps[b, :n], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(known.x[b, :n], fresh.x[b, :n], rtol=1e-4, atol=1e-4)
        assert known.best[b, :n].tolist() == fresh.best[b, :n].tolist()


def peak(call: Callable[[], object], trace: Path) -> int:
    """The most bytes that the CPU's allocator had given out at once during a call, by its own record."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    profiled.export_chrome_trace(str(trace))
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["name"] == "[memory]"]
    return max(itertools.accumulate(event["args"]["Bytes"] for event in sorted(events, key=lambda event: event["ts"])))


def test_kept_features_are_in_memory_once(target, tmp_path):
    """Catches: parts that are joined at the end, so that for a moment all of them are there twice."""
    n, each = 240, 60
    tokens = torch.randint(1, 128, (n * each,), generator=torch.Generator().manual_seed(0)).int().numpy()
    data = Rollouts(tokens, np.arange(1, n + 1) * each, np.full(n, 2, np.int32), np.zeros(n, np.float32))
    kept: list[eagle_loss.Seen] = []
    most = peak(lambda: kept.append(eagle_data.observe_all(target, TAPS, data, range(n), 4, 64)[0]), tmp_path / "trace")
    size = sum(x.numel() * x.element_size() for x in (kept[0].taps, kept[0].x, kept[0].best))
    assert len(kept[0].best) == n * each
    assert size <= most < 1.5 * size


def test_model_writes_prompts_of_its_own(tmp_path):
    """Catches: a user turn with the assistant's marker in it, duplicates, unfinished turns."""
    import dataclasses

    template = "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    writer = dataclasses.replace(
        tiny.model("smollm2-135m", vocab_size=258, eos_token_id=1), tokenizer=tiny.tokenizer(template)
    )
    opening = rollouts.user_opening(writer)
    assert writer.tokenizer.decode(opening) == "<s><user>"
    engine = ns.EngineConfig(max_slots=8)
    written = rollouts.write_prompts(writer, 12, engine, seed=0)
    assert written == rollouts.write_prompts(writer, 12, engine, seed=0)
    assert len(written) == len(set(written))
    assert all(text.strip() == text and text for text in written)
    plain = dataclasses.replace(writer, tokenizer=None)
    with pytest.raises(ValueError, match="no chat template"):
        rollouts.write_prompts(plain, 1, engine, 0)


def test_rollouts_file_is_read_back_and_checked(data, tmp_path):
    """Catches: a damaged or foreign file taken for data, tokens of another vocabulary."""
    path = tmp_path / "data.npz"
    rollouts.save(path, data, {"model": "tiny"})
    found, about = rollouts.load(path, 128)
    assert about == {"model": "tiny"}
    assert found.sequence(7).tolist() == data.sequence(7).tolist()
    assert {float(t) for t in found.temperature} == {0.0, 1.0}
    with pytest.raises(ValueError, match="vocabulary has 5"):
        rollouts.load(path, 5)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="holds no rollouts"):
        rollouts.load(path, 128)


BAD = {
    "--steps 0": "--steps: must be an integer from 1",
    "--batch -1": "--batch: must be an integer from 1",
    "--unroll 1.5": "--unroll: must be an integer from 1",
    "--unroll 33": "--unroll: at most 32",
    "--lr nan": "--lr: must be a number above 0 and at most 1",
    "--lr 0": "--lr: must be a number above 0 and at most 1",
    "--lr inf": "--lr: must be a number",
    "--decay abc": "--decay: must be a number",
    "--warmup -0.1": "--warmup: must be a number",
    "--clip 0": "--clip: must be a number",
    "--draft-vocab 32001": "--draft-vocab: at most 32000",
    "--seed -1": "argument --seed: must be an integer from 0 to 2147483647, got '-1'",
    "--seed 99999999999": "--seed: must be an integer",
    "--taps 3 2": "--taps: must ascend",
    "--taps 2 2": "--taps: must ascend",
    "--taps 0 2": "--taps: must ascend from 1",
    "--slots 5000": "--slots: slots must be an integer from 1 to 4096",
    "--max-len 6": "--unroll: 5 steps need sequences of more than 6",
    "--temperatures -1": "--temperatures: must be a number",
    "--prompts self": "--prompts: 'self': self needs a number",
    "--prompts self:0": "--prompts: 'self:0': the number of prompts",
    "--prompts nowhere.jsonl": "--prompts: nowhere.jsonl: no such file",
    "--prompts x/mt_bench_question.jsonl": "--prompts: 'x/mt_bench_question.jsonl': a test set is not for training",
    "--prompts gsm8k_test.jsonl:5": "a test set is not for training",
    "--lm-head tied": "--lm-head: invalid choice",
    "--data nowhere.npz": "--data: nowhere.npz does not exist",
    "--data=": "argument --data: must be a path, got ''",
    "--out= --prompts self:1": "argument --out: must be a path, got ''",
    f"--data {Path(__file__).parent} --prompts self:1": "tests is a folder",
    "": "--prompts: required",
}


@pytest.mark.parametrize("options", BAD)
def test_c20_bad_options_end_before_any_work(options, tmp_path, capsys, monkeypatch):
    """Catches: an option that is only seen to be wrong hours later, or by an assertion without a name."""
    monkeypatch.setattr(ns, "load", lambda *a, **k: pytest.fail("a model was loaded"))
    with pytest.raises(SystemExit) as stopped:
        train_eagle.main(["--out", str(tmp_path / "out"), *options.split()])
    assert stopped.value.code == 2
    assert BAD[options] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_bundled_head_is_named(target):
    """Catches: a head of another model that is found for any."""
    with pytest.raises(ValueError, match='draft "eagle": no head comes with model'):
        ns.load_draft("eagle", target)

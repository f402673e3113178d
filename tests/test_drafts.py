"""Drafts through the engine: what each method proposes against an independent computation, after any acceptance."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu
from transformers import LlamaForCausalLM

import nanospec_fn as ns
from nanospec_fn.draft import Ngram
from nanospec_fn.draft_model import Eagle3
from nanospec_fn.trees import Tree
from tests import tiny
from tests.oracle_eagle import Oracle
from tests.scripted import CHAIN, TREE, Scripted, greedy, prompt, target

pytestmark = pytest.mark.usefixtures("one_thread")
RAW = tiny.config("smollm2-135m", eos_token_id=None)
SHAPES = {
    "chain": ns.Speculation(top_k=1, depth=4),
    "top-k": ns.Speculation(top_k=3, depth=4),
    "pruned": ns.Speculation(top_k=3, depth=4, num_nodes=7),
}


class Quick(Oracle):
    """The oracle without its loops; `test_quick_oracle` holds it to the slow one."""

    def layer(self, tokens: list[int], features: Tensor, positions: list[int]) -> Tensor:
        table = self.state.get("embed_tokens.weight", self.embed)
        embedded = self.norm("midlayer.input_layernorm", table[torch.tensor(tokens)])
        normed = self.norm("midlayer.hidden_norm", features)
        q, k, v = (self.proj(f"self_attn.{n}_proj", torch.cat([embedded, normed], dim=-1)) for n in "qkv")
        t, d = len(tokens), q.shape[1] // self.heads
        q, k, v = (x.view(t, -1, d) for x in (q, k, v))
        phase = torch.tensor(positions).float()[:, None] * self.theta ** (-torch.arange(0, d, 2).float() / d)
        cos, sin = phase.cos()[:, None], phase.sin()[:, None]

        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

        k, v = (x.repeat_interleave(self.heads // self.kv_heads, dim=1) for x in (turn(k), v))
        scores = torch.einsum("qhd,khd->hqk", turn(q), k) / d**0.5
        scores = scores.masked_fill(torch.ones(t, t).triu(1).bool(), -torch.inf)
        y = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        y = (normed if self.norm_before_residual else features) + self.proj("self_attn.o_proj", y)
        z = self.norm("midlayer.post_attention_layernorm", y)
        return y + self.proj("mlp.down_proj", silu(self.proj("mlp.gate_proj", z)) * self.proj("mlp.up_proj", z))


@dataclass(frozen=True)
class Forced(Eagle3):
    """The head drafts; then a script's tokens stand in its tree, so that any number of them is accepted."""

    script: Scripted = field(default_factory=Scripted)
    seen: list[tuple[list[int], Tree]] = field(default_factory=list, compare=False)  # tokens known, the head's tree

    def propose(self, params: Any, state: Any, s: Any, live: Any, spec: Any, attend: Any, put: Any) -> Any:
        state, tree = super().propose(params, state, s, live, spec, attend, put)
        if not spec.depth:
            return state, tree
        for b, alive in enumerate(live.tolist()):
            if alive:
                one = Tree(*(getattr(tree, n)[b] for n in ("token", "parent", "depth", "logp", "score")))
                self.seen.append((s.tokens[b, : int(s.total[b])].tolist(), one))
        _, forced = self.script.propose(params, state, s, live, dataclasses.replace(spec, num_nodes=None), attend, put)
        return state, Tree(
            *(getattr(forced, n)[:, : spec.nodes] for n in ("token", "parent", "depth", "logp", "score"))
        )


@pytest.fixture(scope="module")
def head() -> tuple[ns.Model, LlamaForCausalLM, Any, Any, Quick]:
    model = tiny.model("smollm2-135m", eos_token_id=None)
    cfg, params, state = tiny.head(RAW, model)
    return model, tiny.llama(RAW), cfg, params, oracle(Quick, state, model)


def oracle(kind: type[Oracle], state: dict[str, Tensor], model: ns.Model) -> Any:
    embed = model.params.embed
    return kind(state, embed, embed, RAW["num_attention_heads"], RAW["num_key_value_heads"])


def test_quick_oracle(head):
    model, _, _, params, quick = head
    slow = oracle(Oracle, quick.state, model)
    features = torch.randn(6, 3 * RAW["hidden_size"], generator=torch.Generator().manual_seed(1))
    tokens, path = prompt(7), [3, 4]
    torch.testing.assert_close(quick.draft(tokens, features, path), slow.draft(tokens, features, path))
    assert linear(features, params.fc).shape == (6, RAW["hidden_size"])


def continuation(hf: LlamaForCausalLM, start: list[int], n: int) -> tuple[int, ...]:
    sequence = list(start)
    for _ in range(n):
        sequence.append(int(hf(torch.tensor([sequence])).logits[0, -1].argmax()))
    return tuple(sequence)


def assert_fresh(tree: Tree, known: list[int], hf: LlamaForCausalLM, cfg: Any, quick: Quick, target_id: Tensor) -> int:
    """Every node's log-prob is what a head without a past gives its token after the known tokens and its path.

    The features are transformers' hidden states of the known tokens but the last, which the target has not seen.
    """
    states = hf(torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states
    features = torch.cat([states[i][0] for i in cfg.taps], dim=-1)
    back = {int(t): i for i, t in enumerate(target_id)}
    nodes = [i for i, depth in enumerate(tree.depth.tolist()) if depth > 0]
    greedy_path: list[int] = []
    for node in nodes:
        path, at = [], node
        while at >= 0:
            path, at = [at, *path], int(tree.parent[at])
        tokens = [int(tree.token[i]) for i in path]
        logp = quick.draft(known, features, tokens)[:-1].log_softmax(-1)
        torch.testing.assert_close(tree.logp[node], logp[-1, back[tokens[-1]]], rtol=0, atol=2e-4)
        along = sum(logp[d, back[t]] for d, t in enumerate(tokens))
        torch.testing.assert_close(tree.score[node], torch.as_tensor(along), rtol=0, atol=1e-3)
        if len(tokens) == len(greedy_path) + 1 and tokens[:-1] == greedy_path:
            best = logp[-1].max()
            if float(logp[-1, back[tokens[-1]]]) == float(best):
                greedy_path = tokens
    assert len(greedy_path) == int(tree.depth.max())  # the greedy chain is kept
    return len(nodes)


@pytest.mark.parametrize("name", ["chain", "top-k"])
def test_c08_draft_kv_after_every_acceptance(head, name):
    """After each round each drafted node is what a fresh draft over the committed tokens and true features proposes.

    Accepted 0 to K in turn, full acceptance twice running, and a decode step between. Catches the last draft token
    that the draft was never run on, a rewind that is off by one, a decode that the draft sleeps through.
    """
    model, hf, cfg, params, quick = head
    spec = SHAPES[name]
    pattern = (4, 4, 0, 2, 1, 3, None, 4, None, None, 0, 4)  # None: a decode step
    start = prompt(6, 3)
    text = continuation(hf, start, 48)
    rights = iter([a for a in pattern if a is not None])
    method = Forced(cfg, script=Scripted(sequences=(text,), right=lambda i, t: next_right[0]))
    next_right = [0]
    draft = ns.Draft(method, params)
    config = ns.EngineConfig(max_slots=1, num_pages=40, page_size=4, prefill_chunk=4)
    program = ns.build(model, draft, config, spec)
    everything = ns.Params(target=model.params, draft=params)
    state = program.insert(program.init(), 0, start, ns.Sampling(max_tokens=48))
    for _ in range(2):
        state, _ = program.prefill(everything, state)
    for a in pattern:
        if a is None:
            state, info = program.decode(everything, state)
        else:
            next_right[0] = next(rights)
            state, info = program.speculate(everything, state)
        assert int(info.accepted[0]) == (a or 0)
    known = state.slots.tokens[0, : int(state.slots.total[0])].tolist()
    assert known == list(text[: len(known)])
    assert len(method.seen) == 9
    for tokens, tree in method.seen:
        assert assert_fresh(tree, tokens, hf, cfg, quick, params.target_id) == spec.nodes


@pytest.mark.parametrize("step", ["speculate", "decode"])
def test_c08_a_refused_round_leaves_the_draft_as_it_was(head, step):
    """A slot that got no pages, or that a step left out, drafts as if that round had not been.

    Catches features of an idle row that overwrite those which its next catch-up needs.
    """
    model, hf, cfg, params, quick = head
    starts = [prompt(7, 1), prompt(8, 2)]
    texts = tuple(continuation(hf, s, 40) for s in starts)
    method = Forced(cfg, script=Scripted(sequences=texts, right=lambda i, t: 2))
    config = ns.EngineConfig(max_slots=2, num_pages=8, page_size=4, prefill_chunk=8)
    program = ns.build(model, ns.Draft(method, params), config, SHAPES["chain"])
    everything = ns.Params(target=model.params, draft=params)
    state = program.init()
    for slot, start in enumerate(starts):
        state = program.insert(state, slot, start, ns.Sampling(max_tokens=30))
    state, _ = program.prefill(everything, state)
    refused = 0
    for _ in range(4):
        state, info = program.speculate(everything, state)
        refused += int((~info.ok).sum())
        if step == "decode":
            state, info = program.decode(everything, state)
            state, _ = program.decode(everything, state, torch.tensor([0]))
    assert refused
    state = program.evict(state, 0)
    for _ in range(2):
        state, info = program.speculate(everything, state)
        assert info.accepted.tolist() == [0, 2]
    for tokens, tree in method.seen:
        assert assert_fresh(tree, tokens, hf, cfg, quick, params.target_id) == 4


@pytest.mark.parametrize("name", SHAPES)
def test_c09_each_node_attends_to_its_own_path(head, name):
    """Three requests of different lengths, in chunks and across pages: each node's log-prob is that of its path alone.

    Catches a branch that reads a sibling's KV, and pruning that renumbers parents wrongly.
    """
    model, hf, cfg, params, quick = head
    starts = [prompt(n, n) for n in (1, 5, 13)]
    texts = tuple(continuation(hf, s, 24) for s in starts)
    # A pruned tree is cut by the script's order: its chain of rank 0 is not complete, so nothing is accepted there.
    right = (lambda i, t: 0) if name == "pruned" else (lambda i, t: (t + i) % 5)
    method = Forced(cfg, script=Scripted(sequences=texts, right=right))
    config = ns.EngineConfig(max_slots=4, num_pages=90, page_size=4, prefill_chunk=8)
    engine = ns.prepare(model, ns.Draft(method, params), config, SHAPES[name])
    out = ns.generate(model, starts, ns.Sampling(max_tokens=8), engine=engine)
    for start, text, one in zip(starts, texts, out, strict=True):
        assert one.tokens == list(text[len(start) : len(start) + 8])
    assert len(method.seen) == sum(len(one.accepted) for one in out)
    for tokens, tree in method.seen:
        assert assert_fresh(tree, tokens, hf, cfg, quick, params.target_id) == SHAPES[name].nodes


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("coupled", [False, True])
def test_eagle_changes_no_byte(head, name, temperature, coupled):
    """Lossless whatever a random head proposes, its own noise shared or not."""
    model, _, cfg, params, _ = head
    starts = [prompt(n, n) for n in (3, 17)]
    sampling = ns.Sampling(max_tokens=10, temperature=temperature, seed=5)
    spec = dataclasses.replace(SHAPES[name], coupled=coupled)
    plain = ns.generate(model, starts, sampling)
    out = ns.generate(model, starts, sampling, draft=ns.Draft(Eagle3(cfg), params), speculation=spec)
    assert [(o.tokens, o.target_logp) for o in out] == [(p.tokens, p.target_logp) for p in plain]


def lookup(known: list[int], longest: int) -> list[tuple[int, int]]:
    """Prompt lookup in plain Python: (tokens matched, where) of each earlier occurrence of the suffix, best first."""
    found = []
    for end in range(len(known) - 1):
        length = 0
        while length < longest and length <= end and known[end - length] == known[-1 - length]:
            length += 1
        if length:
            found.append((length, end))
    return sorted(found, reverse=True)


@dataclass(frozen=True)
class Listening(Ngram):
    """Ngram, whose proposals are kept."""

    seen: list[tuple[list[int], Tree]] = field(default_factory=list, compare=False)

    def propose(self, params: Any, state: Any, s: Any, live: Any, spec: Any, attend: Any, put: Any) -> Any:
        state, tree = super().propose(params, state, s, live, spec, attend, put)
        for b, alive in enumerate(live.tolist()):
            if alive and spec.depth:
                one = Tree(*(getattr(tree, n)[b] for n in ("token", "parent", "depth", "logp", "score")))
                self.seen.append((s.tokens[b, : int(s.total[b])].tolist(), one))
        return state, tree


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_ngram_is_prompt_lookup(top_k):
    """The chains are what followed the longest, then latest matches; equal beginnings are one branch."""
    depth = 3
    generator = torch.Generator().manual_seed(4)
    starts = [torch.randint(0, 3, (n,), generator=generator).tolist() for n in (1, 2, 5, 9, 14)]
    starts += [[7, 8, 9, 7, 8, 9, 7, 8], [1, 2, 3, 4]]
    method = Listening()
    ns.generate(
        target(),
        starts,
        ns.Sampling(max_tokens=12),
        draft=ns.Draft(method),
        speculation=ns.Speculation(top_k=top_k, depth=depth),
    )
    drafted = 0
    for known, tree in method.seen:
        chains = [known[end + 1 : end + 1 + depth] for _, end in lookup(known, method.longest)[:top_k]]
        wanted = {tuple(chain[: d + 1]) for chain in chains for d in range(len(chain))}
        paths = set()
        for node, d in enumerate(tree.depth.tolist()):
            path, at = [], node
            while d > 0 and at >= 0:
                path, at = [int(tree.token[at]), *path], int(tree.parent[at])
            paths |= {tuple(path)} if d > 0 else set()
        assert paths == wanted, known
        assert int((tree.depth > 0).sum()) == len(wanted)  # no node twice
        drafted += len(wanted)
    assert drafted > 20


def test_ngram_accepts_a_loop():
    """A repeating continuation is accepted whole."""
    text = greedy(tuple(prompt(4)), 6)
    start = [*prompt(4), *text, *prompt(4)]
    (plain,) = ns.generate(target(), [start], ns.Sampling(max_tokens=6))
    (out,) = ns.generate(
        target(), [start], ns.Sampling(max_tokens=6), draft=ns.load_draft("ngram", target()), speculation=CHAIN
    )
    assert out.tokens == plain.tokens
    with pytest.raises(ValueError, match="coupled proposals need a draft with logits; ngram has none"):
        ns.build(target(), ns.load_draft("ngram", target()), speculation=ns.Speculation(coupled=True))


@pytest.mark.parametrize("shape", [CHAIN, TREE, ns.Speculation(top_k=3, depth=4, num_nodes=6)])
def test_frozen_is_right_about_everything(shape):
    """A copy of the target accepts every round in full, greedy and, with the noise shared, sampled too."""
    draft = ns.load_draft("frozen", target())
    for temperature, coupled in ((0.0, False), (1.0, True)):
        sampling = ns.Sampling(max_tokens=1 + 3 * 5, temperature=temperature, seed=2)
        spec = dataclasses.replace(shape, coupled=coupled)
        plain = ns.generate(target(), [prompt(6), prompt(11)], sampling)
        out = ns.generate(target(), [prompt(6), prompt(11)], sampling, draft=draft, speculation=spec)
        for one, want in zip(out, plain, strict=True):
            assert (one.tokens, one.target_logp) == (want.tokens, want.target_logp)
            assert one.accepted == [4, 4, 4]
            assert one.origin == [0, *[1, 2, 3, 4, 0] * 3]


def test_frozen_keeps_the_weights_of_its_day():
    """An update of the target in place must not reach the copy."""
    model = tiny.model("tinyllama-1.1b")
    draft = ns.load_draft("frozen", model)
    before = draft.params.embed.clone()
    model.params.embed.mul_(2)
    assert torch.equal(draft.params.embed, before)


def test_another_model_drafts(tmp_path):
    """ "model:" with a folder: another Llama of the same vocabulary; the target's own weights accept everything."""
    raw = tiny.config("tinyllama-1.1b", eos_token_id=None)
    model = tiny.model("tinyllama-1.1b", eos_token_id=None)
    folders = [tiny.write(tmp_path / str(seed), raw, tiny.state_of(tiny.llama(raw, seed))) for seed in (0, 1)]
    start = [t % 96 for t in prompt(6)]
    sampling = ns.Sampling(max_tokens=11)
    (plain,) = ns.generate(model, [start], sampling)
    same, other = (
        ns.generate(model, [start], sampling, draft=ns.load_draft(f"model:{f}", model), speculation=CHAIN)[0]
        for f in folders
    )
    assert same.tokens == other.tokens == plain.tokens
    assert same.target_logp == other.target_logp == plain.target_logp
    assert same.accepted == [4, 4]
    assert len(other.accepted) > 2


def test_load_draft_errors(tmp_path):
    model = target()
    assert ns.load_draft("none", model) is None
    for name in ("", "eagel", "ngram:x", "frozen:x", "none:x", "model:", "model", "eagle:"):
        with pytest.raises(ValueError, match=r"draft must be .*, got"):
            ns.load_draft(name, model)
    for kind in ("model", "eagle"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            ns.load_draft(f"{kind}:{tmp_path}/nowhere", model)
    raw = tiny.config("tinyllama-1.1b")
    small = tiny.write(tmp_path / "small", raw, tiny.state_of(tiny.llama(raw)))
    with pytest.raises(ValueError, match=r"small has a vocabulary of 96, the target of 128"):
        ns.load_draft(f"model:{small}", model)
    other = tiny.write_head(tmp_path / "head", RAW, tiny.head_state(RAW), "speculators")
    with pytest.raises(ValueError, match="hidden size 72, this target's is 64"):
        ns.load_draft(f"eagle:{other}", model)


def test_top_k_is_at_most_the_drafts_vocabulary(head):
    model, _, cfg, params, _ = head
    with pytest.raises(ValueError, match="top_k is 33, the draft's vocabulary has 32 tokens"):
        ns.build(model, ns.Draft(Eagle3(cfg), params), speculation=ns.Speculation(top_k=33, depth=1))
    with pytest.raises(ValueError, match="top_k is 129, the draft's vocabulary has 128 tokens"):
        ns.build(target(), ns.load_draft("frozen", target()), speculation=ns.Speculation(top_k=129, depth=1))


def test_a_draft_for_another_target_is_refused(tmp_path):
    """Bugs: a token that the draft's embedding lacks, found in the middle of a call by an index error (on CUDA by a
    device assert); a head's product with features of another width; a layer that is not there."""
    model = tiny.model("llama-3.1-8b")
    raw = tiny.config("llama-3.1-8b")
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    tiny.write_head(tmp_path, raw, tiny.head_state(raw, 32, 1), "speculators", **taps)
    head = ns.load_draft(f"eagle:{tmp_path}", model)
    smaller = ns.load_draft("frozen", tiny.model("tinyllama-1.1b"))
    cases = [
        (model, smaller, "vocabulary is 96, this target's 160"),
        (tiny.model("llama-3.1-8b", vocab_size=400), head, "vocabulary is 160, this target's 400"),
        (tiny.model("llama-3.1-8b", hidden_size=128), head, "hidden size is 64, this target's 128"),
        (tiny.model("llama-3.1-8b", num_hidden_layers=3), head, "the head taps layer 4, the target has 3 layers"),
    ]
    for other, draft, message in cases:
        for call in (ns.build, ns.prepare, lambda m, d: ns.generate(m, [[1, 2]], draft=d)):
            with pytest.raises(ValueError, match=f"draft: .*{message}"):
                call(other, draft)

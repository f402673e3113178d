"""Promise G1 on a GPU: one bit pattern, whatever is drafted, batched, paged, chunked, preempted or captured."""

import dataclasses
import functools

import pytest
import torch
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import draft, struct
from tests.gpu.shapes import LLAMA_8B, TINY, near_copy, random_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_thread")]

SHAPES = {"tiny": TINY, "8b": dataclasses.replace(LLAMA_8B, num_layers=4)}
TREES = {"chain": ns.Speculation(top_k=1, depth=5), "tree4": ns.Speculation(top_k=4, depth=5)}
TREES["tree6"] = ns.Speculation(top_k=6, depth=5, num_nodes=20)
LENGTHS = (1, 5, 16, 17, 40, 63, 64, 65, 90, 130, 200, 255)


@functools.cache
def target(shape: str) -> ns.Model:
    return random_model(SHAPES[shape])


@functools.cache
def drafter(shape: str, name: str) -> draft.Draft | None:
    return near_copy(target(shape)) if name == "near" else ns.load_draft(name, target(shape))


def requests(shape: str, n: int, tokens: int) -> tuple[list[list[int]], list[ns.Sampling]]:
    """Half greedy, half at temperature 1, some filtered; two prompts alike. The first ones are the same for every n."""
    generator = torch.Generator().manual_seed(0)
    prompts = [
        torch.randint(0, SHAPES[shape].vocab_size, (LENGTHS[i % len(LENGTHS)],), generator=generator).tolist()
        for i in range(n)
    ]
    if n > 4:
        prompts[4] = prompts[1]
    sampling = [
        ns.Sampling(max_tokens=tokens, temperature=i % 2, seed=i, top_p=0.9 if i % 4 == 3 else 1.0) for i in range(n)
    ]
    return prompts, sampling


def run(shape, n, tokens, draft=None, tree=None, **engine):
    prompts, sampling = requests(shape, n, tokens)
    config = ns.EngineConfig(**({"max_slots": 8, "prefill_chunk": 64} | engine))
    return ns.generate(
        target(shape),
        prompts,
        sampling,
        draft=drafter(shape, draft) if draft else None,
        speculation=TREES.get(tree),
        engine=config,
    )


@functools.cache
def plain(shape: str, n: int, tokens: int):
    """Eager, one request at a time."""
    return run(shape, n, tokens, max_slots=1, capture="off", prefill_chunk=512)


def assert_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=False)):
        assert a.tokens == b.tokens, (
            f"prompt {i}: tokens differ at {[x == y for x, y in zip(a.tokens, b.tokens, strict=False)].index(False)}"
        )
        assert a.target_logp == b.target_logp, f"prompt {i}: log-probs differ"


@pytest.mark.parametrize("slots", [1, 8, 32])
@pytest.mark.parametrize(
    "draft, tree",
    [
        (None, None),
        ("near", "chain"),
        ("near", "tree4"),
        ("near", "tree6"),
        ("frozen", "tree4"),
        ("ngram", "chain"),
        ("ngram", "tree4"),
    ],
)
def test_captured_rounds_emit_the_bits_of_plain_eager_decoding(draft, tree, slots):
    n = 32 if slots > 1 else 6
    got = run("tiny", n, 40, draft, tree, max_slots=slots)
    assert_same(got, plain("tiny", 32, 40)[:n])
    if draft == "near" and slots == 8:
        accepted = [a for c in got for a in c.accepted]
        assert 0 < sum(accepted) < 5 * len(accepted), "the draft is to be right at times"


@pytest.mark.parametrize("draft, tree", [(None, None), ("near", "chain"), ("near", "tree4")])
@pytest.mark.parametrize(
    "change",
    [{"capture": "off"}, {"num_pages": 40, "page_size": 16}, {"page_size": 1, "prefill_chunk": 7}, {"page_size": 64}],
    ids=str,
)
def test_paging_chunks_preemption_and_capture_change_no_bit(draft, tree, change):
    assert_same(run("tiny", 12, 40, draft, tree, **change), plain("tiny", 32, 40)[:12])


@pytest.mark.parametrize(
    "draft, tree, slots",
    [
        (None, None, 8),
        ("near", "chain", 1),
        ("near", "chain", 8),
        ("near", "tree4", 8),
        ("ngram", "tree4", 8),
        ("near", "tree6", 32),
    ],
)
def test_8b_layers_emit_the_bits_of_plain_eager_decoding(draft, tree, slots):
    n = max(2, min(slots, 12))
    assert_same(run("8b", n, 24, draft, tree, max_slots=slots), plain("8b", 12, 24)[:n])


@pytest.mark.parametrize("shape, n, tokens", [("tiny", 32, 40), ("8b", 12, 24)])
def test_score_reproduces_every_log_prob(shape, n, tokens):
    prompts, sampling = requests(shape, n, tokens)
    for prompt, s, completion in zip(prompts, sampling, plain(shape, n, tokens), strict=True):
        assert ns.score(target(shape), prompt, completion.tokens, s) == completion.target_logp


def test_forward_is_differentiable_with_the_engines_bits():
    tokens = torch.tensor([requests("tiny", 12, 40)[0][9]], device="cuda")
    params, cfg = target("tiny").params, SHAPES["tiny"]
    with torch.enable_grad():
        leaves = pytree.tree_map(lambda x: x.detach().requires_grad_(), params)
        logits = ns.forward(leaves, cfg, tokens)
        grads = torch.autograd.grad(logits.logsumexp(-1).sum(), pytree.tree_leaves(leaves))
    assert torch.equal(logits, ns.forward(params, cfg, tokens))
    assert all(g.isfinite().all() and g.any() for g in grads)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("draft, tree", [(None, None), ("near", "chain"), ("near", "tree4"), ("ngram", "tree4")])
def test_steps_never_wait_for_the_device(draft, tree):
    """Bug: a shape, branch or copy that needs the host, eager or replayed; and donated bytes equal pure ones."""
    model, drafts = target("tiny"), drafter("tiny", draft) if draft else None
    program = ns.build(model, draft=drafts, engine=ns.EngineConfig(max_slots=2), speculation=TREES.get(tree))
    params = ns.Params(target=model.params, draft=drafts.params if drafts else ())

    def fresh():
        state = program.init()
        for slot, length in enumerate((70, 20)):
            state = program.insert(
                state, slot, list(range(1, length)), ns.Sampling(max_tokens=64, temperature=slot, seed=3)
            )
        return program.prefill(params, state)[0]

    step = program.speculate if draft else program.decode
    fast = ns.capture(step, donate=("state",))
    pure, captured = fresh(), fresh()
    captured, info = fast(params, captured)
    pure, expected = step(params, pure)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            captured, info = fast(params, captured)
            pure, expected = step(params, pure)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert fast.captures == 1
    assert struct.bytes_equal(info, expected)
    assert struct.bytes_equal(captured.slots, pure.slots)

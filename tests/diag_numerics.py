"""A backend's noise beside a reference, in bf16 ulps: `python -m tests.diag_numerics --backend flashinfer`.

The backend decodes greedily; the reference is fed the same tokens, decoding step by step; the logits of the emitted
tokens are compared. On CUDA the reference is the same model with `sdpa`; on a CPU, where only `sdpa` runs, the same
bf16 weights in fp32.
"""

import dataclasses
import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import nanospec_fn as ns
from nanospec_fn import arguments, attention, chat, kernels, model, prompts
from nanospec_fn.struct import put_

WITHIN = (0, 1, 2, 4, 8)  # ulps


def emitted_logits(target: ns.Model, backend: str, tokens: list[int], start: int) -> Tensor:
    """Logits [len(tokens) - start] fp32 of tokens[start:], each of the pass that emits it.

    Args: tokens: prompt and output; start: the prompt's length. The prompt is one pass, every later token another.
    """
    program = ns.build(target, engine=ns.EngineConfig(max_slots=1, max_context=len(tokens), attend=backend))
    state, device = program.init(), target.params.embed.device
    pools: Sequence[Tensor] = state.pools
    table = torch.arange(1, state.slots.page_table.shape[1] + 1, dtype=torch.int32, device=device)[None]
    found = []
    for first, last in [(0, start), *((i, i + 1) for i in range(start, len(tokens) - 1))]:
        token = torch.tensor([tokens[first:last]], dtype=torch.int32, device=device)
        at, count = (torch.tensor([n], dtype=torch.int32, device=device) for n in (first, last - first))
        rows = attention.chain(token, at, count)
        pools, layer = attention.through(program.static.attend, target.cfg, rows, table, pools, put_)
        x, _ = model.hidden(target.params, target.cfg, token.flatten(), rows.position.flatten(), layer)
        found.append(model.logits(target.params, target.cfg, x[-1:])[0, tokens[last]])
    return torch.stack(found)


def ulps(got: Tensor, reference: Tensor) -> Tensor:
    """|got - reference| in units of the last place of the reference as bf16, which has 8 significant bits."""
    _, exponent = torch.frexp(reference.float())  # 0.5 <= mantissa < 1
    return (got.double() - reference.double()).abs() / torch.ldexp(torch.ones_like(got).double(), exponent - 8)


def shares(noise: Tensor) -> dict[int, float]:
    """The share of values that are within so many ulps."""
    return {limit: float((noise <= limit).double().mean()) for limit in WITHIN}


def reference_of(target: ns.Model) -> ns.Model:
    """What a target is compared with: itself on CUDA, its weights in fp32 on a CPU."""
    if target.params.embed.is_cuda:
        return target
    params = pytree.tree_map(torch.Tensor.float, target.params)
    cfg = dataclasses.replace(target.cfg, gemm=kernels.pick_gemm(params.embed.device, torch.float32))
    return dataclasses.replace(target, cfg=cfg, params=params)


@torch.no_grad()
def measure(target: ns.Model, backend: str, requests: Sequence[list[int]], max_tokens: int) -> Tensor:
    """The noise, in ulps, of every token that `backend` emits for the requests."""
    engine = ns.EngineConfig(attend=backend)
    sampling = ns.Sampling(max_tokens=max_tokens, ignore_eos=True)
    out = ns.generate(dataclasses.replace(target, tokenizer=None), requests, sampling, engine=engine)
    reference, noise = reference_of(target), []
    for prompt, completion in zip(requests, out, strict=True):
        tokens = [*prompt, *completion.tokens]
        got = emitted_logits(target, backend, tokens, len(prompt))
        noise.append(ulps(got, emitted_logits(reference, "sdpa", tokens, len(prompt))))
    return torch.cat(noise)


def report(noise: Tensor) -> str:
    """The distribution as a few lines of text."""
    lines = [f"within {limit} ulp: {share:7.2%} {'#' * round(50 * share)}" for limit, share in shares(noise).items()]
    return "\n".join([f"{len(noise)} tokens", *lines, f"mean {float(noise.mean()):.2f}, most {float(noise.max()):.1f}"])


def main(argv: list[str] | None = None) -> int:
    """Print the distribution; the exit code."""
    parser = arguments.Parser(prog="python -m tests.diag_numerics", description="Noise of a backend in bf16 ulps.")
    parser.add_argument("--prompts", default="mt-bench", help="mt-bench, gsm8k or a file (%(default)s)")
    parser.add_argument("--limit", type=arguments.positive, default=8, help="of the prompts (%(default)s)")
    parser.add_argument("--max-tokens", type=arguments.positive, default=64, help="for each (%(default)s)")
    arguments.add_engine(parser)
    args = parser.parse_args(argv)
    arguments.check_engine(parser, args)
    try:
        texts = prompts.load(args.prompts, args.limit)
        target = ns.load(args.model, device=args.device, dtype="bf16")
        ns.build(target, engine=ns.EngineConfig(attend=args.backend))
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    noise = measure(target, args.backend, [chat.encode(target.tokenizer, text) for text in texts], args.max_tokens)
    print(f"{target.name}, backend {args.backend}, {target.params.embed.device}: {report(noise)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

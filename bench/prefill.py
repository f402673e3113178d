"""How fast prompts are read: `python -m bench.prefill --like llama-3.1-8b --prompts 4 --tokens 2048`.

A captured prefill step over all prompts at once, and beside it the same model's matrix products alone through the
library (cuBLAS on CUDA) at the same number of rows. Both rates count the products' 2 n k m operations, so attention's
time lowers the first one. One strict JSON line is printed and appended to <out>/prefill-<model>.jsonl.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

import nanospec_fn as ns
from bench import records, rounds, widen
from nanospec_fn import arguments, program


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.prefill."""
    parser = arguments.Parser(prog="python -m bench.prefill", description="Time a prefill step.")
    parser.add_argument("--prompts", metavar="N", type=arguments.positive, default=4, help="at once (%(default)s)")
    parser.add_argument("--tokens", metavar="N", type=arguments.positive, default=2048, help="of each (%(default)s)")
    parser.add_argument("--repeats", metavar="N", type=arguments.positive, default=5, help="timed (%(default)s)")
    parser.add_argument("--like", metavar="SHAPE", help="widen model and head in memory first, see bench.widen")
    parser.add_argument(
        "--out", metavar="FOLDER", type=arguments.folder, default=Path("bench/results"), help="of the results"
    )
    arguments.add_engine(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Measure and write the row. The exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        arguments.check_engine(parser, args)
        arguments.make_folder(args.out)
        model, draft_name, draft = widen.load(args.model, args.draft, args.like, args.device)
        print(f"prefill of {args.prompts} x {args.tokens} tokens, {args.repeats + 1} times", file=sys.stderr)
        found = measure(model, draft, args.prompts, args.tokens, args.repeats, args.backend)
    except (ValueError, FileNotFoundError) as error:
        parser.error(" ".join(str(error).split()))
    about = records.about_own(model, draft_name, args.backend) | {"prompts": args.prompts, "tokens": args.tokens}
    records.append(args.out / f"prefill-{Path(model.name).name}.jsonl", about | found)
    return 0


@torch.no_grad()
def measure(
    model: ns.Model, draft: ns.Draft | None, prompts: int, tokens: int, repeats: int, attend: str = "auto"
) -> dict[str, Any]:
    """Milliseconds of the step and of the library's products, their rates, and the step's memory.

    Errors: ValueError where the prompts do not fit the model's context or the device.
    """
    spec = ns.Speculation() if draft else None
    lookahead = spec.lookahead if spec else 0
    pages = program.pages_for([tokens + 1] * prompts, ns.EngineConfig.page_size, lookahead, prompts)
    config = ns.EngineConfig(prompts, pages, attend=attend, prefill_chunk=tokens)
    engine = ns.build(model, draft=draft, engine=config, speculation=spec)
    if reason := engine.misfit(tokens):
        raise ValueError(f"tokens: {reason}")
    device = model.params.embed.device
    before = rounds.held(device)
    params = ns.Params(target=model.params, draft=draft.params if draft else ())
    step = ns.capture(engine.prefill, donate=("state",))
    state = rounds.admitted(engine, tokens)
    state, _ = step(params, state)  # captures
    clock = rounds.Clock(device)
    for _ in range(repeats):
        rewind_(state)
        state, _ = clock.time(step, params, state)
    ms, beyond = statistics.median(clock.milliseconds()), rounds.beyond(before, state, device)
    library = statistics.median(products(model, prompts * tokens, repeats))
    operations = (
        2 * prompts * tokens * sum(weight.numel() for layer in model.params.layers for weight in matrices(layer))
    )
    return {
        "ms": ms,
        "tok_s": prompts * tokens / ms * 1e3,
        "tflops": operations / ms / 1e9,
        "library_ms": library,
        "library_tflops": operations / library / 1e9,
        "of_library": library / ms,
        "beyond_gib": beyond,
    }


def rewind_(state: ns.State) -> None:
    """Back to before the prompts were read: the pages stay reserved, the next step writes the same KV to them.

    In place: a captured step is bound to the tensors that it was captured with.
    """
    s = state.slots
    for x in (s.length, s.unseen, s.done):
        x.zero_()
    s.total.copy_(s.prefill_to)


def matrices(layer: Any) -> list[torch.Tensor]:
    """A layer's weights that multiply rows."""
    return [layer.qkv, layer.out, layer.gate_up, layer.down]


def products(model: ns.Model, rows: int, repeats: int) -> list[float]:
    """Milliseconds that the library takes for the products of all layers over so many rows, one after the other."""
    weights = [weight for layer in model.params.layers for weight in matrices(layer)]
    x = {w.shape[1]: torch.randn(rows, w.shape[1], dtype=w.dtype, device=w.device) for w in weights}
    clock = rounds.Clock(weights[0].device)

    def run() -> None:
        for w in weights:
            torch.nn.functional.linear(x[w.shape[1]], w)

    run()
    for _ in range(repeats):
        clock.time(run)
    return clock.milliseconds()


if __name__ == "__main__":
    sys.exit(main())

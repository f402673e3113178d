"""vLLM and SGLang on the same prompts: what they can be asked, and their rows.

Each (config, batch size) has a process of its own, which makes every run of it; see `isolated`.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import nanospec_fn as ns
from bench import isolated, records
from bench.isolated import Job
from bench.measure import Measured
from nanospec_fn import arguments, chat, checkpoint, config, draft_model, weights

MODULE = {"vllm": "bench.vllm_engine", "sglang": "bench.sglang_engine"}  # the adapter that runs in its process
RELEASE = {"vllm": "0.26.0", "sglang": "0.5.17"}  # that the adapter is written against
CHAINS_ONLY = ("vllm",)
TAPS = "eagle_aux_hidden_state_layer_ids"


def plan(args: argparse.Namespace, texts: list[str], speculation: ns.Speculation | None) -> Iterator[dict[str, Any]]:
    """Read what the engine needs, headers and the tokenizer but no weights; its rows that are missing.

    Errors: ValueError or FileNotFoundError naming what the engine cannot load; all before any row.
    """
    engine = args.engine[0]
    name = weights.model_name(args.model)
    device = weights.pick_device(args.device)
    if device.index:
        raise ValueError(f"argument --device: {engine} takes the first one it sees: set CUDA_VISIBLE_DEVICES")
    source = checkpoint.open_checkpoint(name)
    if source.path.is_file():
        raise ValueError(f"argument --model: {engine} loads a folder or a hub id, got {name}")
    draft, head = find_head(engine, args.draft) if speculation else ("none", None)
    tokenizer = chat.from_folder(source.path)
    job = Job(
        model=str(source.path),
        draft=head,
        depth=speculation.depth if speculation else 0,
        top_k=speculation.top_k if speculation else 0,
        dtype=str(weights.pick_dtype("auto", device)).removeprefix("torch."),
        bs=0,
        max_tokens=args.max_tokens,
        stop_ids=config.parse(source.config, source.path).eos_ids,
        requests=[chat.encode(tokenizer, text) for text in texts],
        passes=0,
    )
    about = records.about(engine, name, draft, device)
    return rows(args, engine, job, about, records.present(args.out / f"{engine}-{args.config}.jsonl"))


def find_head(engine: str, name: str) -> tuple[str, str]:
    """A draft's name and its folder: an EAGLE-3 head that the engine runs as this project does.

    What each engine's loader makes of a head: tests/peers/eagle3-loaders.json.
    """
    name = arguments.head_of_environment(name)
    named = None if name == "auto" else draft_model.DraftName.parse(name)
    if not named or named.kind != "eagle" or not named.source:
        raise ValueError(f"argument --draft: {engine} drafts with eagle:X, a folder or a hub id, got {name}")
    source = checkpoint.open_checkpoint(named.source)
    if not any(key.endswith("lm_head.weight") for key in source.tensors):
        raise ValueError(f"argument --draft: {source.path} has no lm_head.weight, which {engine} needs")
    if engine == "sglang" and "transformer_layer_config" in source.config:
        raise ValueError(f"argument --draft: {source.path} is in the speculators form, which sglang does not load")
    if engine == "vllm" and (source.config.get("eagle_config") or {}).get(TAPS):
        raise ValueError(f"argument --draft: {source.path} names {TAPS}, each of which vllm takes one layer early")
    return name, str(source.path)


def as_sglang_knows_it(head: Path, folder: Path) -> Path:
    """The same head, in links, under the architecture by which SGLang knows one; the original form's is a target's."""
    raw = json.loads((head / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    for path in head.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def rows(
    args: argparse.Namespace, engine: str, job: Job, about: dict[str, Any], seen: set[str]
) -> Iterator[dict[str, Any]]:
    """Measure every row that is missing. Args: seen: the keys of those that are there.

    Errors: isolated.EngineError naming the engine, the config and the batch size.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if job.draft and engine == "sglang":
            job = replace(job, draft=str(as_sglang_knows_it(Path(job.draft), Path(folder))))
        for bs in args.bs:
            labels = [about | records.label(args, bs, run, len(job.requests)) for run in range(args.runs)]
            missing = [row for row in labels if records.key(row) not in seen]
            if not missing:
                continue
            passes = isolated.run(MODULE[engine], replace(job, bs=bs, passes=len(missing)), args.time_limit)
            try:
                for row, figures in zip(missing, passes, strict=True):
                    yield row | records.figures(Measured(**figures), None)
            except isolated.EngineError as error:
                raise isolated.EngineError(f"{engine} {args.config}, batch size {bs}: {error}") from None

"""Embed a small model in a larger shape: `python -m bench.widen --draft eagle --like llama-3.1-8b --out DIR`.

DIR/target and DIR/head become ordinary Hugging Face folders that cost what the larger model costs and behave as the
small one does, so that speculation can be timed without the larger model's weights. shapes.py and wide.py have the
construction.
"""

import argparse
import json
import math
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

import nanospec_fn as ns
from bench import shapes, wide
from bench.shapes import Shape
from bench.wide import Maker
from nanospec_fn import arguments, draft_model, files, model, weights
from rl import eagle_head


@dataclass(frozen=True)
class Widening:
    """What is to be made, checked."""

    small: ns.Model
    draft: ns.Draft | None
    shape: Shape
    cfg: model.Config  # the wide model's
    constant: float
    make: Maker
    name: str


def plan(
    small: ns.Model,
    like: str,
    draft: ns.Draft | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Widening:
    """Check that model and head fit the shape. Arguments and errors as for `widen_params`."""
    shape = shapes.find_shape(like)
    where = small.params.embed.device if device is None else torch.device(device)
    shapes.check(small.cfg, shape, "the model")
    if small.cfg.num_layers > shape.num_layers:
        raise ValueError(f"num_layers: the model has {small.cfg.num_layers}, the shape {shape.num_layers}")
    c = shapes.constant(small.cfg)
    cfg = shapes.wide_config(small.cfg, shape, c, where, dtype)
    if draft is not None:
        head = wide.head_of(draft)
        shapes.check(head, shape, "the head")
        shapes.wide_config(head, shape, c, where, dtype)
    make = Maker(where, dtype, torch.Generator(where).manual_seed(seed))
    name = like if like in shapes.SHAPES else Path(like).name.removesuffix(".json")
    return Widening(small, draft, shape, cfg, c, make, f"{Path(small.name).name}-in-{name}")


def widen_params(
    small: ns.Model,
    like: str,
    draft: ns.Draft | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> tuple[ns.Model, ns.Draft | None]:
    """The wide model and head as weights in memory, nothing written; the tokenizer is the small model's.

    Args:
      small: load it, and the head, in fp32, so that weights are rounded once.
      like: a name of shapes.SHAPES, a config.json, or a folder with one.
      device: where the wide weights go; None: the small model's.
    Errors: ValueError naming the size that does not fit or the head's feature that cannot be widened;
      FileNotFoundError; both before anything is made.
    """
    p = plan(small, like, draft, device, dtype, seed)
    made = list(wide.widen_target(small, p.cfg, p.constant, p.make))
    ends = {name: value for name, value in made if name != "layers"}
    params = model.Params(**ends, layers=tuple(value for name, value in made if name == "layers"))
    return ns.Model(p.cfg, params, small.tokenizer, p.name), widen_draft(p)


def load(target: str, draft: str, like: str | None, device: str) -> tuple[ns.Model, str, ns.Draft | None]:
    """A model, a draft's name with "auto" resolved, and the draft, both widened in memory where `like` names a shape.

    Errors: as `ns.load`, `ns.load_draft` and `widen_params`.
    """
    if like:
        check_like(like)
    small = ns.load(target, device=device, dtype="fp32" if like else "auto")
    name, head = arguments.load_draft(draft, small)
    if not like:
        return small, name, head
    dtype = torch.bfloat16 if small.params.embed.is_cuda else torch.float32
    wide_model, wide_head = widen_params(small, like, head, dtype=dtype)
    return wide_model, name, wide_head


def check_like(like: str) -> None:
    """Refuse a value of --like before a model is loaded. Errors: ValueError that names the option."""
    try:
        shapes.find_shape(like)
    except (ValueError, OSError) as error:
        raise ValueError(f"argument --like: {error}") from None


def widen_draft(p: Widening) -> ns.Draft | None:
    """The wide head of a plan that has one."""
    if p.draft is None:
        return None
    cfg, params = wide.widen_head(p.draft, p.small, p.cfg, p.shape, p.constant, p.make)
    return ns.Draft(draft_model.Eagle3(cfg), params)


def write(p: Widening, folder: Path) -> list[Path]:
    """The wide model and head as Hugging Face folders, a layer at a time -> the folders written.

    A folder's config.json goes first and comes last: what was cut off does not load.
    Errors: ValueError where the disk has no room, before anything is written.
    """
    target, head = folder / "target", folder / "head"
    need = size(p)
    target.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target).free
    if need > free:
        raise ValueError(f"{folder}: {need / 2**30:.1f} GiB are needed, {free / 2**30:.1f} GiB are free")
    write_target(p, target)
    wide_head = widen_draft(p)
    if wide_head is None:
        return [target]
    head.mkdir(exist_ok=True)
    described = ns.Model(p.cfg, p.small.params)  # of a target, only the config goes into a head's folder
    eagle_head.write_folder(head, wide_head.params, wide.head_of(wide_head), described, p.make.dtype)
    return [target, head]


def write_target(p: Widening, folder: Path) -> None:
    """The model's config, tokenizer and weights, a shard for each layer."""
    for old in (folder / "config.json", *folder.glob("model*.safetensors*")):
        old.unlink(missing_ok=True)
    raw = describe(p)
    total, where = 0, dict[str, str]()
    for i, tensors in enumerate(shards(p, raw), 1):
        name = f"model-{i:05}-of-{p.cfg.num_layers + 3:05}.safetensors"
        with files.whole(folder / name) as part:
            save_file(tensors, part, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, name)
        total += sum(x.numel() * x.element_size() for x in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": where}
    tokenizer: Any = p.small.tokenizer
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", raw)


def shards(p: Widening, raw: dict[str, Any]) -> Iterator[dict[str, Tensor]]:
    """The wide model's tensors under Hugging Face names, as many at a time as a file holds."""
    ends = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    done = 0
    for name, value in wide.widen_target(p.small, p.cfg, p.constant, p.make):
        if name in ends:
            yield {ends[name]: value.cpu()}
            continue
        found: dict[str, Tensor] = {}
        for part, names in weights.layer_parts(f"model.layers.{done}", p.cfg, p.cfg.hidden_size, raw).items():
            if names:
                pieces = getattr(value, part).cpu().split([shape[0] for shape in names.values()])
                found |= dict(zip(names, pieces, strict=True))
        yield found
        done += 1


def write_json(path: Path, value: dict[str, Any]) -> None:
    files.write(path, (json.dumps(value, indent=2) + "\n").encode())


def size(p: Widening) -> int:
    """Bytes that the folders take, but for a few files of text."""
    e, cfg = p.cfg.hidden_size, p.cfg

    def layer(cfg: model.Config, width: int, raw: dict[str, Any]) -> int:
        parts = weights.layer_parts("", cfg, width, raw).values()
        return sum(math.prod(rows) for part in parts for rows in part.values())

    count = 2 * cfg.vocab_size * e + e + cfg.num_layers * layer(cfg, e, describe(p))
    if p.draft is not None:
        head = wide.head_of(p.draft)
        rows = wide.draft_vocabulary(head, p.shape)
        count += (rows + len(head.taps) * e + 2) * e + layer(cfg, 2 * e, {})
    return count * p.make.dtype.itemsize


def describe(p: Widening) -> dict[str, Any]:
    """config.json of the wide model."""
    cfg, layer, rope = p.cfg, p.small.params.layers[0], p.cfg.rope
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        scaling |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
        scaling |= {"original_max_position_embeddings": rope.original_max_position}
    eos = list(cfg.eos_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": cfg.hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "max_position_embeddings": cfg.max_context,
        "rms_norm_eps": cfg.rms_eps,
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else scaling,
        "attention_bias": isinstance(layer.qkv_bias, Tensor),
        "mlp_bias": isinstance(layer.gate_up_bias, Tensor),
        "tie_word_embeddings": False,
        "vocab_size": cfg.vocab_size,
        "bos_token_id": cfg.bos_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos,
        "torch_dtype": str(p.make.dtype).removeprefix("torch."),
    }


def build_parser() -> argparse.ArgumentParser:
    """The options of bench.widen."""
    parser = arguments.Parser(
        prog="python -m bench.widen",
        description="Embed a small model and its EAGLE-3 head in a larger shape.",
    )
    parser.add_argument("--model", default="smollm2", metavar="M", help="a name, a folder, a .gguf file or a hub id")
    parser.add_argument(
        "--draft", type=head_name, default="eagle", metavar="eagle|eagle:X|none", help="the head; X: a folder or hub id"
    )
    parser.add_argument(
        "--like", default="llama-3.1-8b", metavar="SHAPE", help=f"{', '.join(shapes.SHAPES)}, or a config.json"
    )
    parser.add_argument(
        "--out", type=arguments.folder, required=True, metavar="DIR", help="DIR/target and DIR/head are written"
    )
    parser.add_argument("--device", default="auto", metavar="D", help="where it is computed: auto, cpu, cuda, cuda:N")
    parser.add_argument("--dtype", choices=weights.PRECISIONS, default="bf16", help="of the files")
    return parser


def head_name(text: str) -> str:
    """The type of --draft."""
    if text in ("eagle", "none") or (text.startswith("eagle:") and text != "eagle:"):
        return text
    raise argparse.ArgumentTypeError(f"must be eagle, eagle:X or none, got {text!r}")


def main(argv: list[str] | None = None) -> int:
    """Write the folders; the exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    try:
        check_like(args.like)
        small = ns.load(args.model, device=args.device, dtype="fp32")
        draft = ns.load_draft(args.draft, small)
        planned = plan(small, args.like, draft, dtype=weights.PRECISIONS[args.dtype])
        start = time.perf_counter()
        folders = write(planned, args.out)
    except (ValueError, OSError) as error:
        parser.error(" ".join(str(error).split()))
    taken = time.perf_counter() - start
    print(f"{size(planned) / 2**30:.1f} GiB in {taken:.0f} s: {', '.join(map(str, folders))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

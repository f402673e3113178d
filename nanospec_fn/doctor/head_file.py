"""An EAGLE-3 head's files looked at without being believed: what they say, and how their vocabulary map can be read.

`weights.load_eagle` refuses a head whose map is not as it should be; here every reading of it that gives a map at all
is kept, for a measurement to choose from.

Shapes: V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanospec_fn import checkpoint, config, eagle, weights
from nanospec_fn.checkpoint import Stored
from nanospec_fn.doctor.examine import Subject
from nanospec_fn.doctor.verdict import Finding
from nanospec_fn.model import Model, Rope

READ = {  # the ways of `readings`, in words
    "offsets": "as offsets",
    "absolute": "as the ids themselves",
    "twice": "as offsets that were taken for ids and made offsets again",
    "t2d": "from the marks of t2d in order",
    "identity": "as no map at all",
}


@dataclass(frozen=True)
class HeadFile:
    """A head's config and tensors by the original form's names, none of them read."""

    path: Path
    raw: dict[str, Any]
    tensors: Mapping[str, Stored]
    cfg: eagle.HeadConfig

    @property
    def rows(self) -> bool:
        """Whether the output head is the target's rows of the map."""
        return bool(self.raw.get("lm_head") == weights.TARGET_ROWS)

    @property
    def full(self) -> bool:
        """Whether the draft vocabulary is the target's, so that no map is needed."""
        return self.cfg.draft_vocab_size == self.cfg.vocab_size


def open_head(path: str | Path, target: Model) -> HeadFile:
    """A head's headers, checked against the target.

    Errors: FileNotFoundError, and ValueError for a config that no head of this target can have.
    """
    source = checkpoint.open_checkpoint(weights.as_text(path))
    cfg = config.parse_head(source.config, target.cfg, source.path)
    tensors = {weights.canonical_head_name(key): stored for key, stored in source.tensors.items()}
    return HeadFile(source.path, source.config, tensors, cfg)


def load(file: HeadFile, target: Model, target_id: Tensor) -> Subject:
    """The head with `target_id` [Vd] as its map, whatever the file's map says.

    Errors: ValueError for a tensor that is missing, unknown, of another shape or not finite.
    """
    tensors = {key: stored for key, stored in file.tensors.items() if key not in ("d2t", "t2d")}
    if not file.full:
        offsets = target_id - torch.arange(len(target_id))
        tensors["d2t"] = Stored(tuple(offsets.shape), lambda: offsets)
    return Subject(file.cfg, weights.build_head(tensors, file.raw, file.cfg, target, file.path), rows=file.rows)


def readings(file: HeadFile) -> dict[str, Tensor]:
    """Every way to read the map that gives distinct ids of the target's vocabulary: name -> [Vd] int64.

    "offsets" is the right way; "t2d" takes the marked tokens in order; "identity" no map at all.
    """
    draft, vocab = file.cfg.draft_vocab_size, file.cfg.vocab_size
    index = torch.arange(draft)
    stored, marks = (file.tensors[key].read() if key in file.tensors else None for key in ("d2t", "t2d"))
    found = {"identity": index}
    if marks is not None and marks.shape == (vocab,) and int(marks.bool().sum()) == draft:
        found = {"t2d": marks.bool().nonzero()[:, 0], **found}
    if stored is not None and stored.shape == (draft,):
        offsets = stored.long()
        # The last: offsets that were taken for ids, and made offsets once more.
        found = {"offsets": index + offsets, "absolute": offsets, "twice": 2 * index + offsets, **found}
    return {name: ids for name, ids in found.items() if is_map(ids, vocab)}


def is_sound(file: HeadFile, ways: Mapping[str, Tensor]) -> bool:
    """Whether the loader takes the map as it is: offsets that t2d, if there is one, agrees with."""
    if file.full and "d2t" not in file.tensors:
        return "t2d" not in file.tensors or "t2d" in ways
    if "offsets" not in ways:
        return False
    return "t2d" not in file.tensors or ("t2d" in ways and torch.equal(ways["offsets"].sort().values, ways["t2d"]))


def zeros(file: HeadFile) -> list[str]:
    """The weights that are zero throughout, which training never leaves."""
    weighty = [key for key in file.tensors if key not in ("d2t", "t2d")]
    return [key for key in weighty if not file.tensors[key].read().any()]


def is_identity(target_id: Tensor) -> bool:
    """Whether a map changes nothing."""
    return torch.equal(target_id, torch.arange(len(target_id), device=target_id.device))


def is_map(target_id: Tensor, vocab: int) -> bool:
    """Whether ids are distinct and in the vocabulary."""
    inside = bool(((target_id >= 0) & (target_id < vocab)).all())
    return inside and len(target_id.unique()) == len(target_id)


def findings(file: HeadFile, target: Model) -> list[Finding]:
    """What the files alone tell."""
    cfg = file.cfg
    own = [key for key in ("embed_tokens.weight", "lm_head.weight") if key in file.tensors]
    head = "the target's rows of the map" if file.rows else "its own" if "lm_head.weight" in own else "the target's"
    stored = name_of(file.tensors["fc.weight"].read().dtype) if "fc.weight" in file.tensors else "nothing"
    running = name_of(target.params.embed.dtype)
    flags = [name for name in ("norm_before_residual", "norm_before_fc") if getattr(cfg, name)]
    given = "named in its config" if named_taps(file.raw) else "by default, its config names none"
    return [
        Finding("form", ", ".join((form(file.raw), *flags))),
        Finding("layers", f"inputs of target layers {cfg.taps} of {target.cfg.num_layers}, {given}"),
        Finding("embedding", "its own" if "embed_tokens.weight" in own else "the target's"),
        Finding("output head", f"{head}, {cfg.draft_vocab_size} of {cfg.vocab_size} tokens"),
        Finding("rope", describe_ropes(cfg.rope, target.cfg.rope)),
        Finding("context", describe_context(cfg.max_context, target.cfg.max_context)),
        Finding("dtype", f"stored as {stored}, run in {running}"),
    ]


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def form(raw: Mapping[str, Any]) -> str:
    """Which of the three public forms a head's config has."""
    if raw.get("transformer_layer_config"):
        return "speculators form"
    if "LlamaForCausalLMEagle3" in (raw.get("architectures") or []) or raw.get("eagle_config"):
        return "SGLang / SpecForge form"
    return "original form"


def named_taps(raw: Mapping[str, Any]) -> bool:
    """Whether a head's config names the target's layers."""
    key = "eagle_aux_hidden_state_layer_ids"
    return raw.get(key) is not None or (raw.get("eagle_config") or {}).get(key) is not None


def describe_ropes(mine: Rope, its: Rope) -> str:
    """The head's rotary embedding beside the target's; to differ is no fault in itself."""

    def name(rope: Rope) -> str:
        return f"theta {rope.theta:g}" + ("" if rope.kind == "default" else f" {rope.kind} factor {rope.factor:g}")

    return f"{name(mine)}, " + ("as the target" if mine == its else f"the target {name(its)}")


def describe_context(mine: int, its: int) -> str:
    if mine >= its:
        return f"{mine} positions, the target {its}"
    return f"{mine} positions, the target {its}: past {mine} nothing is known of this head"

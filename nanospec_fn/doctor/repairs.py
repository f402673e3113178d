"""What may be wrong with an EAGLE-3 head, each as the repair that undoes it: a pure function of the head.

A damage is not looked for, its repair is tried: a head that is accepted further when it is run in another way was meant
to be run in that way.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nanospec_fn import struct
from nanospec_fn.doctor import examine, head_file
from nanospec_fn.doctor.examine import Subject
from nanospec_fn.model import Model, Rope

THETAS = (10000.0, 100000.0, 500000.0, 1000000.0)  # of public heads and targets; 10000 is a config's silence


@dataclass(frozen=True, eq=False)
class Repair:
    """Another way to run a head."""

    damage: str  # the verdict if this way is better
    how: str  # what is done, as the subject of a sentence
    subject: Subject
    far: bool = False  # it shows best between positions that are far apart
    likely: bool = False  # the files speak for it: it gives the head what the target has


def every(subject: Subject, target: Model) -> list[Repair]:
    """All repairs that apply to a head."""
    return [*taps(subject, target), *ropes(subject, target), *layer(subject), *embedding(subject)]


def taps(subject: Subject, target: Model) -> Iterator[Repair]:
    """The same number of target layers, all one later or one earlier."""
    for damage, by in (("taps_early", 1), ("taps_late", -1)):
        moved = tuple(tap + by for tap in subject.cfg.taps)
        if moved[0] >= 0 and moved[-1] <= target.cfg.num_layers:
            where = "later" if by > 0 else "earlier"
            cfg = replace(subject.cfg, taps=moved)
            yield Repair(damage, f"features from one layer {where}, {moved}", replace(subject, cfg=cfg))


def ropes(subject: Subject, target: Model) -> Iterator[Repair]:
    """The target's rotary embedding, and plain ones of the thetas that are in use."""
    tried = {subject.cfg.rope}
    for rope in (target.cfg.rope, *(Rope(theta=theta) for theta in THETAS)):
        if rope not in tried:
            tried.add(rope)
            its = rope == target.cfg.rope
            whose = ", the target's" if its else ""
            scaled = "" if rope.kind == "default" else f" {rope.kind}"
            cfg = replace(subject.cfg, rope=rope)
            yield Repair(
                "rope_theta",
                f"rope theta {rope.theta:g}{scaled}{whose}",
                replace(subject, cfg=cfg),
                far=True,
                likely=its,
            )


def layer(subject: Subject) -> Iterator[Repair]:
    """The parts of the layer's input exchanged, and its norms put elsewhere."""
    params, e = subject.params, subject.cfg.hidden_size
    swapped = torch.cat((params.layer.qkv[:, e:], params.layer.qkv[:, :e]), dim=1)
    halves = struct.replace(params, layer=struct.replace(params.layer, qkv=swapped))
    yield Repair("halves_swapped", "q, k and v with their two input halves exchanged", replace(subject, params=halves))
    norms = struct.replace(
        params, feature_norm=params.layer.attn_norm, layer=struct.replace(params.layer, attn_norm=params.feature_norm)
    )
    yield Repair("norms_swapped", "input_layernorm and hidden_norm exchanged", replace(subject, params=norms))
    fed = "without" if subject.normed else "after"
    yield Repair(
        "post_norm_feature",
        f"feeding each output back {fed} the final norm",
        replace(subject, normed=not subject.normed),
    )
    normed = not subject.cfg.norm_before_residual
    cfg = replace(subject.cfg, norm_before_residual=normed)
    yield Repair("residual_norm", f"norm_before_residual {str(normed).lower()}", replace(subject, cfg=cfg))


def embedding(subject: Subject) -> Iterator[Repair]:
    """The target's embedding in place of the head's own."""
    if isinstance(subject.params.embed, Tensor) and subject.cfg.hidden_size == subject.cfg.target_hidden_size:
        params = struct.replace(subject.params, embed=())
        yield Repair("embedding", "the target's embedding", replace(subject, params=params), likely=True)


def maps(subject: Subject, target: Model, ways: Mapping[str, Tensor]) -> Iterator[Repair]:
    """Other readings of the vocabulary map: name -> [Vd], as `head_file.readings` has them."""
    for way, damage in (("absolute", "map_absolute"), ("twice", "map_absolute"), ("t2d", "map_wrong")):
        if way in ways and not torch.equal(ways[way].to(subject.params.target_id.device), subject.params.target_id):
            moved = examine.with_map(subject, target, ways[way].to(subject.params.target_id.device))
            yield Repair(damage, f"d2t read {head_file.READ[way]}", moved)

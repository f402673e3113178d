"""What the training of an EAGLE-3 head is made from."""

from dataclasses import dataclass
from pathlib import Path

import nanospec_fn as ns
from nanospec_fn import eagle, files, weights
from rl import eagle_loss, limits, rollouts

SHORT = 2  # draft steps of the first updates
LM_HEADS = ("own", "target-rows")
NAMES = {"lm_head": LM_HEADS, "head_dtype": tuple(weights.PRECISIONS)}
MOST_UNROLL, MOST_DRAFT_VOCAB = 32, 32000
# The least value of what is counted.
WHOLE = dict.fromkeys(("response_tokens", "max_len", "draft_vocab", "intermediate", "steps", "batch", "unroll"), 1)
WHOLE |= dict.fromkeys(("log_every", "eval_every", "save_every"), 1)
WHOLE |= dict.fromkeys(("seed", "held_out", "short_steps"), 0)
# Ends of the other numbers, and whether the lower one is a value too.
REAL = {
    "decay": (0, 1, False),
    "lr": (0, 1, False),
    "warmup": (0, 1, True),
    "weight_decay": (0, 1, True),
    "clip": (0, 1e9, False),
}
MOST_TEMPERATURE = 100
# Fields that may differ between a run and the one that resumes it.
FREE = ("out", "data", "prompts", "device", "log_every", "eval_every", "save_every", "quiet", "slots", "keep_features")


@dataclass(frozen=True)
class TrainConfig:
    """A run; every field is an option of `python -m rl.train_eagle`, whose --help says more of each.

    From Python: `train_eagle.run(TrainConfig(out=Path("head"), prompts=("self:100",)))`.
    """

    out: Path  # folder of the head, its data, log and training state
    model: str = "auto"
    device: str = "auto"
    dtype: str = "auto"  # of the target
    seed: int = 0
    quiet: bool = False

    data: Path | None = None  # rollouts; None: out/rollouts.npz
    prompts: tuple[str, ...] | None = (
        None  # what rollouts are made from where there are none, see `rollouts.parse_source`
    )
    temperatures: tuple[float, ...] = (0.0, 1.0)  # the prompts take turns
    response_tokens: int = 256
    slots: int = 256  # requests at once
    max_len: int = 512  # tokens of a sequence
    held_out: int = 64  # sequences, at most a tenth

    draft_vocab: int = 32000
    taps: tuple[int, ...] | None = None  # target layers whose inputs the head reads; None: `eagle.default_taps`
    intermediate: int | None = None  # MLP width; None: the target's
    lm_head: str = "own"  # or "target-rows"
    head_dtype: str = "fp16"  # of the head's file

    steps: int = 2000
    batch: int = 32  # sequences
    unroll: int = 5  # draft steps
    short_steps: int = 0  # first updates, which unroll SHORT steps
    decay: float = eagle_loss.DECAY  # weight of each unroll step over the one before
    lr: float = 1e-3  # the highest
    warmup: float = 0.05  # share of the steps
    weight_decay: float = 0.01
    clip: float = 1.0  # largest gradient norm
    keep_features: bool = False
    log_every: int = 20  # steps
    eval_every: int = 200  # steps
    save_every: int = 200  # steps

    @property
    def data_file(self) -> Path:
        """Where the rollouts are, or will be."""
        return self.data or self.out / "rollouts.npz"

    def validate(self) -> None:
        """Refuse what the fields alone show to be wrong. Errors: ValueError that begins with the field."""
        limits.check(self, NAMES, WHOLE, REAL)
        with limits.renamed({"max_slots": "slots"}):
            ns.EngineConfig(max_slots=self.slots).validate()
        if not self.temperatures or not all(0 <= t <= MOST_TEMPERATURE for t in self.temperatures):
            raise ValueError(f"temperatures must be numbers from 0 to {MOST_TEMPERATURE}, got {self.temperatures!r}")
        if self.draft_vocab > MOST_DRAFT_VOCAB:
            raise ValueError(f"draft_vocab: at most {MOST_DRAFT_VOCAB}, got {self.draft_vocab}")
        if self.unroll >= self.max_len - 2:
            raise ValueError(f"unroll: {self.unroll} steps need sequences of more than {self.max_len} tokens")
        if self.unroll > MOST_UNROLL:
            raise ValueError(f"unroll: at most {MOST_UNROLL}, got {self.unroll}")
        if self.taps and (sorted(set(self.taps)) != list(self.taps) or self.taps[0] < 1):
            raise ValueError(f"taps: must ascend from 1 or more, got {' '.join(map(str, self.taps))}")


def check_files(config: TrainConfig) -> None:
    """Refuse, before anything is loaded, what the files show to be wrong.

    Errors: ValueError that begins with the field.
    """
    if config.out.exists() and not config.out.is_dir():
        raise ValueError(f"out: {config.out} is a file")
    try:
        for source in config.prompts or ():
            rollouts.parse_source(source)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"prompts: {error}") from error
    if config.data is not None and config.prompts is None and not files.is_file(config.data):
        raise ValueError(f"data: {files.short(config.data)} does not exist, and without prompts it cannot be made")
    if files.is_folder(config.data_file):
        raise ValueError(f"data: {files.short(config.data_file)} is a folder")
    if not files.is_file(config.data_file) and not config.prompts:
        raise ValueError("prompts: required, as the data does not exist yet")


def check_target(config: TrainConfig, target: ns.Model) -> None:
    """Refuse what does not fit the target. Errors: ValueError that begins with the field."""
    layers = target.cfg.num_layers
    taps = config.taps or eagle.default_taps(layers)
    if len(set(taps)) != len(taps) or not 0 < min(taps) <= max(taps) <= layers:
        raise ValueError(f"taps: {list(taps)} are not distinct inputs 1..{layers} of the target's layers")
    if config.max_len > target.cfg.max_context:
        raise ValueError(f"max_len: {config.max_len} is over the target's context {target.cfg.max_context}")

"""What the training of an EAGLE-3 head is made from."""

from dataclasses import dataclass
from pathlib import Path

from rl import eagle_loss

SHORT = 2  # draft steps of the first updates
LM_HEADS = ("own", "target-rows")
DTYPES = ("fp32", "bf16", "fp16")
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
        """Refuse what nothing would refuse before hours of work. Errors: ValueError that begins with the field."""
        for name, known in {"lm_head": LM_HEADS, "head_dtype": DTYPES}.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("steps", "batch", "unroll", "log_every", "eval_every", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")

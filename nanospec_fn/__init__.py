"""A small inference engine for studying speculative decoding, as pure functions over immutable state.

>>> import nanospec_fn as ns
>>> model = ns.load("smollm2")  # doctest: +SKIP
>>> ns.generate(model, ["Hello"], draft=ns.load_draft("ngram", model))  # doctest: +SKIP
"""

from nanospec_fn.admission import Admission
from nanospec_fn.capture import capture
from nanospec_fn.draft import Draft, Speculation
from nanospec_fn.draft_model import load_draft
from nanospec_fn.engine import Engine, prepare
from nanospec_fn.generate import Chunk, Completion, generate, mean_accepted_len, score, stream
from nanospec_fn.model import Config, Model, forward
from nanospec_fn.program import EngineConfig, Program, build
from nanospec_fn.sampling import Sampling
from nanospec_fn.step import Info, Params, State
from nanospec_fn.struct import DonatedError
from nanospec_fn.weights import load

__all__ = [
    "Admission",
    "Chunk",
    "Completion",
    "Config",
    "DonatedError",
    "Draft",
    "Engine",
    "EngineConfig",
    "Info",
    "Model",
    "Params",
    "Program",
    "Sampling",
    "Speculation",
    "State",
    "build",
    "capture",
    "forward",
    "generate",
    "load",
    "load_draft",
    "mean_accepted_len",
    "prepare",
    "score",
    "stream",
]

"""A trace of rounds: what each verdict rested on and what was emitted, as strict JSON lines that can be replayed.

docs/trace-format.md describes the file. The first line is the `Header`, each later one a `Round` of one request.
Reading a float gives back the bits that were written; minus infinity, which only log-probs can be, is null.

Shapes: N drafted nodes, R = N + 1 rows (row 0 the root, row i + 1 node i). Log-probs are in nats, draws fp32.
"""

import hashlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nanospec_fn import files, jsonl, model
from nanospec_fn.acceptance import Evidence
from nanospec_fn.draft import Speculation
from nanospec_fn.sampling import Sampling
from nanospec_fn.trees import Tree

FORMAT, VERSION = "nanospec-trace", 1
FINISHED = ("stop", "length")
INT32 = 2**31
TOLERANCE = 1e-4  # by which sums of fp32 figures may miss what they add up to


@dataclass(frozen=True)
class File:
    """Where a trace goes, with the versions of the weights that it is to name."""

    path: str | os.PathLike[str]
    policy_version: int = 0
    draft_version: int = 0

    def validate(self) -> None:
        """Errors: ValueError or FileNotFoundError naming a version or path that cannot be written."""
        for name in ("policy_version", "draft_version"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
                raise ValueError(f"{name} must be an integer from 0 to 2^63 - 1, got {value!r}")
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise ValueError(f"trace must be a path or a trace.File, got {self.path!r}")
        try:
            path = Path(self.path)
            path.exists()
            os.access(path, os.W_OK)
        except (OSError, TypeError, ValueError) as error:  # a name that is too long, bytes, NUL
            raise ValueError(f"trace {files.short(repr(self.path))} cannot be a file: {files.short(error)}") from None
        if not path.parent.is_dir():
            raise FileNotFoundError(f"trace {path}: no such folder: {path.parent}")
        if path.is_dir():
            raise ValueError(f"trace {path} is a folder")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ValueError(f"trace {path} cannot be written")


@dataclass(frozen=True)
class Request:
    """One request of the traced call."""

    index: int  # of the prompt in its call
    prompt_tokens: int
    limit: int  # tokens, prompt included, at which it ends
    stop_ids: list[int]  # those in force, the model's among them
    sampling: Sampling


@dataclass(frozen=True)
class Header:
    """What all rounds of a file share."""

    format: str
    version: int
    model: str  # its name as it was loaded
    config: str  # `fingerprint` of its config
    draft: str | None  # the drafting method's `name`
    speculation: Speculation | None
    engine: dict[str, int | str]  # sizes, and the arithmetic the figures come from: attend, device, dtype, torch, cpu
    policy_version: int
    draft_version: int
    requests: list[Request]


@dataclass(frozen=True)
class Nodes:
    """The drafted tree and the target's view of each node, [N] each; an absent node has token -1 and depth 0."""

    token: list[int]
    parent: list[int]  # node, -1 the root
    depth: list[int]
    draft_logp: list[float]  # of the token given its path
    score: list[float]  # sum of draft_logp along the path
    target_logp: list[float]  # of the token at its parent's row
    rank: list[int]  # tokens that are more probable at that row, ties by id
    accept: list[float]  # uniform draw of the acceptance test


@dataclass(frozen=True)
class Rows:
    """What each of the target's rows draws, [R] each."""

    token: list[int]  # the coupled draw
    logp: list[float]  # of `token`
    rest: list[int]  # the draw outside the row's candidates
    rest_logp: list[float]  # of `rest` under the whole row
    rest_mass: list[float]  # log of the probability outside the candidates


@dataclass(frozen=True)
class Round:
    """One round of one request, or its prefill: no nodes, one row, one token. A line of the file."""

    step: int  # of the engine; the rounds of one step ran together
    request: int  # index into Header.requests
    prefill: bool
    seed: int  # the request's key
    position: int  # of the token that row 0 predicts
    nodes: Nodes
    rows: Rows
    path: list[int]  # accepted nodes whose tokens were emitted
    tokens: list[int]  # emitted, cut by a stop id or the limit
    target_logp: list[float]
    behaviour_logp: list[float]
    origin: list[int]  # 0: the row's own draw; d: the node at depth d of `path`
    finish_reason: str | None
    ms: dict[str, float]  # wall time by phase; "step" is the whole step's, shared by its rounds
    policy_version: int
    draft_version: int


@dataclass(frozen=True)
class Trace:
    """A file that was read."""

    header: Header
    rounds: list[Round]
    cut: bool  # the last line was not whole and is left out

    @property
    def unfinished(self) -> list[int]:
        """Requests whose end is not in the file: the run was stopped, or last lines are lost."""
        ended = {r.request for r in self.rounds if r.finish_reason}
        return [i for i in range(len(self.header.requests)) if i not in ended]


def fingerprint(cfg: model.Config) -> str:
    """16 hex digits that differ for models that differ, and not for machines, for which `load` picks gemm and bmm."""
    return hashlib.sha256(repr(replace(cfg, gemm="", bmm="")).encode()).hexdigest()[:16]


def arithmetic(device: torch.device) -> dict[str, int | str]:
    """What the bits of transcendental functions depend on."""
    cpu = torch.backends.cpu.get_cpu_capability()
    return {"device": device.type, "torch": torch.__version__, "cpu": cpu}


def to_host(tree: Tree, evidence: Evidence) -> list[tuple[Nodes, Rows]]:
    """A step's tree and evidence [b] as a record's parts, per row of the batch."""
    e, t = evidence, tree
    nodes = (t.token, t.parent, t.depth, t.logp, t.score, e.node_logp, e.node_rank, e.accept)
    rows = (e.target, e.target_logp, e.rest, e.rest_logp, e.rest_mass)
    per_node = zip(*(x.tolist() for x in nodes), strict=True)
    per_row = zip(*(x.tolist() for x in rows), strict=True)
    return [(Nodes(*n), Rows(*r)) for n, r in zip(per_node, per_row, strict=True)]


def to_evidence(rounds: Sequence[Round]) -> tuple[Evidence, Tree]:
    """Rounds with equally many nodes -> what `acceptance.decide` takes, [b, N] and [b, R], with the recorded bits."""

    def ints(values: list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32).view(len(rounds), -1)

    def reals(values: list[list[float]]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32).view(len(rounds), -1)

    nodes, rows = [r.nodes for r in rounds], [r.rows for r in rounds]
    tree = Tree(
        token=ints([n.token for n in nodes]),
        parent=ints([n.parent for n in nodes]),
        depth=ints([n.depth for n in nodes]),
        logp=reals([n.draft_logp for n in nodes]),
        score=reals([n.score for n in nodes]),
    )
    evidence = Evidence(
        node_logp=reals([n.target_logp for n in nodes]),
        node_rank=ints([n.rank for n in nodes]),
        accept=reals([n.accept for n in nodes]),
        target=ints([r.token for r in rows]),
        target_logp=reals([r.logp for r in rows]),
        rest=ints([r.rest for r in rows]),
        rest_logp=reals([r.rest_logp for r in rows]),
        rest_mass=reals([r.rest_mass for r in rows]),
    )
    return evidence, tree


class Writer:
    """Appends rounds to a file that `create` began, each line at once. A context manager."""

    def __init__(self, file: File):
        self.file = file
        self._out = open(file.path, "ab", buffering=0)  # noqa: SIM115

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, *_: object) -> None:
        self._out.close()

    def write(self, record: Round) -> None:
        """Errors: ValueError for a number that is not finite, OSError."""
        line = jsonl.dump(record).encode("ascii")
        while line:  # a disk that fills up takes a part
            line = line[self._out.write(line) :]


def create(file: File, header: Header) -> None:
    """Begin a trace, replacing what the file held. Errors: ValueError naming a file that cannot be written."""
    try:
        with open(file.path, "w", encoding="ascii") as out:
            out.write(jsonl.dump(header))
    except OSError as error:
        raise ValueError(f"trace {file.path} cannot be written: {error.strerror}") from None


def read(path: str | os.PathLike[str]) -> Trace:
    """A trace from its file; of one that was cut off, all whole rounds.

    Errors: FileNotFoundError; ValueError naming the file and the line that does not belong to a trace.
    """
    if not os.fspath(path):
        raise ValueError("the path of a trace is empty")
    try:
        *lines, rest = Path(path).read_bytes().split(b"\n")
    except FileNotFoundError:
        raise FileNotFoundError(f"{files.short(path)}: no such file") from None
    except OSError as error:
        raise ValueError(f"{files.short(path)}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the path
        raise ValueError(f"{os.fspath(path)!r}: {error}") from None
    if not lines:
        raise ValueError(f"{path}: line 1: the header is incomplete")
    raw = jsonl.load(lines[0], f"{path}: line 1")
    if not isinstance(raw, dict) or raw.get("format") != FORMAT:
        raise ValueError(f"{path}: line 1: not the header of a {FORMAT}")
    if raw.get("version") != VERSION or raw["version"] is True:
        raise ValueError(f"{path}: line 1: version {raw.get('version')!r} is not supported (version {VERSION} is)")
    header = jsonl.parse(Header, raw, f"{path}: line 1")
    try:
        for part in (header.speculation, *(r.sampling for r in header.requests)):
            if part is not None:
                part.validate()
    except ValueError as error:
        raise ValueError(f"{path}: line 1: {error}") from None
    for i, r in enumerate(header.requests):
        if not 1 <= r.prompt_tokens <= r.limit < INT32 or not all(0 <= x < INT32 for x in (r.index, *r.stop_ids)):
            raise ValueError(f"{path}: line 1: request {i} has an index, a length or a stop id that is out of range")
    rounds = []
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}: line {number}"
        record = jsonl.parse(Round, jsonl.load(line, where), where)
        if wrong := _inconsistent(record, header):
            raise ValueError(f"{where}: {wrong}")
        rounds.append(record)
    return Trace(header, rounds, cut=bool(rest))


def _inconsistent(r: Round, header: Header) -> str:
    """What in a round contradicts itself or the header, or ""."""
    nodes, rows, n = r.nodes, r.rows, len(r.nodes.token)
    if not 0 <= r.request < len(header.requests) or header.requests[r.request].sampling.seed != r.seed:
        return f"request {r.request} with seed {r.seed} is not in the header"
    if (r.policy_version, r.draft_version) != (header.policy_version, header.draft_version):
        return "policy_version or draft_version is not the header's"
    prompt = header.requests[r.request].prompt_tokens
    if r.position < prompt or r.prefill != (r.position == prompt):
        return f"prefill is {r.prefill} at position {r.position}, the prompt has {prompt} tokens"
    drafted = header.speculation.nodes if header.speculation and not r.prefill else 0
    if n != drafted:
        return f"it has {n} nodes where the header has {drafted}"
    for part, size in ((nodes, n), (rows, n + 1)):
        if any(len(column) != size for column in vars(part).values()):
            return f"{type(part).__name__.lower()} are not {size} everywhere"
    emitted = {len(r.tokens), len(r.target_logp), len(r.behaviour_logp), len(r.origin)}
    if len(emitted) > 1 or not r.tokens or len(r.path) > len(r.tokens):
        return "tokens, their log-probs and path differ in length"
    ints = [r.position, *nodes.token, *nodes.rank, *rows.token, *rows.rest]
    if not all(-1 <= x < INT32 for x in ints) or not all(0 <= x < INT32 for x in r.tokens):
        return "a token, rank or position is out of range"
    if not all(0 < u < 1 for u in nodes.accept):
        return "an accept draw is not between 0 and 1"
    if r.step < 0 or "step" not in r.ms or min(r.ms.values()) < 0 or r.finish_reason not in (None, *FINISHED):
        return "step, ms or finish_reason is not what a round can have"
    return _wrong_tree(nodes, r.path) or _wrong_mass(r)


def _wrong_tree(nodes: Nodes, path: Sequence[int]) -> str:
    """What makes nodes no tree of distinct siblings with falling scores, or `path` no path in it, or ""."""
    seen = set()
    for i, (token, parent, depth) in enumerate(zip(nodes.token, nodes.parent, nodes.depth, strict=True)):
        if (token, parent, depth) == (Tree.NONE, Tree.ROOT, 0):
            continue
        hangs = parent == Tree.ROOT or (0 <= parent < i and nodes.depth[parent] > 0)
        level, above = (nodes.depth[parent], nodes.score[parent]) if hangs and parent != Tree.ROOT else (0, 0.0)
        if not hangs or depth != level + 1:
            return f"node {i} does not hang below its parent"
        if token < 0 or (parent, token) in seen:
            return f"node {i} has a sibling's token, or none"
        seen.add((parent, token))
        logp, score = nodes.draft_logp[i], above + nodes.draft_logp[i]
        if not -math.inf < logp <= TOLERANCE or not abs(nodes.score[i] - score) <= TOLERANCE * max(1, abs(score)):
            return f"node {i} has draft_logp {logp!r} and score {nodes.score[i]!r}, its parent {above!r}"
    steps = zip((Tree.ROOT, *path), path, strict=False)
    if all(0 <= i < len(nodes.token) and nodes.depth[i] > 0 and nodes.parent[i] == above for above, i in steps):
        return ""
    return f"path {[*path]} does not run through the tree"


def _wrong_mass(r: Round) -> str:
    """Which log-probs no distribution has, or ""."""
    nodes, rows = r.nodes, r.rows
    emitted = (*r.target_logp, *r.behaviour_logp)
    if not all(x <= TOLERANCE for x in (*emitted, *nodes.target_logp, *rows.logp, *rows.rest_logp, *rows.rest_mass)):
        return "a log-prob is above 0"
    if -math.inf in emitted:
        return "an emitted token has probability 0"
    masses = [[mass] for mass in rows.rest_mass]
    for parent, depth, logp in zip(nodes.parent, nodes.depth, nodes.target_logp, strict=True):
        if depth > 0:
            masses[parent + 1].append(logp)
    for row, mass in enumerate(masses):
        if row and nodes.depth[row - 1] == 0:
            continue  # of an absent node: nothing rests on it
        if rows.logp[row] == -math.inf or (rows.rest_mass[row] > -math.inf and rows.rest_logp[row] == -math.inf):
            return f"row {row} drew a token of probability 0"
        if not abs(math.fsum(math.exp(x) for x in mass) - 1) <= TOLERANCE:
            return f"row {row}'s candidates and rest_mass do not add up to 1"
    return ""

"""From a target and a draft to one verdict: each check adds what it found, the first damage is the verdict.

Files come first, then the chat template, then the target's greedy completions are drafted along in every way that a
known damage would have needed; a way that is accepted further than the draft as given names the damage. A draft that
no way makes better is run on inputs that are not its own: one that does as well with them is broken all the same.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

import nanospec_fn as ns
from nanospec_fn import chat, checkpoint, draft_model
from nanospec_fn.doctor import examine, head_file, repairs, rounds, templates
from nanospec_fn.doctor.examine import Comparison, Marks, Subject, View
from nanospec_fn.doctor.head_file import HeadFile
from nanospec_fn.doctor.repairs import Repair
from nanospec_fn.doctor.templates import Preference
from nanospec_fn.doctor.verdict import CHANCE, LIFT, LUCK, MAP_LIFT, Report, Trial, evidence, helps
from nanospec_fn.draft_model import DraftName
from nanospec_fn.prompts import Prompt

TOGETHER = 3  # damages of one head that are told apart
SAMPLE = 8  # prompts that templates are judged on


@dataclass(frozen=True)
class Case:
    """A target and what it is asked: texts or token ids."""

    target: ns.Model
    prompts: Sequence[Prompt]
    backend: str = "auto"
    max_tokens: int = 64
    progress: bool = False

    def encoded(self) -> list[list[int]]:
        return [chat.encode(self.target.tokenizer, prompt) for prompt in self.prompts]

    def complete(self, draft: ns.Draft | None) -> list[ns.Completion]:
        """Greedy completions; the draft changes their rounds, never their tokens."""
        prompts = self.encoded()
        longest = max(map(len, prompts)) + self.max_tokens
        return ns.generate(
            replace(self.target, tokenizer=None),
            prompts,
            ns.Sampling(max_tokens=self.max_tokens),
            draft=draft,
            speculation=ns.Speculation(depth=examine.DEPTH) if draft else None,
            engine=ns.EngineConfig(attend=self.backend, max_context=min(longest, self.target.cfg.max_context)),
            progress=self.progress,
        )


def diagnose(case: Case, name: str) -> Report:
    """Examine the draft `name` ("eagle", "eagle:X", "model:X", "frozen" or "ngram") of a target.

    Errors: FileNotFoundError for a draft that is not there; ValueError for no name of a draft, or a prompt that can
      never fit.
    """
    named = DraftName.parse(name)
    report = Report(case.target.name, name)
    if named.kind == "eagle":
        path = named.source or draft_model.bundled_head(case.target.name)
        if path is None:
            raise ValueError(f"draft 'eagle': no head comes with model {case.target.name!r}; pass eagle:X")
        report, asked = judge_template(report, case, templates.beside(checkpoint.find(str(path))))
        return judge_head(report, case, asked, str(path))
    report, asked = judge_template(report, case, None)
    try:
        report = judge_vocabulary(report, case.target, named.source) if named.kind == "model" else report
        draft = ns.load_draft(name, case.target)
    except ValueError as error:
        return report.blames("refused", " ".join(str(error).split()))
    report, out = measure(report, case, asked, draft)
    return report if report.accepted_length is None else control(report, asked, draft, out)


def judge_template(report: Report, case: Case, beside: templates.Template | None) -> tuple[Report, Case]:
    """Ask the target which chat template it knows; the case as it should be asked."""
    tokenizer: Any = case.target.tokenizer
    texts = [prompt for prompt in case.prompts if isinstance(prompt, str)][:SAMPLE]
    if tokenizer is None or not texts:
        return report.saw("template", "not judged: the prompts are token ids"), case
    given = templates.of(tokenizer)
    mine = templates.prefer(case.target, given, texts) if given else None
    others = [*templates.known(tokenizer), *([beside] if beside else [])]
    others = [t for t in others if given is None or not templates.same(tokenizer, t, given, texts)]
    asked = [p for t in others if (p := templates.prefer(case.target, t, texts))]
    seen = (
        f"the target predicts its own marks at {mine.mean:.2f} nats a token" if mine else "none, or one without marks"
    )
    report = report.saw("template", "; ".join([seen, *(f"those of {p.template.name} at {p.mean:.2f}" for p in asked)]))
    better = [p for p in asked if (p.beats(mine) if mine else p.mean > -templates.SURE)]
    if better:
        best = max(better, key=lambda p: p.mean)
        told = f"{best.mean:.2f} nats a token against {mine.mean:.2f}" if mine else f"{best.mean:.2f} nats a token"
        reason = (
            f"the target knows the template of {best.template.name} better than the one it is prompted with: {told}"
        )
        report = blame_template(report, reason, len(texts))
        return report, replace(case, target=retold(case.target, best)) if report.damages else case
    for p in asked:
        if p.template is beside and mine and mine.beats(p):
            told = f"the target predicts its marks at {p.mean:.2f} nats a token, its own at {mine.mean:.2f}"
            reason = f"the template in the head's folder is not the target's: {told}"
            report = blame_template(report, reason, len(texts))
    return report, case


def blame_template(report: Report, reason: str, prompts: int) -> Report:
    """A template preferred for so many prompts and against none: a damage where that is no luck, else a doubt."""
    if examine.sign_test(prompts, 0) < LUCK:
        return report.blames("wrong_template", reason)
    return report.doubt(f"it may be that {reason}, on {prompts} prompts only")


def retold(target: ns.Model, preference: Preference) -> ns.Model:
    """The target prompted with another template."""
    tokenizer: Any = copy.copy(target.tokenizer)
    tokenizer.chat_template = preference.template.text
    return replace(target, tokenizer=tokenizer)


def judge_vocabulary(report: Report, target: ns.Model, source: str) -> Report:
    """Whether a draft model's tokens mean what the target's do, from its files alone."""
    opened = checkpoint.open_checkpoint(source)
    size = opened.tensors["model.embed_tokens.weight"].shape[0] if "model.embed_tokens.weight" in opened.tensors else 0
    if size != target.cfg.vocab_size:
        return report.blames("other_vocabulary", f"the draft has {size} tokens, the target {target.cfg.vocab_size}")
    tokenizer = chat.from_gguf(opened.metadata) if opened.metadata else chat.from_folder(opened.path)
    mine: Any = target.tokenizer
    if tokenizer is None or mine is None:
        return report.saw("vocabulary", f"{size} tokens as the target; one of them has no tokenizer to compare")
    theirs = tokenizer.get_vocab()
    differ = [token for token, i in mine.get_vocab().items() if theirs.get(token) != i]
    if differ:
        told = (
            f"{len(differ)} of the target's {len(mine.get_vocab())} tokens have another id or none, {differ[0]!r} one"
        )
        return report.blames("other_tokenizer", f"the vocabularies are of one size, but {told}")
    return report.saw("vocabulary", f"{size} tokens, each with the target's id")


def judge_head(report: Report, given: Case, case: Case, path: str) -> Report:
    """Everything about an EAGLE-3 head. `given`: as the target is prompted; `case`: as it should be."""
    target = case.target
    try:
        file = head_file.open_head(path, target)
        report = replace(report, findings=(*report.findings, *head_file.findings(file, target)))
        ways = head_file.readings(file)
        subject = head_file.load(file, target, next(iter(ways.values())))
    except ValueError as error:
        return report.blames("refused", " ".join(str(error).split()))
    sound = head_file.is_sound(file, ways)
    if sound:
        report, out = measure(report, given, case, as_draft(subject))
    else:
        out = case.complete(None)
    if max(len(one.tokens) for one in out) < 2:
        return report
    if zeros := head_file.zeros(file):
        # Another way to run it would only be better for missing what is lost.
        lost = ", ".join(zeros)
        return report.blames("zero_weights", f"nothing but zeros in {lost}: what should pass there is lost")
    layers = {tap + by for tap in subject.cfg.taps for by in (-1, 0, 1)} & set(range(target.cfg.num_layers + 1))
    longest = min(examine.LONG, target.cfg.max_context, subject.cfg.max_context)
    view, far = views(case, out, sorted(layers), longest)
    if not sound:
        report, subject = choose_map(report, file, ways, subject, case, view)
        report, _ = measure(report, given, case, as_draft(subject))
    marks = examine.rehearse(subject, target, view)
    if report.accepted_length is not None:
        rehearsed = examine.accepted_length(marks, view)
        told = (
            f"{rehearsed:.2f} tokens a round along the completions, {report.accepted_length:.2f} in the engine's rounds"
        )
        report = report.saw("rehearsal", told)
    report = report.saw("coverage", f"{examine.coverage(marks):.1%} of the target's tokens are in the map")
    if head_file.is_identity(subject.params.target_id) and not file.full:
        report, subject = judge_identity(report, subject, target, view, marks, sound)
    report = search(report, subject, case, view, far, ways if sound else {})
    if report.damages:
        return report
    return heard(report, examine.listening(subject, target, view, case.progress))


def views(case: Case, out: list[ns.Completion], layers: list[int], longest: int) -> tuple[View, View | None]:
    """What the target makes of its completions, each by itself, and one after another in at most `longest` tokens."""
    said = (case.encoded(), [one.tokens for one in out])
    with tqdm(total=2, desc="target", unit="run", disable=not case.progress) as bar:
        view = examine.observe(case.target, layers, *said)
        bar.update()
        far = examine.pack(case.target, layers, *said, longest)
        bar.update()
    return view, far


def as_draft(subject: Subject) -> ns.Draft:
    """The head as the engine runs it."""
    return ns.Draft(draft_model.Eagle3(subject.cfg), subject.params)


def measure(report: Report, given: Case, case: Case, draft: ns.Draft | None) -> tuple[Report, list[ns.Completion]]:
    """The engine's own rounds with a draft: their mean length, by draft position and by sequence position."""
    out = case.complete(draft)
    seen = rounds_of(case, out)
    report = replace(report, positions=sum(max(0, len(one.tokens) - 1) for one in out))
    if not seen:
        return report, out
    if case is not given:
        before = rounds_of(given, given.complete(draft))
        told = f"{rounds.mean_length(before, examine.DEPTH):.2f} tokens a round" if before else "no round"
        report = report.saw("asked", f"below with the better template; as prompted before: {told}")
    report = replace(
        report,
        rounds=sum(not r.cut for r in seen),
        accepted_length=rounds.mean_length(seen, examine.DEPTH),
        by_depth=rounds.reach(seen, examine.DEPTH),
        by_position=rounds.by_position(seen, examine.DEPTH),
    )
    return report, out


def rounds_of(case: Case, out: list[ns.Completion]) -> list[rounds.Round]:
    """The rounds of all completions."""
    return [r for prompt, one in zip(case.encoded(), out, strict=True) for r in rounds.of(len(prompt), one)]


def control(report: Report, case: Case, draft: ns.Draft | None, out: list[ns.Completion]) -> Report:
    """Whether a draft model is better for its tokens; a draft without a model has no input to lose."""
    if draft is None or not isinstance(draft.method, draft_model.LlamaDraft):
        return report
    cfg = draft.method.cfg
    view = examine.observe(case.target, [], case.encoded(), [one.tokens for one in out])
    if view.tokens.shape[1] > cfg.max_context:
        return report.saw("control", f"not run: the draft's context of {cfg.max_context} is too short for it")
    return heard(report, {"tokens": examine.attending(draft.params, cfg, view)})


def heard(report: Report, inputs: Mapping[str, Comparison]) -> Report:
    """What became of a draft's inputs taken from elsewhere."""
    controls = tuple(Trial("broken", f"its {name}, not those of elsewhere", found) for name, found in inputs.items())
    return replace(report, controls=controls)


def choose_map(
    report: Report, file: HeadFile, ways: dict[str, torch.Tensor], subject: Subject, case: Case, view: View
) -> tuple[Report, Subject]:
    """Which reading of a map that the loader refuses is accepted furthest."""
    subjects = {way: examine.with_map(subject, case.target, ids.to(view.tokens.device)) for way, ids in ways.items()}
    runs = examine.watched(list(subjects.items()), "maps", case.progress)
    marks = {way: examine.rehearse(s, case.target, view) for way, s in runs}
    lengths = {way: examine.accepted_length(m, view) for way, m in marks.items()}
    best = max(lengths, key=lambda way: lengths[way])
    drafted = {way: examine.certain(m, m.hit) for way, m in marks.items()}
    others = [way for way in ways if not torch.equal(ways[way], ways[best])]
    clear = all(examine.compare(drafted[way], drafted[best], view).chance < CHANCE for way in others)
    told = ", ".join(f"{head_file.READ[way]} {length:.2f}" for way, length in lengths.items())
    if "d2t" not in file.tensors:
        damage, reason = "map_dropped", "the file has no d2t"
    elif not clear:
        damage, reason = "map_wrong", "d2t and t2d do not give one map, and no reading of them is clearly the better"
    elif best in ("absolute", "twice"):
        damage, reason = "map_absolute", f"d2t is right when it is read {head_file.READ[best]}"
    elif best == "t2d" and not file.tensors["d2t"].read().any():
        damage, reason = "map_dropped", "d2t is all zeros, and t2d marks other tokens"
    elif best == "offsets":
        damage, reason = "map_inconsistent", "t2d marks other tokens than d2t gives, which is the better of the two"
    else:
        damage, reason = "map_wrong", f"d2t gives no distinct ids that t2d marks; best is it {head_file.READ[best]}"
    return report.blames(damage, f"{reason}; mean accepted length read {told}"), subjects[best]


def judge_identity(
    report: Report, subject: Subject, target: ns.Model, view: View, marks: Marks, sound: bool
) -> tuple[Report, Subject]:
    """Whether a map that changes nothing has lost what it should be: draft ids that stand for other tokens."""
    if subject.rows:
        whole = examine.with_map(subject, target, torch.arange(target.cfg.vocab_size, device=view.tokens.device))
        drafted = examine.rehearse(whole, target, view)
        # By best tokens: the probabilities of a part of the vocabulary are larger by themselves.
        found = examine.compare(examine.certain(marks, marks.hit), examine.certain(drafted, drafted.hit), view)
        how, repaired = "drafting over the whole vocabulary", whole
    else:
        found = examine.compare(*examine.relabelled(marks, subject.params.target_id, view), view)
        how, repaired = "draft ids taken for the tokens they fell on in other completions", subject
    report = replace(report, trials=(*report.trials, Trial("map_dropped", how, found)))
    if not helps(found, MAP_LIFT):
        return report, subject
    if sound:
        report = report.blames("map_dropped", f"d2t is all zeros, and {evidence(how, found)}")
    return report, repaired


def search(
    report: Report, subject: Subject, case: Case, view: View, far: View | None, ways: dict[str, torch.Tensor]
) -> Report:
    """Try every repair, apply the best that helps, and look again. `far`: the completions one after another."""
    for turn in range(TOGETHER):
        every = [*repairs.every(subject, case.target), *repairs.maps(subject, case.target, ways)]
        tried = trials(every, subject, case, view, "ways")
        if far:  # what is worse nearby is not tried there
            again = [r for r, found in tried if r.far and found.other >= found.given * (1 - LIFT)]
            tried += [
                (replace(r, how=f"{r.how}, far apart"), c) for r, c in trials(again, subject, case, far, "far apart")
            ]
        if turn == 0:
            report = replace(report, trials=(*report.trials, *(Trial(r.damage, r.how, c) for r, c in tried)))
        better = [(repair, found) for repair, found in tried if helps(found, 0.0 if repair.likely else LIFT)]
        known = {damage.name for damage in report.damages}
        better = [(repair, found) for repair, found in better if repair.damage not in known]
        if not better:
            break
        damage = max(better, key=lambda pair: pair[1].gain)[0].damage
        # Of several ways to undo one damage, what the files speak for.
        alike = [(repair, found) for repair, found in better if repair.damage == damage]
        best, found = max(alike, key=lambda pair: (pair[0].likely, pair[1].gain))
        report, subject = report.blames(best.damage, evidence(best.how, found)), best.subject
    return report


def trials(
    ways: Sequence[Repair], subject: Subject, case: Case, view: View, what: str
) -> list[tuple[Repair, Comparison]]:
    """Each way beside the head as it is; ways that need layers which were not kept are left out.

    Args: what: the name of the bar on stderr.
    """
    ways = [way for way in ways if set(way.subject.cfg.taps) <= set(view.streams)]
    if not ways:
        return []
    subjects = examine.watched([subject, *(way.subject for way in ways)], what, case.progress)
    runs = (examine.rehearse(s, case.target, view) for s in subjects)
    given = next(runs)
    return [(way, examine.compare(given, marks, view)) for way, marks in zip(ways, runs, strict=True)]

"""Why there was, or was not, a save at a step: read from a Run's events. Pure: no file, no clock; never raises.

Every Attempt that made or was to make the step is told of. What the events do not say stays unknown (None) and is not
guessed. Sentences are made in explain_text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from orchestrator.event_fields import Event, float_of, int_of, number_of, text_of
from orchestrator.run_lives import Life, Track, track_lives
from orchestrator.save_summary import policy_of, stored_bytes_of

__all__ = ["Answer", "AtRisk", "Cover", "Explanation", "NextAsker", "SaveStory", "Thought", "Weighing", "explain"]

_PARTS = ("stall_s", "encode_s", "upload_s", "commit_s", "write_s")
_DURABLE = frozenset({"object-storage", "none"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Thought:
    """What one policy said. ``due_in_s`` None: it did not ask; not above 0: it asked for a save at once."""

    policy: str
    due_in_s: float | None
    why: str
    is_pressing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """``landed_step``: of the save that followed from it, None where none was ordered or bound."""

    step: int
    thoughts: tuple[Thought, ...]
    wish_policy: str | None
    wish_reason: str | None
    held_back: str | None
    landed_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NextAsker:
    """Whose save was due first as of a weighing; ``at_step``: the step that was finished when it came due."""

    policy: str
    due_in_s: float
    at_step: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveStory:
    """The Order that bound a save and what came of it. ``reason`` None: no Order is on record.

    ``outcome``: committed, skipped, failed, in-memory (kind part: no Commit follows), never-taken, cut-off (the Attempt
    ended first) or under-way. ``detail``: why, where that is known. ``notes``: slow, delayed, taken out of use.
    """

    kind: str
    policy: str | None
    reason: str | None
    outcome: str
    detail: str
    stored_bytes: int | None
    took: dict[str, float]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cover:
    """The first Commit at or after the step with its work, or the Attempt that went on from before it, or neither.
    A Commit that was taken out of use later is none. ``is_open``: a Commit may still come."""

    is_open: bool
    commit_step: int | None
    commit_attempt: int | None
    rerun_attempt: int | None
    rerun_from: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AtRisk:
    """A fault when the step was finished: the newest steps that were safe then, and what each fault would have cost.

    ``memory_step`` None: memory held nothing. ``durable_step`` None: nothing was committed.
    """

    memory_step: int | None
    durable_step: int | None
    steps_if_one_is_lost: int
    s_if_one_is_lost: float
    steps_if_all_is_lost: int
    s_if_all_is_lost: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Of one Attempt. ``is_finished``: whether it finished the step. ``at_risk`` None: it did not. ``first_weighed``:
    the step of the Attempt's first weighing on record; None: there is none."""

    attempt: int
    cause: str
    first_step: int
    last_step: int
    is_over: bool
    is_finished: bool
    save: SaveStory | None
    weighing: Weighing | None
    first_weighed: int | None
    next_asker: NextAsker | None
    save_before: int | None
    save_after: int | None
    cover: Cover
    at_risk: AtRisk | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """``answers`` in the order of the Attempts; where it is empty, ``why_nothing`` says why."""

    run_id: str
    step: int
    total_steps: int
    newest_step: int
    answers: tuple[Answer, ...]
    why_nothing: str | None


def explain(events: Iterable[Event], step: int) -> Explanation:
    """What ``events`` say of ``step``."""
    track = track_lives(events)
    answers = tuple(
        _answer(track.lives, index, step) for index, life in enumerate(track.lives) if life.is_concerned(step)
    )
    return Explanation(
        run_id=track.run_id,
        step=step,
        total_steps=track.total_steps,
        newest_step=track.newest_step,
        answers=answers,
        why_nothing=None if answers else _why_nothing(track, step),
    )


def _why_nothing(track: Track, step: int) -> str:
    if not track.lives:
        return "no attempt of it has begun" if track.run_id else "there are no events of a run"
    if step <= 0:
        return "steps are counted from 1; what a run begins with is not saved"
    if 0 < track.total_steps < step:
        return f"the run has {track.total_steps} steps"
    first = track.lives[0]
    if step <= first.restored_step:
        return f"its events begin after step {first.restored_step}, from which it went on ({first.restored_from})"
    planned = f" of {track.total_steps}" if track.total_steps else ""
    return f"the newest step that was made is {track.newest_step}{planned}"


def _answer(lives: Sequence[Life], index: int, step: int) -> Answer:
    life = lives[index]
    is_over = life.is_over or index + 1 < len(lives)
    save = _story(life, step, is_over)
    weighing = _weighing(life, step, None if save is None else save.reason)
    is_finished = life.restored_step < step <= life.last_step
    saves = sorted(set(life.bound) - set(life.skipped))
    return Answer(
        attempt=life.number,
        cause=life.cause,
        first_step=life.restored_step + 1,
        last_step=life.last_step,
        is_over=is_over,
        is_finished=is_finished,
        save=save,
        weighing=weighing,
        first_weighed=min((int_of(event, "step") for event in life.weighings), default=None),
        next_asker=None if weighing is None else _next_asker(life, weighing),
        save_before=max((bound for bound in saves if bound < step), default=None),
        save_after=min((bound for bound in saves if bound > step), default=None),
        cover=_cover(lives, index, step),
        at_risk=_at_risk(lives, index, step) if is_finished else None,
    )


def _story(life: Life, step: int, is_over: bool) -> SaveStory | None:
    tables = (life.bound, life.committed, life.skipped, life.failed)
    if not any(step in table for table in tables):
        return None
    bound, committed = life.bound.get(step), life.committed.get(step)
    kind = text_of(bound, "kind") if bound is not None else ""
    reason = text_of(bound, "reason") if bound is not None else None
    outcome, detail = _outcome(life, step, kind, is_over)
    return SaveStory(
        kind=kind or "snapshot",
        policy=None if reason is None else policy_of(reason, kind),
        reason=reason,
        outcome=outcome,
        detail=detail,
        stored_bytes=None if committed is None else stored_bytes_of(committed),
        took={} if committed is None else _took(committed),
        notes=tuple(life.notes.get(step, ())),
    )


def _outcome(life: Life, step: int, kind: str, is_over: bool) -> tuple[str, str]:
    if step in life.committed:
        return "committed", ""
    for name, table in (("skipped", life.skipped), ("failed", life.failed)):
        if step in table:
            return name, text_of(table[step], "reason")
    is_taken = step <= life.last_step
    if is_taken and kind == "part":
        return "in-memory", ""
    if not is_over:
        return "under-way", ""
    how = f"the attempt ended: {life.end}" if life.end else "its driver vanished"
    return "cut-off" if is_taken else "never-taken", how


def _took(committed: Event) -> dict[str, float]:
    parts = {name: number_of(committed, name) for name in _PARTS}
    return {name: seconds for name, seconds in parts.items() if seconds is not None}


def _weighing(life: Life, step: int, reason: str | None) -> Weighing | None:
    """The weighing that ordered the save of ``step``, else the newest one until ``step``."""
    earlier = [event for event in life.weighings if int_of(event, "step") <= step]
    if not earlier:
        return None
    ordered = [event for event in earlier if reason and _wish(event)[1] == reason]
    chosen = (ordered or earlier)[-1]
    policy, wished = _wish(chosen)
    landed = [
        bound
        for bound, event in life.bound.items()
        if wished is not None and text_of(event, "reason") == wished and bound > int_of(chosen, "step")
    ]
    return Weighing(
        step=int_of(chosen, "step"),
        thoughts=_thoughts(chosen),
        wish_policy=policy,
        wish_reason=wished,
        held_back=text_of(chosen, "held_back") or None,
        landed_step=min(landed, default=None),
    )


def _wish(event: Event) -> tuple[str | None, str | None]:
    wish = event.get("wish")
    if not isinstance(wish, dict):
        return None, None
    return text_of(wish, "policy") or None, text_of(wish, "reason") or None


def _thoughts(event: Event) -> tuple[Thought, ...]:
    opinions = event.get("opinions")
    return tuple(
        Thought(
            policy=text_of(opinion, "policy"),
            due_in_s=number_of(opinion, "due_in_s"),
            why=text_of(opinion, "why"),
            is_pressing=opinion.get("is_pressing") is True,
        )
        for opinion in (opinions if isinstance(opinions, list) else ())
        if isinstance(opinion, dict)
    )


def _next_asker(life: Life, weighing: Weighing) -> NextAsker | None:
    """By the rule of orchestrator.weighing: who asks already, pressing ones first; else who is due first."""
    due = [
        (thought.due_in_s > 0, thought.due_in_s <= 0 and not thought.is_pressing, thought.due_in_s, thought.policy)
        for thought in weighing.thoughts
        if thought.due_in_s is not None
    ]
    if not due:
        return None
    _, _, due_in_s, policy = min(due)
    weighed = next(event for event in reversed(life.weighings) if int_of(event, "step") == weighing.step)
    due_at_s = float_of(weighed, "t_s") + due_in_s
    steps = [number for number, made in life.steps.items() if made.finished_s >= due_at_s and number > weighing.step]
    return NextAsker(policy=policy, due_in_s=due_in_s, at_step=min(steps, default=None) if due_in_s > 0 else None)


def _cover(lives: Sequence[Life], index: int, step: int) -> Cover:
    found = Cover(
        is_open=not lives[-1].is_over, commit_step=None, commit_attempt=None, rerun_attempt=None, rerun_from=None
    )
    for life in lives[index:]:
        if life is not lives[index] and life.restored_step < step:
            return replace(found, is_open=False, rerun_attempt=life.number, rerun_from=life.restored_step)
        commits = [
            commit
            for commit, event in life.committed.items()
            if commit >= step and not _is_out_of_use(lives, commit, float_of(event, "t_s"), math.inf)
        ]
        if commits:
            return replace(found, is_open=False, commit_step=min(commits), commit_attempt=life.number)
    return found


def _at_risk(lives: Sequence[Life], index: int, step: int) -> AtRisk:
    life = lives[index]
    known = [number for number in life.steps if number <= step]
    at_s = life.steps[max(known)].finished_s if known else life.began_s
    durable = _durable_step(lives[: index + 1], step, at_s)
    held = [life.steps[number].safe_step for number in known]
    memory = max((safe for safe in held if 0 <= safe <= step), default=None)
    nearest = max(durable or 0, memory or 0)
    return AtRisk(
        memory_step=memory,
        durable_step=durable,
        steps_if_one_is_lost=step - nearest,
        s_if_one_is_lost=_trained_s(lives[: index + 1], nearest, step),
        steps_if_all_is_lost=step - (durable or 0),
        s_if_all_is_lost=_trained_s(lives[: index + 1], durable or 0, step),
    )


def _durable_step(lives: Sequence[Life], step: int, at_s: float) -> int | None:
    """The newest Commit at ``at_s`` that belongs to the history of the last of ``lives`` and was not out of use."""
    ceiling, found = step, []
    for life in reversed(lives):
        commits = {commit: float_of(event, "t_s") for commit, event in life.committed.items() if commit <= ceiling}
        bases = {commit: since_s for commit, since_s in commits.items() if since_s <= at_s}
        if life.restored_from in _DURABLE and 0 < life.restored_step <= ceiling:
            bases[life.restored_step] = life.began_s
        found += [base for base, since_s in bases.items() if not _is_out_of_use(lives, base, since_s, at_s)]
        ceiling = min(ceiling, life.restored_step)
    return max(found, default=None)


def _is_out_of_use(lives: Sequence[Life], step: int, since_s: float, until_s: float) -> bool:
    """Whether the Checkpoint of ``step`` that was there at ``since_s`` was quarantined until ``until_s``."""
    return any(since_s <= life.quarantined.get(step, -math.inf) <= until_s for life in lives)


def _trained_s(lives: Sequence[Life], after: int, until: int) -> float:
    """Time of the steps after ``after`` in the history of the last of ``lives``, as far as it is on record."""
    ceiling, parts = until, []
    for life in reversed(lives):
        parts += [
            made.step_s for number, made in life.steps.items() if max(after, life.restored_step) < number <= ceiling
        ]
        ceiling = min(ceiling, life.restored_step)
    return math.fsum(parts)

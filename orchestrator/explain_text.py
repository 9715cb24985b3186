"""An explanation of one step in sentences, for the terminal. Pure."""

from __future__ import annotations

from orchestrator.explain import Answer, AtRisk, Explanation, SaveStory, Thought, Weighing
from orchestrator.report_text import duration, size

__all__ = ["explanation_text"]

_NO_POLICY = (
    "no save policy was on: saves came by the fixed cadence (checkpoint.every_steps, every_s) or were asked for"
)
_PART_NAMES = {
    "stall_s": "stall",
    "encode_s": "encode",
    "upload_s": "upload",
    "commit_s": "commit",
    "write_s": "from snapshot to commit",
}


def explanation_text(explanation: Explanation) -> str:
    """One block for each Attempt that made the step; ``explanation`` has at least one."""
    answers = explanation.answers
    times = "in one attempt" if len(answers) == 1 else f"in {len(answers)} attempts, each told below"
    head = f"Run {explanation.run_id}, step {explanation.step}: {times}"
    return "\n\n".join([head, *(_block(answer, explanation.step) for answer in answers)])


def _block(answer: Answer, step: int) -> str:
    made = f"steps {answer.first_step} to {answer.last_step}" if answer.last_step >= answer.first_step else "no step"
    title = f"Attempt {answer.attempt} ({answer.cause}), {made}{'' if answer.is_over else ' so far'}: "
    rows: list[tuple[str, str]] = []
    if answer.save is None:
        title += f"no save at step {step}"
    else:
        title += _headline(answer.save)
        rows += _save_rows(answer.save)
    rows += _weighing_rows(answer)
    if answer.save is None or answer.save.outcome != "committed":
        rows.append(("covered by", _cover(answer, step)))
        rows += _risk_rows(answer.at_risk)
    return "\n".join([title, *(f"  {name:<12} {text}".rstrip() for name, text in rows)])


def _headline(save: SaveStory) -> str:
    match save.outcome:
        case "committed":
            return "saved and committed"
        case "skipped":
            return "a save was due, and skipped"
        case "failed":
            return "a save was taken, and given up"
        case "in-memory":
            return "kept in memory alone, no commit follows"
        case "never-taken":
            return "a save was ordered, and the attempt ended before the step"
        case "cut-off":
            return "a save was taken, and cut off before its commit"
        case _:
            return "a save is ordered, and not committed yet"


def _save_rows(save: SaveStory) -> list[tuple[str, str]]:
    ordered = "no order is on record" if save.reason is None else save.reason or "no reason is on record"
    kind = "" if save.kind == "snapshot" else f" ({save.kind.replace('_', ' ')})"
    rows = [("ordered", ordered + kind)]
    if save.detail:
        rows.append((save.outcome.replace("-", " "), save.detail))
    if save.stored_bytes is not None:
        rows.append(("stored", size(save.stored_bytes)))
    if save.took:
        rows.append(("took", ", ".join(f"{_PART_NAMES[part]} {duration(took)}" for part, took in save.took.items())))
    return [*rows, *(("note", note) for note in save.notes)]


def _weighing_rows(answer: Answer) -> list[tuple[str, str]]:
    weighing = answer.weighing
    if weighing is None or not weighing.thoughts:
        around = [
            f"{what} at step {step}"
            for what, step in (("the last save before was", answer.save_before), ("the next one", answer.save_after))
            if step is not None
        ]
        return [
            ("weighed", _why_not_weighed(answer) if weighing is None else _NO_POLICY),
            *([("saves", ", ".join(around))] if around and answer.save is None else []),
        ]
    rows = [("weighed", f"at step {weighing.step}"), *(("", line) for line in _table(weighing.thoughts))]
    if weighing.held_back:
        rows.append(("held back", weighing.held_back))
    if answer.save is not None and answer.save.reason == weighing.wish_reason:
        return rows
    if weighing.wish_reason:
        rows.append(("ordered then", _wish(weighing)))
    elif answer.save is None:
        rows.append(("next to ask", _next(answer)))
    return rows


def _why_not_weighed(answer: Answer) -> str:
    later = "" if answer.first_weighed is None else f"; the first time was at step {answer.first_weighed}"
    return (
        "what the save policies thought was not written down yet in this attempt: that happens when one of them asks "
        f"for a save, and otherwise every policy.evaluate_every_steps steps{later}"
    )


def _wish(weighing: Weighing) -> str:
    where = "no rank bound it" if weighing.landed_step is None else f"it bound step {weighing.landed_step}"
    return f"{weighing.wish_reason}; {where}"


def _next(answer: Answer) -> str:
    asker = answer.next_asker
    if asker is None:
        return "no policy asked for a save"
    if asker.due_in_s <= 0:
        return f"{asker.policy}, which asked already"
    at_step = "" if asker.at_step is None else f", at step {asker.at_step}"
    return f"{asker.policy}, {duration(asker.due_in_s)} after the weighing{at_step}"


def _table(thoughts: tuple[Thought, ...]) -> list[str]:
    cells = [("policy", "due", "why"), *((thought.policy, _due(thought), thought.why) for thought in thoughts)]
    first, second = (max(len(row[column]) for row in cells) for column in (0, 1))
    return [f"{policy:<{first}}  {due:<{second}}  {why}".rstrip() for policy, due, why in cells]


def _due(thought: Thought) -> str:
    if thought.due_in_s is None:
        return "does not ask"
    pressing = ", pressing" if thought.is_pressing else ""
    return ("now" if thought.due_in_s <= 0 else f"in {duration(thought.due_in_s)}") + pressing


def _cover(answer: Answer, step: int) -> str:
    cover = answer.cover
    if cover.commit_step is not None:
        later = cover.commit_step - step
        after = "" if later == 0 else f", {_steps(later)} later"
        return f"the commit of step {cover.commit_step} (attempt {cover.commit_attempt}){after}"
    if cover.rerun_attempt is not None:
        again = "made it again" if answer.is_finished else "is to make it"
        return f"no commit: attempt {cover.rerun_attempt} went on from step {cover.rerun_from} and {again}"
    return "no commit yet" if cover.is_open else "no commit: the run ended before one"


def _risk_rows(risk: AtRisk | None) -> list[tuple[str, str]]:
    if risk is None:
        return []
    newest = "nothing was committed" if risk.durable_step is None else f"step {risk.durable_step} was committed"
    everything = _cost(risk.steps_if_all_is_lost, risk.s_if_all_is_lost)
    if risk.memory_step is None:
        return [("at a fault", f"{everything} lost: {newest}")]
    if risk.memory_step <= (risk.durable_step or 0):
        return [("at a fault", f"{everything} lost: {newest}, and memory held nothing newer")]
    one = _cost(risk.steps_if_one_is_lost, risk.s_if_one_is_lost)
    return [
        ("at a fault", f"of one node {one} lost: memory held step {risk.memory_step}"),
        ("", f"of all memory {everything} lost: {newest}"),
    ]


def _cost(steps: int, seconds: float) -> str:
    return f"{_steps(steps)} ({duration(seconds)})" if steps else "nothing"


def _steps(number: int) -> str:
    return f"{number} step{'' if number == 1 else 's'}"

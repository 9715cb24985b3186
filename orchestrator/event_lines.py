"""The line that a person should see for an event, while the Run goes; None where it is a routine one."""

from __future__ import annotations

from orchestrator.event_fields import Event, int_of
from orchestrator.report_text import count
from orchestrator.restored import restored_words
from orchestrator.save_summary import is_routine, next_try_words

__all__ = ["event_line"]


def event_line(event: Event) -> str | None:
    """The line a person should see for this event; None for the routine ones."""
    match event.get("event"):
        case "chaos":
            where = f" on {event['detail']}" if event.get("detail") else ""
            return f"chaos: {event.get('verb')} at step {event.get('at_step')}{where}"
        case "fault":
            return f"fault: {event.get('cause')}: {event.get('detail')}"
        case "attempt_started":
            start = f"from step {event.get('restored_step')} ({event.get('restored_from')})"
            lost = int_of(event, "lost_steps")
            again = f", {count(lost, 'step')} run again" if lost else ""
            why = f"attempt {event.get('attempt')} ({event.get('cause')})"
            return f"{why}: {count(int_of(event, 'world_size'), 'worker')}, {start}{again}"
        case "request":
            to = f" to {count(int_of(event, 'workers'), 'worker')}" if event.get("workers") else ""
            return f"asked by {event.get('made_by') or 'someone'}: {event.get('wish')}{to}"
        case "decision" if event.get("decision") in ("keep", "refuse"):
            return str(event.get("reason"))
        case "node_blocked":
            return f"node {str(event.get('node'))[:12]} is not used any more: {event.get('reason')}"
        case "restored":
            return f"restored step {event.get('step')}: {restored_words(event)}"
        case "memory_tier":
            return f"memory tier: {event.get('mode')}: {event.get('reason')}"
        case "memory_degraded":
            return f"memory tier: node {str(event.get('node'))[:12]} has no replica: {event.get('reason')}"
        case "memory_passed_over":
            return f"nothing in memory to go on from, step {event.get('step')} is read instead: {event.get('reason')}"
        case "waiting":
            return f"waiting: {event.get('have')} of {event.get('need')} workers; {event.get('missing')}"
        case "data_awaited":
            return f"the training data does not come: ranks {event.get('ranks')} wait for its store"
        case "checkpointing" | "evaluating" as phase:
            return f"{phase} at step {event.get('step')} takes long: ranks {event.get('ranks')} are at it"
        case "store_away":
            return f"the store is away, training goes on: {event.get('reason')}"
        case "work_at_risk":
            risk = f"{count(int_of(event, 'at_risk_steps'), 'step')} ({_whole(event, 'at_risk_s')} s) at risk"
            away = f"the store has been away for {_whole(event, 'away_s')} s"
            return f"{away}: {risk} since step {event.get('durable_step')}"
        case "store_back":
            missed = f"{event.get('saves_failed')} failed, {event.get('saves_skipped')} skipped"
            newest = f"the newest checkpoint is of step {event.get('durable_step')}"
            return f"the store is back after {_whole(event, 'away_s')} s: {newest}; saves meanwhile: {missed}"
        case "save_bound" if not is_routine(str(event.get("reason") or "cadence")):
            return _order_line(event)
        case "threshold_moved":
            moved = f"{_short(event, 'old')} -> {_short(event, 'new')}"
            return f"the threshold of instability moved, {moved}: {event.get('why')}"
        case "save_share" if event.get("why"):
            return f"a save is large for this machine's memory: {event['why']}"
        case "save_slow":
            usual = f"{_whole(event, 'seconds')} s, usual are {_whole(event, 'usual_s')} s"
            return f"save of step {event.get('step')} is slow ({usual}): {event.get('cause')}"
        case "attempt_ended" if event.get("reason") == "finished":
            return f"step {event.get('last_step')} is trained; waiting until its checkpoint is committed"
        case "save_failed":
            return f"save of step {event.get('step')} failed: {event.get('reason')}{next_try_words(event)}"
        case "save_skipped":
            return f"save of step {event.get('step')} skipped: {event.get('reason')}"
        case "quarantined":
            return f"checkpoint of step {event.get('step')} taken out of use: {event.get('key')}: {event.get('reason')}"
        case "verifying" if event.get("reason") is not None:
            return f"checkpoints are verified by their digests alone: {event['reason']}"
        case "verify_failed":
            return f"CHECKPOINT OF STEP {event.get('step')} IS BAD: {event.get('key')}: {event.get('reason')}"
        case "verify_stopped":
            return f"checkpoints are not verified any more: {event.get('reason')}"
        case "eval":
            return f"eval at step {event.get('step')}: loss {_figure(event, 'loss')}, best {_figure(event, 'best')}"
        case "run_finished":
            return f"run {event.get('status')}: {event.get('exit_reason')}".partition("\n")[0]  # the report has it all
        case _:
            return None


def _order_line(event: Event) -> str:
    """E.g. ``save at step 40: hazard: 12 min since commit, MTBF 41 min, cost 3.1 s``."""
    step, reason = event.get("step"), event.get("reason")
    match event.get("kind"):
        case "leave":
            return f"leaving at step {step} with a save: {reason}"
        case "leave_bounded":
            return f"leaving at step {step} with a save in its bounded form: {reason}"
        case "part":
            return f"leaving at step {step}, which memory holds: {reason}"
        case _:
            return f"save at step {step}: {reason}"


def _figure(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.3f}" if isinstance(value, int | float) else "?"


def _short(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.3g}" if isinstance(value, int | float) else "?"


def _whole(event: Event, key: str) -> str:
    value = event.get(key)
    return f"{value:.0f}" if isinstance(value, int | float) else "?"

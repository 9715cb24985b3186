"""The report at the end of a Run, for the terminal: what happened, what it cost, where things are, what to try next.

A pure function of the summary. It prints nothing and reads nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from orchestrator.next_steps import next_steps
from orchestrator.save_summary import Spacing
from orchestrator.summary import AttemptSummary, RunSummary, back_after_s

__all__ = ["count", "duration", "report_text", "size", "sparkline"]

_BARS = "▁▂▃▄▅▆▇█"
_CURVE_WIDTH = 60
_LEAST_SHARE = 0.0005  # less is 0.0 %
_CAUSES = {
    "start": "the run began",
    "driver-restart": "a new driver took over",
    "join": "new workers joined",
    "scale": "another number of workers was asked for",
    "preemption": "a machine was reclaimed",
    "node-lost": "a machine died",
    "worker-lost": "a worker process died",
    "hang": "a worker stopped answering",
    "collective-error": "communication between workers broke",
    "user-error": "the training code failed",
    "corrupt-checkpoint": "a checkpoint was damaged",
    "storage-error": "the storage did not answer",
}


def report_text(
    summary: RunSummary, *, url: str, asked: Sequence[str] = (), nodes: int = 2, in_use: Collection[int] | None = None
) -> str:
    """The whole report; ``url`` is the run's root, ``asked`` and ``nodes`` go into the commands that it suggests.
    ``in_use``: the steps whose Checkpoints are there and not quarantined, None where nobody has looked."""
    blocks = [
        _headline(summary),
        _curve(summary),
        _attempt_table(summary["attempts"]),
        _costs(summary),
        _saves(summary),
        _storage(summary),
        _places(summary, url, in_use),
    ]
    hints = next_steps(summary, url, asked, nodes)
    if hints:
        blocks.append("\n".join(["What to try next", *(f"  {hint}" for hint in hints)]))
    return "\n\n".join(block for block in blocks if block) + "\n"


def sparkline(values: Sequence[float], width: int = _CURVE_WIDTH) -> str:
    """``values`` as one row of bars, averaged down to ``width``; NaN and infinities show as an exclamation mark."""
    finite = [value for value in values if _is_finite(value)]
    if not finite:
        return "!" * min(len(values), width)
    low, high = min(finite), max(finite)
    buckets = min(width, len(values))
    row = []
    for bucket in range(buckets):
        part = values[bucket * len(values) // buckets : (bucket + 1) * len(values) // buckets]
        mean = sum(part) / len(part)
        if not _is_finite(mean):
            row.append("!")
        else:
            level = (mean - low) / (high - low) if high > low else 0.0
            row.append(_BARS[round(level * (len(_BARS) - 1))])
    return "".join(row)


def duration(seconds: float) -> str:
    """E.g. ``0.84 s``, ``12.3 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.2f} s"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def size(num_bytes: float) -> str:
    """E.g. ``512 B``, ``61.3 MB``, in steps of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} PB"


def count(number: int, noun: str) -> str:
    """E.g. ``1 step``, ``2 steps``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _is_finite(value: float) -> bool:
    return value - value == 0


def _headline(summary: RunSummary) -> str:
    lines = [f"Run {summary['run_id']}: {summary['status']} after {count(summary['steps'], 'step')}"]
    if summary["exit_reason"]:
        lines.append(f"  {summary['exit_reason']}")
    if summary["loss_first"] is not None and summary["loss_last"] is not None:
        lines.append(
            f"  loss {summary['loss_first']:.3f} -> {summary['loss_last']:.3f}, {summary['tokens']:,} tokens seen"
        )
    return "\n".join(lines)


def _curve(summary: RunSummary) -> str:
    losses = summary["losses"]
    if len(losses) < 2:
        return ""
    first, last = losses[0]["step"], losses[-1]["step"]
    bars = sparkline([entry["loss"] for entry in losses])
    sizes = ", ".join(f"{change['size']} from step {change['step']}" for change in summary["world_sizes"])
    return f"Loss, step {first} to {last}\n  {bars}\nWorkers\n  {sizes}"


def _attempt_table(attempts: Sequence[AttemptSummary]) -> str:
    if not attempts:
        return ""
    header = ("attempt", "why", "workers", "continued from", "run again", "back after")
    rows = [header, *(_attempt_row(attempt) for attempt in attempts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    return "What happened\n" + "\n".join(lines)


def _attempt_row(attempt: AttemptSummary) -> tuple[str, ...]:
    source = "" if attempt["restored_from"] == "none" else f", {attempt['restored_from']}"
    lost = count(attempt["lost_steps"], "step") if attempt["lost_steps"] else "nothing"
    back = "-"
    if attempt["fault_s"] is not None:
        took_s = back_after_s(attempt)
        back = "no step finished" if took_s is None else duration(took_s)
    return (
        str(attempt["attempt"]),
        _CAUSES.get(attempt["cause"], attempt["cause"]),
        str(attempt["world_size"]),
        f"step {attempt['restored_step']}{source}",
        lost,
        back,
    )


def _costs(summary: RunSummary) -> str:
    goodput = summary["goodput"]
    total = goodput["total_s"]
    if total <= 0:
        return ""
    rows = [
        ("training that counts", goodput["productive_s"]),
        ("work done twice", goodput["lost_work_s"]),
        ("recovering", goodput["recovery_s"]),
        ("starting up", goodput["startup_s"]),
        ("held up by saves", goodput["save_stall_s"]),
    ]
    rest = total - sum(value for _, value in rows)
    rows = [row for row in (*rows, ("starting, stopping, between drivers", rest)) if row[1] / total >= _LEAST_SHARE]
    width = max((len(name) for name, _ in rows), default=0) + 2
    lines = [f"  {name:<{width}}{duration(value):>10}{value / total:>8.1%}" for name, value in rows]
    return f"Where {duration(total)} went\n" + "\n".join(lines)


def _saves(summary: RunSummary) -> str:
    saves = summary.get("saves")  # a finished Run's summary may be of a version without it
    if saves is None or not (saves["ordered"] or saves["skipped"] or saves["held_back"]):
        return ""
    who = ", ".join(f"{number} {policy}" for policy, number in saves["by_policy"].items())
    lines = [f"  ordered      {saves['ordered']}{': ' if who else ''}{who}"]
    committed = saves.get("committed")
    if committed is not None:
        lines.append(f"  committed    {committed}")
    spacing = _spacing(saves["spacing"])
    if spacing:
        lines.append(f"  apart        {spacing}")
    share = saves["stall_share"]
    of_it = "" if share is None else f", {share:.2%} of it"
    lines.append(
        f"  cost         {duration(saves['stall_s'])} of training{of_it}; {size(saves['stored_bytes'])} stored"
    )
    left_out = [
        (saves["held_back"], f"held back at {count(saves['held_back'], 'weighing')}"),
        (saves["skipped"], f"{saves['skipped']} skipped: two earlier ones were under way"),
    ]
    if any(number for number, _ in left_out):
        lines.append(f"  left out     {', '.join(text for number, text in left_out if number)}")
    if saves["threshold"] is not None:
        lines.append(f"  threshold    moved {count(saves['threshold_moves'], 'time')}, now {saves['threshold']:.3g}")
    return "Saves\n" + "\n".join(lines)


def _spacing(spacing: Spacing) -> str:
    """E.g. ``42.5 steps, 6 min 10 s in the mean; 10 to 96 steps, 62.0 s to 12 min 0 s``."""
    mean, densest, sparsest = spacing["mean_steps"], spacing["densest_steps"], spacing["sparsest_steps"]
    if mean is None or densest is None or sparsest is None:
        return ""
    means, ends = f"{mean:.4g} steps", f"{densest} to {sparsest} steps"
    mean_s, densest_s, sparsest_s = spacing["mean_s"], spacing["densest_s"], spacing["sparsest_s"]
    if mean_s is not None and densest_s is not None and sparsest_s is not None:
        means += f", {duration(mean_s)}"
        ends += f", {duration(densest_s)} to {duration(sparsest_s)}"
    return f"{means} in the mean; {ends}"


def _storage(summary: RunSummary) -> str:
    storage = summary["storage"]
    lines = []
    if storage["outages"]:
        times = "once" if storage["outages"] == 1 else f"{storage['outages']} times"
        away = (
            f"{times}, {duration(storage['outage_s'])} in all, {duration(storage['longest_outage_s'])} at the longest"
        )
        lines.append(f"  away         {away}")
        risk = f"{count(storage['max_at_risk_steps'], 'step')}, {duration(storage['max_at_risk_s'])}"
        lines.append(f"  at risk      {risk} at the most")
    if storage["upload_retries"]:
        lines.append(f"  uploads      {count(storage['upload_retries'], 'request')} sent again")
    missed = [
        (storage["saves_failed"], "failed"),
        (storage["saves_retried"], "tried again"),
        (storage["saves_slow"], "abnormally slow"),
    ]
    lines += [f"  saves        {number} {what}" for number, what in missed if number]
    return "The store\n" + "\n".join(lines) if lines else ""


def _places(summary: RunSummary, url: str, in_use: Collection[int] | None) -> str:
    commits = summary["commits"]
    lines = ["Where things are", f"  run          {url}"]
    there = commits if in_use is None else [commit for commit in commits if commit["step"] in in_use]
    of_them = "" if in_use is None or len(in_use) == len(commits) else f", {len(in_use)} in use"
    if commits:
        newest = max(there, key=lambda commit: commit["step"], default=None)
        which = "" if newest is None else f", the newest of step {newest['step']} ({size(newest['bytes'])})"
        lines.append(f"  checkpoints  {len(commits)} committed{of_them}{which}")
    else:
        lines.append("  checkpoints  none was committed")
    if summary["weights_digest"]:
        lines.append(f"  weights      digest {summary['weights_digest']}")
    return "\n".join(lines)

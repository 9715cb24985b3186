"""What must hold of a run when a soak of it is over. Each check says in one line what does not.

It knows nothing of how faults were injected; the unbroken run that it compares with is made here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.local_cluster import is_running
from storage.arena import arena_directory, process_incarnation
from storage.config import LocalDiskConfig
from storage.spool_files import spool_directory
from tests.chaos.soak_watch import Growth
from tests.runs import (
    Run,
    RunProcess,
    RunResult,
    assert_all_commits_verify,
    assert_each_attempt_goes_on_where_it_restored,
    assert_samples_in_order,
    effective_steps,
)

__all__ = ["LOSS_TOLERANCE", "Violation", "check_growth", "check_history", "check_losses", "check_nothing_left"]

LOSS_TOLERANCE = 1e-4
_GONE_S = 20.0
_S_PER_STEP = 1.0
Violation = tuple[str, str]


def check_history(result: RunResult, num_steps: int) -> list[Violation]:
    """Commits, samples, and that every Attempt went on where it said."""
    found: list[Violation] = []

    def hold(name: str, check: Callable[[], object]) -> None:
        try:
            check()
        except (AssertionError, OSError, KeyError, ValueError) as error:
            found.append((name, f"{type(error).__name__}: {error}"))

    def ends_at_last_step() -> None:
        assert result.summary["status"] == "finished", result.summary.get("exit_reason")
        assert result.summary["steps"] == num_steps
        assert max(effective_steps(result.events)) == num_steps

    def commits_verify() -> None:
        steps = assert_all_commits_verify(result.run)
        assert steps[-1] == num_steps, f"the newest Commit is of step {steps[-1]}, not {num_steps}"

    hold("the run ends at its last step", ends_at_last_step)
    hold("every Commit verifies", commits_verify)
    hold("each sample once and in order", lambda: assert_samples_in_order(result))
    hold("each Attempt goes on where it restored", lambda: assert_each_attempt_goes_on_where_it_restored(result))
    return found


def check_losses(result: RunResult, unbroken: Run, num_steps: int) -> tuple[list[Violation], float]:
    """The losses of the history beside those of the same steps on one worker with no fault; how far they are apart."""
    with RunProcess.of_cli(unbroken, "--local-nodes", "1", "world.max_workers=1") as process:
        reference = process.finish(120.0 + num_steps * _S_PER_STEP)
    if reference.exit_code != 0:
        return [("the unbroken run", f"exit code {reference.exit_code}\n{reference.stderr[-2000:]}")], 0.0
    expected, found = effective_steps(reference.events), effective_steps(result.events)
    apart = {s: abs(e["loss"] / expected[s]["loss"] - 1.0) for s, e in found.items() if s in expected}
    worst = max(apart, key=lambda step: apart[step])
    violations: list[Violation] = []
    if apart[worst] > LOSS_TOLERANCE:
        first = min(step for step, far in apart.items() if far > LOSS_TOLERANCE)
        detail = (
            f"step {first} is the first, step {worst} the worst: {apart[worst]:.2e} apart, {LOSS_TOLERANCE:g} allowed"
        )
        violations.append(("losses of the unbroken run", detail))
    if result.summary.get("sample_digest") != reference.summary["sample_digest"]:
        violations.append(("samples of the unbroken run", "the sample digests differ"))
    return violations, apart[worst]


def check_nothing_left(
    processes: frozenset[tuple[int, int]], run_id: str, disk: LocalDiskConfig, node_ids: Sequence[str]
) -> list[Violation]:
    """No process, no shared memory, no spool."""
    found: list[Violation] = []
    deadline_s = time.monotonic() + _GONE_S
    while left := [pid for pid, born in processes if process_incarnation(pid) == born and is_running(pid)]:
        if time.monotonic() > deadline_s:
            found.append(("no process is left", f"still alive: {', '.join(map(_named, left))}"))
            break
        time.sleep(0.05)
    arenas = sorted({*Path("/dev/shm").glob(f"raysume-{run_id}*"), *_existing(run_id, node_ids)})
    if arenas:
        found.append(("no shared memory is left", ", ".join(map(str, arenas))))
    spools = [str(path) for node_id in node_ids if (path := spool_directory(disk, run_id, node_id)).exists()]
    if spools:
        found.append(("no spool is left", ", ".join(spools)))
    return found


def check_growth(growths: Sequence[Growth]) -> list[Violation]:
    return [("nothing grows", str(growth)) for growth in growths if not growth.is_flat]


def _existing(run_id: str, node_ids: Sequence[str]) -> list[Path]:
    return [path for node_id in node_ids if (path := arena_directory(run_id, node_id)).exists()]


def _named(pid: int) -> str:
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        title = "?"
    return f"{pid} ({title[:80].strip()})"

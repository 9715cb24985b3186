"""A short soak holds, and one can fail: growth is seen, and a strike is over only when its victims are replaced.

Real in the first test: the harness as a process, a Ray cluster of four nodes, ten faults on one run. The long version
of it is `make soak`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.chaos import ChaosPhase, ChaosVerb
from tests.chaos.soak_course import Course
from tests.chaos.soak_plan import WEIGHTS, draw_strikes
from tests.chaos.soak_watch import Sample, Watch, growth_of
from tests.runs import ROOT

NUM_FAULTS = 10
SEED = 6
# A killed driver's Lease must run out first, which takes longer than all of these; see test_driver_kill.
VERBS = [verb for verb in WEIGHTS if verb not in (ChaosVerb.KILL_DRIVER, ChaosVerb.KILL_COORDINATOR)]


@pytest.mark.timeout(400)
def test_a_run_outlives_ten_faults_and_has_nothing_to_show_for_them(tmp_path: Path) -> None:
    found = tmp_path / "soak.json"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.chaos.soak", "--faults", str(NUM_FAULTS), "--seed", str(SEED)),
            *("--verbs", ",".join(VERBS), "--json", str(found), "--keep", str(tmp_path / "soak")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = json.loads(found.read_text())
    assert report["violations"] == []
    assert sum(row["strike"].count("+") + 1 - len(row["refused"]) for row in report["strikes"]) >= NUM_FAULTS - 2
    assert [row for row in report["strikes"] if row["causes"]], "nothing ever broke"


@pytest.mark.parametrize("seed", range(20))
def test_a_seed_gives_its_schedule_again_with_every_fault_in_it(seed: int) -> None:
    strikes = draw_strikes(seed, 200)
    assert strikes == draw_strikes(seed, 200)
    assert strikes != draw_strikes(seed + 1, 200)
    verbs = [verb for strike in strikes for verb in strike.verbs]
    assert len(verbs) == 200
    assert set(verbs) == set(WEIGHTS)
    assert {strike.phase for strike in strikes} == {None, *ChaosPhase}
    in_recovery = {s.verbs[-1] for s in strikes if s.phase in (ChaosPhase.LOAD, ChaosPhase.REGROUP)}
    assert not in_recovery & {ChaosVerb.OOM_WORKER, ChaosVerb.RAISE_IN_WORKER}, "nothing trains then"
    first = [verb for strike in draw_strikes(seed, 2 * len(WEIGHTS)) for verb in strike.verbs]
    assert set(first) == set(WEIGHTS), "a short schedule left a fault out"


def test_growth_is_what_is_beyond_the_tolerance_from_the_first_quarter_to_the_last() -> None:
    steady = growth_of("descriptors", [60.0 + number % 5 for number in range(100)], 16.0, 0.15)
    leaking = growth_of("descriptors", [60.0 + number / 2 for number in range(100)], 16.0, 0.15)
    assert steady is not None
    assert steady.is_flat
    assert leaking is not None
    assert not leaking.is_flat
    assert growth_of("descriptors", [60.0] * 5, 16.0, 0.15) is None


@pytest.mark.parametrize(("mb_a_second", "is_flat"), [(0.0, True), (1.0, False)])
def test_a_process_grows_only_once_it_has_started(mb_a_second: float, is_flat: bool) -> None:
    watch = Watch(root_pid=0, run_id="none")
    for strike, age_s in enumerate([3.0, 5.0, *range(20, 120, 10)]):
        rss_mb = 60.0 * age_s if age_s < 6 else 350.0 + mb_a_second * age_s
        watch.samples.append(
            Sample(
                role="worker",
                pid=7,
                incarnation=1,
                num_fds=60,
                num_threads=40,
                strike=strike,
                age_s=age_s,
                rss_mb=rss_mb,
            )
        )
    found = {growth.what: growth.is_flat for growth in watch.growths()}
    assert found["worker 7: MB"] is is_flat
    assert found["worker 7: descriptors"]


# -- when a strike is over --------------------------------------------------------------------------------------------


def course_of(*events: dict[str, Any]) -> Course:
    """A run of two workers on two nodes, and what comes after."""
    course = Course()
    for number in (1, 2):
        course.take_in({"event": "worker_ready", "worker": f"w{number}", "node_id": f"n{number}", "pid": number})
    for event in (attempt(1, "w1", "w2"), *events):
        course.take_in(event)
    return course


def attempt(number: int, *members: str, cause: str = "worker-lost", lost: int = 0) -> dict[str, Any]:
    return {
        "event": "attempt_started",
        "attempt": number,
        "members": list(members),
        "cause": cause,
        "lost_steps": lost,
        "restored_from": "peer-memory",
    }


def deed(verb: str, t_s: float, node: int = 1) -> dict[str, Any]:
    return {"event": "chaos", "verb": verb, "t_s": t_s, "node_id": f"n{node}", "pid": node, "at_step": 5}


def step(attempt: int, number: int, finished_s: float) -> dict[str, Any]:
    return {"event": "step", "attempt": attempt, "step": number, "finished_s": finished_s}


def test_a_step_that_a_killed_workers_attempt_still_made_is_no_recovery() -> None:
    course = course_of(deed("kill-worker", 10.0), step(1, 5, 10.1))
    assert course.outcome(0, 1, is_given_up=False) is None
    course.take_in(attempt(2, "w2", lost=1))
    course.take_in(step(2, 5, 12.0))
    outcome = course.outcome(0, 1, is_given_up=False)
    assert outcome is not None
    assert (outcome.recovery_s, outcome.tier, outcome.lost_steps, outcome.world_size) == (2.0, "peer-memory", 1, 1)


def test_a_drain_is_over_when_its_node_is_gone_and_costs_what_its_leave_did() -> None:
    course = course_of(deed("drain-node", 10.0), attempt(2, "w2", cause="preemption"), step(2, 6, 10.9))
    assert course.outcome(0, 1, is_given_up=False) is None
    for event in (deed("drain-deadline", 13.0), attempt(3, "w2", "w3", cause="join", lost=3), step(3, 7, 13.5)):
        course.take_in(event)
    outcome = course.outcome(0, 1, is_given_up=False)
    assert outcome is not None
    assert (outcome.causes, outcome.lost_steps, outcome.recovery_s) == (("preemption",), 0, pytest.approx(0.9))


def test_hunger_that_nobody_feels_is_given_up_and_said_but_a_killed_worker_is_waited_for() -> None:
    course = course_of(deed("oom-worker", 10.0), step(1, 6, 11.0))
    assert course.outcome(0, 1, is_given_up=False) is None
    outcome = course.outcome(0, 1, is_given_up=True)
    assert outcome is not None
    assert outcome.is_idle
    both = course_of(deed("oom-worker", 10.0), deed("kill-worker", 10.0, node=2), step(1, 6, 11.0))
    assert both.outcome(0, 1, is_given_up=True) is None

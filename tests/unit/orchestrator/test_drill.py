"""`raysume drill` around its two runs: what it asks for, what it writes, how it ends. The runs are imagined ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator import drill as drill_module
from orchestrator.chaos import parse_chaos
from orchestrator.cli import app
from orchestrator.drill import check_plan, choose_folder, run_drill
from orchestrator.drill_runs import INTERRUPTED, UNBROKEN, DrillPlan, RunEnd, run_command
from orchestrator.errors import ConfigError
from orchestrator.exit_codes import DrillCode, ExitCode
from orchestrator.load_config import load_config
from orchestrator.progress import ProgressView
from tests.fakes.drill_events import Change, DrillEvents

CONFIG = Path(__file__).resolve().parents[3] / "clusters" / "local" / "tiny.yaml"
STEPS = 20
CHAOS = "kill-worker@8"
runner = CliRunner()


def make_plan(folder: Path, *overrides: str, chaos: str = CHAOS, num_nodes: int = 3) -> DrillPlan:
    changes = (f"run.steps={STEPS}", *overrides)
    return DrillPlan(
        config=load_config(CONFIG, changes),
        config_path=CONFIG,
        overrides=changes,
        num_nodes=num_nodes,
        actions=parse_chaos(chaos),
        folder=folder,
    )


class Runs:
    """Stands for the two processes: each leaves a checkpoint behind and ends with the events that are wanted."""

    def __init__(self, *, change: Change | None = None, codes: tuple[int, int] = (0, 0), stop: bool = False) -> None:
        self._changes = {} if change is None else {12: change}
        self._codes, self._stop = dict(zip((UNBROKEN, INTERRUPTED), codes, strict=True)), stop
        self.asked: list[str] = []

    def __call__(self, plan: DrillPlan, name: str, view: ProgressView, stops: list[int]) -> RunEnd:
        view.note(name)
        self.asked.append(name)
        if self._stop:
            stops.append(2)
        directory = plan.directory(name)
        (directory / "shards").mkdir(parents=True)
        (directory / "events.jsonl").touch()
        run = DrillEvents(self._changes if name == INTERRUPTED else {}).begin(3).train(8)
        if name == INTERRUPTED:
            run.strike("kill-worker", 8).begin(2, restored=6, cause="worker-lost")
        code = self._codes[name]
        events: list[Any] = run.train(STEPS if not code else 10).end()
        return RunEnd(name=name, exit_code=code, events=events, seconds=1.0, lines=("the last words",))


def nothing_wrong(directory: Path, events: list[Any]) -> tuple[str, ...]:
    """The audit of a run whose store is imagined too."""
    assert (directory / "shards").exists(), "what was to be audited is gone"
    assert events
    return ()


def test_two_runs_that_did_the_same_end_with_zero_and_leave_no_checkpoints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, runs = make_plan(tmp_path / "out"), Runs()
    assert run_drill(plan, audit=nothing_wrong, run_one=runs) == 0
    assert runs.asked == [UNBROKEN, INTERRUPTED]
    said = capsys.readouterr()
    assert "faults of the second run: kill-worker@8" in said.err
    assert said.out.rstrip().splitlines()[-1].startswith("SAME: ")
    assert "worker-lost" in said.out
    assert sorted(path.name for path in plan.directory(UNBROKEN).iterdir()) == ["events.jsonl"]
    found = json.loads((plan.folder / "drill.json").read_text())
    assert (found["is_same"], found["steps"], found["exit_codes"]) == (True, STEPS, {UNBROKEN: 0, INTERRUPTED: 0})
    assert (plan.folder / "drill.png").read_bytes()[:4] == b"\x89PNG"


def test_a_difference_has_a_code_of_its_own_and_everything_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tmp_path / "out")
    code = run_drill(plan, audit=nothing_wrong, run_one=Runs(change=lambda event: event.update(loss=3.0)))
    assert (code, DrillCode.NOT_THE_SAME.value) == (25, 25)
    out = capsys.readouterr().out
    assert "FIRST DIFFERENCE at step 12" in out
    assert "loss: 1.2635971381157267 uninterrupted, 3.0 interrupted, a difference of 1.37e+00 relative" in out
    assert "the last fault before it: kill-worker at step 8" in out
    assert "attempt 2 (worker-lost), which went on from step 6 (own-memory)" in out
    assert "NOT THE SAME: from step 12 on." in out
    assert (plan.directory(INTERRUPTED) / "shards").exists()


def test_why_a_planned_fault_did_not_happen_is_in_the_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_one(plan: DrillPlan, name: str, view: ProgressView, stops: list[int]) -> RunEnd:
        return replace(Runs()(plan, name, view, stops), undone={"scale:1@16": "the run ended first"})

    plan = make_plan(tmp_path / "out", chaos="kill-worker@8,scale:1@16")
    assert run_drill(plan, audit=nothing_wrong, run_one=run_one) == DrillCode.NOT_THE_SAME
    said = "scale:1@16 never happened: the run ended first; more steps (--steps), or longer ones, give it time"
    assert f"NOT PROVEN: {said}." in capsys.readouterr().out


def test_samples_that_are_not_proven_are_no_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run_drill(make_plan(tmp_path / "out"), audit=lambda *_: ("steps 3 to 4: 1 missing",), run_one=Runs())
    assert code == DrillCode.NOT_THE_SAME
    assert "NOT PROVEN: data audit: steps 3 to 4: 1 missing." in capsys.readouterr().out


@pytest.mark.parametrize(("last_size", "num_notes"), [(2, 1), (3, 0)])
def test_a_growth_that_never_came_is_said(tmp_path: Path, last_size: int, num_notes: int) -> None:
    def run_one(plan: DrillPlan, name: str, view: ProgressView, stops: list[int]) -> RunEnd:
        end = Runs()(plan, name, view, stops)
        if name == UNBROKEN:
            return end
        run = DrillEvents().begin(3).train(8).strike("kill-worker", 8).begin(2, restored=6, cause="worker-lost")
        run.train(9).strike("add-node", 9).train(14).begin(last_size, restored=14, cause="join")
        return replace(end, events=[*run.train(STEPS).end()])

    plan = make_plan(tmp_path / "out", chaos="kill-worker@8,add-node@9")
    assert run_drill(plan, audit=nothing_wrong, run_one=run_one) == 0
    notes = json.loads((plan.folder / "drill.json").read_text())["notes"]
    assert sum("never grew" in note for note in notes) == num_notes
    assert sum("every restore was from memory" in note for note in notes) == 1


@pytest.mark.parametrize(("workers", "num_notes"), [(2, 1), (1, 0)])
def test_a_scale_to_as_many_as_train_already_is_said_to_have_changed_nothing(
    tmp_path: Path, workers: int, num_notes: int
) -> None:
    def run_one(plan: DrillPlan, name: str, view: ProgressView, stops: list[int]) -> RunEnd:
        end = Runs()(plan, name, view, stops)
        run = DrillEvents().begin(3).train(8).strike("kill-worker", 8).begin(2, restored=6, cause="worker-lost")
        run.train(9).strike("scale", 9, f"{workers} workers are asked for")
        return end if name == UNBROKEN else replace(end, events=[*run.train(STEPS).end()])

    plan = make_plan(tmp_path / "out", chaos=f"kill-worker@8,scale:{workers}@9")
    assert run_drill(plan, audit=nothing_wrong, run_one=run_one) == 0
    notes = json.loads((plan.folder / "drill.json").read_text())["notes"]
    assert sum(note.startswith("scale at step 9") and "changed nothing" in note for note in notes) == num_notes


def test_steps_that_nobody_told_of_are_not_claimed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run_one(plan: DrillPlan, name: str, view: ProgressView, stops: list[int]) -> RunEnd:
        end = Runs()(plan, name, view, stops)
        run = DrillEvents().begin(3).train(8).strike("kill-driver", 8).begin(3, restored=10, cause="driver-restart")
        return end if name == UNBROKEN else replace(end, events=[*run.train(STEPS).end()])

    plan = make_plan(tmp_path / "out", chaos="kill-driver@8")
    assert run_drill(plan, audit=nothing_wrong, run_one=run_one) == 0
    said = capsys.readouterr().out
    assert "From step 9 on nobody knows how many workers the interrupted run had" in said
    assert "the runs have different numbers of workers" not in said
    verdict = json.loads((plan.folder / "drill.json").read_text())["verdict"]
    assert verdict.endswith(f"at {STEPS - 2} of {STEPS} steps; the events of the others died with a driver.")


def test_a_picture_that_cannot_be_drawn_costs_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no font")

    monkeypatch.setattr("orchestrator.drill_plot._draw", broken)
    plan = make_plan(tmp_path / "out")
    assert run_drill(plan, audit=nothing_wrong, run_one=Runs()) == 0
    assert json.loads((plan.folder / "drill.json").read_text())["plot"] == "none: ValueError: no font"


def test_json_is_alone_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_drill(make_plan(tmp_path / "out"), json_output=True, audit=nothing_wrong, run_one=Runs()) == 0
    assert json.loads(capsys.readouterr().out)["is_same"] is True


def test_what_was_passed_is_kept_when_asked(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "out")
    assert run_drill(plan, is_kept=True, audit=nothing_wrong, run_one=Runs()) == 0
    assert (plan.directory(UNBROKEN) / "shards").exists()


@pytest.mark.parametrize(("codes", "num_runs"), [((11, 0), 1), ((0, 12), 2)])
def test_a_run_that_failed_gives_its_own_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], codes: tuple[int, int], num_runs: int
) -> None:
    runs = Runs(codes=codes)
    assert run_drill(make_plan(tmp_path / "out"), audit=nothing_wrong, run_one=runs) == max(codes)
    assert len(runs.asked) == num_runs
    err = capsys.readouterr().err
    assert "the last words" in err
    assert f"ended with exit code {max(codes)}" in err


def test_a_stop_ends_with_14_starts_no_second_run_and_leaves_nothing(tmp_path: Path) -> None:
    plan, runs = make_plan(tmp_path / "out"), Runs(stop=True)
    assert run_drill(plan, audit=nothing_wrong, run_one=runs) == ExitCode.STOPPED
    assert runs.asked == [UNBROKEN]
    assert not plan.folder.exists()


def test_both_runs_are_the_same_command_but_for_place_and_faults(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "out", "optim.lr=0.5", num_nodes=2)
    one, other = run_command(plan, UNBROKEN), run_command(plan, INTERRUPTED)
    assert "--chaos" not in one
    place = other.index("--chaos")
    assert other[place + 1] == CHAOS
    del other[place : place + 2]
    assert [(a, b) for a, b in zip(one, other, strict=True) if a != b] == [
        (f"run.url={plan.directory(UNBROKEN)}", f"run.url={plan.directory(INTERRUPTED)}")
    ]
    again = load_config(CONFIG, one[one.index(str(CONFIG)) + 1 :])
    assert (again.run.trace_every, again.world.max_workers, again.optim.lr) == (1, 2, 0.5)


def test_more_workers_than_the_nodes_hold_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"world\.min_workers is 3, and 2 local nodes hold 2 workers"):
        check_plan(make_plan(tmp_path, "world.min_workers=3", num_nodes=2))


def test_each_drill_has_a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = choose_folder(None, "tiny")
    first.mkdir(parents=True)
    assert (first.name, choose_folder(None, "tiny").name) == ("drill-tiny", "drill-tiny-2")
    assert choose_folder(tmp_path / "new", "tiny") == tmp_path / "new"
    with pytest.raises(ConfigError, match="is not empty"):
        choose_folder(tmp_path, "tiny")


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[DrillPlan]:
    """What the command would run, in place of running it."""
    monkeypatch.chdir(tmp_path)
    asked: list[DrillPlan] = []

    def run(plan: DrillPlan, **_: object) -> int:
        asked.append(plan)
        return 0

    monkeypatch.setattr(drill_module, "run_drill", run)
    return asked


def asked_for(*arguments: str, code: int = 0) -> str:
    done = runner.invoke(app, ["drill", str(CONFIG), *arguments])
    assert done.exit_code == code, done.output
    return done.output


def test_faults_steps_and_nodes_are_chosen_where_nobody_says(plans: list[DrillPlan]) -> None:
    asked_for("run.steps=5000")
    plan = plans[0]
    assert (plan.config.run.steps, plan.num_nodes, plan.num_workers) == (80, 3, 3)
    assert {action.verb.value for action in plan.actions} >= {"kill-worker", "kill-node", "drain-node", "stop-worker"}
    asked_for("run.steps=5000", "--seed", "1")
    assert plans[1].actions != plan.actions


def test_faults_steps_nodes_and_loop_are_what_is_said(plans: list[DrillPlan], tmp_path: Path) -> None:
    (tmp_path / "my_loop.py").write_text("def train(session): ...\n")
    loop = ("--loop", "my_loop:train", "--loop-config", '{"a": 1}', "model.config={}")
    asked_for("--steps", "30", "--local-nodes", "2", "--chaos", CHAOS, "--out", "here", *loop)
    plan = plans[0]
    assert (plan.config.run.steps, plan.num_nodes, plan.folder) == (30, 2, tmp_path / "here")
    assert plan.actions == parse_chaos(CHAOS)
    assert plan.loop_options == ("--loop", "my_loop:train", "--loop-config", '{"a": 1}')


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--steps", "10"], "faults need"),
        (["--chaos", "zap@3"], "no such verb"),
        (["--loop", "nowhere:train"], "no module nowhere was found"),
        (["run.stps=3"], "unknown key run.stps"),
    ],
)
def test_what_cannot_be_is_a_configuration_error(plans: list[DrillPlan], arguments: list[str], said: str) -> None:
    assert said in asked_for(*arguments, code=ExitCode.CONFIG_ERROR)
    assert plans == []

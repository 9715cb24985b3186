"""The bench that holds both instability formulas against recorded curves: what it reads, and how it counts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from orchestrator.save_config import InstabilityConfig
from tests.bench.replay_instability import Curve, Replay, Tally, read_curve, replay, tally
from tests.fakes.step_reports import step_report


def row(step: int, **fields: Any) -> dict[str, Any]:
    return {"step": step, "loss": 5.0, "grad_norm": 1.0, **fields}


def test_events_and_recorded_curves_are_read_alike(tmp_path: Path) -> None:
    events, recorded = tmp_path / "events.jsonl", tmp_path / "curve.json"
    rows = [row(1), row(2, loss=9.0), row(2, grad_variance=1e-6)]
    lines = [{"event": "run_started", "step": None}, *({"event": "step", **each} for each in rows)]
    events.write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded.write_text(json.dumps({"reports": rows, "onset": 2, "end": 3}))
    from_events, from_record = read_curve(events, 5, 6), read_curve(recorded, 5, 6)
    assert from_events.reports == from_record.reports
    assert [report.loss for report in from_events.reports] == [5.0, 5.0]  # of a step trained twice the newer
    assert (from_events.onset, from_events.end) == (5, 6)
    assert (from_record.onset, from_record.end) == (2, 3)


def test_a_file_without_a_step_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "events.jsonl"
    empty.write_text('{"event": "run_started"}\n')
    with pytest.raises(ValueError, match="no step in it"):
        read_curve(empty)


def test_triggers_saves_and_misses_are_counted_by_phase() -> None:
    curve = Curve(name="a", reports=tuple(step_report(step) for step in range(1, 401)), onset=200, end=250)
    plain = replay(curve, InstabilityConfig())
    assert (plain.asked, plain.saves) == ((), ())
    # Quiet are steps 1 to 199 and 300 to 400; an evaluation comes every ten steps.
    found = Replay(curve=curve, evaluations=plain.evaluations, asked=(50, 210, 220, 270), saves=(52, 212, 222, 272))
    total = tally([found, plain])
    assert (total.quiet_steps, total.quiet_evaluations) == (2 * 300, 2 * 30)
    assert (total.false_triggers, total.quiet_saves) == (1, 1)
    assert (total.unstable_saves, total.unstable_steps, total.phases) == (2, 100, 2)
    assert (total.delays, total.miss_rate) == ([10], 0.5)
    assert total.density_ratio == pytest.approx((2 / 100) / (1 / 600))
    assert tally([found], from_step=60).false_triggers == 0


def test_a_ratio_to_nothing_is_infinite_and_of_nothing_zero() -> None:
    assert Tally(unstable_saves=1, unstable_steps=1).density_ratio == math.inf
    assert Tally().density_ratio == 0.0


def test_a_save_later_than_20_steps_is_a_miss() -> None:
    curve = Curve(name="a", reports=tuple(step_report(step) for step in range(1, 301)), onset=200, end=250)
    late = Replay(curve=curve, evaluations=(), asked=(230,), saves=(232,))
    assert tally([late]).miss_rate == 1.0


def test_the_published_formula_asks_at_every_evaluation_of_a_noisy_loss() -> None:
    reports = tuple(
        step_report(step, loss=5.0 + 0.3 * (step % 7 in (0, 1, 2)), grad_variance=1e-7) for step in range(1, 101)
    )
    found = replay(Curve(name="a", reports=reports), InstabilityConfig(formula="published"))
    assert found.asked == tuple(range(10, 101, 10))
    assert found.saves[0] == 12
    assert all(later - sooner >= 10 for sooner, later in zip(found.saves, found.saves[1:], strict=False))

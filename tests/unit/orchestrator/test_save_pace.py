"""How long saves take, measured from Signals on the driver's own clock."""

from __future__ import annotations

import pytest

from orchestrator.save_config import DeadlineConfig
from orchestrator.save_pace import SavePace
from orchestrator.signals import (
    Committed,
    SaveBound,
    SaveDelayed,
    SaveFailed,
    SaveShare,
    SaveSkipped,
    StepFinished,
)
from storage.keys import Attempt
from workers.contract import BoundOrder, OrderKind, ShareReport, StepReport

ATTEMPT = Attempt(number=1, nonce="abcd1234")


class Scene:
    def __init__(self, *, is_usually_bounded: bool = False) -> None:
        self.now = 0.0
        config = DeadlineConfig()
        self.pace = SavePace(config, is_usually_bounded=is_usually_bounded, monotonic=lambda: self.now)
        self.pace.begin(2)

    def bind(self, step: int, kind: OrderKind = OrderKind.SNAPSHOT) -> None:
        self.pace.on_signal(
            SaveBound(attempt=ATTEMPT, bound=BoundOrder(number=1, kind=kind, step=step), reason="cadence")
        )

    def share(self, snapshot_bytes: int) -> None:
        report = ShareReport(
            step=1,
            share=0.1,
            extra_bytes=1,
            snapshot_share=0.1,
            snapshot_bytes=snapshot_bytes,
            in_use_bytes=1,
            is_measured=False,
        )
        self.pace.on_signal(SaveShare(attempt=ATTEMPT, report=report))

    def save(
        self, step: int, *, write_s: float, upload_s: float = 0.0, encode_s: float = 0.0, delayed: bool = False
    ) -> None:
        self.finish(step)
        if delayed:
            self.pace.on_signal(SaveDelayed(attempt=ATTEMPT, step=step, rank=0, reason="away", failing_for_s=1.0))
        self.now += write_s
        self.pace.on_signal(
            Committed(
                attempt=ATTEMPT,
                step=step,
                stored_bytes=1,
                stall_s=0.5,
                upload_s=upload_s,
                encode_s=encode_s,
                loss=None,
            )
        )

    def finish(self, step: int, safe_step: int = -1) -> None:
        report = StepReport(
            step=step,
            loss=1.0,
            grad_norm=1.0,
            lr=0.1,
            tokens=1,
            position=1,
            sample_chain="",
            step_s=1.0,
            finished_at_s=9e9,  # another machine's clock
            safe_step=safe_step,
        )
        self.pace.on_signal(StepFinished(attempt=ATTEMPT, report=report))


def test_the_median_of_the_newest_saves_counts_whatever_other_machines_clocks_say() -> None:
    scene = Scene()
    for step, write_s in enumerate((90.0, 90.0, 90.0, 4.0, 5.0, 6.0, 90.0, 5.0), start=1):
        scene.save(step, write_s=write_s)
    assert (scene.pace.forecast().full_s, scene.pace.forecast().is_measured) == (5.0, True)


def test_a_save_heard_of_all_at_once_took_at_least_what_its_parts_did() -> None:
    scene = Scene()
    scene.save(1, write_s=0.0, upload_s=3.0)
    assert scene.pace.forecast().full_s == 3.5


def test_what_an_outage_held_up_says_nothing_about_the_next_save() -> None:
    scene = Scene()
    scene.save(1, write_s=300.0, delayed=True)
    assert not scene.pace.forecast().is_measured
    scene.pace.begin(2)
    scene.save(1, write_s=3.0)
    assert scene.pace.forecast().full_s == 3.0


def test_a_smaller_world_takes_longer() -> None:
    scene = Scene()
    scene.save(1, write_s=5.0, upload_s=4.0)
    scene.pace.begin(1)
    assert scene.pace.forecast().full_s == pytest.approx(9.0)


def test_a_smaller_world_encodes_more_as_well() -> None:
    scene = Scene()
    scene.save(1, write_s=5.0, encode_s=3.0)
    scene.pace.begin(1)
    assert scene.pace.forecast().full_s == pytest.approx(8.0)


def test_an_outage_holds_up_every_save_that_is_under_way() -> None:
    scene = Scene()
    scene.bind(3)
    scene.bind(5)
    scene.finish(3)
    scene.finish(5)
    scene.pace.on_signal(SaveDelayed(attempt=ATTEMPT, step=3, rank=0, reason="away", failing_for_s=1.0))
    scene.save(5, write_s=300.0)
    assert not scene.pace.forecast().is_measured


def test_before_a_save_was_measured_the_size_counts_that_workers_or_the_first_snapshot_tell() -> None:
    scene = Scene()
    assert scene.pace.forecast().full_s == 10.0
    scene.pace.begin(2, 400_000_000)
    assert scene.pace.forecast().full_s == pytest.approx(2.0 + 4.0)
    scene.pace.begin(1)
    assert scene.pace.forecast().full_s == pytest.approx(2.0 + 8.0)
    scene.share(100_000_000)
    assert scene.pace.forecast().full_s == pytest.approx(2.0 + 2.0)


def test_before_a_save_was_measured_it_is_taken_to_last_no_shorter_than_its_replica() -> None:
    scene = Scene()
    scene.finish(1)
    scene.now += 9.0
    scene.finish(2, safe_step=1)  # two steps of one second are what it may take to hear of it
    scene.now += 1.0
    scene.finish(3, safe_step=1)
    assert scene.pace.forecast().full_s == pytest.approx(2.0 + 7.0)
    scene.pace.begin(1)
    assert scene.pace.forecast().full_s == pytest.approx(2.0 + 14.0)
    scene.save(4, write_s=1.5)
    assert scene.pace.forecast().full_s == 1.5


def test_there_is_no_cheaper_form_than_the_bounded_one() -> None:
    assert Scene(is_usually_bounded=True).pace.forecast().bounded_s is None
    assert Scene().pace.forecast().bounded_s is not None


def test_a_guess_of_what_saves_take_is_counted_once() -> None:
    scene = Scene()
    scene.bind(3)
    assert scene.pace.forecast().ahead_s == 0.0
    scene.save(3, write_s=6.0)
    scene.bind(5)
    assert scene.pace.forecast().ahead_s == 6.0


def test_saves_under_way_come_first_for_as_long_as_they_still_take() -> None:
    scene = Scene()
    scene.save(1, write_s=6.0)
    assert scene.pace.forecast().ahead_s == 0.0
    scene.bind(4, OrderKind.PART)
    assert scene.pace.forecast().ahead_s == 0.0, "it stays in memory"
    scene.bind(3)
    assert scene.pace.forecast().ahead_s == 6.0, "its step has not ended"
    scene.finish(3)
    scene.now += 2.0
    assert scene.pace.forecast().ahead_s == 4.0
    scene.bind(5)
    assert scene.pace.forecast().ahead_s == 10.0
    scene.now += 10.0
    assert scene.pace.forecast().ahead_s == 6.0, "nobody knows how late the first one is"
    scene.pace.on_signal(SaveFailed(attempt=ATTEMPT, step=3, reason="r"))
    scene.pace.on_signal(SaveSkipped(attempt=ATTEMPT, step=5))
    assert scene.pace.forecast().ahead_s == 0.0
    scene.bind(7)
    scene.save(7, write_s=6.0)
    assert scene.pace.forecast().ahead_s == 0.0
    scene.bind(9)
    scene.pace.begin(2)
    assert scene.pace.forecast().ahead_s == 0.0

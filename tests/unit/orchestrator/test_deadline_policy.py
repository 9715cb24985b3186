"""When a World with a notice parts and by which save, in exact figures; and what saves are expected to take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.deadline_policy import (
    BOUNDED_STORED_SHARE,
    DeadlineFacts,
    FirstSave,
    KeepOn,
    LeaveNow,
    SaveForecast,
    decide_deadline,
    forecast_save,
)
from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import SaveTimes
from workers.contract import OrderKind

CONFIG = DeadlineConfig(margin_s=2.0)
SAVE = SaveForecast(full_s=6.2, bounded_s=4.0, is_measured=True)
FACTS = DeadlineFacts(left_s=18.0, save=SAVE, step_s=0.6, rest_s=0.6, look_s=0.25)


def times(write_s: float, upload_s: float = 0.0, encode_s: float = 0.0) -> SaveTimes:
    return SaveTimes(
        step=1,
        stall_s=0.0,
        encode_s=encode_s,
        upload_s=upload_s,
        commit_s=0.0,
        write_s=write_s,
        stored_bytes=1,
        raw_bytes=1,
    )


def test_a_world_trains_on_until_the_latest_safe_start_and_says_its_figures() -> None:
    chosen = decide_deadline(FACTS, CONFIG)
    assert isinstance(chosen, KeepOn)
    assert chosen.for_s == pytest.approx(18.0 - 3 * 0.6 - 6.2 - 2.0)
    assert chosen.why == (
        "deadline in 18.0 s, a save takes 6.2 s, the next boundary that an order can meet is 1.8 s away, margin 2 s: "
        "leaving at the latest in 8.0 s"
    )


@pytest.mark.parametrize(("left_s", "leaves"), [(10.26, False), (10.25, True), (10.01, True)])
def test_it_leaves_in_full_form_when_the_next_look_would_be_too_late(left_s: float, leaves: bool) -> None:
    chosen = decide_deadline(replace(FACTS, left_s=left_s), CONFIG)
    assert isinstance(chosen, LeaveNow) is leaves
    if isinstance(chosen, LeaveNow):
        assert (chosen.kind, chosen.fits) == (OrderKind.LEAVE, True)


@pytest.mark.parametrize(
    ("left_s", "form", "kind", "fits"),
    [
        (9.99, "bounded", OrderKind.LEAVE_BOUNDED, True),
        (7.8, "bounded", OrderKind.LEAVE_BOUNDED, True),
        (7.7, "bounded", OrderKind.LEAVE_BOUNDED, False),
        (9.9, "none", OrderKind.LEAVE, False),
    ],
)
def test_where_time_is_short_the_bounded_form_is_taken_and_no_success_claimed_that_is_not_to_be_had(
    left_s: float, form: str, kind: OrderKind, fits: bool
) -> None:
    save = SAVE if form == "bounded" else replace(SAVE, bounded_s=None)
    chosen = decide_deadline(replace(FACTS, left_s=left_s, save=save), CONFIG)
    assert isinstance(chosen, LeaveNow)
    assert (chosen.kind, chosen.fits) == (kind, fits)
    assert ("too late" in chosen.why) is not fits


def test_a_save_of_eight_seconds_with_five_left_is_tried_in_the_cheapest_form_and_not_promised() -> None:
    save = forecast_save(((2, times(8.0, upload_s=6.0)),), 2, CONFIG)
    chosen = decide_deadline(DeadlineFacts(left_s=5.0, save=save, step_s=1.0, rest_s=1.0), CONFIG)
    assert isinstance(chosen, LeaveNow)
    assert (chosen.kind, chosen.fits) == (OrderKind.LEAVE_BOUNDED, False)
    assert chosen.why.endswith("its bounded form 5.8 s: leaving now in that form, and even that may come too late")


@pytest.mark.parametrize("left_s", [0.0, -3.0])
def test_a_deadline_that_is_past_is_left_at_once_without_a_promise(left_s: float) -> None:
    chosen = decide_deadline(replace(FACTS, left_s=left_s), CONFIG)
    assert isinstance(chosen, LeaveNow)
    assert (chosen.kind, chosen.fits) == (OrderKind.LEAVE_BOUNDED, False)


def test_an_unknown_deadline_is_left_at_once_in_full_form() -> None:
    chosen = decide_deadline(replace(FACTS, left_s=None), CONFIG)
    assert chosen == LeaveNow(kind=OrderKind.LEAVE, fits=True, why="its deadline is unknown: leaving now")


@pytest.mark.parametrize(("left_s", "kind"), [(60.0, OrderKind.LEAVE), (9.0, OrderKind.LEAVE_BOUNDED)])
def test_before_the_first_step_and_while_data_is_awaited_it_leaves_at_once(left_s: float, kind: OrderKind) -> None:
    """Nothing is gained by staying: when the next boundary comes nobody can tell."""
    chosen = decide_deadline(replace(FACTS, left_s=left_s, rest_s=None), CONFIG)
    assert isinstance(chosen, LeaveNow)
    assert chosen.kind is kind


@pytest.mark.parametrize("upload_s", [0.0, 3.0, 8.0])
def test_the_bounded_form_saves_of_the_upload_what_it_stores_less(upload_s: float) -> None:
    save = forecast_save(((2, times(8.0, upload_s=upload_s)),), 2, CONFIG)
    assert (save.full_s, save.is_measured) == (8.0, True)
    assert save.bounded_s == pytest.approx(8.0 - upload_s * (1 - BOUNDED_STORED_SHARE))


def test_until_a_save_was_measured_the_configuration_says_what_it_takes_where_it_does() -> None:
    configured = CONFIG.model_copy(update={"first_save_s": 7.0})
    save = forecast_save((), 2, configured, FirstSave(rank_bytes=5e9, replica_s=130.0))
    assert (save.full_s, save.basis) == (7.0, "policy.deadline.first_save_s")
    save = forecast_save((), 2, CONFIG)
    assert (save.full_s, save.is_measured) == (10.0, False)
    assert save.bounded_s == pytest.approx(10.0 * BOUNDED_STORED_SHARE)
    none = CONFIG.model_copy(update={"cheaper_form": "none"})
    assert forecast_save((), 2, none).bounded_s is None


@pytest.mark.parametrize(
    ("rank_bytes", "replica_s", "full_s", "basis"),
    [
        (None, None, 10.0, "nothing is known of it yet"),
        (1e6, None, 2.02, "1.0 MB a rank at 50 MB/s"),
        (5e9, None, 102.0, "5000.0 MB a rank at 50 MB/s"),
        (5e9, 30.0, 102.0, "5000.0 MB a rank at 50 MB/s"),
        (5e9, 130.0, 132.0, "its replica takes 130.0 s"),
        (None, 3.0, 5.0, "its replica takes 3.0 s"),
    ],
)
def test_until_a_save_was_measured_its_size_and_its_replica_say_what_it_takes_where_they_are_known(
    rank_bytes: float | None, replica_s: float | None, full_s: float, basis: str
) -> None:
    save = forecast_save((), 2, CONFIG, FirstSave(rank_bytes=rank_bytes, replica_s=replica_s))
    assert (save.full_s, save.is_measured, save.basis) == (full_s, False, basis)
    chosen = decide_deadline(DeadlineFacts(left_s=500.0, save=save, step_s=1.0, rest_s=1.0), CONFIG)
    assert isinstance(chosen, KeepOn)
    assert chosen.for_s == 500.0 - full_s - 3.0 - 2.0
    assert f"a save is taken to take {full_s:.1f} s ({basis}), " in chosen.why
    measured = forecast_save(((2, times(8.0)),), 2, CONFIG, FirstSave(rank_bytes=rank_bytes, replica_s=replica_s))
    assert (measured.full_s, measured.basis) == (8.0, "")


def test_one_slow_save_does_not_move_what_is_usual() -> None:
    saves = tuple((2, times(write_s)) for write_s in (5.0, 60.0, 6.0, 5.5, 4.0))
    assert forecast_save(saves, 2, CONFIG).full_s == 5.5


def test_fewer_ranks_encode_and_upload_more_each_and_more_ranks_are_not_taken_to_be_faster() -> None:
    saves = ((4, times(8.0, upload_s=3.0, encode_s=2.0)),)
    assert forecast_save(saves, 2, CONFIG).full_s == 13.0
    assert forecast_save(saves, 8, CONFIG).full_s == 8.0


@pytest.mark.parametrize("step_s", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("at_s", [0.0, 0.3, 0.95])
def test_whoever_is_asked_again_and_again_commits_before_the_deadline(step_s: float, at_s: float) -> None:
    """On a clock: looks every quarter second; an Order lands two steps after the running one ends."""
    deadline_s, look_s, now_s = 40.0, 0.25, at_s
    while isinstance(chosen := decide_deadline(_facts(deadline_s - now_s, step_s, look_s), CONFIG), KeepOn):
        now_s += look_s
    assert (chosen.kind, chosen.fits) == (OrderKind.LEAVE, True)
    left_at_s = (now_s // step_s + 3) * step_s
    assert deadline_s - 2.0 - step_s - look_s - 1e-6 <= left_at_s + 6.2 + step_s
    assert left_at_s + 6.2 <= deadline_s - 2.0 + 1e-6


def _facts(left_s: float, step_s: float, look_s: float) -> DeadlineFacts:
    return DeadlineFacts(left_s=left_s, save=SAVE, step_s=step_s, rest_s=step_s, look_s=look_s)


def test_the_last_save_waits_for_those_that_are_under_way() -> None:
    """What they still take passes while the boundary is waited for, and only the rest of it counts."""
    facts = replace(FACTS, save=replace(SAVE, ahead_s=1.5))
    assert decide_deadline(facts, CONFIG) == decide_deadline(FACTS, CONFIG)
    chosen = decide_deadline(replace(FACTS, save=replace(SAVE, ahead_s=4.8)), CONFIG)
    assert isinstance(chosen, KeepOn)
    assert chosen.for_s == pytest.approx(8.0 - 3.0)
    assert "a save takes 6.2 s after 3.0 s behind those under way, " in chosen.why
    bounded = decide_deadline(replace(FACTS, left_s=11.0, save=replace(SAVE, ahead_s=4.8)), CONFIG)
    assert isinstance(bounded, LeaveNow)
    assert (bounded.kind, bounded.fits) == (OrderKind.LEAVE_BOUNDED, True)

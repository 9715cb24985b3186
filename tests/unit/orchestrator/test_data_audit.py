"""The audit proves what really happened, and names the step of everything else."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from copy import copy
from dataclasses import replace

import pytest

from orchestrator.data_audit import AuditReport, audit
from tests.fakes.sample_history import History, order_of, random_history
from workers.ledger import Ledger, LedgerUnreadable
from workers.sample_order import SampleOrder, SourceRows
from workers.skipped_windows import Windows


def proven(history: History, **options: object) -> AuditReport:
    report = audit(history.ledger, claims=history.claims, **options)  # type: ignore[arg-type]
    assert report.findings == ()
    assert (report.missing, report.repeated) == (0, 0)
    return report


@pytest.mark.parametrize("seed", range(12))
def test_any_history_of_kills_resizes_bad_steps_and_other_batches_is_proven(seed: int) -> None:
    history = random_history(seed)
    report = proven(history)
    progress = history.progress
    assert (report.first_step, report.last_step, report.samples) == (1, progress.step, progress.position)
    assert report.worlds == {
        size: list(history.worlds.values()).count(size) for size in sorted(set(history.worlds.values()))
    }
    (part,) = report.parts
    places = report.samples + report.num_skipped
    for source, taken in zip(part.sources, history.order.taken(places), strict=True):
        assert (source.whole, sum(source.partial.values())) == divmod(taken, source.num_rows)
    assert report.num_chains == len(history.ledger.trained)


def test_the_history_tells_nothing_of_what_was_rolled_back() -> None:
    history = History()
    history.start(4)
    history.train(3)
    saved = copy(history.progress)
    history.train(5)
    history.start(3, at=saved)
    history.train(1)
    report = proven(history)
    assert (report.last_step, report.samples, report.worlds, report.lives) == (4, 32, {3: 1, 4: 3}, 2)


def test_a_window_left_out_on_purpose_is_a_class_of_its_own() -> None:
    history = History()
    history.start(2)
    history.train(2)
    history.reject("loss-spike")
    history.start(2)
    history.train(8)
    report = proven(history)
    assert [(one.place, one.left_out, one.step, one.why) for one in report.skipped] == [(16, 8, 3, "loss-spike")]
    assert (report.samples, report.num_skipped) == (80, 8)
    (source,) = report.parts[0].sources
    assert (source.whole, source.partial) == (1, {1: 28}), "a row that was left out is part of its epoch"


def test_a_window_that_still_lies_ahead_is_not_counted_as_skipped() -> None:
    history = History()
    history.start(2)
    saved = copy(history.progress)
    history.train(2)
    history.reject()
    history.start(2, at=saved)
    history.train(1)
    assert (proven(history).num_skipped, proven(history).skipped) == (0, ())


@pytest.mark.parametrize("num_attempts", [1, 3])
def test_a_run_that_went_on_from_another_runs_checkpoint_is_proven_with_that_ones_history(num_attempts: int) -> None:
    """Its own Attempts count from 1 again."""
    history = History()
    for _ in range(num_attempts):
        history.start(2)
        history.train(2)
    history.attempt = 0
    for world_size in (3, 1):
        history.start(world_size)
        history.train(1)
    report = proven(history)
    assert (report.lives, report.runs, report.attempts) == (num_attempts + 2, 2, (1, 2))
    assert report.worlds == {1: 1, 2: 2 * num_attempts, 3: 1}
    assert Ledger.read(history.ledger.text) == history.ledger


def test_a_state_of_an_older_release_is_proven_from_where_its_ledger_begins() -> None:
    history = History()
    history.start(2)
    history.train(3)
    history.progress.ledger = ""
    history.start(2)
    history.train(2)
    report = proven(history)
    assert (report.first_step, report.unrecorded, report.samples) == (4, 24, 16)


def test_data_changed_on_purpose_is_proven_on_both_sides_of_the_change() -> None:
    history = History()
    history.start(2)
    history.train(9)
    history.order = order_of(40, seed=6)
    history.start(2)
    history.train(9)
    report = proven(history)
    assert [(part.first_step, part.last_step, part.seed, part.num_rows) for part in report.parts] == [
        (1, 9, 5, 60),
        (10, 18, 6, 40),
    ]
    assert [part.sources[0].partial for part in report.parts] == [{1: 12}, {1: 8, 3: 24}]
    assert report.parts[1].sources[0].whole == 1


def test_sources_of_unlike_sizes_have_epochs_of_their_own() -> None:
    sources = (SourceRows(name="large", num_rows=50, weight=3), SourceRows(name="small", num_rows=7))
    history = History(order=SampleOrder(seed=2, sources=sources))
    history.start(3)
    history.train(20)
    (part,) = proven(history).parts
    assert [(one.name, one.whole, one.partial) for one in part.sources] == [
        ("large", 2, {2: 20}),
        ("small", 5, {5: 5}),
    ]


def test_an_epoch_smaller_than_a_step_is_counted_all_the_same() -> None:
    history = History(order=order_of(3))
    history.start(1)
    history.train(2)
    history.reject()
    history.start(1)
    history.train(4)
    (source,) = proven(history).parts[0].sources
    assert (source.whole, source.partial) == (18, {18: 2})


# What was tampered with. The history: steps 1-4 at one size, 5 and 6 at another, step 7's samples left out, 7-12 after.


def course() -> History:
    history = History()
    history.start(4)
    history.train(4)
    history.start(3)
    history.train(2)
    history.reject()
    history.start(2)
    history.train(6)
    return history


def with_range(ledger: Ledger, number: int, **values: object) -> Ledger:
    trained = list(ledger.trained)
    trained[number] = trained[number].model_copy(update=values)
    return replace(ledger, trained=tuple(trained))


def moved(places: Windows, by: int) -> Windows:
    return tuple((place + by, count) for place, count in places)


def gap(ledger: Ledger) -> Ledger:
    return with_range(ledger, 1, places=moved(ledger.trained[1].places, 2))


def overlap(ledger: Ledger) -> Ledger:
    return with_range(ledger, 1, places=moved(ledger.trained[1].places, -2))


def repeated_range(ledger: Ledger) -> Ledger:
    first, second, third = ledger.trained
    return replace(ledger, trained=(first, second, second, third))


def swapped_ranges(ledger: Ledger) -> Ledger:
    first, second, third = ledger.trained
    return replace(ledger, trained=(second, first, third))


def lost_range(ledger: Ledger) -> Ledger:
    return replace(ledger, trained=(ledger.trained[0], ledger.trained[2]))


def gap_within_a_range(ledger: Ledger) -> Ledger:
    return with_range(ledger, 2, places=((56, 19), (77, 29)))


def dropped_window(ledger: Ledger) -> Ledger:
    return replace(ledger, left_out=())


def another_window(ledger: Ledger) -> Ledger:
    return replace(ledger, left_out=(*ledger.left_out, ledger.left_out[0].model_copy(update={"place": 64})))


def another_leaf(ledger: Ledger) -> Ledger:
    return with_range(ledger, 1, leaf=4)


def more_steps_than_samples(ledger: Ledger) -> Ledger:
    return with_range(ledger, 1, batch=4)


def other_world_sizes(ledger: Ledger) -> Ledger:
    return with_range(ledger, 1, worlds={3: 5})


def earlier_attempt(ledger: Ledger) -> Ledger:
    return with_range(ledger, 2, attempts=(1, 1))


def no_order(ledger: Ledger) -> Ledger:
    return replace(ledger, orders=())


def cut_short(ledger: Ledger) -> Ledger:
    return replace(ledger, trained=ledger.trained[:-1])


@pytest.mark.parametrize(
    ("tamper", "kind", "steps"),
    [
        (gap, "places", (5, 5)),
        (overlap, "places", (5, 5)),
        (repeated_range, "places", (5, 5)),
        (repeated_range, "steps", (5, 6)),
        (swapped_ranges, "places", (5, 5)),
        (lost_range, "places", (7, 7)),
        (lost_range, "steps", (5, 6)),
        (gap_within_a_range, "places", (9, 9)),
        (dropped_window, "places", (7, 7)),
        (dropped_window, "end", (12, 12)),
        (another_window, "window", (8, 8)),
        (another_leaf, "chain", (5, 6)),
        (more_steps_than_samples, "range", (5, 6)),
        (other_world_sizes, "range", (5, 6)),
        (earlier_attempt, "range", (7, 12)),
        (no_order, "range", (1, 12)),
        (cut_short, "end", (6, 6)),
    ],
)
def test_what_was_tampered_with_is_found_and_its_step_is_named(
    tamper: Callable[[Ledger], Ledger], kind: str, steps: tuple[int, int]
) -> None:
    history = course()
    proven(history)
    report = audit(tamper(history.ledger), claims=history.claims)
    assert not report.is_proven
    assert (kind, *steps) in [(one.kind, one.first_step, one.last_step) for one in report.findings]


@pytest.mark.parametrize(
    "claim",
    [
        {"step": 11},
        {"position": 95},
        {"chain": "f" * 32},
        {"skipped": ()},
        {"epoch": 7},
        {"seed": 9},
        {"num_rows": 61},
        {"reported": (88, "f" * 32)},
    ],
)
def test_a_training_state_that_says_otherwise_is_found(claim: dict[str, object]) -> None:
    """As a state would whose parts were not saved at one step."""
    history = course()
    claims = replace(history.claims, reported=(96, history.progress.sample_chain))
    assert audit(history.ledger, claims=claims).is_proven
    findings = audit(history.ledger, claims=replace(claims, **claim)).findings  # type: ignore[arg-type]
    assert "end" in [one.kind for one in findings]


def test_samples_that_are_missing_or_come_again_are_counted() -> None:
    ledger = course().ledger
    told = {
        tamper.__name__: audit(tamper(ledger)) for tamper in (gap, overlap, repeated_range, swapped_ranges, lost_range)
    }
    assert {name: (report.missing, report.repeated) for name, report in told.items()} == {
        "gap": (2, 2),  # and the range behind goes back to where it was
        "overlap": (2, 2),
        "repeated_range": (0, 16),
        "swapped_ranges": (0, 0),
        "lost_range": (16, 0),
    }


def changed(chain: str) -> str:
    return f"{int(chain[:1], 16) ^ 1:x}{chain[1:]}"


def test_a_changed_chain_is_found_and_told_from_changed_samples() -> None:
    """What comes before and behind fits, so it is the record that is wrong, at the very end of its range."""
    history = course()
    ledger = with_range(history.ledger, 1, chain=changed(history.ledger.trained[1].chain))
    (found,) = audit(ledger, claims=history.claims).findings
    assert (found.kind, found.first_step, found.last_step) == ("chain", 6, 6)
    last = with_range(history.ledger, 2, chain=changed(history.ledger.trained[2].chain))
    kinds = [(one.kind, one.first_step, one.last_step) for one in audit(last, claims=history.claims).findings]
    assert kinds == [("chain", 12, 12), ("end", 12, 12)]


def test_a_changed_seed_is_found_in_the_first_range_and_with_reported_chains_in_the_first_step() -> None:
    history = course()
    first = history.ledger.orders[0]
    ledger = replace(history.ledger, orders=(first.model_copy(update={"order": order_of(seed=6).as_fields()}),))
    findings = audit(ledger, claims=history.claims).findings
    assert ("chain", 1, 4) in [(one.kind, one.first_step, one.last_step) for one in findings]
    assert any("seed 6" in one.text and "with 5" in one.text for one in findings)
    findings = audit(ledger, claims=history.claims, told=history.told).findings
    assert ("chain", 1, 1) in [(one.kind, one.first_step, one.last_step) for one in findings]
    assert not audit(history.ledger, order_of(seed=6)).is_proven
    assert audit(history.ledger, order_of(seed=5)).is_proven


def test_reported_chains_name_the_step_at_which_the_ranks_saw_other_samples() -> None:
    """The ranks themselves went wrong at step 9: their chains are true to what they saw, not to the order."""
    history = History()
    history.start(2)
    history.train(8)
    wrong = order_of(seed=77)
    history.order, right = wrong, history.order
    history.train(1)
    history.order = right
    history.train(4)
    report = audit(history.ledger, claims=history.claims)
    assert [(one.kind, one.first_step, one.last_step) for one in report.findings] == [("chain", 1, 13)]
    report = audit(history.ledger, claims=history.claims, told=history.told)
    assert [(one.kind, one.first_step, one.last_step) for one in report.findings] == [("chain", 9, 9)]
    some = {step: chain for step, chain in history.told.items() if step in (4, 7, 11)}
    report = audit(history.ledger, claims=history.claims, told=some)
    assert [(one.first_step, one.last_step) for one in report.findings] == [(8, 11)]


def test_reports_of_what_was_rolled_back_accuse_nobody() -> None:
    history = course()
    told = dict(history.told) | {3: "f" * 32}
    assert audit(history.ledger, claims=history.claims, told=told).findings == ()


def test_large_steps_are_taken_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    history = random_history(3)
    whole = proven(history)
    dealt_with: list[int] = []
    monkeypatch.setattr("orchestrator.data_audit._CHUNK", 10)
    assert proven(history, progress=dealt_with.append) == whole
    assert sum(dealt_with) == whole.samples
    assert max(dealt_with) <= 12


@pytest.mark.parametrize("seed", range(30))
def test_no_single_number_of_a_ledger_can_be_changed_unseen(seed: int) -> None:
    """Every number that the audit can know, in turn: a random one of a random history."""
    history = random_history(seed % 5)
    lines = history.ledger.text.split("\n")
    rng = random.Random(seed)
    # Which attempt or world size trained a range is the ledger's word alone.
    line = rng.choice([number for number, text in enumerate(lines) if '"batch"' in text])
    text = re.sub(
        r'"(worlds|attempts|lives)":(\{[^}]*\}|\[[^]]*\]|\d+)', lambda match: "~" * len(match[0]), lines[line]
    )
    spots = [match for match in re.finditer(r"\d+", text) if len(match[0]) < 20]
    spot = rng.choice(spots)
    lines[line] = f"{lines[line][: spot.start()]}{int(spot[0]) + rng.randint(1, 3)}{lines[line][spot.end() :]}"
    try:
        changed_ledger = Ledger.read("\n".join(lines))
    except LedgerUnreadable:
        return
    assert not audit(changed_ledger, claims=history.claims).is_proven, lines[line]

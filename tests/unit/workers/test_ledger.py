"""What the ledger records of steps, Attempts, windows and orders, and how it stays small."""

from __future__ import annotations

from dataclasses import replace

import pytest

import workers.ledger as ledger_module
from workers.contract import SkippedWindow
from workers.ledger import EMPTY_CHAIN, Ledger, LedgerUnreadable, add_step, begin_attempt
from workers.skipped_windows import Windows, merge

ORDER = {"seed": 5}


def chain_of(step: int) -> str:
    return f"{step:032x}"


class Course:
    """A state's way through steps and Attempts, without the training."""

    def __init__(self, *, batch: int = 8, leaf: int = 2) -> None:
        self.text, self.step, self.position, self.attempt = "", 0, 0, 0
        self.batch, self.leaf, self.world_size, self.skipped = batch, leaf, 1, ()
        self.chain = EMPTY_CHAIN

    def attempt_of(
        self, world_size: int, *, windows: tuple[SkippedWindow, ...] = (), order: dict[str, int] | None = None
    ) -> None:
        self.attempt += 1
        self.world_size = world_size
        self.skipped: Windows = merge(self.skipped, ((one.place, one.samples) for one in windows))
        self.text = begin_attempt(
            self.text,
            step=self.step,
            position=self.position,
            chain=self.chain,
            attempt=self.attempt,
            order=order or ORDER,
            skipped=self.skipped,
            told=windows,
        )

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            self.chain = chain_of(self.step)
            self.text = add_step(
                self.text,
                self.step,
                position=self.position,
                batch=self.batch,
                leaf=self.leaf,
                skipped=self.skipped,
                attempt=self.attempt,
                world_size=self.world_size,
                chain=self.chain,
            )
            self.position += self.batch

    @property
    def ledger(self) -> Ledger:
        return Ledger.read(self.text)


def test_a_step_without_anything_special_only_extends_the_last_range() -> None:
    course = Course()
    course.attempt_of(3)
    course.steps(5)
    (only,) = course.ledger.trained
    assert (only.steps, only.places, only.batch, only.leaf) == ((1, 5), ((0, 40),), 8, 2)
    assert (only.worlds, only.attempts, only.lives, only.chain) == ({3: 5}, (1, 1), 1, chain_of(5))
    assert course.text.count("\n") == 2, "the beginning, the order, the range"


def test_each_attempt_and_each_batch_has_a_range_of_its_own() -> None:
    course = Course()
    course.attempt_of(4)
    course.steps(2)
    course.attempt_of(3)
    course.steps(1)
    course.attempt_of(3)
    course.batch, course.leaf = 12, 3
    course.steps(2)
    course.batch = 6
    course.steps(1)
    told = [(one.steps, one.places, one.batch, one.worlds, one.attempts) for one in course.ledger.trained]
    assert told == [
        ((1, 2), ((0, 16),), 8, {4: 2}, (1, 1)),
        ((3, 3), ((16, 8),), 8, {3: 1}, (2, 2)),
        ((4, 5), ((24, 24),), 12, {3: 2}, (3, 3)),
        ((6, 6), ((48, 6),), 6, {3: 1}, (3, 3)),
    ]


def test_a_window_is_recorded_with_its_step_and_its_reason_and_no_range_covers_it() -> None:
    course = Course()
    course.attempt_of(2)
    course.steps(2)
    course.attempt_of(2, windows=(SkippedWindow(place=24, samples=8, step=4, reason="not-finite"),))
    course.steps(3)
    course.attempt_of(1)
    ledger = course.ledger
    assert [(one.place, one.left_out, one.step, one.why) for one in ledger.left_out] == [(24, 8, 4, "not-finite")]
    assert [one.places for one in ledger.trained] == [((0, 16),), ((16, 8), (32, 16))]


def test_a_window_that_nobody_explains_is_recorded_all_the_same() -> None:
    windows = (SkippedWindow(place=8, samples=8, step=2, reason="loss-spike"),)
    text = begin_attempt(
        "", step=0, position=0, chain=EMPTY_CHAIN, attempt=1, order=ORDER, skipped=((8, 12), (40, 4)), told=windows
    )
    told = [(one.place, one.left_out, one.step, one.why) for one in Ledger.read(text).left_out]
    assert told == [(8, 8, 2, "loss-spike"), (16, 4, None, ""), (40, 4, None, "")]


def test_a_state_without_a_ledger_gets_one_that_speaks_from_here_on() -> None:
    course = Course()
    course.step, course.position, course.chain = 5, 40, chain_of(5)
    course.skipped = ((8, 8), (48, 8))
    course.attempt_of(2)
    course.steps(2)
    ledger = course.ledger
    beginning = ledger.beginning
    assert (beginning.step, beginning.place, beginning.position, beginning.chain) == (5, 48, 40, chain_of(5))
    assert [(one.place, one.left_out) for one in ledger.left_out] == [(48, 8)]
    assert [(one.steps, one.places) for one in ledger.trained] == [((6, 7), ((56, 16),))]


def test_another_order_is_recorded_with_the_step_from_which_it_holds() -> None:
    course = Course()
    course.attempt_of(1)
    course.steps(2)
    course.attempt_of(1, order={"seed": 6})
    course.attempt_of(1, order={"seed": 7})  # the Attempt before finished no step
    course.steps(1)
    assert [(one.step, one.order) for one in course.ledger.orders] == [(1, {"seed": 5}), (3, {"seed": 7})]


def test_hundreds_of_regroups_stay_small_and_lose_neither_steps_nor_attempts_nor_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ledger_module, "MAX_RANGES", 96)
    course = Course()
    for number in range(800):
        course.attempt_of(1 + number % 4)
        course.steps(1)
    ledger = course.ledger
    assert len(ledger.trained) <= 96
    assert len(course.text) < 20_000
    assert sum(one.num_steps for one in ledger.trained) == course.step == 800
    assert sum(one.lives for one in ledger.trained) == 800
    assert [sum(one.worlds.get(size, 0) for one in ledger.trained) for size in range(1, 5)] == [200] * 4
    assert all(before.fits(after) for before, after in zip(ledger.trained, ledger.trained[1:], strict=False))
    assert all(one.chain == chain_of(one.steps[1]) for one in ledger.trained)
    assert [one.attempts[0] for one in ledger.trained[-30:]] == list(range(771, 801)), "the newest are not joined"
    # Chains stand about evenly over the whole history, not only at its end.
    assert max(one.num_steps for one in ledger.trained) <= 2 * 800 // 32 + 2


def test_a_long_attempt_keeps_chains_on_the_way() -> None:
    course = Course()
    course.attempt_of(1)
    course.steps(2500)
    assert [one.steps for one in course.ledger.trained] == [(1, 1024), (1025, 2048), (2049, 2500)]
    assert [one.lives for one in course.ledger.trained] == [1, 1, 1]
    joined = course.ledger.trained[0].joined(course.ledger.trained[1])
    assert (joined.lives, joined.attempts) == (1, (1, 1)), "one Attempt is counted once"


def test_ranges_of_unlike_batches_or_orders_are_never_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_RANGES", 64)
    course = Course()
    for number in range(84):
        course.batch = 8 if number % 2 else 16
        course.attempt_of(1)
        course.steps(1)
    assert {one.num_steps for one in course.ledger.trained} == {1}
    course = Course()
    for number in range(84):
        course.attempt_of(1, order={"seed": number})
        course.steps(1)
    assert {one.num_steps for one in course.ledger.trained} == {1}


def test_what_was_written_reads_back_the_same() -> None:
    course = Course()
    course.attempt_of(2, windows=(SkippedWindow(place=8, samples=8, step=2, reason="not-finite"),))
    course.steps(3)
    ledger = course.ledger
    assert Ledger.read(ledger.text) == ledger
    assert ledger.text == course.text
    assert replace(ledger, trained=()).last_step == 0


@pytest.mark.parametrize(
    ("damage", "line"),
    [
        (lambda text: text.replace('"batch":8', '"batch":0'), 3),
        (lambda text: text.replace('"order"', '"orders"'), 2),
        (lambda text: text[:-20], 3),
        (lambda text: text.split("\n", 1)[1], 1),
        (lambda text: text.replace('"ledger":1', '"ledger":2'), 1),
    ],
)
def test_a_text_that_is_no_ledger_is_refused_by_line(damage: object, line: int) -> None:
    course = Course()
    course.attempt_of(2)
    course.steps(1)
    assert callable(damage)
    with pytest.raises(LedgerUnreadable) as caught:
        Ledger.read(damage(course.text))
    assert caught.value.line == line

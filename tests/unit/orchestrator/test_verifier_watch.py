"""When verification begins and what follows from it. Scripted: the verifier process, clock and load."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from orchestrator.signals import Committed, Quarantined
from orchestrator.verifier import Verdict
from orchestrator.verifier_policy import may_begin, shards_at_once, verify_limit_s
from orchestrator.verifier_watch import VerifierLost, VerifierWatch, load_per_core
from storage.config import CheckpointConfig
from storage.errors import StoreUnavailable
from storage.keys import Attempt, StepKey
from storage.verify import SHARDS_AT_ONCE
from tests.fakes.verifier_ports import ScriptedVerifier

ATTEMPT = Attempt(number=2, nonce="0000aaaa")
CONFIG = CheckpointConfig(verify_load_per_core=0.5, verify_after_s=100.0)


def key_of(step: int) -> StepKey:
    return StepKey(step=step, attempt=ATTEMPT)


def committed(step: int) -> Committed:
    return Committed(attempt=ATTEMPT, step=step, stored_bytes=10, stall_s=0.0, upload_s=0.0, loss=None)


def good(key: StepKey) -> Verdict:
    return Verdict(key=key, committed_utc="", by="load", loss=2.0, expected=2.0)


def bad(key: StepKey) -> Verdict:
    return Verdict(key=key, committed_utc="", by="digests", problem=("shards/x", "hash mismatch"))


class Bench:
    """A watch with everything round it scripted."""

    def __init__(
        self, answers: Callable[[StepKey], Any] = good, *, earlier: Mapping[StepKey, int] = MappingProxyType({})
    ) -> None:
        self.now_s, self.load = 0.0, 0.1
        self.quarantine_fails: list[Exception] = []
        self.events: list[tuple[str, int | None, dict[str, Any]]] = []
        self.quarantined: list[tuple[StepKey, str, str]] = []
        self.ports: list[ScriptedVerifier] = []
        self._answers, self._earlier = answers, earlier
        self.is_spawned = threading.Event()
        self.watch = VerifierWatch(
            CONFIG,
            spawn=self._spawn,
            emit=self._emit,
            quarantine=self._quarantine,
            load=lambda: self.load,
            monotonic=lambda: self.now_s,
            look_s=0.01,
        )

    def _quarantine(self, key: StepKey, object_key: str, reason: str) -> None:
        if self.quarantine_fails:
            raise self.quarantine_fails.pop()
        self.quarantined.append((key, object_key, reason))

    def _spawn(self) -> ScriptedVerifier:
        self.ports.append(ScriptedVerifier(self._answers, earlier=self._earlier))
        self.is_spawned.set()
        return self.ports[-1]

    def _emit(self, event: str, *, step: int | None = None, **fields: Any) -> None:
        self.events.append((event, step, fields))


@pytest.mark.parametrize(
    ("load", "ages", "begins"),
    [
        (0.4, [1.0], True),
        (0.5, [1.0], False),
        (9.0, [1.0, 99.0], False),
        (9.0, [1.0, 100.0], True),
        (0.0, [], False),
    ],
)
def test_it_begins_where_the_machine_is_idle_or_a_checkpoint_of_age(
    load: float, ages: list[float], begins: bool
) -> None:
    assert may_begin(CONFIG, load_per_core=load, ages_s=ages) is begins


def test_a_busy_machine_has_one_shard_read_after_another() -> None:
    limit = CONFIG.verify_load_per_core
    assert shards_at_once(CONFIG, load_per_core=limit / 2) == SHARDS_AT_ONCE > 1
    assert shards_at_once(CONFIG, load_per_core=limit) == 1


def test_the_limit_grows_with_the_checkpoint() -> None:
    assert verify_limit_s(0) == 300.0
    assert verify_limit_s(2_000_000_000) == 2300.0


def test_no_process_is_made_before_a_checkpoint_waits_and_it_is_time() -> None:
    bench = Bench()
    assert bench.watch.look()
    bench.load = 2.0
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    assert bench.ports == []
    bench.now_s = 100.0
    assert bench.watch.look()
    assert bench.ports[0].keys == [key_of(10)]


def test_on_a_busy_machine_older_ones_wait_for_it_to_be_idle_once_a_newer_one_is_verified() -> None:
    bench = Bench()
    bench.load = 2.0
    bench.watch.on_signal(committed(10))
    bench.now_s = 50.0
    bench.watch.on_signal(committed(20))
    for now_s in (100.0, 105.0, 900.0):
        bench.now_s = now_s
        assert bench.watch.look()
    assert bench.ports[0].keys == [key_of(20)]
    bench.watch.on_signal(committed(30))
    bench.now_s = 1000.0
    assert bench.watch.look()
    assert bench.ports[0].keys == [key_of(20), key_of(30)], "what came since is of age"
    bench.load = 0.1
    assert bench.watch.look()
    assert bench.ports[0].keys[-1] == key_of(10)


def test_the_newest_is_verified_first_and_what_earlier_drivers_left_too() -> None:
    bench = Bench(earlier={key_of(5): 2_000_000})
    for step in (10, 20):
        bench.watch.on_signal(committed(step))
    for _ in range(5):
        assert bench.watch.look()
    assert bench.ports[0].keys == [key_of(20), key_of(10), key_of(5)]
    assert len(bench.ports) == 1
    assert [(event, step, fields["unverified"]) for event, step, fields in bench.events] == [
        ("verified", 20, 2),
        ("verified", 10, 1),
        ("verified", 5, 0),
    ]
    assert bench.events[0][2]["by"] == "load"
    assert bench.ports[0].limits_s[2] == verify_limit_s(2_000_000), "its size is known, not taken for nothing"


def test_a_failed_one_is_said_and_quarantined_and_not_verified_again() -> None:
    bench = Bench(bad)
    bench.watch.on_signal(committed(10))
    bench.watch.look()
    bench.watch.look()
    [(event, step, fields)] = bench.events
    assert (event, step, fields["key"], fields["reason"]) == ("verify_failed", 10, "shards/x", "hash mismatch")
    [(key, object_key, reason)] = bench.quarantined
    assert (key, object_key) == (key_of(10), "shards/x")
    assert "hash mismatch" in reason


def test_a_second_one_in_a_row_that_only_its_load_speaks_against_stays_in_use() -> None:
    """Else a machine that computes something else would take every Checkpoint of the run out of use."""
    bench = Bench(lambda key: replace(bad(key), by="load"))
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    bench.watch.on_signal(committed(20))
    assert not bench.watch.look()
    assert [key.step for key, _, _ in bench.quarantined] == [10]
    assert [event for event, _, _ in bench.events] == ["verify_failed", "verify_failed", "verify_stopped"]
    assert "step 20 stays in use" in bench.events[-1][2]["reason"]


def test_one_that_could_not_be_taken_out_of_use_is_no_second_one_in_a_row() -> None:
    bench = Bench(lambda key: replace(bad(key), by="load"))
    bench.quarantine_fails.append(StoreUnavailable("put", "quarantine/x", "away"))
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    assert bench.quarantined == []
    bench.now_s = 60.0
    assert bench.watch.look()
    assert [key.step for key, _, _ in bench.quarantined] == [10]
    assert "verify_stopped" not in [event for event, _, _ in bench.events]


def test_the_last_one_may_be_quarantined_while_the_process_begins() -> None:
    bench = Bench()

    def spawn() -> ScriptedVerifier:
        bench.watch.on_signal(Quarantined(attempt=ATTEMPT, step=10, key="x", reason="y"))
        return bench._spawn()

    bench.watch._spawn = spawn
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    assert bench.ports[0].keys == []


def test_whatever_goes_wrong_it_is_said_that_nothing_is_verified_any_more() -> None:
    bench = Bench(bad)
    bench.quarantine_fails.append(RuntimeError("a fault of ours"))
    bench.watch.on_signal(committed(10))
    bench.watch.start()
    bench.watch._thread.join(10)
    assert not bench.watch._thread.is_alive()
    assert [event for event, _, _ in bench.events] == ["verifying", "verify_failed", "verify_stopped"]
    bench.watch.close()


def test_the_only_one_stays_in_use_where_its_digests_are_right() -> None:
    """Taken out, it would leave a Run with nothing to go on from for the sake of another machine's arithmetic."""
    bench = Bench(lambda key: replace(bad(key), by="load", is_only=True))
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    assert bench.quarantined == []
    [(event, _, fields)] = bench.events
    assert (event, "stays in use" in fields["reason"]) == ("verify_failed", True)
    damaged = Bench(lambda key: replace(bad(key), is_only=True))
    damaged.watch.on_signal(committed(10))
    assert damaged.watch.look()
    assert [key.step for key, _, _ in damaged.quarantined] == [10]


def test_a_good_load_in_between_makes_the_next_doubt_a_first_one() -> None:
    answers = {10: "load", 20: None, 30: "load"}
    bench = Bench(lambda key: good(key) if answers[key.step] is None else replace(bad(key), by="load"))
    for step in (10, 20, 30):
        bench.watch.on_signal(committed(step))
        assert bench.watch.look()
    assert [key.step for key, _, _ in bench.quarantined] == [10, 30]


def test_damaged_bytes_are_quarantined_one_after_the_other() -> None:
    bench = Bench(bad)
    for step in (10, 20, 30):
        bench.watch.on_signal(committed(step))
        assert bench.watch.look()
    assert [key.step for key, _, _ in bench.quarantined] == [10, 20, 30]


def test_one_that_was_quarantined_meanwhile_or_is_gone_is_left_alone() -> None:
    bench = Bench(lambda _: None)
    bench.watch.on_signal(committed(10))
    bench.watch.on_signal(committed(20))
    bench.watch.on_signal(Quarantined(attempt=ATTEMPT, step=20, key="x", reason="y"))
    bench.watch.look()
    bench.watch.look()
    assert bench.ports[0].keys == [key_of(10)]
    assert bench.events == []


def test_a_store_that_is_away_is_waited_for_ever_longer() -> None:
    """Each try reads the whole Checkpoint anew, and a store that refuses will refuse again."""
    away = StoreUnavailable("get", "x", "away")
    answers = iter([away, away, good(key_of(10))])
    bench = Bench(lambda _: next(answers))
    bench.watch.on_signal(committed(10))
    for now_s, tries in ((0.0, 1), (29.0, 1), (30.0, 2), (89.0, 2)):
        bench.now_s = now_s
        assert bench.watch.look()
        assert len(bench.ports[0].keys) == tries
    assert bench.events == []
    bench.now_s = 90.0
    assert bench.watch.look()
    assert [event for event, _, _ in bench.events] == ["verified"]
    assert len(bench.ports) == 1


def test_a_lost_process_is_replaced_a_few_times_in_a_row_and_then_it_is_said() -> None:
    bench = Bench(lambda _: VerifierLost("killed for memory"))
    bench.watch.on_signal(committed(10))
    assert bench.watch.look()
    assert bench.watch.look()
    assert not bench.watch.look()
    assert len(bench.ports) == 3
    assert all(port.is_killed for port in bench.ports)
    [(event, _, fields)] = bench.events
    assert event == "verify_stopped"
    assert "killed for memory" in fields["reason"]


def test_closing_ends_a_verification_that_is_under_way() -> None:
    bench = Bench(lambda _: ScriptedVerifier.BLOCK)
    bench.watch.on_signal(committed(10))
    bench.watch.start()
    assert bench.is_spawned.wait(10)
    assert bench.ports[0].is_asked.wait(10)
    bench.watch.close()
    assert bench.ports[0].is_killed
    assert [event for event, _, _ in bench.events] == ["verifying"]


def test_off_means_no_thread() -> None:
    bench = Bench()
    watch = VerifierWatch(
        CheckpointConfig(verify="off"),
        spawn=bench._spawn,
        emit=bench._emit,
        quarantine=lambda *_: None,
    )
    watch.on_signal(committed(10))
    watch.start()
    watch.close()
    assert bench.ports == []
    assert bench.events == [("verifying", None, {"by": "off", "reason": None})]


def test_the_load_of_this_machine_is_a_number() -> None:
    assert load_per_core() >= 0.0


def test_yaml_off_is_off() -> None:
    assert CheckpointConfig.model_validate({"verify": False}).verify == "off"

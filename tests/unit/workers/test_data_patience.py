"""How long a rank waits for its data, under a clock of its own; the real stores are in tests/integration."""

from __future__ import annotations

import pytest

from storage.config import CheckpointConfig, StoreConfig
from storage.errors import StoreRefused, StoreUnavailable
from workers.contract import Phase
from workers.data_errors import DataError
from workers.data_patience import DataPatience, data_store_config, wait_limit_s
from workers.errors import AttemptAbandoned
from workers.heartbeat import Pulse

AWAY = StoreUnavailable("get_range", "train-00000.parquet", "503")


class Read:
    """Fails as the script says, then gives a number."""

    def __init__(self, *script: Exception) -> None:
        self._script = list(script)
        self.num_calls = 0

    def __call__(self) -> int:
        self.num_calls += 1
        if self._script:
            raise self._script.pop(0)
        return 7


class Desk:
    def __init__(self, limit_s: float = 100.0) -> None:
        self.now_s, self.pauses, self.is_over = 0.0, list[float](), False
        self.pulse = Pulse(phase=Phase.TRAINING, clock=lambda: self.now_s)
        self.patience = DataPatience(
            limit_s=limit_s, pulse=self.pulse, check=self._check, pause=self._pause, monotonic=lambda: self.now_s
        )

    def _check(self) -> None:
        if self.is_over:
            raise AttemptAbandoned("a000001-00000000", "over")

    def _pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.pauses.append(seconds)


def test_pauses_grow_and_each_try_is_a_heartbeat() -> None:
    desk = Desk()
    assert desk.patience.call(Read(*[AWAY] * 6)) == 7
    assert desk.pauses == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    assert desk.pulse.read().age_s == 0.0
    assert desk.pulse.read().phase is Phase.TRAINING


def test_patience_ends_at_its_limit_with_what_the_store_said_last() -> None:
    desk, last = Desk(limit_s=3.0), StoreUnavailable("get_range", "k", "the last word")
    with pytest.raises(StoreUnavailable, match="the last word"):
        desk.patience.call(Read(AWAY, AWAY, last, AWAY))
    assert desk.pauses == [0.5, 1.0]


@pytest.mark.parametrize("error", [StoreRefused("get_range", "k", "403"), DataError("bad token")])
@pytest.mark.parametrize("before", [(), (AWAY,)])
def test_what_waiting_cannot_cure_is_raised_at_once(error: Exception, before: tuple[Exception, ...]) -> None:
    desk, read = Desk(), Read(*before, error)
    with pytest.raises(type(error)):
        desk.patience.call(read)
    assert read.num_calls == len(before) + 1


def test_an_attempt_that_is_abandoned_waits_no_longer() -> None:
    desk = Desk()
    desk.is_over = True
    with pytest.raises(AttemptAbandoned):
        desk.patience.call(Read(AWAY))
    assert desk.pauses == []


def test_a_rank_with_peers_gives_up_before_their_collectives_do() -> None:
    config = CheckpointConfig(store=StoreConfig(deadline_s=30.0, retries=5), max_outage_s=1000.0)
    assert wait_limit_s(config, world_size=1, group_timeout_s=120.0) == 1000.0
    store = data_store_config(config.store)
    longest = wait_limit_s(config, world_size=2, group_timeout_s=120.0)
    assert longest > 0.0
    assert longest + 2 * (store.retries + 1) * store.deadline_s < 120.0
    assert wait_limit_s(config, world_size=2, group_timeout_s=1.0) == 0.0

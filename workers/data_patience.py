"""Outlasts a store that does not give the training data for a while, visibly: the wait is a phase of its own.

How long is the caller's bound: ranks that have their data wait in a collective meanwhile, which has a time-out. What
outlasts that is the driver's business, which begins a new Attempt when the store is back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from storage.config import CheckpointConfig, StoreConfig
from storage.errors import StoreRefused, StoreUnavailable
from workers.contract import Phase
from workers.heartbeat import Pulse

__all__ = ["DataPatience", "data_store_config", "wait_limit_s"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_FIRST_DELAY_S, _LONGEST_DELAY_S = 0.5, 5.0
_DEADLINE_S = 15.0
_RETRIES = 1
_SHARE_OF_GROUP_TIMEOUT = 0.75


def data_store_config(config: StoreConfig) -> StoreConfig:
    """For reading data inside a step: a call ends soon, so that a heartbeat comes before the next."""
    few = {"retries": min(_RETRIES, config.retries), "deadline_s": min(_DEADLINE_S, config.deadline_s)}
    return config.model_copy(update=few)


def wait_limit_s(config: CheckpointConfig, *, world_size: int, group_timeout_s: float) -> float:
    """How long a rank may wait for data before its peers' collectives give up; two more reads may run beside it."""
    if world_size == 1:
        return config.max_outage_s
    store = data_store_config(config.store)
    reads_s = 2 * (store.retries + 1) * store.deadline_s
    return min(config.max_outage_s, max(0.0, _SHARE_OF_GROUP_TIMEOUT * group_timeout_s - reads_s))


class DataPatience:
    """`call` tries a read again until it works, ``check`` raises, or ``limit_s`` have passed since it first failed."""

    def __init__(
        self,
        *,
        limit_s: float,
        pulse: Pulse,
        check: Callable[[], None],
        pause: Callable[[float], object] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit_s, self._pulse, self._check = limit_s, pulse, check
        self._pause, self._monotonic = pause, monotonic

    def call(self, read: Callable[[], T]) -> T:
        """What ``read`` returns. Raises StoreUnavailable at the end of patience, a refusal and all else at once."""
        try:
            return read()
        except StoreRefused:
            raise
        except StoreUnavailable as error:
            first = error
        with self._pulse.during(Phase.WAITING_FOR_DATA):
            return self._wait(read, first)

    def _wait(self, read: Callable[[], T], error: StoreUnavailable) -> T:
        began_s, delay_s = self._monotonic(), _FIRST_DELAY_S
        _log.info("the data does not come, training waits: %s", error)
        while True:
            if self._monotonic() - began_s + delay_s > self._limit_s:
                raise error
            self._check()
            self._pause(delay_s)
            self._pulse.beat()
            delay_s = min(_LONGEST_DELAY_S, 2 * delay_s)
            try:
                result = read()
            except StoreRefused:
                raise
            except StoreUnavailable as again:
                error = again
                continue
            _log.info("the data comes again after %.0f s", self._monotonic() - began_s)
            return result

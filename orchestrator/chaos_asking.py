"""Asks the driver of a run for another number of workers, as a person would with `raysume scale`, beside the schedule.

An answer may take seconds, in which other faults strike, so each is asked on a thread of its own.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

from orchestrator.asking import Asking, DriverGone, NoDriver, NotARun
from orchestrator.chaos import ChaosAction
from orchestrator.config import RunConfig
from orchestrator.errors import SupervisorError
from storage.errors import StorageError
from storage.open_store import open_store

__all__ = ["Resizing"]

_log = logging.getLogger(__name__)
_LIMIT_S: Final = 60.0
_CLOSE_S: Final = 5.0


class Resizing:
    """The `scale` verb. One that the driver refuses, or nobody answers, is said and has not happened."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._threads: list[threading.Thread] = []

    def ask(self, action: ChaosAction, on_accepted: Callable[[], None]) -> None:
        """``on_accepted`` is called from another thread. Raises SupervisorError where the last one is not over."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if self._threads:
            raise SupervisorError("the driver has not answered the scale before this one yet")
        thread = threading.Thread(target=self._ask, args=(action, on_accepted), name=f"chaos-{action}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def close(self) -> None:
        for thread in self._threads:
            thread.join(_CLOSE_S)

    def _ask(self, action: ChaosAction, on_accepted: Callable[[], None]) -> None:
        try:
            asking = Asking(open_store(self._config.run.url, self._config.checkpoint.store))
            reply = asking.ask("scale", action.workers, until_done=False, timeout_s=_LIMIT_S).reply
        except (NotARun, NoDriver, DriverGone, StorageError) as error:
            what = "the driver ended before it answered, " if isinstance(error, NoDriver | DriverGone) else ""
            _log.warning("chaos: %s did NOT happen: %s%s: %s", action, what, type(error).__name__, error)
            return
        if reply is None or reply.state == "refused":
            why = "no driver took it" if reply is None else f"the driver refused: {reply.reason}"
            _log.warning("chaos: %s did NOT happen: %s", action, why)
            return
        on_accepted()

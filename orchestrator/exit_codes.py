"""The exit codes of `raysume run` and `drill`, in one table. Scripts rely on them; a number is never reused."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["DrillCode", "ExitCode"]


class ExitCode(IntEnum):
    """Why the process ended. 1 is left to uncaught errors and 2 to the command line parser."""

    SUCCESS = 0
    CONFIG_ERROR = 10  # nothing was started: bad config, path, permission, batch arithmetic, mismatching Checkpoint
    USER_ERROR = 11  # the training code raised and max_user_errors is used up
    FAILURE_BUDGET = 12  # infrastructure failures used up their budget
    PREEMPTED = 13  # the preemption budget is used up
    STOPPED = 14  # Ctrl-C, SIGTERM or `ray job stop`
    BELOW_MINIMUM = 15  # fewer than world.min_workers for longer than world.max_wait_s, or every node goes away
    STORAGE_OUTAGE = 16  # the store stayed away too long, or too many saves in a row failed
    FINAL_SAVE_FAILED = 17  # trained to the last step, which could not be committed
    REFUSED = 18  # another driver holds the Run
    INTERNAL_ERROR = 19  # a fault of Raysume itself


class DrillCode(IntEnum):
    """What `raysume drill` adds: where a run of it ends otherwise than well, the drill ends with that run's code."""

    NOT_THE_SAME = 25  # both runs ended well, and the interrupted one is not the uninterrupted one, or proves nothing

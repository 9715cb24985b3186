"""How long after a save that failed the next one is tried: twice as long with each in a row, up to a cap. Pure.

A ledger of bounded size; time is an argument. What counts as a failure is its owner's to say.
"""

from __future__ import annotations

import math

__all__ = ["LONGEST_BACKOFF_S", "SaveBackoff"]

LONGEST_BACKOFF_S = 300.0
"""However many have failed: what failed them may be over, and only another save tells."""
_FIRST_S = 1.0  # where no least interval between saves is set
_MAX_DOUBLINGS = 30


class SaveBackoff:
    """``least_s``: between two saves anyhow, and so after the first failure."""

    def __init__(self, least_s: float) -> None:
        self._first_s = max(_FIRST_S, least_s)
        self.in_row = 0
        self.next_try_at_s = -math.inf

    def failed(self, tried_at_s: float) -> None:
        """One more has failed, which was tried at ``tried_at_s``."""
        wait_s = self._first_s * 2.0 ** min(self.in_row, _MAX_DOUBLINGS)
        wait_s = max(self._first_s, min(wait_s, LONGEST_BACKOFF_S))
        self.in_row, self.next_try_at_s = self.in_row + 1, tried_at_s + wait_s

    def reset(self) -> None:
        """A save succeeded, or another World makes the next one."""
        self.in_row, self.next_try_at_s = 0, -math.inf

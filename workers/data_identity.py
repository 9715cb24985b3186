"""The identity of the training data as a Tracker: saved in every Checkpoint, compared on every resume.

What belongs to the identity, and how a difference reads, is `dataset_card`'s business.
"""

from __future__ import annotations

import logging
from typing import Any

from workers.dataset_card import DatasetCard, check_fingerprint, fingerprint_fields

__all__ = ["DATA_TRACKER", "DataIdentity"]

_log = logging.getLogger(__name__)

DATA_TRACKER = "data"


class DataIdentity:
    """Raises DatasetChanged when a Checkpoint was made with other data, unless that is allowed; then it says so."""

    def __init__(self, card: DatasetCard, *, seed: int, global_batch: int, allow_changed: bool) -> None:
        self._card, self._seed, self._global_batch = card, seed, global_batch
        self._allow_changed = allow_changed

    def state_dict(self) -> dict[str, Any]:
        return dict(fingerprint_fields(self._card, seed=self._seed, global_batch=self._global_batch))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        changes = check_fingerprint(
            state_dict,
            self._card,
            seed=self._seed,
            global_batch=self._global_batch,
            allow_changed=self._allow_changed,
        )
        for change in changes:
            _log.warning("the data differs from the Checkpoint's, which is allowed: %s", change)

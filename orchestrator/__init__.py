"""The driver side: decides about nodes, workers and saves. Loads no torch."""

import os
import sys

_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.insert(0, _PLACE)  # a user's own workers.py would be found first
try:
    from workers.own_packages import import_beside
finally:
    sys.path.remove(_PLACE)

__all__: list[str] = []

import_beside("workers", "storage")

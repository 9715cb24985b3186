"""The driver side: decides about nodes, workers and saves. Loads no torch."""

import os
import sys

_PLACE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

sys.path.insert(0, _PLACE)  # a user's own workers.py would be found first
try:
    from workers.own_packages import import_beside
except ModuleNotFoundError as error:
    if error.name != "workers.own_packages":
        raise
    raise ImportError(
        f"{getattr(sys.modules['workers'], '__file__', None) or 'another module'} has the name of Raysume's package "
        "workers and was imported before it: give that file another name"
    ) from error
finally:
    sys.path.remove(_PLACE)

__all__: list[str] = []

import_beside("workers", "storage")

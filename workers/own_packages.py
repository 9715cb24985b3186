"""Makes sure that our packages are ours: a user's directory may hold a storage.py or workers.py that is found first.

Python looks into the directory of a script before all else, and so does a Ray worker into that of its driver. Standard
library alone: nothing else may be imported before this has been done.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

__all__ = ["PACKAGES", "import_beside", "place"]

PACKAGES = ("storage", "workers", "orchestrator")


def place() -> str:
    """The directory that holds our packages."""
    return os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def import_beside(*names: str) -> None:
    """Import these packages from where this one lies, whatever the path says. Raises ImportError where another module
    of such a name has been imported already."""
    for name in names:
        spec = PathFinder.find_spec(name, [place()])
        if spec is None or spec.loader is None:
            continue  # installed piece by piece: the path has to lead there
        known = sys.modules.get(name)
        if known is None:
            module = sys.modules[name] = module_from_spec(spec)
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[name]
                raise
            continue
        file = getattr(known, "__file__", None)
        if os.path.realpath(file or "") != os.path.realpath(spec.origin or ""):
            raise ImportError(
                f"{file or known} has the name of Raysume's package {name} and was imported before it: give that file "
                "another name"
            )

"""Processes of ours in a user's directory: they find our packages, whatever files of the user's have such names.

The user's own loop is imported from that directory all the same, after our packages were.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import PathFinder
from typing import Any, Final

from workers.own_packages import PACKAGES, place

__all__ = ["child_environment", "child_python", "hiding_files", "our_packages_first", "ray_environment"]

_HOOK: Final = "worker_process_setup_hook"
_MARK: Final = ("workers", "own_packages.py")


def child_python(module: str, *arguments: str) -> list[str]:
    """The command line of a module of ours. -P: not the user's directory first."""
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """For `child_python`: our packages are found where this process has them, installed or not. -P says nothing of
    PYTHONPATH, in which a job of Ray's has its working directory."""
    environment = dict(os.environ)
    others = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and path != place()]
    if os.path.basename(place()) in ("site-packages", "dist-packages") and not hiding_files(others):
        return environment  # found by itself; put first it would come before the standard library
    return {**environment, "PYTHONPATH": os.pathsep.join([place(), *others])}


def hiding_files(directories: Sequence[str]) -> list[str]:
    """Files in ``directories`` that would be imported in the place of our packages; another copy of ours is none."""
    elsewhere = [path for path in directories if not os.path.isfile(os.path.join(path, *_MARK))]
    found = (PathFinder.find_spec(name, [path]) for path in elsewhere for name in PACKAGES)
    return sorted({spec.origin for spec in found if spec is not None and spec.origin is not None})


def ray_environment() -> dict[str, Any] | None:
    """The runtime environment to connect to Ray with; None, as nearly always: nothing hides our packages.

    A Ray worker looks into the directories of its driver first. What it runs before gives a process of its own to each
    environment, so it is not asked for without need.
    """
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    searched = [os.getcwd(), *([script] if script in sys.path else []), *filter(None, paths)]
    hiding = hiding_files(searched)
    return {_HOOK: our_packages_first(place())} if hiding else None


def our_packages_first(driver_place: str) -> Callable[[], None]:
    """What a Ray worker does before its path is made longer. It travels as code: by its name it could not be found."""
    packages, mark = PACKAGES, _MARK

    def import_ours() -> None:
        import importlib
        import os
        import sys

        def has_ours(path: str) -> bool:
            return os.path.isfile(os.path.join(path, *mark))

        found = next((path for path in (driver_place, *sys.path) if has_ours(path)), None)
        if found is None:
            return  # not installed on this machine: what the driver's path leads to has to do
        sys.path.insert(0, found)
        try:
            for name in packages:
                importlib.import_module(name)
        finally:
            sys.path.remove(found)

    return import_ours

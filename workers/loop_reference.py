"""A training loop of a user's own by its name: MODULE:FUNCTION, imported where it is called. No torch, no ray.

What travels to a worker is the name alone, so a driver need not import what the loop imports. `python -m
workers.loop_reference MODULE:FUNCTION` says whether the name leads to something that can be called.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from workers.errors import WorkersError
from workers.own_packages import PACKAGES

__all__ = ["LoopNotFound", "LoopReference"]

_UNREADABLE = "expected MODULE:FUNCTION, e.g. train:train for the function train of train.py"


class LoopNotFound(WorkersError):
    """The name of a training loop leads to nothing that can be called. ``reason`` says what was tried."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(name, reason)
        self.name, self.reason = name, reason

    def __str__(self) -> str:
        return f"training loop {self.name!r}: {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopReference:
    """A train loop that is imported when it is first called. ``directory``: where the driver was started, which is
    looked into besides this process's own working directory."""

    module: str
    function: str
    directory: str

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"

    def __call__(self, session: Any) -> None:
        self.load()(session)

    @classmethod
    def parse(cls, text: str, directory: str) -> LoopReference:
        """Raises LoopNotFound for what is no MODULE:FUNCTION."""
        module, colon, function = text.partition(":")
        if module.endswith(".py"):
            path = module.removesuffix(".py").replace(os.sep, ".").lstrip(".")
            raise LoopNotFound(text, f"a module is named, not a file: {path}:{function or 'train'}")
        parts = [*module.split("."), *function.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            raise LoopNotFound(text, _UNREADABLE)
        return cls(module=module, function=function, directory=directory)

    def load(self) -> Callable[[Any], None]:
        """The function. Raises LoopNotFound."""
        places = self._look_here_too()
        found = self._import(places)
        for name in self.function.split("."):
            if not hasattr(found, name):
                raise LoopNotFound(str(self), self._no_such(found, name))
            found = getattr(found, name)
        if not callable(found):
            raise LoopNotFound(str(self), f"it is {type(found).__name__}, not a function of one session")
        loop: Callable[[Any], None] = found
        return loop

    def _look_here_too(self) -> list[str]:
        """Both directories are looked into first, as Python looks into that of a script."""
        places = [place for place in dict.fromkeys((os.getcwd(), self.directory)) if os.path.isdir(place)]
        for place in reversed(places):
            if place not in sys.path:
                sys.path.insert(0, place)
        return places

    def _import(self, places: list[str]) -> Any:
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            if error.name is not None and f"{self.module}.".startswith(f"{error.name}."):
                looked = ", ".join(places)
                reason = f"no module {error.name} was found in {looked}, nor among what is installed{self._taken()}"
                raise LoopNotFound(str(self), reason) from error
            raise LoopNotFound(str(self), f"module {self.module} imports {error.name}, which is not there") from error
        except (Exception, SystemExit) as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{type(error).__name__}: {error}, at {last.filename}:{last.lineno}"
            hint = "; what starts a run belongs below if __name__ == '__main__'" if _is_exit(error) else ""
            raise LoopNotFound(str(self), f"importing module {self.module} failed: {what}{hint}") from error

    def _no_such(self, owner: Any, name: str) -> str:
        names = sorted(one for one, value in vars(owner).items() if callable(value) and not one.startswith("_"))
        where = getattr(owner, "__file__", None) or self.module
        return f"{where} has no {name}; it has {', '.join(names[:12]) or 'no function at all'}{self._taken()}"

    def _taken(self) -> str:
        """Where a file of the user's may have been meant that is out of reach."""
        top = self.module.partition(".")[0]
        return f"; {top} is a package of Raysume's: give your file another name" if top in PACKAGES else ""


def _is_exit(error: BaseException) -> bool:
    return isinstance(error, SystemExit)


if __name__ == "__main__":
    try:
        LoopReference.parse(sys.argv[1], os.getcwd()).load()
    except LoopNotFound as error:
        print(error, file=sys.stderr)
        sys.exit(3)

"""Stand-ins for what loads a Checkpoint and for a verifier process: they answer as a test tells them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from orchestrator.verifier import Verdict
from orchestrator.verifier_watch import VerifierLost
from storage.keys import StepKey
from storage.object_store import ObjectStore
from storage.sources import RestorePlan
from workers.load_finding import LoadFinding

__all__ = ["ScriptedLoad", "ScriptedVerifier"]


class ScriptedLoad:
    """A LoadPort: ``answer`` is returned, or raised."""

    def __init__(self, answer: LoadFinding | Exception, *, state_bytes: int = 100) -> None:
        self.answer, self.state_bytes = answer, state_bytes
        self.steps: list[int] = []

    def check(self, plan: RestorePlan, store: ObjectStore) -> LoadFinding:
        self.steps.append(plan.step)
        store.get(plan.manifest_key)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


class ScriptedVerifier:
    """A VerifierPort. ``answers``: of `verify`, one after the other; None stands for a Checkpoint that is gone, BLOCK
    for an answer that never comes."""

    BLOCK = "block"

    def __init__(
        self, answers: Callable[[StepKey], Verdict | Exception | str | None], *, earlier: Mapping[StepKey, int]
    ) -> None:
        self._answers, self._earlier = answers, dict(earlier)
        self._killed = threading.Event()
        self.is_asked = threading.Event()
        self.keys: list[StepKey] = []
        self.limits_s: list[float] = []

    @property
    def is_killed(self) -> bool:
        return self._killed.is_set()

    def unverified(self) -> dict[StepKey, int]:
        return self._earlier

    def verify(self, key: StepKey, timeout_s: float) -> Verdict | None:
        self.keys.append(key)
        self.limits_s.append(timeout_s)
        self.is_asked.set()
        answer = self._answers(key)
        if isinstance(answer, str):
            assert self._killed.wait(min(timeout_s, 30.0)), "nobody killed the verifier"
            raise VerifierLost("killed")
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        self._killed.set()

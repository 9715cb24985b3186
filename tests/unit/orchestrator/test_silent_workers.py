"""Who does not answer is told once, and long before it is a hang."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.silent_workers import SilentWorkers

Said = list[tuple[str, dict[str, Any]]]


@pytest.mark.parametrize(("limit_s", "after_s"), [(15.0, 5.0), (6.0, 5.0), (60.0, 20.0)])
def test_a_silent_worker_is_told_once_and_another_one_beside_it(limit_s: float, after_s: float) -> None:
    said: Said = []
    silent = SilentWorkers(lambda event, fields: said.append((event, fields)), limit_s)
    silent.look_at({"w1": 0.0, "w2": after_s - 0.1})
    assert said == []
    for more_s in (0.0, 0.5, 3.0):
        silent.look_at({"w1": 0.0, "w2": after_s + more_s})
    silent.look_at({"w1": 0.0, "w2": 0.0})
    silent.look_at({"w1": 0.0, "w2": after_s})
    assert said == [("worker_silent", {"workers": ["w2"], "num_workers": 1, "silent_s": after_s})]
    silent.look_at({"w1": after_s, "w2": after_s + 1.0})
    assert said[1:] == [("worker_silent", {"workers": ["w1", "w2"], "num_workers": 2, "silent_s": after_s + 1.0})]


def test_of_a_large_world_that_falls_silent_some_are_named_in_one_event() -> None:
    said: Said = []
    SilentWorkers(lambda event, fields: said.append((event, fields)), 15.0).look_at({f"w{n}": 9.0 for n in range(1000)})
    ((_, fields),) = said
    assert (len(fields["workers"]), fields["num_workers"]) == (8, 1000)

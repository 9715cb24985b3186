"""Events read from bytes: those that are none are passed over, and a long file is not held parsed."""

from __future__ import annotations

import json
import tracemalloc

from orchestrator.event_tail import each_event, events_in


def test_lines_that_are_torn_or_no_events_are_passed_over() -> None:
    data = b'{"event": "a"}\n{"torn": \n[1]\n{"event": 5}\n{"event": "b", "step": 2}\n{"event": "c"'
    assert [event["event"] for event in each_event(data)] == ["a", "b"]
    assert list(each_event(data)) == events_in(data)


def test_a_file_of_months_is_read_one_event_at_a_time() -> None:
    line = json.dumps({"event": "step", **{f"field_{number}": f"{number}" * 8 for number in range(20)}})
    data = f"{line}\n".encode() * 5000
    tracemalloc.start()
    try:
        assert sum(1 for _ in each_event(data)) == 5000
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < len(data) / 4, "parsed, all of it takes many times its bytes"

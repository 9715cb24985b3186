"""Rank 0's word of what one save takes, from the coordinator to one event an Attempt. No ray, no torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from orchestrator.committer import Committer
from orchestrator.coordinator import Coordinator
from orchestrator.event_lines import event_line
from orchestrator.patient_store import PatientStore
from orchestrator.recorder import Recorder
from orchestrator.save_config import SavePolicyConfig
from orchestrator.signals import SaveShare
from storage.config import CheckpointConfig
from storage.keys import Attempt
from storage.memory_store import MemoryStore
from workers.contract import ExchangeRequest, ShareReport

FIRST, SECOND = (Attempt(number=number, nonce="0000aaaa") for number in (1, 2))
REPORT = ShareReport(
    step=10,
    share=0.0,
    extra_bytes=0,
    snapshot_share=0.71,
    snapshot_bytes=710,
    in_use_bytes=1000,
    is_measured=True,
    why="moments in float32 are 47% of the device memory in use",
)


class Lines:
    """An EventSink that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def emit(
        self, event: str, *, attempt: int | None = None, step: int | None = None, rank: int | None = None, **fields: Any
    ) -> None:
        self.events.append({"event": event, "attempt": attempt, "step": step, "rank": rank, **fields})

    def shares(self) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == "save_share"]


def begin(recorder: Recorder, attempt: Attempt) -> None:
    recorder.attempt_started(attempt, 2, restored_step=0)


def test_the_share_that_rank_0_brings_becomes_a_signal_of_its_attempt() -> None:
    store = PatientStore(MemoryStore(), limit_s=60.0, pause=lambda _: None)
    config = CheckpointConfig(every_steps=10)
    committer = Committer(
        run_id="run", store=store, config=config, metadata={}, now_utc=lambda: "", monotonic=lambda: 0.0
    )
    coordinator = Coordinator(
        committer=committer,
        store=store,
        config=config,
        policy=SavePolicyConfig(),
        total_steps=100,
        monotonic=lambda: 0.0,
    )
    coordinator.begin_attempt(SECOND, world_size=2, base_step=0)
    coordinator.exchange(ExchangeRequest(attempt=FIRST, shares=(REPORT,)))
    coordinator.exchange(ExchangeRequest(attempt=SECOND, shares=(REPORT,)))
    signals = coordinator.drain_signals()
    coordinator.close()
    assert [signal for signal in signals if isinstance(signal, SaveShare)] == [SaveShare(attempt=SECOND, report=REPORT)]


def test_a_share_told_twice_is_one_event_and_the_next_attempt_has_its_own() -> None:
    lines = Lines()
    recorder = Recorder(lines, start_unix_s=0.0)
    begin(recorder, FIRST)
    recorder.record([SaveShare(attempt=FIRST, report=REPORT)] * 2)
    begin(recorder, SECOND)
    recorder.record([SaveShare(attempt=SECOND, report=REPORT)])
    assert lines.shares() == [
        {"event": "save_share", "attempt": number, "rank": None, **asdict(REPORT)} for number in (1, 2)
    ]
    assert event_line(lines.shares()[0]) == f"a save is large for this machine's memory: {REPORT.why}"

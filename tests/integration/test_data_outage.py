"""The training data's store goes away while leaves are read: waited for in a phase of its own, nothing lost or doubled.

Real: OpenStack Swift, killed with SIGKILL and started again over the same files, or stopped; loader processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import boto3
import pytest

from orchestrator.failure_policy import AttemptFacts, FaultKind, classify, is_outage
from storage.config import StoreConfig
from storage.errors import StoreUnavailable
from storage.keys import Attempt
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from tests.servers import SwiftServer
from workers.config import DataConfig
from workers.contract import Outcome, OutcomeKind, Phase
from workers.data_patience import DataPatience
from workers.dataset import TokenDataset
from workers.dataset_card import Split, load_card
from workers.failure_cause import cause_of
from workers.heartbeat import Pulse
from workers.sample_order import sample_ids
from workers.stream import LeafStream, validation_leaves

NUM_ROWS = 64
URL = "s3://data/rows"


class Waiting:
    """A patience whose pauses take no time but on its own clock; each tells what ``on_pause`` makes of it."""

    def __init__(self, on_pause: Callable[[int], object], limit_s: float = 60.0) -> None:
        self.now_s, self.phases, self.pulse = 0.0, list[Phase](), Pulse(phase=Phase.TRAINING)
        self._on_pause = on_pause
        self.patience = DataPatience(
            limit_s=limit_s, pulse=self.pulse, check=lambda: None, pause=self._pause, monotonic=lambda: self.now_s
        )

    def _pause(self, seconds: float) -> None:
        self.now_s += seconds
        self.phases.append(self.pulse.read().phase)
        self._on_pause(len(self.phases))


@pytest.fixture
def swift(tmp_path: Path, s3_env: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[SwiftServer]:
    """A Swift of one's own with a dataset on it."""
    del s3_env
    server = SwiftServer(tmp_path).start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.endpoint)
        boto3.client("s3", endpoint_url=server.endpoint).create_bucket(Bucket="data")
        write_numbered_rows(URL, NUM_ROWS, validation_rows=16)
        end_fork_server()  # loader processes get the environment that it was started in
        yield server
    finally:
        end_fork_server()
        server.stop()


def end_fork_server() -> None:
    """The next process that needs one starts another."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def open_rows(split: Split = "train", deadline_s: float = 2.0) -> TokenDataset:
    """As workers open it: one try a call. Keeps one row group, so that nearly every leaf needs the store."""
    config = StoreConfig(retries=0, deadline_s=deadline_s)
    return TokenDataset(URL, load_card(open_store(URL)), split, config, cached_row_groups=1)


def stream_of(waiting: Waiting, num_workers: int) -> LeafStream:
    config = DataConfig(url=URL, sequence_length=4, global_batch=4, micro_batch=1, num_workers=num_workers, prefetch=2)
    return LeafStream(open_rows(), config, 0, 0, 1, waiting.patience)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_store_that_is_killed_between_two_leaves_costs_neither_a_sample_nor_the_attempt(
    swift: SwiftServer, num_workers: int
) -> None:
    waiting = Waiting(lambda number: swift.start() if number == 2 else None)
    seen: list[int] = []
    with stream_of(waiting, num_workers) as stream:
        stream.seek(1)
        for step in range(1, 9):
            for leaf in stream.leaves(step):
                seen += leaf.sample_ids.tolist()
                assert leaf.input_ids[:, 0].tolist() == leaf.sample_ids.tolist()
                if (step, leaf.index) == (3, 1):
                    swift.kill()
    assert seen == sample_ids(0, NUM_ROWS, 0, 32).tolist()
    assert len(waiting.phases) >= 2
    assert set(waiting.phases) == {Phase.WAITING_FOR_DATA}
    assert waiting.pulse.read().phase is Phase.TRAINING


def test_a_store_that_answers_nothing_is_waited_for_in_an_evaluation_too(swift: SwiftServer) -> None:
    waiting = Waiting(lambda _: swift.proceed())
    leaves = validation_leaves(open_rows("validation"), 16, 1, 0, 1, waiting.patience)
    first = next(leaves)
    swift.pause()
    assert [leaf.input_ids[0, 0].item() for leaf in (first, *leaves)] == list(range(NUM_ROWS, NUM_ROWS + 16))
    assert waiting.phases == [Phase.WAITING_FOR_DATA]


def test_an_end_of_patience_is_an_outage_and_nobody_s_mistake(swift: SwiftServer) -> None:
    waiting = Waiting(lambda _: None, limit_s=20.0)
    with stream_of(waiting, 0) as stream:
        stream.seek(1)
        swift.kill()
        with pytest.raises(StoreUnavailable) as caught:
            list(stream.leaves(1))
    assert 10.0 < waiting.now_s <= 20.0
    cause = cause_of(caught.value, rank=0, step=1, loaded=None, is_abandoned=False)
    attempt = Attempt(number=1, nonce="00000001")
    outcome = Outcome(attempt=attempt, worker_id="w0", rank=0, kind=OutcomeKind.FAILED, last_step=0, cause=cause)
    fault = classify(AttemptFacts(outcomes=(outcome,)))
    assert fault.kind is FaultKind.STORAGE
    assert is_outage(fault)
    assert "train-0000" in fault.detail

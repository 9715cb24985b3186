"""LeafStream with real loader processes (fork server), on a real dataset in a folder; one test kills their parent."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.stream import LeafStream, sample_ids

WAIT_S = 60.0


def config_of(folder: Path, num_workers: int, prefetch: int = 4) -> DataConfig:
    return DataConfig(
        url=str(folder), sequence_length=4, global_batch=4, micro_batch=2, num_workers=num_workers, prefetch=prefetch
    )


def consume(folder: Path, world_size: int, steps: range, num_workers: int) -> list[int]:
    """All ranks' consumed row ids of ``steps``, in stream order."""
    dataset = TokenDataset.open(str(folder), "train")
    by_place: dict[tuple[int, int], list[int]] = {}
    for rank in range(world_size):
        with LeafStream(dataset, config_of(folder, num_workers), 0, rank, world_size) as stream:
            stream.seek(steps.start)
            for step in steps:
                for leaf in stream.leaves(step):
                    assert leaf.input_ids[:, 0].tolist() == leaf.sample_ids.tolist()
                    if not leaf.is_surplus:
                        by_place[step, leaf.index] = leaf.sample_ids.tolist()
    return [row for place in sorted(by_place) for row in by_place[place]]


def gone(pid: int) -> bool:
    """Waits until the process of this pid has ended, whoever its parent is."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], WAIT_S)[0])
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("workers_before", "world_before", "workers_after", "world_after"),
    [(2, 2, 2, 2), (2, 2, 0, 3), (0, 3, 1, 2), (0, 2, 0, 1)],
)
def test_what_was_prefetched_but_not_consumed_comes_again_and_nothing_twice(  # case B46
    tmp_path: Path, workers_before: int, world_before: int, workers_after: int, world_after: int
) -> None:
    """Loader processes before and after, before only, after only, and the thread that reads ahead without them."""
    write_numbered_rows(str(tmp_path), 40)
    seen = consume(tmp_path, world_before, range(1, 6), workers_before)
    seen += consume(tmp_path, world_after, range(6, 11), workers_after)
    assert seen == sample_ids(0, 40, 0, 40).tolist()
    assert sorted(seen) == list(range(40))


def test_seeking_and_closing_end_the_loader_processes(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 40)
    before = set(multiprocessing.active_children())
    stream = LeafStream(TokenDataset.open(str(tmp_path), "train"), config_of(tmp_path, 2), 0, 0, 1)
    stream.seek(1)
    first = {child.pid for child in set(multiprocessing.active_children()) - before}
    next(stream.leaves(1))
    stream.seek(7)
    second = {child.pid for child in set(multiprocessing.active_children()) - before}
    assert [leaf.index for leaf in stream.leaves(7)] == [0, 1]
    stream.close()
    assert (len(first), len(second), first & second) == (2, 2, set())
    assert all(gone(pid) for pid in first | second if pid)


def test_a_stream_works_off_the_main_thread_and_leaves_the_random_state_alone(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 40)
    state = torch.get_rng_state()
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.extend(consume(tmp_path, 1, range(1, 4), 1)))
    thread.start()
    thread.join(WAIT_S)
    assert seen == sample_ids(0, 40, 0, 12).tolist()
    assert torch.equal(state, torch.get_rng_state())


def test_an_error_in_a_loader_process_keeps_its_type_and_fields(tmp_path: Path) -> None:
    write_numbered_rows(str(tmp_path), 40)
    dataset = TokenDataset.open(str(tmp_path), "train")
    for path in tmp_path.glob("train-*.parquet"):
        path.unlink()
    with LeafStream(dataset, config_of(tmp_path, 1), 0, 0, 1) as stream:
        stream.seek(1)
        with pytest.raises(DataError, match="the file is missing") as caught:
            next(stream.leaves(1))
    assert (caught.value.file or "").startswith("train-")


PARENT = """
import multiprocessing, sys
from workers.config import DataConfig
from workers.dataset import TokenDataset
from workers.stream import LeafStream

if __name__ == "__main__":
    config = DataConfig(
        url=sys.argv[1], sequence_length=1024, global_batch=64, micro_batch=64, num_workers=2, prefetch=4
    )
    stream = LeafStream(TokenDataset.open(sys.argv[1], "train"), config, 0, 0, 1)
    stream.seek(1)
    list(stream.leaves(1))
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    sys.stdin.read()
"""


def test_loader_processes_end_when_their_training_process_is_killed(tmp_path: Path) -> None:
    """With leaves too large for the queue's pipe, so that they are blocked in it when nobody reads any more."""
    write_numbered_rows(str(tmp_path / "data"), 128, sequence_length=1024, row_group_rows=64)
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    ) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        parent.send_signal(signal.SIGKILL)
        parent.wait(WAIT_S)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)

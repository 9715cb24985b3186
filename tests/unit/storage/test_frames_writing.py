"""Writing a Shard to a sink: the same bytes with and without threads, little memory, and nothing read afterwards."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from storage.codec import digest128
from storage.config import CheckpointConfig
from storage.frames import RawChunk, ShardSummary, encode_shard, itemsize_of, write_shard
from storage.keys import Attempt

ATTEMPT = Attempt(number=3, nonce="0123abcd")
CONFIG = CheckpointConfig(frame_bytes=1 << 16)


def chunks(num_bytes: int = 6 << 20) -> list[RawChunk]:
    rng = np.random.default_rng(0)
    big = rng.normal(0, 0.02, num_bytes // 4).astype(np.float32)
    parts = [("big", big.reshape(-1, 64)), ("odd", big[:77]), ("step", big[:1].reshape(()))]
    return [
        RawChunk(
            name=name,
            dtype="float32",
            offsets=(0,) * array.ndim,
            sizes=array.shape,
            level="L1",
            itemsize=itemsize_of("float32"),
            data=memoryview(array.tobytes()),
        )
        for name, array in parts
    ]


class Sink:
    """Keeps what is written; fails at write number ``fails_at``."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.writes: list[bytes] = []
        self._fails_at = fails_at

    def write(self, data: bytes | memoryview, /) -> None:
        if len(self.writes) == self._fails_at:
            raise OSError("no space left")
        self.writes.append(bytes(data))


class CountingPool(Executor):
    """A pool of threads that knows how many frames wait or are being encoded."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._lock = threading.Lock()
        self.futures: list[Future[Any]] = []
        self.most_unwritten = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = self._threads.submit(fn, *args, **kwargs)
        with self._lock:
            self.futures.append(future)
        return future


def write(sink: Sink, pool: Executor | None = None, config: CheckpointConfig = CONFIG) -> ShardSummary:
    return write_shard(chunks(), sink, step=7, attempt=ATTEMPT, rank=2, config=config, pool=pool)


def test_the_streamed_object_is_the_one_made_in_memory_with_and_without_threads() -> None:
    whole = encode_shard(chunks(), step=7, attempt=ATTEMPT, rank=2, config=CONFIG)
    with ThreadPoolExecutor(3) as threads:
        for pool in (None, threads):
            sink = Sink()
            summary = write(sink, pool)
            content = b"".join(sink.writes)
            assert content == bytes(whole.data)
            assert summary.record("k") == whole.record("k")
            assert (summary.size, summary.digest) == (len(content), digest128(content))
            assert summary.index == whole.index


def test_a_shard_is_written_a_frame_at_a_time() -> None:
    sink = Sink()
    write(sink)
    assert max(map(len, sink.writes[:-2])) <= CONFIG.frame_bytes * 4
    assert len(sink.writes) > 20


def test_frames_that_wait_to_be_written_are_bounded_in_bytes() -> None:
    """A sink that stands still: no more than the window is ever encoded ahead of it."""
    arrays = chunks(64 << 20)
    with ThreadPoolExecutor(2) as threads:
        pool = CountingPool(threads)

        class Blocked(Sink):
            def write(self, data: bytes | memoryview, /) -> None:
                pool.most_unwritten = max(pool.most_unwritten, len(pool.futures) - len(self.writes))
                super().write(data)

        config = CheckpointConfig(frame_bytes=1 << 20)
        write_shard(arrays, Blocked(), step=1, attempt=ATTEMPT, rank=0, config=config, pool=pool)
    assert 2 <= pool.most_unwritten <= 17


@pytest.mark.parametrize("fails_at", [0, 3])
def test_an_error_of_the_sink_passes_through_and_leaves_no_thread_at_work(fails_at: int) -> None:
    with ThreadPoolExecutor(2) as threads:
        pool = CountingPool(threads)
        with pytest.raises(OSError, match="no space left"):
            write(Sink(fails_at), pool)
        assert pool.futures
        assert all(future.done() for future in pool.futures)


def test_a_chunk_that_lies_about_its_size_is_refused_before_anything_is_written() -> None:
    good, *_ = chunks()
    bad = RawChunk(name="w", dtype="float32", offsets=(0,), sizes=(3,), level="L1", itemsize=4, data=memoryview(b"ab"))
    sink = Sink()
    with pytest.raises(ValueError, match="must hold 12 bytes"):
        write_shard([good, bad], sink, step=7, attempt=ATTEMPT, rank=2, config=CONFIG)
    assert sink.writes == []

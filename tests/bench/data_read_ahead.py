"""How much of a step waits for data on a store that answers late, with reading ahead on and off.

`python -m tests.bench.data_read_ahead` prints one line for each setting. The store is memory whose every read takes
``--latency-ms``, read as a remote one is, several row groups at once; the step is arithmetic of about ``--step-ms``.
Timed: for a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from storage.memory_store import MemoryStore
from storage.open_store import open_store
from tests.fakes.token_datasets import write_numbered_rows
from workers.config import DataConfig
from workers.dataset import READS_AT_ONCE, TokenDataset, cached_groups
from workers.dataset_card import load_card
from workers.stream import LeafStream

SETTINGS = (("rows", 0), ("rows", 2), ("blocks", 0), ("blocks", 2))
SEQUENCE_LENGTH, NUM_ROWS, GROUP_ROWS = 128, 4096, 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    shuffle: str
    prefetch: int
    step_s: float
    waiting_s: float

    @property
    def share(self) -> float:
        return self.waiting_s / self.step_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--latency-ms", type=float, default=50.0)
    parser.add_argument("--step-ms", type=float, default=300.0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    url = f"memory://{uuid.uuid4()}"
    write_numbered_rows(url, NUM_ROWS, sequence_length=SEQUENCE_LENGTH, row_group_rows=GROUP_ROWS)
    rounds = _rounds_of(options.step_ms / 1000)
    get_range = MemoryStore.get_range

    def late(store: MemoryStore, key: str, offset: int, length: int, *, deadline_s: float = 60.0) -> bytes:
        time.sleep(options.latency_ms / 1000)
        return get_range(store, key, offset, length, deadline_s=deadline_s)

    MemoryStore.get_range = late  # type: ignore[method-assign,assignment]
    found = [
        _measure(_config(url, shuffle, prefetch, options.micro_batch), options.steps, rounds)
        for shuffle, prefetch in SETTINGS
    ]
    print(f"store {options.latency_ms:.0f} ms, leaf of {options.micro_batch} rows, computing {options.step_ms:.0f} ms")
    for one in found:
        print(
            f"shuffle {one.shuffle:<7} prefetch {one.prefetch}: step {1000 * one.step_s:.0f} ms, "
            f"waiting {1000 * one.waiting_s:.0f} ms, {100 * one.share:.1f} %"
        )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1))


def _config(url: str, shuffle: str, prefetch: int, micro_batch: int) -> DataConfig:
    return DataConfig.model_validate(
        {
            "url": url,
            "sequence_length": SEQUENCE_LENGTH,
            "global_batch": micro_batch,
            "micro_batch": micro_batch,
            "shuffle": shuffle,
            "prefetch": prefetch,
        }
    )


def _measure(data: DataConfig, steps: int, rounds: int) -> Measured:
    """Means over the steps after the first two, which open files and start the thread."""
    waiting, taken = list[float](), list[float]()
    kept = cached_groups(data.shuffle, data.shuffle_window_groups)
    card = load_card(open_store(data.url))
    rows = TokenDataset(data.url, card, "train", cached_row_groups=kept, reads_at_once=READS_AT_ONCE)
    with LeafStream(rows, data, 0, 0, 1) as stream:
        stream.seek(1)
        for step in range(1, steps + 3):
            began_s = time.perf_counter()
            (_leaf,) = stream.leaves(step)
            got_s = time.perf_counter()
            _compute(rounds)
            waiting.append(got_s - began_s)
            taken.append(time.perf_counter() - began_s)
    return Measured(
        shuffle=data.shuffle,
        prefetch=data.prefetch,
        step_s=sum(taken[2:]) / steps,
        waiting_s=sum(waiting[2:]) / steps,
    )


def _compute(rounds: int) -> None:
    square = torch.ones(256, 256)
    for _ in range(rounds):
        square = square @ square * 1e-3


def _rounds_of(seconds: float) -> int:
    """How many rounds take about so long here."""
    _compute(50)  # the first rounds start what torch needs
    began_s, rounds = time.perf_counter(), 200
    _compute(rounds)
    return max(1, round(rounds * seconds / (time.perf_counter() - began_s)))


if __name__ == "__main__":
    main()

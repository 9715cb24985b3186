"""A stored Checkpoint with a flipped bit anywhere, or with a planted pickle: found by verifying and by loading.

Real records and Shards on the in-memory store; loading is what a rank does, without torch.
"""

from __future__ import annotations

import ast
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.codec import Encoding
from storage.commit_bytes import commit_from_bytes, commit_to_bytes
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig
from storage.errors import CorruptCheckpoint, StorageError
from storage.frames import RawChunk, encode_shard, read_index, read_rows
from storage.keys import Attempt, StepKey, quarantine_key, shard_key
from storage.manifest import AttemptRecord, ChunkPlace, Commit, Manifest, Receipt, TensorLayout
from storage.memory_store import MemoryStore
from storage.merge import merge_receipts
from storage.restore import plan_restore
from storage.verify import verify_commit
from tests.fakes.checkpoints import RUN, TIME, attempt, save

SEED = 11
NEXT = Attempt(number=2, nonce="00000002")
REPOSITORY = Path(__file__).parents[3]


def load(store: MemoryStore) -> tuple[int, dict[tuple[str, tuple[int, ...]], bytes]]:
    """The step and the raw bytes of every chunk of the newest usable Checkpoint, as ranks read them."""
    log = CommitLog(store, RUN)
    plan = plan_restore(log, attempt=NEXT)
    assert plan is not None
    commit = next(commit for commit in log.commits() if commit.step_key == plan.source)
    manifest = log.read_manifest(commit)
    loaded: dict[tuple[str, tuple[int, ...]], bytes] = {}
    for record in manifest.shards:

        def fetch(offset: int, length: int, key: str = record.key) -> bytes:
            return store.get_range(key, offset, length)

        for chunk in read_index(fetch, record, step=plan.step).chunks:
            rows = chunk.sizes[0]
            loaded[chunk.name, chunk.offsets] = read_rows(chunk, 0, rows, fetch, step=plan.step, key=record.key)
    return plan.step, loaded


def is_sound(store: MemoryStore) -> bool:
    """What `verify` says of all that lies in the store."""
    log = CommitLog(store, RUN)
    scan = log.scan()
    return (
        not scan.unreadable
        and len(scan.commits) == 2
        and all(verify_commit(store, log, commit).is_good for commit in scan.commits)
    )


def copy_of(store: MemoryStore) -> MemoryStore:
    copy = MemoryStore()
    for entry in store.list(""):
        copy.put(entry.key, store.get(entry.key))
    return copy


def small_checkpoint(encoding: Encoding) -> MemoryStore:
    """Steps 1 and 2 of two ranks, a few hundred bytes each; step 2 has a loss and a metric."""
    store = MemoryStore()
    save(store, 1, metric=0.5)
    key = StepKey(step=2, attempt=attempt())
    receipts = []
    for rank in range(2):
        data = random.Random(rank).randbytes(96)
        chunk = RawChunk(
            name="w",
            dtype="float32",
            offsets=(rank * 4, 0),
            sizes=(4, 6),
            level="L1",
            itemsize=4,
            data=memoryview(data),
        )
        config = CheckpointConfig(encoding=encoding)
        encoded = encode_shard([chunk], step=2, attempt=key.attempt, rank=rank, config=config)
        store.put(shard_key(key, rank), bytes(encoded.data))
        place = ChunkPlace(rank=rank, offsets=(rank * 4, 0), sizes=(4, 6))
        receipts.append(
            Receipt(
                run_id=RUN,
                step=2,
                attempt=AttemptRecord.of(key.attempt),
                world_size=2,
                shard=encoded.record(shard_key(key, rank)),
                tensors={"w": TensorLayout(dtype="float32", shape=(8, 6), level="L1", chunks=(place,))},
                shared_state={"lr": 0.1} if rank == 0 else None,
            )
        )
    commit_it(store, merge_receipts(receipts, time_utc=TIME, metadata={}, ledger=None))
    return store


def commit_it(store: MemoryStore, manifest: Manifest) -> Commit:
    log = CommitLog(store, RUN, writer="0badcafe")
    stored = log.write_manifest(manifest)
    return log.append(
        Commit(
            run_id=RUN,
            step=manifest.step,
            attempt=manifest.attempt,
            base_step=0,
            time_utc=TIME,
            manifest_key=stored.key,
            manifest_bytes=stored.num_bytes,
            manifest_digest=stored.digest,
            stored_bytes=manifest.stored_bytes,
            loss=1.25,
            metric=0.75,
        )
    )


def outcome(store: MemoryStore) -> str:
    """What loading a damaged store comes to."""
    try:
        step, _ = load(store)
    except CorruptCheckpoint as error:
        return f"refused for {error.key}"
    return f"step {step} instead"


@pytest.mark.parametrize("encoding", ["raw", "shuffle-zstd", "planes-zstd"])
def test_a_flipped_bit_in_any_byte_of_a_checkpoint_is_found_by_verify_and_by_load(encoding: Encoding) -> None:
    good, source = small_checkpoint(encoding), random.Random(SEED)
    assert is_sound(good)
    step, values = load(copy_of(good))
    assert (step, len(values)) == (2, 2)
    of_step_2 = [entry for entry in good.list("") if "step-0000000002" in entry.key]
    assert len(of_step_2) == 4
    for entry in of_step_2:
        content = good.get(entry.key)
        for place in range(entry.size):
            where = f"{entry.key} byte {place} of {entry.size}, seed {SEED}"
            bad = copy_of(good)
            flipped = content[place] ^ 1 << source.randrange(8)
            bad.put(entry.key, content[:place] + bytes([flipped]) + content[place + 1 :])
            assert not is_sound(bad), where
            # Found: refused, or the step before is taken.
            assert outcome(bad) in ("step 1 instead", f"refused for {entry.key}"), where


def test_a_commit_of_the_first_format_has_no_digest_and_is_read() -> None:
    store = small_checkpoint("raw")
    commit = CommitLog(store, RUN).commits()[-1]
    assert commit_from_bytes(commit.model_dump_json().encode()) == commit
    assert commit_from_bytes(commit_to_bytes(commit)) == commit


class Planted:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (self._path,)


def test_a_planted_pickle_is_never_unpickled(tmp_path: Path) -> None:
    made = tmp_path / "made"
    planted = pickle.dumps(Planted(made))
    pickle.loads(planted)
    assert made.exists(), "the plant must work for the test to mean something"
    made.unlink()
    good = small_checkpoint("raw")
    for entry in good.list(""):
        bad = copy_of(good)
        bad.put(entry.key, planted)
        is_sound(bad)
        try:
            load(bad)
        except StorageError:
            continue
    bad = copy_of(good)
    newest = CommitLog(bad, RUN).commits()[-1]
    bad.put(quarantine_key(newest.step_key), planted)
    assert CommitLog(bad, RUN).quarantined()
    assert load(shard_of_a_pickle(planted))[1] == {("w", (0,)): planted}
    assert not made.exists()


def shard_of_a_pickle(planted: bytes) -> MemoryStore:
    """A Checkpoint that is whole and good, whose one tensor's bytes are a pickle."""
    store = MemoryStore()
    key = StepKey(step=2, attempt=attempt())
    chunk = RawChunk(
        name="w",
        dtype="uint8",
        offsets=(0,),
        sizes=(len(planted),),
        level="L1",
        itemsize=1,
        data=memoryview(planted),
    )
    encoded = encode_shard([chunk], step=2, attempt=key.attempt, rank=0, config=CheckpointConfig(encoding="zstd"))
    store.put(shard_key(key, 0), bytes(encoded.data))
    place = ChunkPlace(rank=0, offsets=(0,), sizes=(len(planted),))
    receipt = Receipt(
        run_id=RUN,
        step=2,
        attempt=AttemptRecord.of(key.attempt),
        world_size=1,
        shard=encoded.record(shard_key(key, 0)),
        tensors={"w": TensorLayout(dtype="uint8", shape=(len(planted),), level="L1", chunks=(place,))},
        shared_state={},
    )
    commit_it(store, merge_receipts([receipt], time_utc=TIME, metadata={}, ledger=None))
    return store


def test_nothing_that_runs_stored_bytes_is_called() -> None:
    """No unpickler in the packages; `torch.load` only with ``weights_only``, `yaml.load` only with a loader of ours."""
    found = []
    for package in ("storage", "workers", "orchestrator"):
        for path in (REPOSITORY / package).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and _runs(node):
                    found.append(f"{path.name}:{node.lineno}")
    assert not found


def _runs(call: ast.Call) -> bool:
    module, _, name = ast.unparse(call.func).rpartition(".")
    if (module, name) in (("torch", "load"), ("yaml", "load")):
        given = {word.arg: ast.unparse(word.value) for word in call.keywords}
        return given.get("weights_only") != "True" and given.get("Loader") != "_StrictLoader"
    unpickles = module in _UNPICKLERS and name in {"load", "loads", "Unpickler"}
    return unpickles or (name in {"eval", "exec"} and not module)


_UNPICKLERS = {"pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "np", "numpy"}

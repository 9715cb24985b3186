"""A Checkpoint whose Progress knows less than ours is resumed, and what it lacks begins here."""

from __future__ import annotations

import pytest
from torch.distributed.device_mesh import DeviceMesh

from storage.memory_store import MemoryStore
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.sample_history import order_of
from tests.fakes.small_training import build_state, commit, newest_plan, save, train_step
from workers.advance import begin
from workers.ledger import Ledger
from workers.resume import restore


@pytest.mark.parametrize("lacking", [("ledger",), ("ledger", "skipped")])
def test_a_checkpoint_of_a_release_without_ledgers_is_resumed_with_one_from_its_step_on(
    mesh: DeviceMesh, lacking: tuple[str, ...]
) -> None:
    store, sink = MemoryStore(), RecordingSink()
    state = build_state(mesh)
    train_step(state)
    state.progress.ledger = "what a later one says"
    save(state, store, sink)
    (receipt,) = sink.receipts
    assert receipt.shared_state is not None
    progress = receipt.shared_state["progress"]
    assert isinstance(progress, dict)
    plain = {name: value for name, value in progress.items() if name not in lacking}
    older = receipt.model_copy(update={"shared_state": receipt.shared_state | {"progress": plain}})
    commit(store, [older])
    resumed = build_state(mesh, init_weights=False)
    restore(resumed, newest_plan(store), store, rank=0, world_size=1)
    assert (resumed.progress.step, resumed.progress.position, resumed.progress.ledger) == (1, 3, "")
    begin(resumed.progress, order_of(), (), 1)
    beginning = Ledger.read(resumed.progress.ledger).beginning
    assert (beginning.step, beginning.position, beginning.place) == (1, 3, 3)

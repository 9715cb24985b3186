"""The actor shells on a real local Ray: worker, rendezvous and Keeper actors; the coordinator is scripted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from storage.keeper_actor import KeeperActor
from storage.keys import Attempt
from tests.fakes.rank_processes import make_spec
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.contract import ExchangeReply, ExchangeRequest, OutcomeKind, Phase
from workers.rendezvous import RendezvousActor
from workers.worker import create_worker

CALL_S = 120.0


@ray.remote(num_cpus=0)
class CoordinatorStub:
    """Answers every exchange and counts the reports."""

    def __init__(self) -> None:
        self._steps: list[int] = []

    def exchange(self, request: ExchangeRequest) -> ExchangeReply:
        self._steps.extend(report.step for report in request.reports)
        return ExchangeReply(attempt=request.attempt, order=None, settled_steps=(), is_current=True)

    def steps(self) -> list[int]:
        return self._steps


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 1024 * 1024,
        _node_ip_address="127.0.0.1",
        runtime_env={"env_vars": {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}},
    )
    try:
        yield
    finally:
        ray.shutdown()


def get(reference: Any) -> Any:
    return ray.get(reference, timeout=CALL_S)


@pytest.mark.usefixtures("local_ray")
def test_two_worker_actors_train_to_the_end_and_refuse_what_is_old(tmp_path: Path) -> None:
    settings = make_settings(str(tmp_path / "data"), total_steps=3)
    write_numbered_rows(settings.data.url, 60, sequence_length=16, validation_rows=4)
    rendezvous = RendezvousActor.remote("127.0.0.1")
    keeper_class = ray.remote(num_cpus=0, max_concurrency=8)(KeeperActor)
    keepers = [
        keeper_class.remote("run", f"n{rank}", str(tmp_path / "run"), settings.checkpoint, "build", "none", 60.0)
        for rank in range(2)
    ]
    workers = [
        create_worker(settings, worker_id=f"w{rank}", node_id=f"n{rank}", keeper=keepers[rank], options={"num_cpus": 1})
        for rank in range(2)
    ]
    facts = get([worker.prepare.remote() for worker in workers])
    assert [(one.worker_id, one.device) for one in facts] == [("w0", "cpu"), ("w1", "cpu")]
    host, port = get(rendezvous.address.remote())
    assert host == "127.0.0.1"
    coordinator = CoordinatorStub.remote()
    attempt = Attempt(number=1, nonce="00000001")
    # The wait is sent first: a wait never misses a start that is still on its way.
    waits = [worker.wait_outcome.remote(attempt, CALL_S) for worker in workers]
    get([worker.start.remote(make_spec(attempt, r, 2, port), coordinator) for r, worker in enumerate(workers)])
    outcomes = get(waits)
    assert [outcome.kind for outcome in outcomes] == [OutcomeKind.FINISHED] * 2
    assert get(coordinator.steps.remote()) == [1, 2, 3]
    assert get(workers[1].heartbeat.remote()).phase is Phase.IDLE
    with pytest.raises(ray.exceptions.RayTaskError, match="not newer"):
        get(workers[0].start.remote(make_spec(attempt, 0, 1, port), coordinator))
    assert get(workers[0].abandon.remote(attempt, 10.0)).is_clean
    for keeper in keepers:
        assert get(keeper.status.remote()).last_error is None
        get(keeper.close.remote())

"""What a worker's actor adds to its process. Played: the process; Ray is not needed for what is looked at here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.worker_settings import make_settings
from workers import worker_process
from workers.worker import WorkerActor

Seen = dict[str, bool]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    """Whether objects were collected while the process was made and while it prepared itself, which fails."""
    found: Seen = {}

    class Process:
        def __init__(self, *_: Any, **__: Any) -> None:
            found["made"] = gc.isenabled()

        def prepare(self) -> None:
            found["prepared"] = gc.isenabled()
            raise ValueError("no such dataset")

    monkeypatch.setattr(worker_process, "WorkerProcess", Process)
    yield found
    gc.enable()


def test_nothing_is_collected_until_a_worker_is_prepared_or_has_failed(seen: Seen) -> None:
    plain: Any = WorkerActor.__ray_metadata__.modified_class  # type: ignore[attr-defined]
    worker = plain(make_settings("rows"), worker_id="w1", node_id="n1", keeper=None)
    with pytest.raises(ValueError, match="no such dataset"):
        worker.prepare()
    assert seen == {"made": False, "prepared": False}
    assert gc.isenabled()

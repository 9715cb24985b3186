"""What a rank says of the Checkpoint it was filled from. Real: FSDP2 on gloo, the record path, the restore."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from storage.keys import Attempt
from storage.local_store import LocalStore
from tests.fakes.rank_processes import make_spec
from tests.fakes.small_training import OPTIM, OddModel, build_state, save_alone, train_step
from tests.fakes.worker_settings import make_settings
from workers.contract import Restored
from workers.loading import Makers, WarmParts, load_state
from workers.optim import lr_factor_at
from workers.resume import RestoreReport


def own_schedule(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda _: 1.0)


@pytest.mark.parametrize(
    ("total_steps", "is_own", "told"), [(1500, False, None), (175, False, (1500, 175)), (175, True, None)]
)
def test_a_schedule_that_run_steps_made_shorter_is_followed_and_told(
    mesh: DeviceMesh, tmp_path: Path, total_steps: int, is_own: bool, told: tuple[int, int] | None
) -> None:
    state = build_state(mesh)
    for _ in range(8):
        train_step(state)
    plan = save_alone(state, LocalStore(tmp_path), metadata={"config": {"run": {"steps": 1500}}})
    plan = replace(plan, root_url=str(tmp_path))
    spec = replace(make_spec(Attempt(number=2, nonce="11111111"), 0, 1, 1), restore=plan)
    settings = replace(make_settings("unused", total_steps=total_steps), optim=OPTIM, reproducible=False)
    parts = WarmParts(
        device=torch.device("cpu"),
        template=None,
        dataset=None,  # type: ignore[arg-type]
        validation=None,
        stager=None,  # type: ignore[arg-type]
    )
    heard: list[Restored] = []

    def on_restored(restored: Restored, _: RestoreReport) -> None:
        heard.append(restored)

    makers = Makers(model=OddModel, scheduler=own_schedule if is_own else None)
    loaded = load_state(
        makers, settings=settings, spec=spec, parts=parts, own_trackers={}, mesh=mesh, on_restored=on_restored
    )
    assert [restored.schedule_steps for restored in heard] == [told]
    if not is_own:
        loaded.scheduler.step()
        assert loaded.scheduler.get_last_lr()[0] == pytest.approx(OPTIM.lr * lr_factor_at(10, OPTIM, total_steps))

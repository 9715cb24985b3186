"""A training loop with unstable phases: the learning rate is many times too high there. Run by its path.

Arguments: the run's YAML file, the address of the Ray cluster, and the loop's own settings as JSON: ``windows`` (first
step and the step after the last one of each), ``factor`` of the rate there, ``least_step_s``. Steps of a tiny model are
so short that nothing set in seconds could be compared: a step takes at least that long, as if a device computed it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from workers.session import Session

__all__ = ["main", "train"]


def train(session: Session) -> None:
    """The built-in recipe with a schedule that goes wrong for a while."""
    settings: Any = session.loop_config
    least_step_s = float(settings["least_step_s"])

    def make_scheduler(optimizer: Optimizer) -> LRScheduler:
        from torch.optim.lr_scheduler import LambdaLR

        warmup = int(settings["warmup_steps"])

        def factor(finished: int) -> float:
            step = finished + 1
            is_unstable = any(first <= step < end for first, end in settings["windows"])
            return min(1.0, step / warmup) * (float(settings["factor"]) if is_unstable else 1.0)

        return LambdaLR(optimizer, factor)

    session.build(make_scheduler=make_scheduler)
    began_at = time.monotonic()
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        time.sleep(max(0.0, began_at + least_step_s - time.monotonic()))
        session.step_end(step)
        began_at = time.monotonic()


def main(config_path: str, ray_address: str, settings: str) -> int:
    """Drive the run; returns the exit code."""
    from orchestrator.load_config import load_config
    from orchestrator.options import DriverOptions
    from orchestrator.trainer import ElasticTrainer

    options = DriverOptions(ray_address=ray_address, json_output=True)
    trainer = ElasticTrainer(train, json.loads(settings), config=load_config(Path(config_path), []), options=options)
    return int(trainer.fit().exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

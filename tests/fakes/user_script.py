"""A training script as a user writes one, with two files by which a test holds it up or breaks it. Run by its path.

Arguments: the run's YAML file, the address of the Ray cluster, a directory. While the file ``closed`` lies there no
Attempt takes its first step; once ``bad-batch`` does, every Attempt fails.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.session import Session

_LONGEST_HOLD_S = 60.0


def train(session: Session) -> None:
    """The built-in loop with the two files looked at."""
    folder = Path(str(session.loop_config["folder"]))
    session.build()
    until = time.monotonic() + _LONGEST_HOLD_S
    while (folder / "closed").exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{folder / 'closed'} was not taken away within {_LONGEST_HOLD_S:g} s")
        time.sleep(0.02)
    for step in session.steps():
        if session.rank == 0 and (folder / "bad-batch").exists():
            raise ValueError("a bad batch")
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)


def main(config_path: str, ray_address: str, folder: str) -> int:
    """Drive the run; returns the exit code."""
    from orchestrator.load_config import load_config
    from orchestrator.options import DriverOptions
    from orchestrator.trainer import ElasticTrainer

    options = DriverOptions(ray_address=ray_address, json_output=True)
    trainer = ElasticTrainer(train, {"folder": folder}, config=load_config(Path(config_path), []), options=options)
    return int(trainer.fit().exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The training script of a soak: the built-in loop, held to a pace by a file. Run by its path.

Arguments: the run's YAML file, the address of the Ray cluster, the event file, the pace file. That one holds the step
up to which training goes at its usual pace; beyond it each step takes longer, so that a run does not end before its
faults have struck. An empty file lets it run freely.
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.session import Session

_PAUSE_S, _LONGEST_PAUSE_S, _DOUBLES_AFTER = 0.05, 1.0, 8


def train(session: Session) -> None:
    """The built-in loop with a pause before each step but the first."""
    pace = Path(str(session.loop_config["pace"]))
    is_first = True
    for step in session.steps():
        allowed = pace.read_text()
        if allowed and not is_first:
            beyond = max(0, step.number - int(allowed))
            time.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2.0 ** min(beyond / _DOUBLES_AFTER, 16)))
        is_first = False
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.evaluate_if_due(step)
        session.step_end(step)


def main(config_path: str, ray_address: str, events_path: str, pace: str) -> int:
    """Drive the run; returns the exit code."""
    logging.basicConfig(level="INFO", format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    from orchestrator.load_config import load_config
    from orchestrator.options import DriverOptions
    from orchestrator.trainer import ElasticTrainer

    options = DriverOptions(ray_address=ray_address, events_path=Path(events_path), json_output=True)
    trainer = ElasticTrainer(train, {"pace": pace}, config=load_config(Path(config_path), []), options=options)
    return int(trainer.fit().exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

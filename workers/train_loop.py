"""The built-in training loop, written on the same Session that a user's own loop gets.

Everything that makes a Run survive happens inside `step_end`; everything that makes it learn stands here.
"""

from __future__ import annotations

from workers.session import Session

__all__ = ["train"]


def train(session: Session) -> None:
    """Train from where the Run stands to its last step, or to an Order to leave."""
    for step in session.steps():
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.evaluate_if_due(step)  # before step_end, so that a Checkpoint of this step knows its metric
        session.step_end(step)

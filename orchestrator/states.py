"""The controller's states and the table of legal moves between them. Pure values."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["LEGAL_MOVES", "IllegalMove", "State", "checked_move"]


class IllegalMove(RuntimeError):
    """The controller tried a move that its table does not allow: a fault of Raysume itself."""

    def __init__(self, current: str, following: str) -> None:
        super().__init__(current, following)
        self.current, self.following = current, following

    def __str__(self) -> str:
        return f"controller cannot go from {self.current} to {self.following}"


class State(StrEnum):
    """Where the controller stands. Exactly one at a time."""

    GATHERING = "gathering"  # workers start and warm up; below the minimum this is waiting
    FORMING = "forming"  # a World is fixed; ranks join the group and load
    RUNNING = "running"  # steps are being finished
    LEAVING = "leaving"  # a Leave was ordered; ranks snapshot and part
    RECOVERING = "recovering"  # something broke; suspects are fenced, survivors let go of the old World
    SAVING = "saving"  # all steps done; the last Commit is awaited
    ENDED = "ended"


LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.GATHERING: frozenset({State.FORMING, State.ENDED}),
    State.FORMING: frozenset({State.RUNNING, State.LEAVING, State.RECOVERING, State.SAVING, State.ENDED}),
    State.RUNNING: frozenset({State.LEAVING, State.RECOVERING, State.SAVING, State.ENDED}),
    State.LEAVING: frozenset({State.GATHERING, State.RECOVERING, State.SAVING, State.ENDED}),
    State.RECOVERING: frozenset({State.GATHERING, State.ENDED}),
    State.SAVING: frozenset({State.GATHERING, State.ENDED}),
    State.ENDED: frozenset(),
}


def checked_move(current: State, following: State) -> State:
    """``following`` if the table allows it from ``current``; raises IllegalMove otherwise. Staying is always legal."""
    if following is not current and following not in LEGAL_MOVES[current]:
        raise IllegalMove(current.value, following.value)
    return following

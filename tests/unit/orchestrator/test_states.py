"""The table of legal moves."""

from __future__ import annotations

import pytest

from orchestrator.states import LEGAL_MOVES, IllegalMove, State, checked_move


def test_every_state_is_in_the_table_and_reaches_the_end() -> None:
    assert set(LEGAL_MOVES) == set(State)
    for state in State:
        seen, todo = {state}, [state]
        while todo:
            for following in LEGAL_MOVES[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        assert State.ENDED in seen


def test_an_illegal_move_is_refused_and_staying_is_legal() -> None:
    assert checked_move(State.RUNNING, State.RUNNING) is State.RUNNING
    with pytest.raises(IllegalMove, match="from ended to running"):
        checked_move(State.ENDED, State.RUNNING)

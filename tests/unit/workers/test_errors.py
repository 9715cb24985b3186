"""Errors of the workers package cross processes with their fields and words."""

from __future__ import annotations

import pickle

import pytest

from workers.errors import (
    AttemptAbandoned,
    AttemptRefused,
    CoordinatorUnavailable,
    FormingFailed,
    LoopMisused,
    RanksDisagree,
    WorkersError,
)


@pytest.mark.parametrize(
    "error",
    [
        AttemptRefused("w1", "a000003-00000000", "it is not newer"),
        AttemptAbandoned("a000003-00000000", "abandoned"),
        FormingFailed("a000003-00000000", 2, 4, 3, 60.0),
        RanksDisagree(1, 7, 6.5),
        LoopMisused("twice"),
        CoordinatorUnavailable("no answer"),
    ],
)
def test_an_error_survives_pickling_with_its_words(error: WorkersError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_a_world_that_did_not_form_says_how_many_were_missing() -> None:
    text = str(FormingFailed("a000003-00000000", 2, 4, 3, 60.0))
    assert "3 of 4 ranks" in text
    assert "group_timeout_s" in text

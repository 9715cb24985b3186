"""Who hangs: pure judgement of pulses."""

from __future__ import annotations

from orchestrator.config import FailureConfig
from orchestrator.heartbeats import Pulse, judge, limit_of
from workers.contract import Heartbeat, Phase

CONFIG = FailureConfig(silent_s=10, training_s=20, checkpointing_s=60)


def pulse(worker: str, phase: Phase, age_s: float, silent_s: float = 0.0) -> Pulse:
    beat = Heartbeat(worker_id=worker, attempt=None, phase=phase, step=3, age_s=age_s)
    return Pulse(beat=beat, silent_s=silent_s)


def test_a_silent_process_is_named_and_those_that_wait_for_it_are_not() -> None:
    pulses = {
        "a": pulse("a", Phase.TRAINING, 25.0),
        "b": pulse("b", Phase.TRAINING, 1.0, silent_s=11.0),
        "c": pulse("c", Phase.TRAINING, 26.0),
    }
    assert [hang.worker_id for hang in judge(pulses, CONFIG)] == ["b"]


def test_when_all_answer_the_one_that_stands_still_longest_is_the_culprit() -> None:
    pulses = {"a": pulse("a", Phase.TRAINING, 21.0), "b": pulse("b", Phase.TRAINING, 24.0)}
    assert [hang.worker_id for hang in judge(pulses, CONFIG)] == ["b"]


def test_a_long_save_is_no_hang_until_its_own_limit() -> None:
    assert judge({"a": pulse("a", Phase.CHECKPOINTING, 45.0)}, CONFIG) == ()
    late = judge({"a": pulse("a", Phase.CHECKPOINTING, 61.0)}, CONFIG)
    assert [hang.worker_id for hang in late] == ["a"]
    assert "checkpointing_timeout" in late[0].detail


def test_every_phase_has_a_limit_but_idle() -> None:
    for phase in Phase:
        limit = limit_of(phase, CONFIG)
        assert (limit is None) == (phase is Phase.IDLE)


def test_nobody_hangs_while_a_member_waits_for_data_but_it_hangs_itself_beyond_its_limit() -> None:
    peers = {"a": pulse("a", Phase.TRAINING, 70.0), "b": pulse("b", Phase.EVALUATING, 700.0)}
    assert judge(peers | {"c": pulse("c", Phase.WAITING_FOR_DATA, 5.0)}, CONFIG) == ()
    (hang,) = judge(peers | {"c": pulse("c", Phase.WAITING_FOR_DATA, 601.0)}, CONFIG)
    assert hang.worker_id == "c"
    silent = peers | {"c": pulse("c", Phase.WAITING_FOR_DATA, 5.0), "d": pulse("d", Phase.TRAINING, 1.0, silent_s=11.0)}
    assert [one.worker_id for one in judge(silent, CONFIG)] == ["d"]


def test_nobody_hangs_while_a_member_saves_but_it_hangs_itself_beyond_its_limit() -> None:
    peers = {"a": pulse("a", Phase.TRAINING, 70.0), "b": pulse("b", Phase.TRAINING, 71.0)}
    assert judge(peers | {"c": pulse("c", Phase.CHECKPOINTING, 45.0)}, CONFIG) == ()
    (hang,) = judge(peers | {"c": pulse("c", Phase.CHECKPOINTING, 61.0)}, CONFIG)
    assert hang.worker_id == "c"


def test_who_waited_for_a_long_save_does_not_hang_because_its_heartbeat_is_older_than_the_savers() -> None:
    waited = {"a": pulse("a", Phase.TRAINING, 45.0)}
    assert judge(waited | {"b": pulse("b", Phase.TRAINING, 0.1)}, CONFIG) == ()
    assert [one.worker_id for one in judge(waited | {"b": pulse("b", Phase.TRAINING, 20.1)}, CONFIG)] == ["a"]


def test_those_that_have_begun_an_evaluation_excuse_nobody_who_does_not_come() -> None:
    late = {"a": pulse("a", Phase.TRAINING, 24.0)}
    (hang,) = judge(late | {"b": pulse("b", Phase.EVALUATING, 21.0)}, CONFIG)
    assert hang.worker_id == "a"
    assert judge(late | {"b": pulse("b", Phase.EVALUATING, 19.0)}, CONFIG) == ()


def test_the_first_step_of_one_holds_up_the_second_of_another_for_as_long_as_it_may_take() -> None:
    ahead = {"a": pulse("a", Phase.TRAINING, 400.0)}
    assert judge(ahead | {"b": pulse("b", Phase.COMPILING, 500.0)}, CONFIG) == ()
    (hang,) = judge(ahead | {"b": pulse("b", Phase.COMPILING, 601.0)}, CONFIG)
    assert hang.worker_id == "b"


def test_who_leaves_waits_for_a_long_save_of_another_and_for_the_moment_after_it() -> None:
    gone = {"a": pulse("a", Phase.LEAVING, 130.0)}
    config = CONFIG.model_copy(update={"checkpointing_s": 600.0})
    assert judge(gone | {"b": pulse("b", Phase.CHECKPOINTING, 131.0)}, config) == ()
    assert judge(gone | {"b": pulse("b", Phase.LEAVING, 0.1)}, config) == ()
    (hang,) = judge(gone | {"b": pulse("b", Phase.TRAINING, 131.0)}, config)
    assert hang.worker_id == "b"
    (hang,) = judge({"a": pulse("a", Phase.LEAVING, 1.0), "b": pulse("b", Phase.TRAINING, 24.0)}, CONFIG)
    assert hang.worker_id == "b", "who has left is no excuse for who has not"

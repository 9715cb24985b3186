"""Receipts whose digests of the same tensors differ make no Checkpoint, and the ranks in the wrong are named."""

from __future__ import annotations

import pickle

import pytest
from pydantic import JsonValue

from storage.merge import StepMerge
from storage.replicas import DIGESTS, NAMES, ReplicaFold, ReplicasDisagree
from tests.unit.storage.test_merge import receipt

NAMES_OF_WHOLE: JsonValue = {"whole": ["model.a", "model.b", "optim.a.exp_avg"]}


def state(rank: int, digests: str, **more: JsonValue) -> dict[str, JsonValue]:
    own: dict[str, JsonValue] = {"rank": rank, DIGESTS: {"whole": digests}}
    return own | ({NAMES: NAMES_OF_WHOLE} if rank == 0 else {}) | more


def merged(*digests: str) -> StepMerge:
    merge = StepMerge()
    num = len(digests)
    for rank, text in enumerate(digests):
        merge.add(receipt(rank, num, (num,), [((rank,), (1,))], rank_state=state(rank, text)))
    return merge


def refusal(*digests: str) -> ReplicasDisagree:
    with pytest.raises(ReplicasDisagree) as caught:
        merged(*digests).manifest(time_utc="t", metadata={}, ledger=None)
    return caught.value


ALIKE = "aaaaaaaabbbbbbbbcccccccc"
ODD = "aaaaaaaabbbbbbb1ccccccc1"


def test_replicas_that_agree_make_a_manifest_with_one_digest_each() -> None:
    manifest = merged(ALIKE, ALIKE, ALIKE).manifest(time_utc="t", metadata={}, ledger=None)
    kept = [own[DIGESTS] for own in manifest.rank_states]
    assert kept[0] == kept[1] == kept[2]
    assert isinstance(kept[0], dict)
    assert len(str(kept[0]["whole"])) == 16
    assert all(NAMES not in own for own in manifest.rank_states)
    assert [own["rank"] for own in manifest.rank_states] == [0, 1, 2]


def test_the_minority_is_named_and_the_first_tensor() -> None:
    error = refusal(ALIKE, ALIKE, ODD, ALIKE)
    assert error.disagreement.ranks == (2,)
    assert error.disagreement.is_settled
    assert (error.disagreement.tensor, error.disagreement.num_tensors) == ("model.b", 2)
    assert "rank 2 holds differs from the 3 others, first in model.b, in 2 tensors" in str(error)


@pytest.mark.parametrize("digests", [(ALIKE, ODD), (ALIKE, ALIKE, ODD, ODD), (ALIKE, ODD, ODD[::-1])])
def test_without_a_majority_all_are_named(digests: tuple[str, ...]) -> None:
    error = refusal(*digests)
    assert error.disagreement.ranks == tuple(range(len(digests)))
    assert not error.disagreement.is_settled
    assert "no majority" in str(error)


def test_one_that_lacks_a_tensor_disagrees() -> None:
    error = refusal(ALIKE, ALIKE, ALIKE[:16])
    assert (error.disagreement.ranks, error.disagreement.tensor) == ((2,), "optim.a.exp_avg")


def test_only_ranks_that_hold_the_same_are_compared() -> None:
    fold = ReplicaFold()
    for rank, label in enumerate(("shard-0", "shard-1", "shard-0", "shard-1")):
        fold.add(rank, {DIGESTS: {label: label[-1] * 8, "whole": "abababab"}})
    assert fold.disagreement() is None
    fold.add(4, {DIGESTS: {"shard-1": "00000000"}})
    found = fold.disagreement()
    assert found is not None
    assert (found.ranks, found.among) == ((4,), (1, 3, 4))


@pytest.mark.parametrize("own", [{}, {DIGESTS: None}, {DIGESTS: {"whole": 3}}, {DIGESTS: ["whole"]}, {NAMES: 1}])
def test_a_state_without_digests_stays_as_it_is(own: dict[str, JsonValue]) -> None:
    fold = ReplicaFold()
    assert fold.add(0, own) == own
    assert fold.disagreement() is None


def test_the_refusal_survives_pickling() -> None:
    error = refusal(ALIKE, ALIKE, ODD)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.disagreement) == (str(error), error.disagreement)

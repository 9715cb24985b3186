"""What ranks say they restored, folded into one event."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.restored import restored_fields, restored_words
from storage.keys import Attempt
from storage.manifest import Tier
from workers.contract import FieldPair, ProofReport, Restored

ATTEMPT = Attempt(number=2, nonce="0000aaaa")


def restored(tiers: dict[Tier, int], bound: float | None = None, *, reseeded: bool = False) -> Restored:
    return Restored(attempt=ATTEMPT, step=40, bytes_by_tier=tiers, bound=bound, reseeded=reseeded)


def test_bytes_are_summed_by_tier_and_the_largest_bound_counts() -> None:
    ranks = [
        restored({"local-disk": 100, "object-storage": 0}, 0.001),
        restored({"local-disk": 0, "object-storage": 70}, 0.005, reseeded=True),
        restored({"local-disk": 30, "object-storage": 0}),
    ]
    assert restored_fields(ranks) == {
        "tiers": {"local-disk": 130, "object-storage": 70},
        "bytes": 200,
        "fidelity": "bounded",
        "bound": 0.005,
        "reseeded_ranks": 1,
        "proof": None,
        "side_by_side": [],
    }


def test_without_a_rounded_tensor_it_is_exact() -> None:
    fields = restored_fields([restored({"local-disk": 5, "object-storage": 0})])
    assert (fields["fidelity"], fields["bound"], fields["tiers"]) == ("exact", None, {"local-disk": 5})


def test_the_proof_and_what_was_compared_are_told_once_for_all_ranks() -> None:
    pairs = (FieldPair(name="step", saved="40", restored="40"),)
    proof = ProofReport(expected=2.5, found=2.5, tolerance=0.0, seconds=0.1)
    first = replace(restored({"object-storage": 5}), proof=proof, side_by_side=pairs)
    fields = restored_fields([first, replace(restored({"object-storage": 5}), proof=proof)])
    assert fields["side_by_side"] == [["step", "40", "40"]]
    assert (fields["proof"]["expected"], fields["proof"]["found"]) == (2.5, 2.5)
    assert restored_words(fields) == "10 B from object-storage, bit for bit, the probe's loss is 2.5 again (to the bit)"


def test_a_step_that_was_not_probed_says_why() -> None:
    without = replace(restored({"own-memory": 5}), proof=ProofReport(skipped="the step comes from memory"))
    fields = restored_fields([without])
    assert fields["proof"] == {"skipped": "the step comes from memory"}
    assert restored_words(fields).endswith("not probed (the step comes from memory)")


def test_a_schedule_of_another_length_is_told_with_both_lengths_and_only_then() -> None:
    moved = replace(restored({"object-storage": 5}), schedule_steps=(1500, 175))
    fields = restored_fields([moved, restored({"object-storage": 5})])
    assert fields["schedule_steps"] == [1500, 175]
    assert restored_words(fields).endswith("a schedule of 175 steps from here, before it was 1500")
    assert "schedule_steps" not in restored_fields([restored({"object-storage": 5})])

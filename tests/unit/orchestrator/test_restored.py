"""What ranks say they restored, folded into one event."""

from __future__ import annotations

from orchestrator.restored import restored_fields
from storage.keys import Attempt
from storage.manifest import Tier
from workers.contract import Restored

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
    }


def test_without_a_rounded_tensor_it_is_exact() -> None:
    fields = restored_fields([restored({"local-disk": 5, "object-storage": 0})])
    assert (fields["fidelity"], fields["bound"], fields["tiers"]) == ("exact", None, {"local-disk": 5})

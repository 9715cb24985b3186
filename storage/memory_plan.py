"""Chooses the newest generation that the memory Tier holds whole, and makes a RestorePlan of its Receipts. Pure.

Which Keepers are asked, and whether the newest Commit is the better answer, is decided elsewhere. A generation is
taken only when it belongs to the Run's history: what a newer Attempt did not go on from is not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from storage.codec import digest128
from storage.keeper_protocol import GenerationFacts, MemoryReport
from storage.keys import Attempt, StepKey
from storage.manifest import Receipt, ShardRecord
from storage.merge import StepMerge
from storage.sources import MemoryPlace, MemorySource, RestorePlan, ShardLocation

__all__ = ["ChosenGeneration", "NoGeneration", "build_plan", "choose_generation"]

_SHOWN_RANKS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenGeneration:
    """A step that is whole in memory. ``holders``: for each rank, in order, who holds it, the rank's own node first.

    ``passed_over``: why each newer step of the history was not taken, newest first.
    """

    key: StepKey
    world_size: int
    holders: tuple[tuple[MemoryPlace, ...], ...]
    passed_over: tuple[str, ...] = ()

    @property
    def nodes(self) -> tuple[str, ...]:
        """Every node that holds a part, each once."""
        return tuple(dict.fromkeys(place.address.node_id for places in self.holders for place in places))


@dataclass(frozen=True, slots=True, kw_only=True)
class NoGeneration:
    """Nothing in memory can be gone on from, and why, in words."""

    reason: str


def choose_generation(
    reports: Sequence[MemoryReport],
    *,
    lineage: Mapping[Attempt, int],
    distrusted: Collection[StepKey] = (),
    below_step: int | None = None,
) -> ChosenGeneration | NoGeneration:
    """The newest complete generation, by Attempt and step.

    ``lineage``: the step that each Attempt of the Run went on from. ``distrusted``: could not be read before.
    ``below_step``: that step and later ones do not count.
    """
    limits = _limits(lineage)
    passed_over: list[str] = []
    for (number, step, world_size), held in sorted(_by_step(reports).items(), reverse=True):
        for nonce, by_rank in sorted(held.items()):
            attempt = Attempt(number=number, nonce=nonce)
            key = StepKey(step=step, attempt=attempt)
            limit = limits.get(attempt, -1)
            if step > limit or (below_step is not None and step >= below_step):
                continue
            if key in distrusted:
                passed_over.append(f"step {step} could not be read")
                continue
            missing = [rank for rank in range(world_size) if rank not in by_rank]
            if missing:
                passed_over.append(_missing_words(step, missing))
                continue
            holders = tuple(tuple(by_rank[rank]) for rank in range(world_size))
            return ChosenGeneration(key=key, world_size=world_size, holders=holders, passed_over=tuple(passed_over))
    return NoGeneration(reason="; ".join(passed_over) or _nothing_words(reports))


def build_plan(
    chosen: ChosenGeneration,
    receipts: Mapping[str, Sequence[Receipt]],
    *,
    attempt: Attempt,
    member_nodes: Sequence[str],
    root_url: str,
    time_utc: str,
    metadata: Mapping[str, JsonValue],
    key: bytes,
) -> RestorePlan:
    """The plan by which ``attempt`` loads ``chosen``. Raises CommitRefused where the Receipts do not make it whole.

    ``receipts``: what the Keeper of each node answered. ``member_nodes``: the node of each rank of the new World.
    ``key``: opens the transport.
    """
    merge = StepMerge()
    places: list[tuple[MemoryPlace, ...]] = []
    for rank, holders in enumerate(chosen.holders):
        vouched = [(place, receipt) for place in holders for receipt in _receipt_of(chosen, rank, place, receipts)]
        if not vouched:
            continue  # the merge names every rank that is missing
        first = vouched[0][1]
        merge.add(first)
        places.append(tuple(place for place, receipt in vouched if _is_same(receipt.shard, first.shard)))
    manifest = merge.manifest(time_utc=time_utc, metadata=metadata, ledger=None)
    content = manifest.model_dump_json().encode()
    return RestorePlan(
        attempt=attempt,
        source=chosen.key,
        root_url=root_url,
        manifest_key="",
        manifest_bytes=len(content),
        manifest_digest=digest128(content),
        shards=tuple(_locations(chosen, places, member_nodes)),
        memory=MemorySource(manifest=content, places=tuple(places), key=key),
    )


def _limits(lineage: Mapping[Attempt, int]) -> dict[Attempt, int]:
    """The last step of each Attempt that is history: no later Attempt went on from before it."""
    limits: dict[Attempt, int] = {}
    limit, of_same_number = 1 << 62, 1 << 62
    number: int | None = None
    for attempt in sorted(lineage, reverse=True):
        if attempt.number != number:
            number, limit = attempt.number, of_same_number
        limits[attempt] = limit
        of_same_number = min(of_same_number, lineage[attempt])
    return limits


def _by_step(
    reports: Sequence[MemoryReport],
) -> dict[tuple[int, int, int], dict[str, dict[int, list[MemoryPlace]]]]:
    """(Attempt number, step, world size) -> nonce -> rank -> holders, own nodes first, each node once."""
    found: dict[tuple[int, int, int], dict[str, dict[int, list[MemoryPlace]]]] = {}
    held = [(facts, report) for report in reports for facts in report.generations if 0 <= facts.rank < facts.world_size]
    for facts, report in sorted(held, key=lambda one: (one[0].is_replica, one[1].address.node_id)):
        of_step = found.setdefault((facts.attempt.number, facts.step, facts.world_size), {})
        places = of_step.setdefault(facts.attempt.nonce, {}).setdefault(facts.rank, [])
        if all(place.address.node_id != report.address.node_id for place in places):
            places.append(_place(facts, report))
    return found


def _place(facts: GenerationFacts, report: MemoryReport) -> MemoryPlace:
    return MemoryPlace(
        rank=facts.rank,
        address=report.address,
        path=facts.path,
        num_bytes=facts.num_bytes,
        is_replica=facts.is_replica,
    )


def _receipt_of(
    chosen: ChosenGeneration, rank: int, place: MemoryPlace, receipts: Mapping[str, Sequence[Receipt]]
) -> Iterator[Receipt]:
    """The Receipt of ``rank`` from the Keeper at ``place``: at most one."""
    for receipt in receipts.get(place.address.node_id, ()):
        if (receipt.step_key, receipt.shard.rank, receipt.world_size) == (chosen.key, rank, chosen.world_size):
            yield receipt
            return


def _is_same(one: ShardRecord, other: ShardRecord) -> bool:
    return (one.size, one.digest, one.index_digest) == (other.size, other.digest, other.index_digest)


def _locations(
    chosen: ChosenGeneration, places: Sequence[tuple[MemoryPlace, ...]], member_nodes: Sequence[str]
) -> Iterator[ShardLocation]:
    """A rank finds its own Snapshot only while ranks stay what they were; a reshard reads from peers."""
    is_same_size = len(member_nodes) == chosen.world_size
    for rank, held in enumerate(places):
        nodes = {place.address.node_id for place in held if not place.is_replica}
        is_own = is_same_size and member_nodes[rank] in nodes
        address = held[0].address
        yield ShardLocation(
            rank=rank, tier="own-memory" if is_own else "peer-memory", location=f"{address.host}:{address.port}"
        )


def _missing_words(step: int, missing: Sequence[int]) -> str:
    shown = ", ".join(map(str, missing[:_SHOWN_RANKS]))
    more = f" and {len(missing) - _SHOWN_RANKS} more" if len(missing) > _SHOWN_RANKS else ""
    noun, verb = ("rank", "is") if len(missing) == 1 else ("ranks", "are")
    return f"{noun} {shown}{more} of step {step} {verb} held nowhere"


def _nothing_words(reports: Sequence[MemoryReport]) -> str:
    if not reports:
        return "no Keeper answered"
    if not any(report.generations for report in reports):
        return "no Keeper holds a Snapshot in memory"
    return "what Keepers hold in memory is not of this Run's history"

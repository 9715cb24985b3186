"""Which generation is gone on from, and the plan made of its Receipts. Pure values; the Receipts are of real Shards."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import pytest

from storage.codec import digest128
from storage.errors import CommitRefused
from storage.keeper_protocol import GenerationFacts, MemoryReport, TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Manifest, Receipt
from storage.memory_plan import ChosenGeneration, NoGeneration, build_plan, choose_generation
from storage.sources import RestorePlan
from tests.fakes.checkpoints import attempt, prepare

Held = tuple[int, int, int, int, bool]  # attempt number, step, rank, world size, is_replica


def report(node: str, *held: Held) -> MemoryReport:
    return MemoryReport(
        address=TransportAddress(node_id=node, host="10.0.0.1", port=1000),
        generations=tuple(
            GenerationFacts(
                attempt=attempt(number),
                step=step,
                rank=rank,
                world_size=world_size,
                num_bytes=64,
                path=f"/dev/shm/{node}-{number}-{step}-{rank}",
                is_replica=is_replica,
            )
            for number, step, rank, world_size, is_replica in held
        ),
    )


def key(number: int, step: int) -> StepKey:
    return StepKey(step=step, attempt=attempt(number))


def lineage(*bases: int) -> dict[Attempt, int]:
    """Attempt 1, 2, ... with the step each went on from."""
    return {attempt(number): base for number, base in enumerate(bases, start=1)}


def chosen(reports: Sequence[MemoryReport], bases: Mapping[Attempt, int], **more: object) -> ChosenGeneration:
    found = choose_generation(reports, lineage=bases, **more)  # type: ignore[arg-type]
    assert isinstance(found, ChosenGeneration), found
    return found


def nodes_of(found: ChosenGeneration) -> list[list[str]]:
    return [[place.address.node_id for place in places] for places in found.holders]


def test_the_newest_step_that_every_rank_has_somewhere_is_taken_from_the_rank_s_own_node_first() -> None:
    reports = [
        report("b", (1, 7, 1, 2, False), (1, 7, 0, 2, True), (1, 6, 1, 2, False)),
        report("a", (1, 7, 0, 2, False), (1, 7, 1, 2, True), (1, 6, 0, 2, False)),
    ]
    found = chosen(reports, lineage(0))
    assert found.key == key(1, 7)
    assert nodes_of(found) == [["a", "b"], ["b", "a"]]
    assert found.nodes == ("a", "b")
    assert found.passed_over == ()


def test_a_lost_node_is_stood_in_for_by_its_replicas() -> None:
    found = chosen([report("a", (1, 7, 0, 2, False), (1, 7, 1, 2, True))], lineage(0))
    assert nodes_of(found) == [["a"], ["a"]]
    assert [places[0].is_replica for places in found.holders] == [False, True]


def test_an_incomplete_newest_step_falls_back_to_the_one_before_and_says_so() -> None:
    reports = [report("a", (1, 41, 0, 3, False), (1, 41, 1, 3, True), (1, 40, 0, 3, False), (1, 40, 1, 3, True))]
    reports.append(report("b", (1, 40, 2, 3, False)))
    found = chosen(reports, lineage(0))
    assert found.key == key(1, 40)
    assert found.passed_over == ("rank 2 of step 41 is held nowhere",)


def test_what_is_nowhere_whole_is_told_with_its_ranks() -> None:
    found = choose_generation([report("a", (1, 41, 0, 4, False), (1, 40, 3, 4, False))], lineage=lineage(0))
    assert found == NoGeneration(
        reason="ranks 1, 2, 3 of step 41 are held nowhere; ranks 0, 1, 2 of step 40 are held nowhere"
    )


@pytest.mark.parametrize(
    ("reports", "reason"),
    [
        ([], "no Keeper answered"),
        ([report("a")], "no Keeper holds a Snapshot in memory"),
        ([report("a", (9, 1, 0, 1, False))], "what Keepers hold in memory is not of this Run's history"),
    ],
)
def test_why_there_is_nothing_is_said(reports: list[MemoryReport], reason: str) -> None:
    assert choose_generation(reports, lineage=lineage(0)) == NoGeneration(reason=reason)


def test_ranks_of_two_attempts_never_make_one_step() -> None:
    reports = [report("a", (1, 5, 0, 2, False)), report("b", (2, 5, 1, 2, False))]
    assert isinstance(choose_generation(reports, lineage=lineage(0, 4)), NoGeneration)


def test_ranks_of_two_owners_of_one_attempt_number_never_make_one_step() -> None:
    own = report("a", (1, 5, 0, 2, False))
    other = report("b", (1, 5, 1, 2, False))
    other = replace(
        other, generations=tuple(replace(one, attempt=Attempt(number=1, nonce="ffffffff")) for one in other.generations)
    )
    both = {attempt(1): 0, Attempt(number=1, nonce="ffffffff"): 0}
    assert isinstance(choose_generation([own, other], lineage=both), NoGeneration)


def test_steps_that_a_later_attempt_rolled_back_are_no_history() -> None:
    """Attempt 1 came to step 9, attempt 2 went on from 4 and was lost at once: 9 must not come back."""
    reports = [report("a", (1, 9, 0, 1, False), (1, 4, 0, 1, False), (1, 3, 0, 1, False))]
    assert chosen(reports, lineage(0, 4)).key == key(1, 4)
    assert chosen(reports, lineage(0, 4, 3)).key == key(1, 3)
    assert chosen(reports, lineage(0, 9)).key == key(1, 9)


def test_an_attempt_that_this_run_never_had_is_passed_over() -> None:
    reports = [report("a", (7, 90, 0, 1, False), (1, 3, 0, 1, False))]
    assert chosen(reports, lineage(0)).key == key(1, 3)


def test_a_newer_attempt_comes_before_an_older_one() -> None:
    reports = [report("a", (1, 5, 0, 1, False), (2, 6, 0, 1, False))]
    assert chosen(reports, lineage(0, 5)).key == key(2, 6)


def test_world_sizes_may_differ_between_attempts_but_not_within_a_step() -> None:
    shrunk = [report("a", (1, 5, 0, 3, False), (1, 5, 1, 3, True), (2, 6, 0, 2, False))]
    shrunk.append(report("b", (1, 5, 2, 3, False), (2, 6, 1, 2, False)))
    assert chosen(shrunk, lineage(0, 5)).world_size == 2
    odd = [report("a", (1, 5, 0, 2, False)), report("b", (1, 5, 1, 3, False))]
    assert isinstance(choose_generation(odd, lineage=lineage(0)), NoGeneration)


def test_a_rank_twice_on_one_node_counts_once_and_an_impossible_rank_not_at_all() -> None:
    reports = [report("a", (1, 5, 0, 1, True), (1, 5, 0, 1, False), (1, 5, 4, 1, False))]
    found = chosen(reports, lineage(0))
    assert nodes_of(found) == [["a"]]
    assert not found.holders[0][0].is_replica


def test_what_could_not_be_read_before_is_not_taken_again() -> None:
    reports = [report("a", (1, 5, 0, 1, False), (1, 4, 0, 1, False))]
    found = chosen(reports, lineage(0), distrusted={key(1, 5)})
    assert found.key == key(1, 4)
    assert found.passed_over == ("step 5 could not be read",)


def test_the_run_s_last_step_is_not_gone_on_from() -> None:
    reports = [report("a", (1, 5, 0, 1, False), (1, 4, 0, 1, False))]
    assert chosen(reports, lineage(0), below_step=5).key == key(1, 4)


def oracle(
    reports: Sequence[MemoryReport], bases: Mapping[Attempt, int], distrusted: Iterable[StepKey]
) -> StepKey | None:
    """By brute force: every step of every Attempt, tried from the newest."""
    facts = [one for each in reports for one in each.generations]
    for owner in sorted(bases, reverse=True):
        later = [base for other, base in bases.items() if other.number > owner.number]
        for step in range(60, -1, -1):
            if any(step > base for base in later) or StepKey(step=step, attempt=owner) in distrusted:
                continue
            for size in (1, 2, 3):
                ranks = {one.rank for one in facts if (one.attempt, one.step, one.world_size) == (owner, step, size)}
                if ranks >= set(range(size)):
                    return StepKey(step=step, attempt=owner)
    return None


@pytest.mark.parametrize("seed", range(300))
def test_random_histories_agree_with_brute_force(seed: int) -> None:
    draw = random.Random(seed)
    bases: dict[Attempt, int] = {}
    sizes: dict[int, int] = {}
    steps: list[tuple[int, int]] = []
    reached = 0
    for number in range(1, draw.randint(2, 5)):
        base = draw.randint(max(0, reached - 4), reached)
        bases[attempt(number)], sizes[number] = base, draw.randint(1, 3)
        reached = base + draw.randint(0, 6)
        steps += [(number, step) for step in range(base + 1, reached + 1)]
    held = [
        (number, step, rank, sizes[number], draw.random() < 0.5)
        for number, step in steps
        for rank in range(sizes[number])
        for _ in range(draw.randint(0, 2))
    ]
    reports = [report(node, *draw.sample(held, draw.randint(0, len(held)))) for node in "abc"]
    distrusted = {key(number, step) for number, step in steps if draw.random() < 0.15}
    found = choose_generation(reports, lineage=bases, distrusted=distrusted)
    assert (found.key if isinstance(found, ChosenGeneration) else None) == oracle(reports, bases, distrusted)


# -- the plan -------------------------------------------------------------------------------------------------------


def plan_of(
    reports: Sequence[MemoryReport],
    receipts: Mapping[str, Sequence[Receipt]],
    member_nodes: Sequence[str] = ("a", "b"),
) -> RestorePlan:
    found = chosen(reports, lineage(0))
    return build_plan(
        found,
        receipts,
        attempt=attempt(2),
        member_nodes=member_nodes,
        root_url="memory://",
        time_utc="2026-01-01T00:00:00.000Z",
        metadata={"config": "x"},
        key=bytes(32),
    )


BOTH = [
    report("a", (1, 7, 0, 2, False), (1, 7, 1, 2, True)),
    report("b", (1, 7, 1, 2, False), (1, 7, 0, 2, True)),
]


def test_the_plan_holds_the_manifest_and_every_place_of_each_shard() -> None:
    receipts = prepare(7, world_size=2).receipts
    plan = plan_of(BOTH, {"a": receipts, "b": receipts})
    assert plan.memory is not None
    assert (plan.step, plan.tier) == (7, "own-memory")
    assert (len(plan.memory.manifest), digest128(plan.memory.manifest)) == (plan.manifest_bytes, plan.manifest_digest)
    manifest = Manifest.model_validate_json(plan.memory.manifest)
    assert manifest.metadata == {"config": "x"}
    assert [shard.rank for shard in manifest.shards] == [0, 1]
    assert [[place.address.node_id for place in places] for places in plan.memory.places] == [["a", "b"], ["b", "a"]]


@pytest.mark.parametrize("member_nodes", [("b", "c"), ("a",), ("a", "b", "c")])
def test_a_world_of_other_nodes_or_another_size_reads_from_peers(member_nodes: tuple[str, ...]) -> None:
    receipts = prepare(7, world_size=2).receipts
    assert plan_of([BOTH[0]], {"a": receipts}, member_nodes).tier == "peer-memory"


def test_a_holder_that_gave_no_receipt_is_no_place_to_read_from() -> None:
    receipts = prepare(7, world_size=2).receipts
    plan = plan_of(BOTH, {"b": receipts})
    assert plan.memory is not None
    assert [[place.address.node_id for place in places] for places in plan.memory.places] == [["b"], ["b"]]


def test_a_replica_with_another_digest_than_the_rank_s_own_is_left_out() -> None:
    receipts = prepare(7, world_size=2).receipts
    shard = receipts[0].shard.model_copy(update={"digest": "0" * 32})
    stale = [receipts[0].model_copy(update={"shard": shard}), receipts[1]]
    plan = plan_of(BOTH, {"a": receipts, "b": stale})
    assert plan.memory is not None
    assert [[place.address.node_id for place in places] for places in plan.memory.places] == [["a"], ["b", "a"]]


@pytest.mark.parametrize("wrong", ["rank", "step"])
def test_receipts_that_do_not_make_the_step_whole_make_no_plan(wrong: str) -> None:
    receipts = prepare(7 if wrong == "rank" else 8, world_size=2).receipts
    given = receipts[:1] if wrong == "rank" else receipts
    with pytest.raises(CommitRefused, match="missing: rank 1" if wrong == "rank" else "no Receipts"):
        plan_of(BOTH, {"a": given, "b": given})

"""Where an Attempt goes on: memory against the newest Checkpoint, in every way a World can end. No ray.

The Keepers and the store are scripts; choosing among generations and building plans is real.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.attempt_run import AttemptEnd, Broken, Left
from orchestrator.config import RunConfig, RunSettings
from orchestrator.decisions import Stop
from orchestrator.failure_policy import AttemptFacts, Fault, FaultKind
from orchestrator.journal import JournalEntry
from orchestrator.memory_survey import Answers
from orchestrator.plan_chooser import EXPECTED_S, MOVING_S, PlanChooser
from orchestrator.recorder import Recorder
from orchestrator.resume import Resume
from orchestrator.signals import Committed, Quarantined, StepFinished
from orchestrator.store_watch import StoreUser
from storage.config import CheckpointConfig, MemoryConfig
from storage.keeper_protocol import GenerationFacts, MemoryReport, TransportAddress
from storage.keys import Attempt, StepKey
from storage.manifest import Receipt
from storage.sources import RestorePlan
from tests.fakes.checkpoints import prepare
from tests.fakes.outcomes import failed_outcomes
from workers.config import DataConfig, ModelConfig
from workers.contract import StepReport

NONCE = "0000aaaa"
TOTAL_STEPS = 100


def attempt(number: int, nonce: str = NONCE) -> Attempt:
    return Attempt(number=number, nonce=nonce)


class Scene:
    """Keepers that hold ``held`` (node -> attempt, step, rank, world size), a store whose newest Checkpoint is of
    ``stored``, and a clock that only sleeping moves."""

    def __init__(
        self,
        *,
        mode: str = "auto",
        resume: Resume | None = None,
        wish: str = "auto",
        stored: int | None = None,
        durable: int | None = 0,
    ) -> None:
        self.now = 0.0
        self.held: dict[str, list[tuple[int, int, int, int]]] = {}
        self.nonce = NONCE
        self.stored = stored
        self.leaving: frozenset[str] = frozenset()
        self.silent: frozenset[str] = frozenset()
        self.on_sleep: Callable[[], None] = lambda: None
        self.waits: list[int | None] = []
        self.asked: list[tuple[int | None, str | None]] = []
        self.under_way: dict[int, tuple[int, ...]] = {}
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.entries: list[JournalEntry] = []
        self.spoilt: set[int] = set()
        self.adopted: list[frozenset[str]] = []
        self.is_away = False
        self.recorder = Recorder(self, start_unix_s=0.0)
        memory = MemoryConfig(mode=mode)
        config = RunConfig(
            run=RunSettings(name="x", url="memory://x", steps=TOTAL_STEPS, resume=wish),
            model=ModelConfig(config={"model_type": "llama"}),
            data=DataConfig(url="/nowhere", sequence_length=4, global_batch=4, micro_batch=1),
            checkpoint=CheckpointConfig(memory=memory),
        )
        self.chooser = PlanChooser(
            config=config, nonce=NONCE, entries=self.entries, coordinator=self, store=self, recorder=self.recorder,
            survey=self, adopt=self.adopted.append, living=lambda: frozenset(self.held), draining=lambda: self.leaving,
            resume=resume or Resume(), memory_key=bytes(32), durable_step=durable, monotonic=lambda: self.now,
            sleep=self._sleep,
        )  # fmt: skip

    def _sleep(self, seconds: float) -> None:
        self.now += seconds
        self.on_sleep()

    def begin(self, number: int, base_step: int, nonce: str = NONCE) -> None:
        """Attempt ``number`` stands in the Journal and starts."""
        world = [["w1", "a"], ["w2", "gone"]]
        fields = {"number": number, "nonce": nonce, "restored_step": base_step, "world": world}
        self.entries.append(JournalEntry(sequence=len(self.entries), kind="attempt", time_utc="", fields=fields))
        if nonce == NONCE:
            self.recorder.attempt_started(attempt(number), 1, restored_step=base_step)

    def choose(self, before: AttemptEnd | None, number: int = 9, nodes: Sequence[str] = ("a", "b")) -> Any:
        return self.chooser.choose(attempt(number), before, nodes)

    def chosen_step(self, before: AttemptEnd | None, number: int = 9) -> tuple[int, str]:
        plan = self.choose(before, number)
        assert isinstance(plan, RestorePlan), plan
        return plan.step, "store" if plan.memory is None else "memory"

    # The event sink.
    def emit(self, event: str, **fields: Any) -> None:
        self.events.append((event, fields))

    # The Keepers.
    def reports(self, nodes: Collection[str], is_enough: Callable[[Sequence[MemoryReport]], bool]) -> Answers:
        del is_enough
        reports = tuple(
            MemoryReport(
                address=TransportAddress(node_id=node, host="127.0.0.1", port=1),
                generations=tuple(
                    GenerationFacts(
                        attempt=attempt(number, self.nonce), step=step, rank=rank, world_size=size, num_bytes=9,
                        path="/x", is_replica=False,
                    )
                    for number, step, rank, size in self.held[node]
                ),
            )
            for node in sorted(set(nodes) - self.silent)
        )  # fmt: skip
        return Answers(reports=reports, silent=self.silent)

    def receipts(self, nodes: Collection[str], key: StepKey) -> dict[str, tuple[Receipt, ...]]:
        if key.step in self.spoilt:
            return {}
        size = next(size for held in self.held.values() for _, step, _, size in held if step == key.step)
        return dict.fromkeys(nodes, prepare(key.step, by=key.attempt, world_size=size).receipts)

    # The coordinator and the store.
    def choose_plan(self, for_: Attempt, step: int | None, allow_partial: bool, url: str | None) -> RestorePlan | None:
        self.asked.append((step, url))
        found = self.stored if step is None else step
        if found is None:
            return None
        return RestorePlan(
            attempt=for_, source=StepKey(step=found, attempt=attempt(1)), root_url="x", manifest_key="m",
            manifest_bytes=1, manifest_digest="0" * 32, shards=(), allow_partial=allow_partial,
        )  # fmt: skip

    def pending(self) -> dict[int, tuple[int, ...]]:
        return self.under_way

    def take_signals(self) -> None:
        pass

    def call(self, user: StoreUser, ask: Callable[[], Any], *, outlasts_refusals: bool = True) -> Any:
        del user, outlasts_refusals
        return ask()

    def wait_settled(self, step: int | None, limit_s: float) -> Stop | None:
        del limit_s
        self.waits.append(step)
        return None

    def commit(self, step: int, number: int = 1) -> None:
        self.recorder.record(
            [Committed(attempt=attempt(number), step=step, stored_bytes=1, stall_s=0.0, upload_s=0.0, loss=None)]
        )
        self.stored = step

    def finish(self, step: int, safe_step: int, number: int = 1) -> None:
        report = StepReport(
            step=step, loss=1.0, grad_norm=1.0, lr=0.1, tokens=1, position=1, sample_chain="", step_s=0.1,
            finished_at_s=0.0, memory_step=step, safe_step=safe_step,
        )  # fmt: skip
        self.recorder.record([StepFinished(attempt=attempt(number), report=report)])


def broken(kind: FaultKind = FaultKind.NODE_LOST, lost: tuple[str, ...] = ("c",)) -> Broken:
    return Broken(fault=Fault(kind=kind, detail="x"), facts=AttemptFacts(lost_nodes=lost), detected_at_s=0.0)


def parted(step: int) -> Left:
    return Left(step=step, cause="join", reason="x", detected_at_s=0.0, is_parted=True)


def two_ranks(scene: Scene, number: int, step: int) -> None:
    for rank, node in enumerate("ab"):
        scene.held.setdefault(node, []).append((number, step, rank, 2))


def running(mode: str = "auto", **more: Any) -> Scene:
    """Attempt 1 trains; steps 40 and 41 are whole in memory, step 30 is committed."""
    scene = Scene(mode=mode, stored=30, **more)
    scene.begin(1, 0)
    scene.commit(30)
    scene.finish(41, 40)
    two_ranks(scene, 1, 40)
    two_ranks(scene, 1, 41)
    return scene


def test_after_a_loss_the_newest_step_in_memory_is_taken_and_no_save_is_waited_for() -> None:
    scene = running()
    scene.under_way = {35: (0,)}
    plan = scene.choose(broken(lost=()))
    assert (plan.step, plan.tier, plan.memory.key) == (41, "own-memory", bytes(32))
    assert (scene.waits, scene.asked, scene.now) == ([], [], 0.0)
    assert scene.chooser.durable_step == 30


def test_with_the_tier_off_nothing_changes() -> None:
    scene = running(mode="off")
    scene.under_way = {35: (0,)}
    assert scene.chosen_step(broken(lost=())) == (30, "store")
    assert scene.waits == [None]
    assert not [event for event, _ in scene.events if event.startswith("memory")]


def test_a_commit_newer_than_what_is_whole_in_memory_wins() -> None:
    scene = running()
    scene.commit(50)
    assert scene.chosen_step(broken()) == (50, "store")
    assert scene.events[-1][1]["reason"] == "step 41 in memory is older than the newest Checkpoint"


def test_memory_and_commit_of_one_step_are_read_from_memory() -> None:
    scene = running()
    scene.commit(41)
    assert scene.chosen_step(broken()) == (41, "memory")


def test_nothing_whole_in_memory_is_said_plainly_and_the_checkpoint_read() -> None:
    scene = running()
    scene.held = {"a": scene.held["a"]}
    assert scene.chosen_step(broken()) == (30, "store")
    name, fields = scene.events[-1]
    assert (name, fields["step"]) == ("memory_passed_over", 30)
    assert fields["reason"] == "rank 1 of step 41 is held nowhere; rank 1 of step 40 is held nowhere"


def test_a_step_that_all_parted_at_is_looked_for_until_it_is_there() -> None:
    scene = running()
    scene.on_sleep = lambda: two_ranks(scene, 1, 44) if scene.now > 1.0 and len(scene.held["a"]) == 2 else None
    assert scene.chosen_step(parted(44)) == (44, "memory")
    assert 1.0 < scene.now < EXPECTED_S


def test_a_step_that_does_not_come_is_not_looked_for_for_ever() -> None:
    scene = running()
    assert scene.chosen_step(parted(44)) == (41, "memory")
    assert EXPECTED_S <= scene.now < EXPECTED_S + 1.0


def test_what_a_lost_node_took_away_is_not_waited_for_but_a_silent_keeper_is() -> None:
    scene = running()
    scene.finish(43, 42)
    assert scene.chosen_step(broken()) == (41, "memory")
    assert scene.now == 0.0
    two_ranks(scene, 1, 42)
    scene.silent = frozenset("b")
    scene.on_sleep = lambda: setattr(scene, "silent", frozenset())
    assert scene.chosen_step(broken()) == (42, "memory")
    assert scene.now > 0.0


def test_after_a_leave_the_save_is_waited_for_only_if_memory_has_nothing_better() -> None:
    scene = running()
    left = Left(step=45, cause="join", reason="x", detected_at_s=0.0)
    scene.commit(45)
    assert scene.chosen_step(left) == (45, "store")
    assert scene.waits == [45]


def test_a_node_that_goes_away_is_not_read_where_the_others_have_all() -> None:
    scene = running()
    scene.held["c"] = [(1, 41, 0, 2), (1, 41, 1, 2)]
    scene.leaving = frozenset({"a"})
    plan = scene.choose(parted(41))
    assert [[place.address.node_id for place in places] for places in plan.memory.places] == [["c"], ["b", "c"]]
    assert scene.now == 0.0


def test_replicas_of_a_node_that_goes_away_are_waited_for_then_it_is_read_itself() -> None:
    scene = running()
    scene.leaving = frozenset({"a"})
    scene.on_sleep = lambda: scene.held["b"].append((1, 41, 0, 2)) if scene.now > 1.0 else None
    plan = scene.choose(parted(41))
    assert plan.memory.places[0][0].address.node_id == "b"
    assert 1.0 < scene.now < MOVING_S
    for leaving, waited_s in (({"a"}, MOVING_S), ({"a", "b"}, 0.0)):  # where all go, nothing moves
        stuck = running()
        stuck.leaving = frozenset(leaving)
        assert stuck.choose(parted(41)).memory.places[0][0].address.node_id == "a"
        assert waited_s <= stuck.now < waited_s + 1.0


def test_a_generation_that_could_not_be_read_is_passed_over_from_then_on() -> None:
    scene = running()
    assert scene.chosen_step(broken()) == (41, "memory")
    scene.begin(2, 41)
    assert scene.chosen_step(broken(FaultKind.MEMORY, lost=())) == (40, "memory")
    scene.begin(3, 40)
    assert scene.chosen_step(broken(FaultKind.MEMORY, lost=())) == (30, "store")


@pytest.mark.parametrize("is_forming", [False, True], ids=["loading", "before-it-was-read"])
def test_a_generation_that_nothing_comes_of_is_given_up_after_two_tries(is_forming: bool) -> None:
    scene = running()
    for number in (2, 3):
        assert scene.chosen_step(broken()) == (41, "memory")
        scene.begin(number, 41)
        facts = AttemptFacts(outcomes=failed_outcomes(attempt(number), is_forming=is_forming))
        end = replace(broken(FaultKind.COLLECTIVE), facts=facts)
        assert scene.chosen_step(end) == (41 if number == 2 or is_forming else 40, "memory")


def test_receipts_that_do_not_fit_lead_to_the_generation_before() -> None:
    scene = running()
    scene.spoilt = {41}
    assert scene.chosen_step(broken()) == (40, "memory")


def test_a_quarantined_checkpoint_leaves_the_comparison_to_the_store() -> None:
    scene = running()
    scene.recorder.record([Quarantined(attempt=attempt(1), step=30, key="k", reason="bad")])
    scene.stored = 20
    assert scene.chosen_step(broken()) == (41, "memory")
    scene.stored = 43
    assert scene.chosen_step(broken()) == (43, "store")


def test_the_last_step_of_the_run_is_trained_again_so_that_it_is_saved() -> None:
    scene = running()
    two_ranks(scene, 1, TOTAL_STEPS)
    assert scene.chosen_step(broken()) == (41, "memory")


# -- the first Attempt of a driver ----------------------------------------------------------------------------------


def adopted(**more: Any) -> Scene:
    """Another driver's Attempt 1 left steps 40 and 41 in memory; step 30 is committed."""
    scene = Scene(stored=30, durable=30, **more)
    scene.begin(1, 0, nonce="0000bbbb")
    scene.nonce = "0000bbbb"
    two_ranks(scene, 1, 40)
    two_ranks(scene, 1, 41)
    return scene


def test_a_new_driver_goes_on_from_what_the_keepers_of_the_last_one_hold() -> None:
    scene = adopted()
    assert scene.chosen_step(None) == (41, "memory")
    assert scene.adopted == [frozenset({"a"})]
    assert scene.chosen_step(broken()) == (41, "memory")
    assert len(scene.adopted) == 1


def test_a_world_that_had_only_been_chosen_hides_no_keepers_of_the_one_before_it() -> None:
    scene = adopted()
    scene.begin(2, 41, nonce="0000bbbb")
    scene.entries[-1].fields["world"] = [["w3", "c"]]
    scene.held["c"] = []
    assert scene.chosen_step(None) == (41, "memory")
    assert scene.adopted == [{"a", "c"}]


def test_a_new_driver_on_empty_keepers_reads_the_checkpoint_without_a_word() -> None:
    scene = Scene(stored=30, durable=30)
    assert scene.chosen_step(None) == (30, "store")
    assert scene.events == []


@pytest.mark.parametrize(
    ("wish", "resume"),
    [
        ("20", Resume(step=20)),
        ("20", Resume(step=20, levels=("L1",))),
        ("auto", Resume(allow_partial=True)),
        ("none", Resume()),
    ],
)
def test_who_asked_for_something_certain_gets_it_and_later_only_its_own_generations(wish: str, resume: Resume) -> None:
    scene = adopted(wish=wish, resume=resume)
    step, source = scene.chosen_step(None)
    assert (step, source) == (resume.step or 30, "store")
    scene.begin(2, step)
    assert scene.chosen_step(broken()) == (step, "store")
    scene.nonce = NONCE
    two_ranks(scene, 2, step + 1)
    assert scene.chosen_step(broken()) == (step + 1, "memory")


def test_a_run_that_never_committed_goes_on_from_memory_alone() -> None:
    scene = Scene()
    scene.begin(1, 0)
    two_ranks(scene, 1, 3)
    assert scene.chosen_step(broken()) == (3, "memory")
    scene.held.clear()
    assert scene.choose(broken()) is None
    assert scene.events[-1] == (
        "memory_passed_over", {"attempt": 9, "step": 0, "reason": "no Keeper answered"},
    )  # fmt: skip

"""The proof of resume on one rank: real models on a real gloo group, the real record path."""

from __future__ import annotations

import math
import pickle
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from storage.errors import ProofFailed
from storage.keys import Attempt
from storage.sources import MemorySource, RestorePlan
from tests.fakes.rank_processes import make_spec
from tests.fakes.small_training import OddModel, build_state, train_step
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.compute_clock import ComputeClock
from workers.contract import CauseKind, ProofReport
from workers.data_errors import DataError
from workers.dataset import TokenDataset
from workers.failure_cause import classify
from workers.heartbeat import Pulse
from workers.loading import WarmParts
from workers.names import named_parameters
from workers.probe import ProbeRows, probe_loss, probe_rows
from workers.proof import Proof, ProofRecord, agrees, attach, read_record, tolerance_of
from workers.resume_check import ResumeCheck
from workers.rng import capture_rng
from workers.snapshot import capture
from workers.state import TrainingState
from workers.stream import Leaf

SPEC = make_spec(Attempt(number=2, nonce="11111111"), 0, 1, 1)


def odd_loss(model: nn.Module, leaf: Leaf) -> torch.Tensor:
    logits = model(leaf.input_ids % 7)
    return nn.functional.cross_entropy(logits.flatten(0, 1), (leaf.labels % 7).flatten())


def all_reduced(vector: torch.Tensor) -> dist.Work:
    work: dist.Work | None = dist.all_reduce(vector, async_op=True)
    assert work is not None
    return work


@pytest.fixture
def parts(tmp_path: Path) -> WarmParts:
    write_numbered_rows(str(tmp_path), 24, sequence_length=16)
    dataset = TokenDataset.open(str(tmp_path), "train")
    return WarmParts(
        device=torch.device("cpu"),
        template=None,
        dataset=dataset,
        validation=None,
        stager=None,  # type: ignore[arg-type]
    )


@pytest.fixture
def state(mesh: DeviceMesh) -> TrainingState:
    state = build_state(mesh)
    train_step(state)
    return state


def make_proof(parts: WarmParts, loss: Callable[..., torch.Tensor] = odd_loss, **changes: Any) -> Proof:
    settings = make_settings(parts.dataset.url)
    proof = Proof(replace(settings, **changes), SPEC, parts, loss=loss, is_causal_lm=False)
    proof.prepare(None)
    return proof


class RestlessModel(OddModel):
    """Draws at random, counts its calls in a stored buffer and replaces another one, whatever its mode."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.scale = self.scale * 2
        noise = torch.rand(1) + random.random() + np.random.rand()
        return super().forward(ids) * noise.to(self.scale.dtype)


def test_training_cannot_tell_that_a_probe_was_taken(mesh: DeviceMesh, parts: WarmParts) -> None:
    with torch.device("meta"):
        model = RestlessModel(dropout=0.5)
    state = build_state(mesh, model=model)
    model.blocks[0].eval()  # the user's own choice
    clock = ComputeClock(torch.device("cpu"))
    clock.attach(model)
    proof = make_proof(parts)
    modes = [module.training for module in model.modules()]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rng = {name: value.clone() for name, value in capture_rng(0).items()}
    versions = {name: (id(one), one._version) for name, one in named_parameters(model)}

    first = proof.take(state, 1, is_pressed=False)
    assert all(torch.equal(rng[name], value) for name, value in capture_rng(0).items())
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    rng = {name: value.clone() for name, value in capture_rng(0).items()}
    second = proof.take(state, 1, is_pressed=False)

    assert first is not None
    assert second is not None
    assert first.loss == second.loss, "the probe itself must not depend on what was drawn before"
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert all(torch.equal(rng[name], value) for name, value in capture_rng(0).items())
    assert {name: (id(one), one._version) for name, one in named_parameters(model)} == versions
    assert clock.take() == 0.0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_run_with_probes_trains_to_the_same_bits(mesh: DeviceMesh, parts: WarmParts) -> None:
    def losses(*, probed: bool) -> list[float]:
        torch.manual_seed(3)
        with torch.device("meta"):
            model = OddModel(dropout=0.3)
        state = build_state(mesh, model=model)
        proof = make_proof(parts)
        found = []
        for step in range(4):
            found.append(train_step(state))
            if probed:
                proof.take(state, step, is_pressed=False)
        return found

    assert losses(probed=True) == losses(probed=False)


def test_compiled_blocks_are_not_compiled_once_more_for_a_probe(mesh: DeviceMesh, parts: WarmParts) -> None:
    compiled: list[int] = []

    def backend(graph: torch.fx.GraphModule, _inputs: Any) -> Any:
        compiled.append(1)
        return graph.forward

    with torch.device("meta"):
        model = OddModel()
    state = build_state(mesh, model=model)
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend=backend)
    plain = probe_loss(state.model, odd_loss, leaf_of(parts), rank=0, is_compiled=True)
    assert compiled == []
    train_step(state)
    num_compiled = len(compiled)
    assert num_compiled > 0, "the blocks are compiled in training"
    probe_loss(state.model, odd_loss, leaf_of(parts), rank=0, is_compiled=True)
    assert len(compiled) == num_compiled
    assert math.isfinite(plain)


def leaf_of(parts: WarmParts) -> Leaf:
    return parts.probe_rows.batch((0, 1), parts.dataset.rows).leaf


def test_the_record_goes_into_the_shared_state_and_is_read_again(state: TrainingState, parts: WarmParts) -> None:
    record = make_proof(parts).take(state, 1, is_pressed=False)
    assert record is not None
    assert record.rows == probe_rows(parts.dataset, seed=5, count=2)
    assert record.environment["device"] == "cpu"
    assert record.environment["torch"] == torch.__version__
    snapshot = capture(state, rank=0, world_size=1)
    attach(snapshot, record)
    assert snapshot.shared_state is not None
    assert record.seconds > 0
    assert read_record(snapshot.shared_state) == record.model_copy(update={"seconds": 0.0})
    again = make_proof(parts).take(state, 1, is_pressed=False)
    assert again is not None
    assert again.as_plain() == snapshot.shared_state["proof"], "the same state makes the same Checkpoint"
    other_rank = capture(state, rank=1, world_size=2)
    attach(other_rank, record)
    assert other_rank.shared_state is None


def test_weights_that_are_those_that_were_saved_are_confirmed(state: TrainingState, parts: WarmParts) -> None:
    record = make_proof(parts).take(state, 1, is_pressed=False)
    assert record is not None
    report = make_proof(parts).confirm(state, plan_of(), {"proof": record.as_plain()}, all_reduced)
    assert (report.expected, report.found, report.tolerance) == (record.loss, record.loss, 0.0)
    assert report.skipped is None


@pytest.mark.parametrize(("factor", "is_seen_elsewhere"), [(1.5, True), (1 + 1e-6, False)])
def test_other_weights_fail_the_proof(
    state: TrainingState, parts: WarmParts, factor: float, is_seen_elsewhere: bool
) -> None:
    """Exactly where everything that decides the bits is as it was, within one per cent where it is not."""
    record = make_proof(parts).take(state, 1, is_pressed=False)
    assert record is not None
    with torch.no_grad():
        for _, parameter in named_parameters(state.model):
            parameter.mul_(factor)
    with pytest.raises(ProofFailed) as caught:
        make_proof(parts).confirm(state, plan_of(), {"proof": record.as_plain()}, all_reduced)
    error = caught.value
    for word in ("rank 0", repr(record.loss), "step 7", "exactly", "quarantine --lift"):
        assert word in str(error)
    assert classify(error) is CauseKind.CORRUPT_CHECKPOINT
    assert error.key == "manifests/x"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)

    elsewhere = record.model_copy(update={"environment": record.environment | {"machine": "another"}})

    def confirm() -> ProofReport:
        return make_proof(parts).confirm(state, plan_of(), {"proof": elsewhere.as_plain()}, all_reduced)

    if is_seen_elsewhere:
        with pytest.raises(ProofFailed, match="within 1%"):
            confirm()
    else:
        assert confirm().tolerance == 0.01


def plan_of(**changes: Any) -> Any:
    from storage.keys import StepKey

    attempt = Attempt(number=1, nonce="0badcafe")
    plan = RestorePlan(
        attempt=attempt,
        source=StepKey(step=7, attempt=attempt),
        root_url="memory://",
        manifest_key="manifests/x",
        manifest_bytes=1,
        manifest_digest="0" * 32,
        shards=(),
    )
    return replace(plan, **changes)


@pytest.mark.parametrize(
    ("expected", "found", "tolerance", "is_same"),
    [
        (2.0, 2.0, 0.0, True),
        (2.0, math.nextafter(2.0, 3), 0.0, False),
        (2.0, 2.0199, 0.01, True),
        (2.0, 2.0201, 0.01, False),
        (2.0, math.nan, 0.01, False),
        (math.nan, 2.0, 0.01, False),
        (math.nan, math.nan, 0.0, True),
        (math.inf, math.inf, 0.0, True),
        (2.0, math.inf, 0.01, False),
        (math.inf, 2.0, 0.01, False),
        (0.0, 1e-5, 0.01, True),
        (0.0, 1e-3, 0.01, False),
    ],
)
def test_losses_agree_within_the_tolerance_whatever_they_are(
    expected: float, found: float, tolerance: float, is_same: bool
) -> None:
    assert agrees(expected, found, tolerance) is is_same


@pytest.mark.parametrize("loss", [math.nan, math.inf, 0.1 + 0.2])
def test_any_loss_survives_its_record(loss: float) -> None:
    read = read_record({"proof": ProofRecord(loss=loss, rows=(1,)).as_plain()}).loss
    assert read == loss or (math.isnan(read) and math.isnan(loss))


def test_only_the_same_cpu_environment_is_exact() -> None:
    here = {"device": "cpu", "torch": "2"}
    assert tolerance_of(ProofRecord(environment=here), here) == 0.0
    assert tolerance_of(ProofRecord(environment=here), here | {"torch": "3"}) == 0.01
    cuda = {"device": "cuda", "torch": "2"}
    assert tolerance_of(ProofRecord(environment=cuda), cuda) == 0.01


def test_what_has_no_probe_is_passed_over_and_says_why(state: TrainingState, parts: WarmParts) -> None:
    proof = make_proof(parts)
    record = proof.take(state, 1, is_pressed=False)
    assert record is not None
    saved = {"proof": record.as_plain()}
    pressed = proof.take(state, 1, is_pressed=True)
    assert pressed is not None
    memory = MemorySource(manifest=b"", places=())

    def why(plan: Any = None, shared: Any = saved, proof: Proof = proof) -> str:
        return proof.confirm(state, plan_of() if plan is None else plan, shared, all_reduced).skipped or ""

    assert "memory" in why(plan_of(memory=memory))
    assert "not all" in why(plan_of(allow_partial=True))
    assert "without one" in why(shared={})
    assert "deadline" in why(shared={"proof": pressed.as_plain()})
    assert "version 2" in why(shared={"proof": record.as_plain() | {"version": 2}})
    assert "cannot be read" in why(shared={"proof": {"rows": "all"}})
    off = make_settings(parts.dataset.url).checkpoint.model_copy(update={"proof": False})
    assert "off" in why(proof=make_proof(parts, checkpoint=off))
    assert make_proof(parts, checkpoint=off).take(state, 1, is_pressed=False) is None


def test_a_loop_with_its_own_model_and_no_loss_has_no_probe_and_hears_it_once(
    state: TrainingState, parts: WarmParts, caplog: pytest.LogCaptureFixture
) -> None:
    proof = Proof.of(make_settings(parts.dataset.url), SPEC, parts, loss=None, has_own_model=True)
    proof.prepare(None)
    assert proof.take(state, 1, is_pressed=False) is None
    Proof.of(make_settings(parts.dataset.url), SPEC, parts, loss=None, has_own_model=True)  # the next Attempt
    assert sum("session.build was given no loss" in record.message for record in caplog.records) == 1


def test_other_tokens_under_the_rows_are_refused_unless_the_data_may_differ(
    state: TrainingState, parts: WarmParts
) -> None:
    record = make_proof(parts).take(state, 1, is_pressed=False)
    assert record is not None
    other = record.model_copy(update={"tokens_digest": "0" * 32})
    gone = record.model_copy(update={"rows": (23, 24)})
    settings = make_settings(parts.dataset.url)
    allowed = settings.data.model_copy(update={"allow_changed": True})
    for changed, word in ((other, "other tokens"), (gone, "not among the 24")):
        saved = {"proof": changed.as_plain()}
        with pytest.raises(DataError, match=word):
            make_proof(parts).confirm(state, plan_of(), saved, all_reduced)
        assert word in (make_proof(parts, data=allowed).confirm(state, plan_of(), saved, all_reduced).skipped or "")


def test_the_batch_is_read_once_in_a_process(parts: WarmParts, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = TokenDataset.rows

    def counted(self: TokenDataset, ids: Any) -> Any:
        reads.append(len(ids))
        return read(self, ids)

    monkeypatch.setattr(TokenDataset, "rows", counted)
    make_proof(parts)
    make_proof(parts)
    assert reads == [2]


def test_a_step_from_memory_is_trained_on_before_the_batch_is_read(
    state: TrainingState, parts: WarmParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    read = TokenDataset.rows

    def counted(self: TokenDataset, ids: Any) -> Any:
        reads.append(len(ids))
        return read(self, ids)

    monkeypatch.setattr(TokenDataset, "rows", counted)

    def checked(plan: RestorePlan) -> Proof:
        """The proof as it is before the first step of an Attempt with this plan, in a fresh process."""
        fresh = replace(parts, probe_rows=ProbeRows())
        proof = Proof(make_settings(parts.dataset.url), SPEC, fresh, loss=odd_loss, is_causal_lm=False)
        check = ResumeCheck(
            proof,
            replace(SPEC, restore=plan),
            groups=None,  # type: ignore[arg-type]
            patience=None,  # type: ignore[arg-type]
            pulse=Pulse(),
            is_built_in=False,
        )
        check.run(state, position=0)
        return proof

    from_memory = plan_of(memory=MemorySource(manifest=b"", places=()))
    checked(plan_of())
    assert reads == [2], "a load from the store takes its probe at once"
    proof = checked(from_memory)
    assert reads == [2]
    proof.ready()
    assert reads == [2, 2], "no save has to wait for it"
    assert proof.take(state, 1, is_pressed=False) is not None
    assert reads == [2, 2]
    unready = checked(from_memory)
    assert unready.take(state, 1, is_pressed=False) is not None, "a save before the first step has a probe all the same"


def test_probe_rows_are_neighbours_that_the_seed_decides(parts: WarmParts) -> None:
    rows = probe_rows(parts.dataset, seed=1, count=30)
    assert [(rows[0] + number) % 24 for number in range(30)] == list(rows)
    assert rows == probe_rows(parts.dataset, seed=1, count=30)
    assert len({probe_rows(parts.dataset, seed=seed, count=1) for seed in range(20)}) > 5

"""One digest at every world size. Real: four processes, gloo, FSDP2, the data stream, Keepers, a store, restores.

Each setting is trained from scratch at several world sizes, and gone on with from a Checkpoint that another world size
has written. The same worlds without the mode show that these inputs can tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes import reproducible_loops as loops
from tests.fakes.rank_processes import Ended, Trio
from tests.fakes.restores import plan_for
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import TINY_LLAMA, make_settings
from workers.config import ActivationCheckpointConfig, ModelConfig, OptimConfig, Reproducible
from workers.contract import CauseKind, OutcomeKind
from workers.settings import WorkerSettings

STEPS, EVERY_STEPS = 4, 2
SIZES = (1, 2, 3, 4)
NUM_LEAVES = 5  # never a whole number of rounds but at one rank, and a surplus leaf at 2, 3 and 4
MODES: tuple[Reproducible, ...] = (True, "exact")
CHECKPOINTED = ActivationCheckpointConfig(enabled=True)
NOISY_LLAMA = TINY_LLAMA.model_copy(
    update={"config": {**TINY_LLAMA.config, "attention_dropout": 0.2, "tie_word_embeddings": True}}
)
OWN = ModelConfig(activation_checkpointing=CHECKPOINTED)


@dataclass(frozen=True, kw_only=True)
class Line:
    """What a run has shown, to the bit."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    metrics: tuple[tuple[int, float], ...]
    digest: str


@pytest.fixture
def six() -> Iterator[Trio]:
    six = Trio(6)
    try:
        yield six
    finally:
        six.close()


@pytest.fixture(scope="module")
def four() -> Iterator[Trio]:
    four = Trio(max(SIZES))
    try:
        yield four
    finally:
        four.close()


@pytest.fixture(scope="module")
def data_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("data"))
    write_numbered_rows(url, 200, sequence_length=16, validation_rows=12)
    return url


def settings_of(data_url: str, reproducible: Reproducible, model: ModelConfig, **changes: Any) -> WorkerSettings:
    plain = make_settings(data_url, every_steps=EVERY_STEPS, eval_every=2, total_steps=STEPS)
    data = plain.data.model_copy(update={"global_batch": 2 * NUM_LEAVES})
    optim = OptimConfig(lr=0.01, warmup_steps=2, clip_norm=0.05)  # far below the norm: every step is clipped
    return replace(plain, reproducible=reproducible, model=model, data=data, optim=optim, **changes)


def line_of(ended: Sequence[Ended]) -> Line:
    assert [one.outcome.kind for one in ended] == [OutcomeKind.FINISHED] * len(ended), ended[0].outcome.cause
    first = ended[0]
    assert first.outcome.weights_digest is not None
    return Line(
        losses=tuple(report.loss for report in first.reports),
        grad_norms=tuple(report.grad_norm for report in first.reports),
        metrics=tuple((report.step, report.loss) for report in first.evals),
        digest=first.outcome.weights_digest,
    )


def tail_of(line: Line) -> Line:
    """What is left of an unbroken run's after the Checkpoint."""
    metrics = tuple((step, loss) for step, loss in line.metrics if step > EVERY_STEPS)
    return Line(
        losses=line.losses[EVERY_STEPS:], grad_norms=line.grad_norms[EVERY_STEPS:], metrics=metrics, digest=line.digest
    )


def assert_one_line(four: Trio, root: Path, sizes: Sequence[int]) -> Line:
    """From scratch at each of ``sizes``; and from the Checkpoints of two of them at another."""
    runs = {size: four.run(size) for size in sizes}
    lines = {size: line_of(ended) for size, ended in runs.items()}
    expected = lines[sizes[0]]
    assert all(line == expected for line in lines.values()), lines
    assert len(expected.losses) == STEPS
    assert min(expected.grad_norms) > 0.05
    for before, after in ((sizes[-1], sizes[0]), (sizes[1], sizes[-1])):
        resumed = line_of(four.run(after, restore=plan_for(root, runs[before], EVERY_STEPS)))
        assert resumed == tail_of(expected), (before, after)
    return expected


@pytest.mark.parametrize("mode", MODES)
def test_awkward_parameters_dropout_and_recomputing_give_one_digest(
    four: Trio, data_url: str, tmp_path: Path, mode: Reproducible
) -> None:
    """0-dim, one row, tied and uneven parameters; draws from all generators; accumulation; surplus leaves; clipping."""
    four.make(settings_of(data_url, mode, OWN), tmp_path, loops.train_odd)
    assert_one_line(four, tmp_path, SIZES)


@pytest.mark.parametrize("mode", MODES)
def test_a_llama_with_dropout_gives_one_digest(four: Trio, data_url: str, tmp_path: Path, mode: Reproducible) -> None:
    four.make(settings_of(data_url, mode, NOISY_LLAMA), tmp_path)
    assert_one_line(four, tmp_path, (1, 2, 4))


@pytest.mark.parametrize("mode", MODES)
def test_bfloat16_with_float32_masters_gives_one_digest(
    four: Trio, data_url: str, tmp_path: Path, mode: Reproducible
) -> None:
    model = OWN.model_copy(update={"compute_dtype": "bfloat16"})
    four.make(settings_of(data_url, mode, model), tmp_path, loops.train_odd)
    assert_one_line(four, tmp_path, (1, 3))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_worlds_of_five_and_six_give_the_same_digest_too(
    six: Trio, data_url: str, tmp_path: Path, mode: Reproducible
) -> None:
    """Six ranks have five leaves to share, and a width of twelve is no multiple of five."""
    six.make(settings_of(data_url, mode, OWN), tmp_path, loops.train_odd)
    assert_one_line(six, tmp_path, (1, 5, 6))


def test_replicas_give_one_digest_too(four: Trio, data_url: str, tmp_path: Path) -> None:
    model = OWN.model_copy(update={"parallelism": "ddp"})
    four.make(settings_of(data_url, True, model), tmp_path, loops.train_odd)
    assert_one_line(four, tmp_path, (1, 2, 3))


def test_only_the_fold_in_leaf_order_is_the_same_where_rounding_in_fp64_shows(
    four: Trio, data_url: str, tmp_path: Path
) -> None:
    """The limit of fp64 sums, and that the exact mode has none. What a surplus leaf computes does not matter to it."""
    digests: dict[Reproducible, list[str | None]] = {}
    for mode in MODES:
        sizes = SIZES if mode == "exact" else SIZES[:2]
        plain = make_settings(data_url, total_steps=1)  # four leaves
        settings = replace(plain, reproducible=mode, model=ModelConfig(), optim=OptimConfig(clip_norm=1e30))
        four.make(settings, tmp_path, loops.train_cancelling)
        digests[mode] = [four.run(size)[0].outcome.weights_digest for size in sizes]
    assert len(set(digests[True])) == 2
    assert len(set(digests["exact"])) == 1
    assert digests["exact"][0] is not None


def test_without_the_mode_these_worlds_differ(four: Trio, data_url: str, tmp_path: Path) -> None:
    """Else none of the above could fail. No dropout here: it is the order of sums alone that tells."""
    four.make(settings_of(data_url, False, TINY_LLAMA), tmp_path)
    lines = [line_of(four.run(size)) for size in (1, 2, 4)]
    assert len({line.digest for line in lines}) > 1
    assert len({line.losses for line in lines}) > 1
    for line in lines:
        assert line.losses == pytest.approx(lines[0].losses, rel=1e-4)


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (loops.train_fused, "fused=True in group 0"),
        (loops.train_batch_normed, "blocks.1.normed is a BatchNorm1d"),
        (loops.train_twice_called, "blocks.0 runs more than once"),
        (loops.train_with_a_running_buffer, "buffer count is changed"),
    ],
)
def test_what_cannot_be_reproducible_is_refused_by_name(
    four: Trio, data_url: str, tmp_path: Path, loop: Callable[[Any], None], message: str
) -> None:
    four.make(settings_of(data_url, True, ModelConfig()), tmp_path, loop)
    causes = [one.outcome.cause for one in four.run(2)]
    assert {cause.kind for cause in causes} <= {CauseKind.CONFIGURATION, CauseKind.COLLECTIVE}
    named = [cause.message for cause in causes if cause.kind is CauseKind.CONFIGURATION]
    assert named
    assert all(message in text and "reproducible: false" in text for text in named)

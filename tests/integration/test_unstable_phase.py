"""A run whose learning rate goes wrong for 50 steps saves there, soon and often, and hardly anywhere else.

Real: Ray nodes on loopback, worker processes, FSDP over gloo, the coordinator with its policies, a store of files, real
text. Only the instability policy speaks; what it asked for is read from the events of the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench.ablation_figures import figures_of
from tests.bench.unstable_runs import (
    IN_TIME_STEPS,
    Course,
    asked_by_instability,
    make_unstable_run,
    run_course,
    write_text,
)
from tests.clusters import RayNodes, ray_nodes

pytestmark = pytest.mark.timeout(500)

ONSET, END, STEPS = 200, 250, 300
INSTABILITY_ALONE = {
    "policies": ["instability"],
    "min_interval_s": 0.0,
    "max_interval_s": 3600.0,
    "max_at_risk_s": None,
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayNodes]:
    with ray_nodes(2) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def text_url(tmp_path_factory: pytest.TempPathFactory) -> str:
    url = str(tmp_path_factory.mktemp("text"))
    write_text(url)
    return url


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 5))], ids=lambda seed: f"seed-{seed}"
)
def test_saves_are_denser_in_an_unstable_phase_and_the_first_comes_in_time(
    tmp_path: Path, nodes: RayNodes, text_url: str, seed: int
) -> None:
    course = Course(seed=seed, steps=STEPS, windows=((ONSET, END),))
    run = make_unstable_run(tmp_path, text_url, course, checkpoint={}, policy=INSTABILITY_ALONE)
    result = run_course(run, course, nodes.address, timeout_s=400.0)
    asked = asked_by_instability(result.events)
    within = [step for step in asked if ONSET <= step < END]
    assert within, f"no save for the unstable phase; asked for at {asked}"
    assert within[0] - ONSET <= IN_TIME_STEPS, f"the first save came late: {asked}"
    assert figures_of(result.events, result.summary, course).density_ratio >= 3.0, f"saves were asked for at {asked}"

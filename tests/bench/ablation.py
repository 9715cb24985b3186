"""Which save policy is worth its saves: the same runs with the same faults and the same unstable phase under each.

Every contestant trains the built-in recipe on two workers of a local Ray cluster, with the memory Tier off, so that a
lost worker costs all that was not committed. A run trains for half a minute, and what the policies set in seconds is
scaled with it to about a hundredth of its default. For an idle machine: a busy one stretches the steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.bench.ablation_figures import Figures, figures_of
from tests.bench.unstable_runs import Course, course_of, make_unstable_run, run_course, write_text
from tests.clusters import ray_nodes

__all__ = ["CONTESTANTS", "Contestant", "added", "table", "write_json"]

ROOT = Path(__file__).resolve().parents[2]
STEPS, WINDOW, NUM_FAULTS, LEAST_STEP_S = 300, (200, 250), 3, 0.1
NUM_NODES = 4
_RUN_TIMEOUT_S = 300.0
SCALED = {
    "min_interval_s": 1.0,
    "max_interval_s": 15.0,
    "max_at_risk_s": 10.0,
    "hazard": {"first_interval_s": 5.0, "prior_node_mtbf_s": 864.0},
    "deadline": {"first_save_s": 0.5},
}
_NO_BOUNDS = {"max_interval_s": 3600.0, "max_at_risk_s": None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """Settings of ``checkpoint`` and ``policy``; the latter go over the scaled ones."""

    name: str
    checkpoint: Mapping[str, Any] = field(default_factory=dict)
    policy: Mapping[str, Any] = field(default_factory=dict)


CONTESTANTS = (
    Contestant(name="fixed cadence", checkpoint={"every_steps": 50}),
    Contestant(name="hazard alone", policy={**_NO_BOUNDS, "policies": ["hazard"]}),
    Contestant(name="bounds alone", policy={"policies": []}),
    Contestant(
        name="instability published alone",
        policy={**_NO_BOUNDS, "policies": ["instability"], "instability": {"formula": "published"}},
    ),
    Contestant(name="instability corrected alone", policy={**_NO_BOUNDS, "policies": ["instability"]}),
    Contestant(name="default (hazard, bounds)"),
    Contestant(
        name="default and instability corrected", policy={"policies": ["hazard", "memory-pressure", "instability"]}
    ),
)


def added(figures: Sequence[Figures]) -> Figures:
    """Of one contestant over several seeds."""
    sums: dict[str, Any] = {
        each.name: sum(getattr(figure, each.name) for figure in figures)
        for each in dataclasses.fields(Figures)
        if each.name != "spacings"
    }
    return Figures(**sums, spacings=tuple(spacing for figure in figures for spacing in figure.spacings))


def one_run(folder: Path, data_url: str, contestant: Contestant, course: Course, address: str) -> Figures:
    policy = {**SCALED, **contestant.policy}
    run = make_unstable_run(folder, data_url, course, checkpoint=contestant.checkpoint, policy=policy)
    result = run_course(run, course, address, timeout_s=_RUN_TIMEOUT_S)
    return figures_of(result.events, result.summary, course)


HEADINGS = (
    *("contestant", "runs", "steps lost", "s lost", "at risk", "saves", "MB", "cost %", "in window", "quiet"),
    *("x denser", "false", "missed", "spacing"),
)


def _row(name: str, num_runs: int, figures: Figures) -> tuple[str, ...]:
    spacing = f"{min(figures.spacings)}..{max(figures.spacings)}" if figures.spacings else "-"
    return (
        name,
        str(num_runs),
        str(figures.lost_steps),
        f"{figures.lost_s:.1f}",
        f"{figures.mean_at_risk_steps:.1f}",
        str(figures.saves),
        f"{figures.stored_bytes / 1e6:.1f}",
        f"{100 * figures.cost_share:.2f}",
        f"{figures.unstable_saves} in {figures.unstable_steps}",
        f"{figures.quiet_saves} in {figures.quiet_steps}",
        f"{figures.density_ratio:.1f}",
        f"{figures.false_triggers}/{figures.quiet_evaluations}",
        f"{figures.missed}/{figures.windows}",
        spacing,
    )


def table(told: Mapping[str, Sequence[Figures]]) -> str:
    """As Markdown, for the docs as well."""
    rows = [HEADINGS, tuple("---" for _ in HEADINGS)]
    rows += [_row(name, len(figures), added(figures)) for name, figures in told.items() if figures]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def write_json(path: Path, told: Mapping[str, Sequence[Figures]], courses: Sequence[Course]) -> None:
    """What notebooks/when_to_save.ipynb reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tree = {
        "scaled": SCALED,
        "courses": [dataclasses.asdict(course) for course in courses],
        "contestants": {name: [dataclasses.asdict(each) for each in figures] for name, figures in told.items()},
    }
    path.write_text(json.dumps(tree, indent=1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=[], help="contestants whose name has one of these words in it")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/ablation.json")
    options = parser.parse_args()
    contestants = [each for each in CONTESTANTS if not options.only or any(word in each.name for word in options.only)]
    if not contestants:
        parser.error(f"no contestant has one of {options.only} in its name: {[each.name for each in CONTESTANTS]}")
    courses = [
        course_of(seed, steps=STEPS, window=WINDOW, num_faults=NUM_FAULTS, least_step_s=LEAST_STEP_S)
        for seed in options.seeds
    ]
    told: dict[str, list[Figures]] = {each.name: [] for each in contestants}
    with tempfile.TemporaryDirectory() as scratch, ray_nodes(NUM_NODES) as nodes:
        data_url = f"{scratch}/data"
        write_text(data_url)
        for course in courses:
            print(f"seed {course.seed}: workers lost at steps {course.lost_at}, unstable {course.windows}", flush=True)
            for number, each in enumerate(contestants):
                folder = Path(scratch) / f"{number}-{course.seed}"
                told[each.name].append(one_run(folder, data_url, each, course, nodes.address))
                print(f"  {each.name}: {told[each.name][-1]}", flush=True)
                write_json(options.out, told, courses)
    print(table(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())

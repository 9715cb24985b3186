"""The picture of a drill: everything on it can be read. Real: matplotlib's layout."""

from __future__ import annotations

import pytest
from matplotlib.text import Annotation

from orchestrator import drill_plot
from orchestrator.drill_compare import compare
from orchestrator.drill_history import read_history
from orchestrator.drill_rules import ROUNDED
from tests.fakes.drill_events import DrillEvents

STEPS = 20


@pytest.mark.parametrize("step", [1, 12, STEPS - 1])
def test_faults_and_legend_lie_on_the_picture_and_cover_no_curve(step: int) -> None:
    run = DrillEvents().begin(4).train(step)
    for verb in ("add-node", "drain-node", "kill-coordinator"):
        run.strike(verb, step)
    interrupted = read_history(run.begin(4, restored=step, cause="preemption").train(STEPS).end())
    unbroken = read_history(DrillEvents().begin(4).train(STEPS).end())
    found = compare(unbroken, interrupted, rules=ROUNDED, num_steps=STEPS)
    figure = drill_plot._draw(unbroken, interrupted, found)
    figure.draw_without_rendering()
    axes = [axis.get_window_extent() for axis in figure.axes]
    labels = [text for text in figure.axes[0].get_children() if isinstance(text, Annotation)]
    assert [label.get_text() for label in labels] == ["add-node, drain-node, kill-coordinator"]
    boxes = [label.get_window_extent() for label in labels]
    boxes += [legend.get_window_extent() for legend in figure.legends]
    assert len(boxes) == 2
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1
        assert not any(box.overlaps(axis) for axis in axes)

"""A save ahead of trouble: a score of how the loss bends and how the gradient spreads, above a threshold. Pure.

Where the signals come from is said in training_signals.py, what moves the threshold in threshold_feedback.py.
"""

from __future__ import annotations

import math

from orchestrator.save_config import InstabilityConfig
from orchestrator.save_facts import Opinion, SaveFacts, TrainingFacts

__all__ = ["InstabilityPolicy", "corrected_score", "instability_score", "published_score", "reachable_threshold"]

_BELOW_HIGHEST = 0.01


class InstabilityPolicy:
    """``InstabilityPolicy(config)``. Asks once for each evaluation whose score is above the threshold; a save that any
    policy had bound at that step or later answers it."""

    def __init__(self, config: InstabilityConfig) -> None:
        self._config = config

    @property
    def name(self) -> str:
        return "instability"

    def opinion(self, facts: SaveFacts) -> Opinion:
        training = facts.training
        score = None if training is None else instability_score(training, self._config)
        if training is None or score is None:
            return Opinion(policy=self.name, due_at_s=None, why="too little seen of loss and gradient yet")
        threshold = reachable_threshold(self._config, facts.threshold_offset)
        figures = _in_words(training, self._config)
        if score <= threshold:
            why = f"score {score:.2f}, threshold {threshold:.2f}: {figures}"
            return Opinion(policy=self.name, due_at_s=None, why=why)
        why = f"score {score:.2f} > {threshold:.2f}: {figures}"
        answered = self._answered(facts, training)
        if answered is not None:
            return Opinion(policy=self.name, due_at_s=None, why=f"{why}; {answered}")
        return Opinion(policy=self.name, due_at_s=facts.now_s, why=why)

    def _answered(self, facts: SaveFacts, training: TrainingFacts) -> str | None:
        """Why a score above the threshold asks for nothing; None: it does ask."""
        if facts.last_save_step >= training.step:
            return f"saved at step {facts.last_save_step}"
        last = facts.last_instability_step
        if last is not None and facts.newest_step - last < self._config.min_interval_steps:
            since = max(0, facts.newest_step - last)
            return f"{since} steps since the last such save, policy.instability.min_interval_steps is " + str(
                self._config.min_interval_steps
            )
        return None


def instability_score(training: TrainingFacts, config: InstabilityConfig) -> float | None:
    """By the formula that is set. None while a value that it needs is not known."""
    if config.formula == "published":
        if training.loss_curvature is None or training.grad_variance is None:
            return None
        return published_score(training.loss_curvature, training.grad_variance, config)
    if training.loss_curvature is None or training.peak_variance is None:
        return None
    if not training.curvature_scale or not training.variance_scale:
        return None
    return corrected_score(
        training.loss_curvature / training.curvature_scale, training.peak_variance / training.variance_scale, config
    )


def published_score(curvature: float, variance: float, config: InstabilityConfig) -> float:
    """As it was published: 0.35 for a loss without curvature and a wild gradient, below 0.85 for the contrary."""
    weight = config.curvature_weight
    steady = 1.0 - _sigmoid(variance / config.variance_scale)
    return weight * _sigmoid(abs(curvature) / config.curvature_scale) + (1.0 - weight) * steady


def corrected_score(curvature_ratio: float, variance_ratio: float, config: InstabilityConfig) -> float:
    """Of both signals as multiples of what is usual: 0 where nothing moves, up to 1, and a wild gradient raises it."""
    weight = config.curvature_weight
    bent = 2.0 * _sigmoid(abs(curvature_ratio) * config.curvature_gain) - 1.0
    wild = 2.0 * _sigmoid(variance_ratio * config.variance_gain) - 1.0
    return weight * bent + (1.0 - weight) * wild


def reachable_threshold(config: InstabilityConfig, offset: float) -> float:
    """The threshold as size and time of the saves have moved it, yet one that some score still exceeds."""
    steadiest = 0.5 if config.formula == "published" else 1.0
    highest = config.curvature_weight + (1.0 - config.curvature_weight) * steadiest
    return min(config.threshold + offset, highest - _BELOW_HIGHEST)


def _sigmoid(value: float) -> float:
    """Of a value that is not negative."""
    return 1.0 / (1.0 + math.exp(-value))


def _in_words(training: TrainingFacts, config: InstabilityConfig) -> str:
    if config.formula == "published":
        return f"curvature {_figure(training.loss_curvature)}, variance {_figure(training.grad_variance)}"
    return (
        f"curvature {_figure(training.loss_curvature)} (usual {_figure(training.curvature_scale)}), "
        f"variance {_figure(training.peak_variance)} (usual {_figure(training.variance_scale)})"
    )


def _figure(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2g}"

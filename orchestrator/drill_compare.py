"""Compares an interrupted run with an uninterrupted one of the same configuration, step by step. Pure.

It knows events only, as `orchestrator.drill_history` reads them; how the two runs were made is the drill's business.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.chaos import ChaosAction
from orchestrator.drill_history import History, Strike
from orchestrator.drill_rules import OPTIONAL, WEIGHTS, WHERE_BOTH_HAVE, Measure, Quantity, Rule, Rules
from orchestrator.event_fields import Event, int_of

__all__ = ["Comparison", "Difference", "compare"]

_ENDED = " ended "  # in what the run says of a fault for which it, or its driver, was over too early


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """``size``: how far apart, in the rule's measure; None for what is equal or not."""

    step: int
    quantity: Quantity
    unbroken: object
    interrupted: object
    size: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """``first``: everything that differs at the first step at which more differs than is allowed. ``largest``: of each
    number the largest difference, allowed or not. ``num_differing``: at how many steps more differs than is allowed.
    ``num_compared``: at how many steps it was held to its rule. ``world_differs_at``: the first step of Worlds of
    different sizes, or of one that nobody told; ``sizes_differ_at``: the first of those
    that were told. ``problems``: other reasons for which this is no proof."""

    rules: Rules
    num_steps: int
    first: tuple[Difference, ...]
    largest: dict[Quantity, Difference]
    num_differing: dict[Quantity, int]
    num_compared: dict[Quantity, int]
    world_differs_at: int | None
    sizes_differ_at: int | None
    last_strike: Strike | None
    problems: tuple[str, ...]

    @property
    def is_same(self) -> bool:
        return not self.first and not self.problems


def compare(
    unbroken: History,
    interrupted: History,
    *,
    rules: Rules,
    num_steps: int,
    planned: Sequence[ChaosAction] = (),
    undone: Mapping[str, str] | None = None,
) -> Comparison:
    """``planned``: every fault that was to happen. ``undone``: why one of them did not, as far as the run said it."""
    shared = sorted(unbroken.steps.keys() & interrupted.steps.keys())
    changed = [step for step in shared if unbroken.world_size(step) != interrupted.world_size(step)]
    unknown = unbroken.untold | interrupted.untold  # whose Worlds nobody told
    tally = _Tally(rules=rules, world_differs_at=min([*changed, *unknown], default=None))
    for step in shared:
        for quantity in rules:
            tally.add(step, quantity, unbroken.steps[step], interrupted.steps[step])
    problems = (
        *_missing(unbroken, interrupted, num_steps),
        *_untraced(unbroken, interrupted, shared),
        *_never_happened(interrupted, planned, undone or {}),
        *_not_interrupted(unbroken, interrupted),
        *_not_fresh(interrupted, shared),
        *_other_end(unbroken, interrupted, rules, is_same_world=tally.world_differs_at is None),
    )
    return Comparison(
        rules=rules,
        num_steps=num_steps,
        first=tuple(tally.first),
        largest=tally.largest,
        num_differing=tally.num_differing,
        num_compared=tally.num_compared,
        world_differs_at=tally.world_differs_at,
        sizes_differ_at=min(changed, default=None),
        last_strike=interrupted.strike_before(tally.first[0].step) if tally.first else None,
        problems=problems,
    )


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Takes the steps in their order; see `Comparison`."""

    rules: Rules
    world_differs_at: int | None
    first: list[Difference] = field(default_factory=list)
    largest: dict[Quantity, Difference] = field(default_factory=dict)
    num_differing: dict[Quantity, int] = field(default_factory=dict)
    num_compared: dict[Quantity, int] = field(default_factory=dict)

    def add(self, step: int, quantity: Quantity, one: Event, other: Event) -> None:
        num_told = (quantity.field in one) + (quantity.field in other)
        if (quantity in OPTIONAL and num_told == 0) or (quantity in WHERE_BOTH_HAVE and num_told < 2):
            return
        rule = self.rules[quantity]
        difference = _difference(step, quantity, rule, one, other)
        if difference is not None and difference.size is not None:
            before = self.largest.get(quantity, difference)
            self.largest[quantity] = max(before, difference, key=lambda found: found.size or 0.0)
        if rule.only_same_world and self.world_differs_at is not None and step >= self.world_differs_at:
            return
        self.num_compared[quantity] = self.num_compared.get(quantity, 0) + 1
        if difference is None or _is_allowed(difference, rule):
            return
        self.num_differing[quantity] = self.num_differing.get(quantity, 0) + 1
        if not self.first or self.first[0].step == step:
            self.first.append(difference)


def _difference(step: int, quantity: Quantity, rule: Rule, one: Event, other: Event) -> Difference | None:
    """None where both are the same; a number that is none in one of them is infinitely far from any."""
    here, there = one.get(quantity.field), other.get(quantity.field)
    if _is_same(here, there):
        return None
    size: float | None = None
    if isinstance(here, int | float) and isinstance(there, int | float):
        size = _distance(float(here), float(there), rule.measure)
    return Difference(step=step, quantity=quantity, unbroken=here, interrupted=there, size=size)


def _is_same(here: object, there: object) -> bool:
    if isinstance(here, float) and isinstance(there, float) and math.isnan(here) and math.isnan(there):
        return True
    return here == there


def _distance(here: float, there: float, measure: Measure) -> float:
    apart = abs(there - here)
    if not math.isfinite(apart):
        return math.inf
    if measure is Measure.ABSOLUTE:
        return apart
    return apart / abs(here) if here else math.inf if apart else 0.0


def _is_allowed(difference: Difference, rule: Rule) -> bool:
    if rule.measure is Measure.BITS or difference.size is None:
        return False
    return difference.size <= rule.tolerance


def _missing(unbroken: History, interrupted: History, num_steps: int) -> list[str]:
    found = [] if unbroken.steps.keys() & interrupted.steps.keys() else ["there is no step that both runs tell of"]
    for name, history in (("uninterrupted", unbroken), ("interrupted", interrupted)):
        missing = sorted(set(range(1, num_steps + 1)) - history.steps.keys() - history.untold)
        if missing:
            shown = ", ".join(map(str, missing[:6])) + (", ..." if len(missing) > 6 else "")
            found.append(f"the {name} run did not make {len(missing)} of {num_steps} steps: {shown}")
        if (beyond := history.last_step) > num_steps:
            found.append(f"the {name} run went on to step {beyond}")
    return found


def _untraced(unbroken: History, interrupted: History, shared: Sequence[int]) -> list[str]:
    found = []
    for name, history in (("uninterrupted", unbroken), ("interrupted", interrupted)):
        bare = [step for step in shared if not isinstance(history.steps[step].get(WEIGHTS.field), str)]
        if bare:
            found.append(f"{len(bare)} steps of the {name} run, from {bare[0]} on, have no digests (run.trace_every)")
    return found


def _never_happened(interrupted: History, planned: Sequence[ChaosAction], undone: Mapping[str, str]) -> list[str]:
    found = []
    left = [(strike.verb, strike.planned_step) for strike in interrupted.strikes]
    # Of two with the same verb and step, that one has happened of which nobody said the opposite.
    for action in sorted(planned, key=lambda action: str(action) in undone):
        happened = (action.verb.value, action.step)
        if happened in left:
            left.remove(happened)
        elif (why := undone.get(str(action))) is None:
            found.append(f"{action} never happened")
        else:
            advice = "; more steps (--steps), or longer ones, give it time" if _ENDED in why else ""
            found.append(f"{action} never happened: {why}{advice}")
    return found


def _not_interrupted(unbroken: History, interrupted: History) -> list[str]:
    found = []
    if interrupted.recoveries:
        found += [f"{strike} interrupted nothing: {_why_idle(strike)}" for strike in interrupted.idle_strikes]
    else:
        found.append("nothing was interrupted: the second run went through in one attempt as well")
    if unbroken.recoveries:
        causes = ", ".join(str(attempt["cause"]) for attempt in unbroken.recoveries)
        found.append(f"the uninterrupted run was interrupted itself: {causes}")
    return found


def _why_idle(strike: Strike) -> str:
    if strike.verb in ("kill-driver", "kill-coordinator"):
        return "no new driver trained after it"
    return "nothing that it hit was training, or the run was over before it was missed"


def _not_fresh(interrupted: History, shared: Sequence[int]) -> list[str]:
    """A process that lives on keeps what a loop never put into its state, so only a new one can lack it."""
    fresh = interrupted.reach.fresh_attempts()
    if not shared or not interrupted.recoveries:
        return []
    if any(int_of(interrupted.steps[step], "attempt") in fresh for step in shared):
        return []
    return [
        "no step was made by a fresh process, so what a loop keeps outside of its state could not show; "
        "add kill-driver, or kill-node and add-node, with steps enough for the new workers to start"
    ]


def _other_end(unbroken: History, interrupted: History, rules: Rules, *, is_same_world: bool) -> list[str]:
    """The digests that the runs themselves end with; what is demanded of the weights is demanded of them."""
    if rules[WEIGHTS].only_same_world and not is_same_world:
        return []
    ends = unbroken.weights_digest, interrupted.weights_digest
    if ends[0] == ends[1] and ends[0] is not None:
        return []
    return [f"the weights at the end: {ends[0] or 'not told'} uninterrupted, {ends[1] or 'not told'} interrupted"]

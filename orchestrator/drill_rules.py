"""What a drill demands of each quantity of a step, where a run promises the same bits and where it does not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.drill_history import EVAL_LOSS

__all__ = [
    "EVALUATION",
    "EXACT",
    "GRAD_NORM_TOLERANCE",
    "LOSS",
    "LOSS_SCALE",
    "LOSS_TOLERANCE",
    "LR_TOLERANCE",
    "OPTIMIZER",
    "OPTIONAL",
    "OWN",
    "QUANTITIES",
    "RNG",
    "ROUNDED",
    "WEIGHTS",
    "WHERE_BOTH_HAVE",
    "Measure",
    "Quantity",
    "Rule",
    "Rules",
]

LOSS_TOLERANCE = 1e-4
LR_TOLERANCE = 1e-12
GRAD_NORM_TOLERANCE = 1e-3


class Measure(StrEnum):
    """How two values of a quantity may differ."""

    BITS = "equal to the bit"
    ABSOLUTE = "absolute"
    RELATIVE = "relative"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What is demanded of one quantity. ``only_same_world``: up to the first step at which the two Worlds differ in
    size, and no longer: from there sums are formed in another order, and rank 0 has other leaves."""

    measure: Measure
    tolerance: float = 0.0
    only_same_world: bool = False

    def __str__(self) -> str:
        if self.measure is not Measure.BITS:
            return f"{self.tolerance:g} {self.measure}"
        return f"{self.measure}{', until the number of workers differs' if self.only_same_world else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantity:
    """One thing that every step event tells. ``field``: its name there."""

    name: str
    field: str


# In the order in which a step comes about, so that the first one that differs is the nearest to the cause.
POSITION = Quantity(name="data position", field="position")
CHAIN = Quantity(name="samples", field="sample_chain")
TOKENS = Quantity(name="tokens", field="tokens")
LR = Quantity(name="learning rate", field="lr")
LOSS = Quantity(name="loss", field="loss")
GRAD_NORM = Quantity(name="gradient norm", field="grad_norm")
LOSS_SCALE = Quantity(name="loss scale", field="loss_scale")
EVALUATION = Quantity(name="evaluation", field=EVAL_LOSS)
OPTIMIZER = Quantity(name="optimizer", field="optimizer_digest")
WEIGHTS = Quantity(name="weights", field="weights_digest")
SCHEDULE = Quantity(name="schedule and loss scale", field="schedule_digest")
REST = Quantity(name="buffers and trackers", field="rest_digest")
RNG = Quantity(name="random state of rank 0", field="rng_digest")
OWN = Quantity(name="own trackers of rank 0", field="own_digest")
QUANTITIES = (
    *(POSITION, CHAIN, TOKENS),
    *(LR, LOSS, GRAD_NORM, LOSS_SCALE, EVALUATION),
    *(OPTIMIZER, WEIGHTS, SCHEDULE, REST, RNG, OWN),
)
OPTIONAL = frozenset({LOSS_SCALE, OWN})  # told by runs alone that have such
WHERE_BOTH_HAVE = frozenset({EVALUATION})  # one that an Order cut short is left out, and made at no other step

Rules = dict[Quantity, Rule]
_BITS = Rule(measure=Measure.BITS)
_WHILE_SAME = Rule(measure=Measure.BITS, only_same_world=True)

EXACT: Rules = {**dict.fromkeys(QUANTITIES, _BITS), OWN: _WHILE_SAME}
"""What `reproducible` promises: the same bits at any number of workers. What a rank keeps for itself follows the leaves
that it has, whose number is another in a World of another size."""

ROUNDED: Rules = {
    **EXACT,
    LR: Rule(measure=Measure.ABSOLUTE, tolerance=LR_TOLERANCE),
    LOSS: Rule(measure=Measure.RELATIVE, tolerance=LOSS_TOLERANCE),
    GRAD_NORM: Rule(measure=Measure.RELATIVE, tolerance=GRAD_NORM_TOLERANCE),
    EVALUATION: Rule(measure=Measure.RELATIVE, tolerance=LOSS_TOLERANCE),
    OPTIMIZER: _WHILE_SAME,
    WEIGHTS: _WHILE_SAME,
    REST: _WHILE_SAME,
    RNG: _WHILE_SAME,
}
"""What holds otherwise: sums over ranks are rounded in an order that depends on their number."""

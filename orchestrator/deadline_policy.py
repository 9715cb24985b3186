"""When a World with a preemption notice parts from the doomed nodes, and by which save. Pure: times are arguments.

Only for a World that must leave its last step in the store: what memory can hand over is handed over at once. It orders
nothing and does not say whether the save became a Commit.
"""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import SaveTimes
from workers.contract import OrderKind

__all__ = [
    "BOUNDED_STORED_SHARE",
    "COMMIT_S",
    "STEPS_TO_LEAVE",
    "DeadlineFacts",
    "FirstSave",
    "KeepOn",
    "LeaveNow",
    "SaveForecast",
    "decide_deadline",
    "forecast_save",
]

BOUNDED_STORED_SHARE = 0.52 / 0.83
"""Stored size of the bounded form to that of the exact one, by the limits that docs/figures.md holds both to."""
COMMIT_S = 2.0
"""Of a save that was not measured: small writes and listings, whatever its size."""
_BIND_AHEAD = 2  # an Order lands two steps after the end of the one that is running
STEPS_TO_LEAVE = 1 + _BIND_AHEAD
"""At most, from an Order until it lands: the one that is running as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveForecast:
    """From Snapshot to Commit, in seconds. ``bounded_s`` None: that form is not to be had, or is the usual one.

    ``ahead_s``: what the saves under way still take, which a rank's Keeper carries to the store before any later one.
    ``basis``: of a guess, what it rests on.
    """

    full_s: float
    bounded_s: float | None
    is_measured: bool
    ahead_s: float = 0.0
    basis: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSave:
    """What is known of a save before any was measured. ``rank_bytes``: of one rank's Snapshot. ``replica_s``: what
    copying it into another node's memory takes at least. None: that is not known."""

    rank_bytes: float | None = None
    replica_s: float | None = None

    def forecast_s(self, config: DeadlineConfig) -> tuple[float, str]:
        """Its time, and what that rests on. Nothing is in the store sooner than in the memory of a neighbour."""
        if config.first_save_s is not None:
            return config.first_save_s, "policy.deadline.first_save_s"
        if self.rank_bytes is None and self.replica_s is None:
            return config.guess_s, "nothing is known of it yet"
        written_s = 0.0 if self.rank_bytes is None else self.rank_bytes / config.first_bytes_per_s
        copied_s = self.replica_s or 0.0
        if self.rank_bytes is None or copied_s > written_s:
            return copied_s + COMMIT_S, f"its replica takes {copied_s:.1f} s"
        return written_s + COMMIT_S, f"{self.rank_bytes / 1e6:.1f} MB a rank at {config.first_bytes_per_s / 1e6:g} MB/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineFacts:
    """``left_s``: until the earliest deadline of a node of the World, None: unknown.

    ``rest_s``: what the running phase takes at most until its step ends; None: that cannot be told, as before the first
    step of an Attempt, or while data is waited for. ``look_s``: until this is asked again.
    """

    left_s: float | None
    save: SaveForecast
    step_s: float | None
    rest_s: float | None
    look_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepOn:
    """Train on, at most ``for_s``."""

    for_s: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveNow:
    """``fits`` False: nothing says that the save is committed before the node is gone."""

    kind: OrderKind
    fits: bool
    why: str


def forecast_save(
    saves: tuple[tuple[int, SaveTimes], ...],
    world_size: int,
    config: DeadlineConfig,
    first: FirstSave = FirstSave(),
) -> SaveForecast:
    """What the next save takes, by the median of ``saves``: each with the size of the World that made it; without any
    by what else is known.

    A smaller World has larger Shards for each rank, which encodes and uploads them alone; a larger one is not taken to
    be faster, since the store may be what holds it up.
    """
    basis = ""
    if not saves:
        full_s, basis = first.forecast_s(config)
        upload_s = full_s
    else:
        scaled = [_scaled(times, max(1.0, size / world_size)) for size, times in saves]
        full_s, upload_s = sorted(scaled)[len(scaled) // 2]
    bounded_s = full_s - upload_s * (1 - BOUNDED_STORED_SHARE)
    is_allowed = config.cheaper_form == "bounded"
    bounded = bounded_s if is_allowed else None
    return SaveForecast(full_s=full_s, bounded_s=bounded, is_measured=bool(saves), basis=basis)


def _scaled(times: SaveTimes, factor: float) -> tuple[float, float]:
    """The whole and the part of it that is upload."""
    grown_s = (factor - 1) * (times.encode_s + times.upload_s)
    return times.write_s + grown_s, min(times.write_s + grown_s, times.upload_s * factor)


def decide_deadline(facts: DeadlineFacts, config: DeadlineConfig) -> KeepOn | LeaveNow:
    """Train on until the latest moment at which an Order still leads to a Commit in time; then, or where that cannot be
    told, leave: in the usual form, in the bounded one where only that fits, in the cheapest where nothing does."""
    save, cheapest = facts.save, OrderKind.LEAVE if facts.save.bounded_s is None else OrderKind.LEAVE_BOUNDED
    if facts.left_s is None:
        return LeaveNow(kind=OrderKind.LEAVE, fits=True, why="its deadline is unknown: leaving now")
    if facts.left_s <= 0:
        why = f"its deadline is {-facts.left_s:.1f} s past: leaving now, and the save may not be committed"
        return LeaveNow(kind=cheapest, fits=False, why=why)
    boundary_s = (facts.rest_s or 0.0) + _BIND_AHEAD * (facts.step_s or 0.0)
    behind_s = max(0.0, save.ahead_s - boundary_s)
    words = _figures(facts, boundary_s, behind_s, config)
    room_s = facts.left_s - boundary_s - behind_s - config.margin_s
    spare_s = room_s - save.full_s
    if facts.rest_s is not None and spare_s > facts.look_s:
        return KeepOn(for_s=spare_s, why=f"{words}: leaving at the latest in {spare_s:.1f} s")
    if spare_s >= 0:
        known = "" if facts.rest_s is not None else "; when the running step ends cannot be told"
        return LeaveNow(kind=OrderKind.LEAVE, fits=True, why=f"{words}{known}: leaving now")
    if save.bounded_s is None:
        return LeaveNow(kind=OrderKind.LEAVE, fits=False, why=f"{words}: leaving now, and the save may come too late")
    short = f"{words}, its bounded form {save.bounded_s:.1f} s"
    fits = room_s >= save.bounded_s
    end = "leaving now in that form" + ("" if fits else ", and even that may come too late")
    return LeaveNow(kind=OrderKind.LEAVE_BOUNDED, fits=fits, why=f"{short}: {end}")


def _figures(facts: DeadlineFacts, boundary_s: float, behind_s: float, config: DeadlineConfig) -> str:
    takes = "takes" if facts.save.is_measured else "is taken to take"
    basis = f" ({facts.save.basis})" if facts.save.basis else ""
    behind = f" after {behind_s:.1f} s behind those under way" if behind_s else ""
    return (
        f"deadline in {facts.left_s:.1f} s, a save {takes} {facts.save.full_s:.1f} s{basis}{behind}, "
        f"the next boundary that an order can meet is {boundary_s:.1f} s away, margin {config.margin_s:g} s"
    )

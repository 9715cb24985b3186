"""When to save: the one rule by which the policies' opinions become a wish. Pure; time comes in with the facts.

The earliest due time wins. A minimum interval holds every policy back that is not pressing, and nothing is ordered
while two saves are unsettled, but not for good, soon after others failed, where the last save before a preemption
would have to wait for it, or where the last step saves anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.hazard import time_in_words, usual_write_s
from orchestrator.notice_policy import why_in_the_way
from orchestrator.save_config import DeadlineConfig
from orchestrator.save_facts import Opinion, SaveFacts, SavePolicy, SaveWish, Weighed

__all__ = ["MAX_UNSETTLED", "weigh"]

MAX_UNSETTLED = 2
"""One save under way and one staged: saves never pile up."""
_PATIENCE_S = 60.0
_MANY_TIMES = 4.0
"""How long, and how many times what a save usually takes, saves under way hold back others. Receipts that a dead Keeper
took along never come, and only those of a later save tell so."""
_BIND_AHEAD = 2  # an Order lands two steps ahead


def weigh(
    facts: SaveFacts, policies: Sequence[SavePolicy], *, min_interval_s: float, deadline: DeadlineConfig | None = None
) -> Weighed:
    """Ask every policy, and say what follows. ``deadline`` None: no preemption notice holds a save back."""
    opinions = tuple(policy.opinion(facts) for policy in policies)
    asking = [opinion for opinion in opinions if opinion.due_at_s is not None and opinion.due_at_s <= facts.now_s]
    if not asking:
        return Weighed(step=facts.newest_step, now_s=facts.now_s, opinions=opinions)
    first = min(asking, key=lambda opinion: (not opinion.is_pressing, opinion.due_at_s))
    held_back = _held_back(facts, first, min_interval_s, deadline)
    if held_back is not None:
        return Weighed(step=facts.newest_step, now_s=facts.now_s, opinions=opinions, held_back=held_back)
    wish = SaveWish(policy=first.policy, reason=f"{first.policy}: {first.why}")
    return Weighed(step=facts.newest_step, now_s=facts.now_s, opinions=opinions, wish=wish)


def _held_back(facts: SaveFacts, first: Opinion, min_interval_s: float, deadline: DeadlineConfig | None) -> str | None:
    """Why the save that ``first`` asks for is not ordered now; None: it is."""
    if facts.newest_step + _BIND_AHEAD >= facts.total_steps:
        return "the last step saves anyway"
    in_the_way = None if deadline is None else why_in_the_way(facts, deadline)
    if in_the_way is not None:
        return in_the_way
    since_s = facts.now_s - facts.last_save_at_s
    patience_s = max(_PATIENCE_S, _MANY_TIMES * (usual_write_s(facts.saves) or 0.0))
    if facts.unsettled >= MAX_UNSETTLED and since_s < patience_s:
        return f"{facts.unsettled} saves are still under way, the newest for {time_in_words(since_s)}"
    if facts.now_s < facts.next_try_at_s:
        failed = "the last save" if facts.failed_in_row == 1 else f"{facts.failed_in_row} saves in a row"
        return f"{failed} failed, the next one is tried in {time_in_words(facts.next_try_at_s - facts.now_s)}"
    if not first.is_pressing and since_s < min_interval_s:
        return f"the last save is {since_s:.0f} s old, policy.min_interval_s is {min_interval_s:g}"
    return None

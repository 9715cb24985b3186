"""Whether a Run goes on while the store fails it: a pure function over facts. No clock, no ray."""

from __future__ import annotations

from orchestrator.decisions import Keep, Stop
from orchestrator.exit_codes import ExitCode
from orchestrator.store_watch import StoreFacts
from storage.config import CheckpointConfig
from storage.events import utc_text

__all__ = ["decide_on_storage"]


def decide_on_storage(facts: StoreFacts, config: CheckpointConfig, *, now_unix_s: float) -> Keep | Stop:
    """Training goes on through an outage, until it is too long or too many saves in a row have failed."""
    if facts.away_s is not None and facts.away_s > config.max_outage_s:
        since = utc_text(now_unix_s - facts.away_s)
        what = f"the store has been away for {facts.away_s:.0f} s, since {since} (checkpoint.max_outage_s is "
        return _stop(f"{what}{config.max_outage_s:g}): {facts.reason}", facts)
    limit = config.max_failed_saves
    if limit is not None and facts.failed_in_row >= limit:
        what = f"{facts.failed_in_row} saves in a row failed (checkpoint.max_failed_saves is {limit})"
        return _stop(f"{what}; the last one: {facts.last_failure}", facts)
    return Keep()


def _stop(what: str, facts: StoreFacts) -> Stop:
    newest = f"step {facts.durable_step}" if facts.durable_step else "none, the run begins anew"
    lost = f"{facts.at_risk_steps} steps ({facts.at_risk_s:.0f} s) after it are not saved"
    todo = "run the same command again when the store takes writes"
    return Stop(exit_code=ExitCode.STORAGE_OUTAGE, reason=f"{what}; newest checkpoint: {newest}; {lost}; {todo}")

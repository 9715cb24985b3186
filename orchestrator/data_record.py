"""What an audit of the data is made from: a Checkpoint's Manifest, or a file that one was exported to. Pure.

Where a Checkpoint is of a release that kept no ledger, the plainest history that its position allows is assumed: it is
for the audit to see whether the chain bears it out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from pydantic import JsonValue

from orchestrator.data_audit import AuditReport, Claims, audit
from storage.manifest import Manifest
from storage.plain_values import plain_to_value
from workers.ledger import EMPTY_CHAIN, Beginning, Ledger, LedgerUnreadable, LeftOut, OrderFrom, TrainedRange
from workers.sample_order import SampleOrder, SourceRows
from workers.skipped_windows import Windows, spans

__all__ = ["DataRecord", "audit_record", "exported", "record_in", "record_of"]

_STATE: Final = "state"


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRecord:
    """Of one Checkpoint. ``ledger`` None: it has none. ``batch``, ``leaf``: of its last step, where they are known."""

    run_id: str
    attempt: int
    claims: Claims
    ledger: Ledger | None
    batch: int | None = None
    leaf: int | None = None


def record_of(manifest: Manifest) -> DataRecord:
    """Raises LedgerUnreadable where its training state is none that this version reads."""
    state = {name: _section(manifest.shared_state, name) for name in ("progress", "trackers")}
    progress, identity = state["progress"], state["trackers"].get("data")
    identity = identity if isinstance(identity, dict) else {}
    reported = manifest.ledger
    data = _section(_section(manifest.metadata, "config"), "data")
    try:
        claims = Claims(
            step=int(progress["step"]),
            position=int(progress["position"]),
            chain=str(progress["sample_chain"]),
            skipped=tuple((int(first), int(count)) for first, count in progress.get("skipped", ())),
            epoch=_whole(progress.get("epoch")),
            seed=_whole(identity.get("seed")),
            num_rows=_whole(identity.get("total_rows")),
            reported=None if reported is None else (reported.position, reported.sample_chain),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise LedgerUnreadable(0, f"the training state has no progress that can be read: {error!r}") from error
    text = progress.get("ledger")
    return DataRecord(
        run_id=manifest.run_id,
        attempt=manifest.attempt.number,
        claims=claims,
        ledger=Ledger.read(text) if isinstance(text, str) and text else None,
        batch=_whole(identity.get("global_batch")),
        leaf=_whole(data.get("micro_batch")),
    )


def exported(record: DataRecord) -> str:
    """As a file: the ledger, and behind it one line with the rest."""
    rest = asdict(record) | {"ledger": None}
    text = "" if record.ledger is None else f"{record.ledger.text}\n"
    return f"{text}{json.dumps({_STATE: rest})}\n"


def record_in(text: str) -> DataRecord:
    """What `exported` wrote. Raises LedgerUnreadable."""
    body, _, last = text.rstrip("\n").rpartition("\n")
    number = body.count("\n") + 2 if body else 1
    try:
        rest = dict(json.loads(last)[_STATE])
        claims = dict(rest["claims"])
        skipped, reported = claims.pop("skipped"), claims.pop("reported")
        windows = None if skipped is None else tuple((int(first), int(count)) for first, count in skipped)
        rest["claims"] = Claims(**claims, skipped=windows, reported=None if reported is None else tuple(reported))
        rest["ledger"] = Ledger.read(body) if body else None
        return DataRecord(**rest)
    except LedgerUnreadable:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise LedgerUnreadable(number, f"expected the training state as `--export` writes it: {error!r}") from error


def audit_record(
    record: DataRecord, *, told: Mapping[int, str], progress: Callable[[int], None] = lambda _: None
) -> AuditReport | None:
    """None: there is no ledger, and the chain is not that of the plainest history either."""
    ledger = record.ledger
    past = _assumed(record)
    if past is not None:
        assumed = audit(past, claims=record.claims, told=told, progress=progress)
        until = record.claims.step if ledger is None else ledger.beginning.step
        if not any(found.first_step <= until for found in assumed.findings):
            return replace(assumed, assumed_steps=until)
    return None if ledger is None else audit(ledger, claims=record.claims, told=told, progress=progress)


def _assumed(record: DataRecord) -> Ledger | None:
    """The ledger with what comes before its beginning: equal batches, one after the other. None: nothing does."""
    ledger, claims = record.ledger, record.claims
    if ledger is None:
        step, position, chain = claims.step, claims.position, claims.chain
        leaf, orders = record.leaf, _order_of(claims)
        left_out: tuple[LeftOut, ...] = ()
        trained: tuple[TrainedRange, ...] = ()
    else:
        step, position, chain = ledger.beginning.step, ledger.beginning.position, ledger.beginning.chain
        leaf = ledger.trained[0].leaf if ledger.trained else record.leaf
        orders = tuple(one.model_copy(update={"step": 1}) for one in ledger.orders[:1]) + ledger.orders[1:]
        left_out, trained = ledger.left_out, ledger.trained
    if not step or position % step or leaf is None or not orders:
        return None
    start = 0 if ledger is None else ledger.beginning.place
    earlier = _before(claims.skipped or (), None if ledger is None else start)
    first = TrainedRange(
        steps=(1, step),
        places=spans(0, position, claims.skipped or ()),
        batch=position // step,
        leaf=leaf,
        worlds={0: step},
        attempts=(0, 0),
        chain=chain,
    )
    return Ledger(
        beginning=Beginning(step=0, place=0, position=0, chain=EMPTY_CHAIN),
        orders=orders,
        left_out=(*(LeftOut(place=place, left_out=count) for place, count in earlier), *left_out),
        runs=() if ledger is None else ledger.runs,
        trained=(first, *trained),
    )


def _before(windows: Windows, end: int | None) -> Windows:
    """What of ``windows`` lies before a place; None: all."""
    if end is None:
        return windows
    return tuple((first, min(first + count, end) - first) for first, count in windows if first < end)


def _order_of(claims: Claims) -> tuple[OrderFrom, ...]:
    """That of one dataset shuffled by rows, which is all that there was before ledgers."""
    if claims.seed is None or not claims.num_rows:
        return ()
    order = SampleOrder(seed=claims.seed, sources=(SourceRows(name="train", num_rows=claims.num_rows),))
    return (OrderFrom(step=1, order=order.as_fields()),)


def _section(state: Mapping[str, JsonValue], name: str) -> dict[str, Any]:
    value = plain_to_value(state.get(name))
    return value if isinstance(value, dict) else {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None

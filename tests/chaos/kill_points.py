"""Lives of a process that saves, commits, prunes and sweeps with the real storage code, each ended at a chosen point.

Run as a program it is a nursery: it loads the code once and forks one process per life it is asked for on standard
input. A life kills itself with SIGKILL before the n-th call of a kind, or after some of that call's bytes. What it has
acknowledged it says on standard output beforehand. Neither ray nor torch is loaded.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import storage.s3_multipart
from storage.commit_log import CommitLog
from storage.config import CheckpointConfig, LocalDiskConfig
from storage.direct import DirectKeeper
from storage.keeper import Keeper
from storage.keys import Attempt, StepKey
from storage.local_store import LocalStore
from storage.object_store import ObjectStore
from storage.restore import plan_restore
from storage.s3_store import S3Store
from tests.fakes.os_tap import Call, tapped
from tests.fakes.recording_sink import RecordingSink
from tests.fakes.saving import RUN, committer_for, save_all_ranks

__all__ = ["BYTES", "CATEGORIES", "Life", "attempt_of", "open_url"]

CATEGORIES = ("save", "spool", "upload", "commit", "prune", "sweep")
BYTES = " bytes"
"""``upload bytes`` are those calls of an upload that carry bytes: a life may end within them."""

PART_BYTES = 16 << 10

_CHANGES = frozenset({"write", "send", "rename", "replace", "link", "mkdir", "ftruncate", "posix_fallocate"})
_SYNCS = frozenset({"fsync", "fdatasync"})
_REMOVALS = frozenset({"unlink", "remove", "rmdir"})
_real_write = os.write


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """One life: where, how many saves of how many ranks, and the call that ends it (``category`` None: none does)."""

    number: int
    url: str
    arena: str
    saves: int
    world_size: int
    use_keeper: bool
    use_spool: bool
    sweep_orphans: bool
    category: str | None = None
    nth: int = 0
    fraction: float = 0.0


def attempt_of(number: int) -> Attempt:
    return Attempt(number=number, nonce=f"{number:08x}")


def open_url(url: str) -> ObjectStore:
    """The store without retries: a life ends at its first trouble. On S3 with parts of a few KiB."""
    if url.startswith("s3://"):
        storage.s3_multipart.part_bytes = lambda size: max(PART_BYTES, -(-size // 100))
        return S3Store(url, multipart_bytes=PART_BYTES)
    return LocalStore(url)


def category_of(call: Call, path: str) -> str | None:
    """Which part of the work a call belongs to, by what it does to which object; None: it changes nothing there."""
    if call.name not in _CHANGES | _SYNCS | _REMOVALS:
        return None
    is_removal = call.name in _REMOVALS and "/.raysume-" not in path
    if "/raysume-run-" in path or "raysume-direct-" in path:
        return "save"
    if "/spool/" in path:
        return "spool"
    if "/commits" in path:
        return "prune" if is_removal else "commit"
    if "/manifests" in path:
        return "sweep" if is_removal else "commit"
    if "/shards" in path:
        return "sweep" if is_removal else "upload"
    return None


class KillPoint:
    """Counts calls by category and ends this process at the one that its life names."""

    def __init__(self, life: Life) -> None:
        self._life = life
        self._lock = threading.Lock()
        self._requests: dict[int, str] = {}
        self.counts: Counter[str] = Counter()

    def __call__(self, call: Call, perform: Callable[[], Any]) -> Any:
        path = self._path(call)
        category = self._category(call, path)
        if category is None:
            return perform()
        with self._lock:
            kinds = {category, category + BYTES} if len(call.data) else {category}
            self.counts.update(kinds)
            is_last = self._life.category in kinds and self.counts[self._life.category] == self._life.nth
        if is_last:
            self._end(call, category, path)
        return perform()

    def _end(self, call: Call, category: str, path: str) -> None:
        done = int(len(call.data) * self._life.fraction) if call.perform_part else 0
        if done and call.perform_part:
            call.perform_part(done)
        say(killed={"category": category, "call": call.name, "path": path, "byte": done, "of": len(call.data)})
        os.kill(os.getpid(), signal.SIGKILL)

    def _path(self, call: Call) -> str:
        if call.paths:
            return call.paths[-1]
        return os.readlink(f"/proc/self/fd/{call.fd}") if call.name != "send" else self._requested(call)

    def _requested(self, call: Call) -> str:
        """The request line that a socket's bytes belong to: its head and its body may be sent apart."""
        head = bytes(call.data[:1024])
        if head.split(b" ", 1)[0] in (b"PUT", b"POST", b"DELETE", b"GET", b"HEAD"):
            self._requests[call.fd] = head.split(b"\r\n", 1)[0].decode(errors="replace")
        return self._requests.get(call.fd, "")

    def _category(self, call: Call, path: str) -> str | None:
        if call.name != "send":
            return category_of(call, path)
        verb, _, target = path.partition(" ")
        if verb in ("PUT", "POST"):
            return category_of(call, target)
        return category_of(Call(name="unlink"), target) if verb == "DELETE" else None


def say(**words: Any) -> None:
    """One line on standard output, past every tap; it is out before the next instruction."""
    _real_write(1, json.dumps(words).encode() + b"\n")


def live(life: Life) -> None:
    """Continue from the newest Commit: save, retain, and so on, saying what is acknowledged."""
    kill_point = KillPoint(life)
    store = open_url(life.url)
    with tapped(kill_point), patch.object(CommitLog, "uncommit", _announced(CommitLog.uncommit)):
        _save_and_retain(life, store)
    say(counts=dict(kill_point.counts))


def _save_and_retain(life: Life, store: ObjectStore) -> None:
    attempt, box = attempt_of(life.number), RecordingSink()
    plan = plan_restore(CommitLog(store, RUN), attempt=attempt)
    base_step = plan.step if plan else 0
    committer = committer_for(store, orphan_grace_s=0.0 if life.sweep_orphans else 3600.0)
    committer.sweep_dead(attempt)
    disk = LocalDiskConfig(
        mode="on" if life.use_spool else "off", directory=str(Path(life.arena).parent / "spool"), keep_free_bytes=0
    )
    config = CheckpointConfig(encoding="raw" if life.number % 2 else "shuffle-zstd", local_disk=disk)
    keeper: Keeper | DirectKeeper
    if life.use_keeper:
        keeper = Keeper(RUN, "node", store, box, config, Path(life.arena), budget_bytes=1 << 24)
    else:
        keeper = DirectKeeper(store, box, config)
    for step in range(base_step + 1, base_step + 1 + life.saves):
        save_all_ranks(
            committer, keeper, box, attempt=attempt, step=step, base_step=base_step, world_size=life.world_size
        )
        say(committed=step)
        committer.retain()
    if isinstance(keeper, Keeper):
        keeper.close()


def _announced(uncommit: Callable[[CommitLog, StepKey], None]) -> Callable[[CommitLog, StepKey], None]:
    def announced(self: CommitLog, step_key: StepKey) -> None:
        say(uncommitting=step_key.step)
        uncommit(self, step_key)

    return announced


def nursery() -> None:
    """One life for each line of standard input, one after the other; `ended` closes what is said of each."""
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            code = 0
            try:
                live(Life(**json.loads(line)))
            except BaseException:  # noqa: BLE001 - a forked process must never go on in its parent's loop
                traceback.print_exc()
                code = 1
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(pid, 0)
        say(ended=os.waitstatus_to_exitcode(status))


def order_for(life: Life) -> bytes:
    """The line that asks a nursery for ``life``."""
    return json.dumps(asdict(life)).encode() + b"\n"


if __name__ == "__main__":
    nursery()

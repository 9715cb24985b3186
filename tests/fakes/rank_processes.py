"""Real worker processes for tests: each holds a WorkerProcess with a real Keeper of its own, driven through a pipe.

Ray is not needed: process groups are gloo's, the rendezvous store is a real one in the test's process, the coordinator
is `ScriptedCoordinator` inside rank 0. A process is reused from test to test with a new WorkerProcess in it. All are
forked from one server that has torch and transformers already: importing them takes longer than most tests.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from storage.keys import Attempt, new_nonce
from storage.sources import RestorePlan
from workers.contract import AttemptSpec, Member, MemorySpec, SkippedWindow, World
from workers.settings import WorkerSettings

__all__ = ["Ended", "RankProcess", "Trio", "make_spec"]

_CALL_S = 120.0
_KEY = bytes(range(32))
_PRELOADED = [
    "workers.worker_process",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How an Attempt ended on one rank, and on rank 0 what its coordinator had heard."""

    outcome: Any
    reports: tuple[Any, ...] = ()
    evals: tuple[Any, ...] = ()
    bound: tuple[Any, ...] = ()
    skipped: tuple[int, ...] = ()
    shares: tuple[Any, ...] = ()
    receipts: tuple[Any, ...] = ()


def make_spec(
    attempt: Attempt,
    rank: int,
    world_size: int,
    port: int,
    *,
    restore: RestorePlan | None = None,
    timeout_s: float = 30.0,
    data_override: bool = False,
    memory: MemorySpec | None = None,
    skipped: tuple[SkippedWindow, ...] = (),
) -> AttemptSpec:
    members = tuple(Member(rank=r, worker_id=f"w{r}", node_id=f"n{r}") for r in range(world_size))
    return AttemptSpec(
        run_id="run",
        world=World(attempt=attempt, members=members),
        rank=rank,
        store_host="127.0.0.1",
        store_port=port,
        group_timeout_s=timeout_s,
        restore=restore,
        data_override=data_override,
        memory=memory,
        skipped=skipped,
    )


class RankProcess:
    """One child process. Every call waits for its answer, at most two minutes; errors of the child are raised here."""

    def __init__(self, rank: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)  # as long as no other test has started that server
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def make(self, settings: WorkerSettings, root: Path, train_loop: Callable[[Any], None] | None = None) -> None:
        self.call("make", settings, root, train_loop)

    def call(self, name: str, *arguments: Any, **options: Any) -> Any:
        self.send(name, *arguments, **options)
        return self.receive()

    def send(self, name: str, *arguments: Any, **options: Any) -> None:
        self._pipe.send((name, arguments, options))

    def receive(self) -> Any:
        if not self._pipe.poll(_CALL_S):
            raise TimeoutError(f"process {self.pid} gave no answer within {_CALL_S:g} s")
        is_error, value = self._pipe.recv()
        if is_error:
            raise value
        return value

    def close(self) -> None:
        self._process.kill()
        self._process.join(10)
        shutil.rmtree(_arena_of(self.pid), ignore_errors=True)  # absent when no Keeper was made in it


class Trio:
    """Three processes, or ``size``, and the store they meet at."""

    def __init__(self, size: int = 3) -> None:
        from workers.rendezvous import Rendezvous  # loads ray, which the processes have no use for

        self.rendezvous = Rendezvous("127.0.0.1")
        self._number = 0
        self.processes = [RankProcess(rank) for rank in range(size)]

    def make(self, settings: WorkerSettings, root: Path, train_loop: Callable[[Any], None] | None = None) -> None:
        for process in self.processes:
            process.send("make", settings, root, train_loop)
        for process in self.processes:
            process.receive()

    def new_attempt(self) -> Attempt:
        self._number += 1
        return Attempt(number=self._number, nonce=new_nonce())

    def start(
        self,
        world_size: int,
        *,
        restore: RestorePlan | None = None,
        data_override: bool = False,
        timeout_s: float = 30.0,
        in_memory: bool = False,
        skipped: tuple[SkippedWindow, ...] = (),
        **script: object,
    ) -> Attempt:
        """Begin an Attempt on the first ``world_size`` processes; ``script`` goes to rank 0's coordinator.

        ``in_memory``: with generations, each replicated to the Keeper of the next rank.
        """
        attempt, port = self.new_attempt(), self.rendezvous.address()[1]
        peers = [self.processes[rank].call("address") for rank in range(world_size)] if in_memory else []
        for rank in range(world_size):
            peer = peers[(rank + 1) % world_size] if world_size > 1 and in_memory else None
            spec = make_spec(
                attempt,
                rank,
                world_size,
                port,
                restore=restore,
                data_override=data_override,
                timeout_s=timeout_s,
                memory=MemorySpec(peer=peer, key=_KEY) if in_memory else None,
                skipped=skipped,
            )
            self.processes[rank].call("start", spec, **script)
        return attempt

    def ended(self, attempt: Attempt, ranks: Sequence[int]) -> list[Ended]:
        for rank in ranks:
            self.processes[rank].send("ended", attempt)
        return [self.processes[rank].receive() for rank in ranks]

    def run(self, world_size: int, **options: Any) -> list[Ended]:
        return self.ended(self.start(world_size, **options), range(world_size))

    def replace(self, rank: int) -> None:
        """A fresh process in the place of ``rank``'s; it must be made again."""
        self.processes[rank].close()
        self.processes[rank] = RankProcess(rank)

    def close(self) -> None:
        for process in self.processes:
            process.close()


class _Server:
    """The child's side: each public method is a call."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._worker: Any = None
        self._keeper: Any = None
        self._sink: Any = None
        self._coordinator: Any = None

    def make(self, settings: WorkerSettings, root: Path, train_loop: Callable[[Any], None] | None) -> None:
        from storage.keeper import Keeper
        from storage.open_store import open_store
        from tests.fakes.recording_sink import RecordingSink
        from workers.worker_process import WorkerProcess

        self.close()
        self._sink = RecordingSink()
        arena = _arena_of(os.getpid())
        self._keeper = Keeper(
            settings.run_id,
            f"n{self._rank}",
            open_store(str(root)),
            self._sink,
            settings.checkpoint,
            arena,
            transport_key=_KEY,
        )
        self._worker = WorkerProcess(
            settings,
            worker_id=f"w{self._rank}",
            node_id=f"n{self._rank}",
            keeper=self._keeper,
            train_loop=train_loop,
        )
        self._worker.prepare()

    def start(self, spec: AttemptSpec, **script: Any) -> None:
        from tests.fakes.coordinators import ScriptedCoordinator

        self._coordinator = ScriptedCoordinator(spec.attempt, **script)
        self._worker.start(spec, self._coordinator)

    def ended(self, attempt: Attempt, timeout_s: float = 60.0) -> Ended | None:
        outcome = self._worker.wait_outcome(attempt, timeout_s)
        if outcome is None:
            return None
        self._keeper.flush(timeout_s)
        heard = self._coordinator
        return Ended(
            outcome=outcome,
            reports=tuple(heard.reports),
            evals=tuple(heard.evals),
            bound=tuple(heard.bound),
            skipped=tuple(heard.skipped),
            shares=tuple(heard.shares),
            receipts=tuple(self._sink.receipts),
        )

    def address(self) -> Any:
        return self._keeper.greet().address

    def memory_report(self) -> Any:
        return self._keeper.memory_report()

    def generation_receipts(self, attempt: Attempt, step: int) -> Any:
        return self._keeper.generation_receipts(attempt, step)

    def abandon(self, attempt: Attempt, timeout_s: float = 30.0) -> Any:
        return self._worker.abandon(attempt, timeout_s)

    def heartbeat(self) -> Any:
        return self._worker.heartbeat()

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._keeper.close()


def _arena_of(pid: int) -> Path:
    return Path("/dev/shm") / f"raysume-test-{pid}"


def _serve(pipe: Connection, rank: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    server = _Server(rank)
    while True:
        try:
            name, arguments, options = pipe.recv()
        except EOFError:
            server.close()
            return
        try:
            pipe.send((False, getattr(server, name)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001  the test sees it
            pipe.send((True, error))

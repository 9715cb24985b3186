"""The Keeper as a detached Ray actor, one per Run and node: how it is found, made, replaced, reached, and how it ends.

A thin shell: everything it does is storage.keeper's. The only file of storage that imports ray.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeVar

import ray
import xxhash
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from storage.arena import arena_directory
from storage.config import CheckpointConfig
from storage.errors import KeeperRefused, KeeperUnreachable, StorageError
from storage.keeper import Keeper
from storage.keeper_protocol import (
    KEEPER_PROTOCOL_VERSION,
    BufferLease,
    KeeperGreeting,
    KeeperStatus,
    LeaseRequest,
    MemoryProgress,
    MemoryReport,
    SealedSnapshot,
    TransportAddress,
)
from storage.keys import Attempt
from storage.loop_waits import wait_on_loop
from storage.manifest import Receipt
from storage.open_store import open_store

__all__ = ["NAMESPACE", "CoordinatorSink", "KeeperActor", "KeeperClient", "ensure_keeper", "keeper_name"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAMESPACE: Final = "raysume"
_MAX_CALLS: Final = 256  # calls on the event loop at a time; each costs a coroutine, not a thread
_NUM_CALLS: Final = 4
_NUM_LEASES: Final = 8
_NUM_WAITS: Final = 2
_CLAIM_TIMEOUT_S: Final = 10.0
_POLL_S: Final = 0.1
_INDEX_WAIT_S: Final = 2.0


def keeper_name(run_id: str, node_id: str) -> str:
    """Name of the actor, unique per Run and node in the namespace."""
    return f"raysume-keeper-{run_id}-{node_id[:16]}"


class CoordinatorSink:
    """Delivers to the coordinator of whatever driver is alive now: looked up anew for each call."""

    def __init__(self, coordinator_name: str, timeout_s: float = 10.0) -> None:
        self.coordinator_name = coordinator_name
        self._timeout_s = timeout_s

    def deliver(self, receipt: Receipt) -> bool:
        return bool(self._call(lambda coordinator: coordinator.deliver.remote(receipt)))

    def deliver_many(self, receipts: tuple[Receipt, ...]) -> tuple[bool, ...]:
        taken = self._call(lambda coordinator: coordinator.deliver_many.remote(receipts))
        return (False,) * len(receipts) if taken is None else tuple(taken)

    def report_failed(self, attempt: Attempt, step: int, rank: int, reason: str) -> bool:
        return bool(self._call(lambda coordinator: coordinator.report_failed.remote(attempt, step, rank, reason)))

    def report_delayed(self, attempt: Attempt, step: int, rank: int, reason: str, failing_for_s: float) -> bool:
        return bool(
            self._call(
                lambda coordinator: coordinator.report_delayed.remote(attempt, step, rank, reason, failing_for_s)
            )
        )

    def _call(self, send: Callable[[Any], Any]) -> Any | None:
        try:
            coordinator = ray.get_actor(self.coordinator_name, namespace=NAMESPACE)
            # Not ray.get, which takes any thread of an async actor for its event loop and warns of blocking it.
            return send(coordinator).future().result(timeout=self._timeout_s)
        except (ValueError, TimeoutError, RayError) as error:  # ValueError: there is no actor of that name
            logger.warning("coordinator %s cannot be reached: %s", self.coordinator_name, error)
            return None


class KeeperActor:
    """The shell round a Keeper. Ends its process when no driver has renewed it for its time to live.

    An async actor: Ray runs each call on one event loop, where nothing may block. Calls that take locks or touch disks
    run in threads, in three groups, so that neither long waits nor first leases of a size keep a seal from its turn.
    """

    def __init__(
        self,
        run_id: str,
        node_id: str,
        root_url: str,
        config: CheckpointConfig,
        identity: str,
        coordinator_name: str,
        ttl_s: float,
        transport_key: bytes | None = None,
    ) -> None:
        self._calls = ThreadPoolExecutor(_NUM_CALLS, thread_name_prefix="keeper-call")
        self._leases = ThreadPoolExecutor(_NUM_LEASES, thread_name_prefix="keeper-lease")
        self._waits = ThreadPoolExecutor(_NUM_WAITS, thread_name_prefix="keeper-wait")
        self._sink = CoordinatorSink(coordinator_name)
        self._keeper = self._start(run_id, node_id, root_url, config, identity, transport_key)
        self._keeper.renew(ttl_s)
        self._is_closed = threading.Event()
        self._is_attended = asyncio.Event()
        threading.Thread(target=self._watch, args=(min(1.0, ttl_s / 4),), name="keeper-watch", daemon=True).start()

    async def greet(self) -> KeeperGreeting:
        return self._keeper.greet()

    async def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        return await _in(self._leases, self._keeper.lease_buffer, request)

    async def seal(self, snapshot: SealedSnapshot) -> None:
        await _in(self._calls, self._keeper.seal, snapshot)

    async def release(self, lease_ids: Sequence[str]) -> None:
        await _in(self._calls, self._keeper.release, lease_ids)

    async def status(self) -> KeeperStatus:
        return await _in(self._calls, self._keeper.status)

    async def renew(self, ttl_s: float, newest_attempt: int = 0) -> KeeperStatus:
        """``newest_attempt``: its number, once it trains. A Keeper that has no rank of it would not know."""
        await _in(self._calls, self._keeper.renew, ttl_s)
        await _in(self._calls, self._keeper.forget_attempts_before, newest_attempt)
        return await self.status()

    async def attend(self, coordinator_name: str, ttl_s: float, transport_key: bytes | None = None) -> None:
        """A new driver took over: Receipts go to its coordinator from now on, peers and workers have its key."""
        self._sink.coordinator_name = coordinator_name
        if transport_key is not None:
            await _in(self._calls, self._keeper.memory.set_key, transport_key)
        self._is_attended.set()
        self._is_attended = asyncio.Event()
        await self.renew(ttl_s)

    async def outlast(self) -> None:
        """Returns when a driver attends to this Keeper anew. Until then whoever calls learns at once of its death."""
        await self._is_attended.wait()

    async def redirect(self, lost: TransportAddress, address: TransportAddress) -> None:
        """The peer at ``lost`` is gone: replicas for it go to ``address``, where another one listens."""
        self._keeper.memory.redirect(lost, address)

    async def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        """See MemoryPort. Costs no thread: all ranks of a node may wait."""
        memory = self._keeper.memory
        await wait_on_loop(memory.watch, partial(memory.is_decided, attempt, rank, step), timeout_s)
        return memory.progress(attempt, rank)

    async def memory_report(self) -> MemoryReport:
        """See Keeper.memory_report."""
        memory = self._keeper.memory
        await wait_on_loop(memory.watch, memory.is_indexed, _INDEX_WAIT_S)
        return await _in(self._calls, memory.report, 0.0)

    async def generation_receipts(self, attempt: Attempt, step: int) -> tuple[Receipt, ...]:
        return await _in(self._calls, self._keeper.generation_receipts, attempt, step)

    async def flush(self, timeout_s: float) -> bool:
        """Waits ``timeout_s`` from the moment it has a thread: two may wait at a time, further ones wait for those."""
        return await _in(self._waits, self._keeper.flush, timeout_s)

    async def close(self, *, keep_unsent: bool = False) -> None:
        """Remove the arena and the local-disk spool (see Keeper.close); the caller kills the actor next."""
        self._is_closed.set()
        await _in(self._calls, partial(self._keeper.close, keep_unsent=keep_unsent))

    def _start(
        self,
        run_id: str,
        node_id: str,
        root_url: str,
        config: CheckpointConfig,
        identity: str,
        transport_key: bytes | None,
    ) -> Keeper:
        until = time.monotonic() + _CLAIM_TIMEOUT_S
        store = open_store(root_url, config.store, keeps_parts=True)
        while True:
            try:
                return Keeper(
                    run_id,
                    node_id,
                    store,
                    self._sink,
                    config,
                    arena_directory(run_id, node_id),
                    build_digest=identity,
                    host=ray.util.get_node_ip_address(),
                    transport_key=transport_key,
                )
            except StorageError:  # a Keeper killed a moment ago may not be gone yet
                if time.monotonic() >= until:
                    raise
                time.sleep(_POLL_S)

    def _watch(self, every_s: float) -> None:
        while not self._is_closed.wait(every_s):
            if self._keeper.is_expired:
                logger.warning("no driver renewed this Keeper: it removes its arena, keeps unsent Shards, and ends")
                self._keeper.close(keep_unsent=True)
                os._exit(0)  # a detached actor has no owner to end it; nothing is left to run down


async def _in(pool: ThreadPoolExecutor, call: Callable[..., T], *arguments: Any) -> T:
    """The result of a blocking call, made in one of ``pool``'s threads."""
    return await asyncio.get_running_loop().run_in_executor(pool, call, *arguments)


class KeeperClient:
    """The Keeper's actor handle as a MemoryPort: plain calls with a timeout, errors of the storage package.

    ``name``: where the Keeper that takes a dead one's place is found.
    """

    def __init__(self, handle: Any, timeout_s: float = 30.0, *, name: str | None = None) -> None:
        self._handle = handle
        self._timeout_s = timeout_s
        self._name = name

    def lease_buffer(self, request: LeaseRequest) -> BufferLease | None:
        lease: BufferLease | None = self._call("lease_buffer", request)
        return lease

    def seal(self, snapshot: SealedSnapshot) -> None:
        self._call("seal", snapshot)

    def release(self, lease_ids: Sequence[str]) -> None:
        self._call("release", tuple(lease_ids))

    def status(self) -> KeeperStatus:
        status: KeeperStatus = self._call("status")
        return status

    def wait_replicated(self, attempt: Attempt, rank: int, step: int, timeout_s: float) -> MemoryProgress:
        progress: MemoryProgress = self._call("wait_replicated", attempt, rank, step, timeout_s, more_s=timeout_s)
        return progress

    def _call(self, verb: str, *arguments: Any, more_s: float = 0.0) -> Any:
        try:
            return self._ask(verb, *arguments, more_s=more_s)
        except ActorDiedError as error:
            successor = None if self._name is None else _find(self._name)
            if successor is None or successor == self._handle:
                raise KeeperUnreachable(verb, f"it has died ({type(error).__name__})") from error
            self._handle = successor
        try:
            return self._ask(verb, *arguments, more_s=more_s)
        except ActorDiedError as error:
            raise KeeperUnreachable(verb, f"its successor has died too ({type(error).__name__})") from error

    def _ask(self, verb: str, *arguments: Any, more_s: float) -> Any:
        timeout_s = self._timeout_s + more_s
        try:
            return ray.get(getattr(self._handle, verb).remote(*arguments), timeout=timeout_s)
        except ActorDiedError:
            raise
        except RayTaskError as error:
            if isinstance(error.cause, StorageError):
                raise error.cause from None  # Ray's wrapper would hide the type and holds a traceback
            raise StorageError(f"Keeper: {verb} failed: {error}") from error
        except RayError as error:
            raise KeeperUnreachable(verb, f"{type(error).__name__} after at most {timeout_s:g} s") from error


def ensure_keeper(
    *,
    node_id: str,
    run_id: str,
    root_url: str,
    config: CheckpointConfig,
    build_digest: str,
    coordinator_name: str,
    ttl_s: float = 120.0,
    timeout_s: float = 60.0,
    transport_key: bytes | None = None,
) -> Any:
    """Handle of the node's Keeper: the living one when its protocol, build and settings are ours, else a new one.

    ``transport_key``: what the Run's Keepers and workers prove themselves to each other with; all must have one.
    A Keeper that does not fit is flushed for a part of ``timeout_s`` and killed. Raises StorageError when time is up.
    """
    until = time.monotonic() + timeout_s
    name = keeper_name(run_id, node_id)
    settings = xxhash.xxh3_64_hexdigest(f"{root_url}\n{config.model_dump_json()}".encode())
    identity = f"{build_digest}/{settings}"
    arguments = (run_id, node_id, root_url, config, identity, coordinator_name, ttl_s, transport_key)
    while True:
        existing = _find(name)
        if existing is not None:
            if _adopt(existing, identity, (coordinator_name, ttl_s, transport_key), _left(until)):
                return existing
            _retire(existing, name, _left(until) / 2)
        try:
            handle = _create(name, node_id, arguments)
            greeting = ray.get(handle.greet.remote(), timeout=_left(until))
        except ValueError as error:  # the name is still taken: by one being killed, or by another caller's Keeper
            if time.monotonic() >= until:
                raise StorageError(f"node {node_id}: the name {name} of its Keeper stays taken: {error}") from error
            time.sleep(_POLL_S)
            continue
        except RayActorError as error:
            if not error.actor_init_failed:
                raise StorageError(f"node {node_id}: its Keeper died as it was made: {error}") from error
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise KeeperRefused(node_id, lines[-1]) from error  # above it: Ray's picture of the remote stack
        except RayError as error:
            raise StorageError(f"node {node_id}: its Keeper did not start within {timeout_s:g} s: {error}") from error
        logger.info("run %s: Keeper of node %s started, pid %d", run_id, node_id, greeting.pid)
        return handle


def _create(name: str, node_id: str, arguments: tuple[Any, ...]) -> Any:
    return (
        ray.remote(KeeperActor)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=_MAX_CALLS,
            max_restarts=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )
        .remote(*arguments)
    )


def _find(name: str) -> Any | None:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _adopt(handle: Any, identity: str, driver: tuple[str, float, bytes | None], timeout_s: float) -> bool:
    """Greet a Keeper that was here before; True when it fits and listens to this driver now."""
    try:
        greeting: KeeperGreeting = ray.get(handle.greet.remote(), timeout=min(10.0, timeout_s))
        if (greeting.protocol_version, greeting.build_digest) != (KEEPER_PROTOCOL_VERSION, identity):
            return False
        ray.get(handle.attend.remote(*driver), timeout=min(10.0, timeout_s))
    except RayError as error:
        logger.warning("a Keeper does not answer and is replaced: %s", type(error).__name__)
        return False
    return True


def _retire(handle: Any, name: str, timeout_s: float) -> None:
    try:
        if not ray.get(handle.flush.remote(timeout_s / 2), timeout=timeout_s):
            logger.warning("%s: replaced although not everything it holds is durable", name)
        ray.get(handle.close.remote(keep_unsent=True), timeout=timeout_s)
    except RayError as error:
        logger.warning("%s: replaced without a flush: %s", name, type(error).__name__)
    ray.kill(handle, no_restart=True)


def _left(until: float) -> float:
    return max(1.0, until - time.monotonic())

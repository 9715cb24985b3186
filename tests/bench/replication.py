"""What it costs to carry a Snapshot of one gigabyte into another node's memory, beside Ray's own way of doing it.

Ours: `send_replica` in one process, `TransportServer` in another, both on shared memory that is mapped and warm; the
receiver's digest counts, the sender's does not: the Keeper has made it before. Ray's: `ray.put` of the same bytes by an
actor and `ray.get` by an actor on another node of a real cluster, whose raylets carry the object (and check nothing).
Both in one run, turn by turn, over loopback. CPU is user and system time of all processes that take part: for Ray the
two actors and the two raylets. Prints the medians and writes JSON. From the root: python -m tests.bench.replication
"""

from __future__ import annotations

import argparse
import contextlib
import math
import mmap
import multiprocessing
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import xxhash

from storage.keeper_protocol import TransportAddress
from storage.keys import Attempt
from storage.transport import ReplicaRef
from storage.transport_client import ReplicaClient, send_replica
from storage.transport_server import TransportServer
from tests.bench.figures import Figure, table, write_json

ROOT = Path(__file__).resolve().parent.parent.parent
RUN, KEY = "bench", secrets.token_bytes(32)
ATTEMPT = Attempt(number=1, nonce="0000beef")
GB = 10**9
LIMIT_CPU_S = 1.0
FETCH_BYTES = 8 << 20
DEADLINE_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")


class SharedFile:
    """A shared-memory file, all its pages there and mapped, as an arena has them."""

    def __init__(self, num_bytes: int) -> None:
        self.fd = os.memfd_create("replication")
        os.truncate(self.fd, num_bytes)
        self.map = mmap.mmap(self.fd, num_bytes)
        with memoryview(self.map) as view:
            for start in range(0, num_bytes, 1 << 20):
                piece = view[start : start + (1 << 20)]
                piece[:] = bytes(len(piece))
                piece.release()

    def fill(self) -> str:
        """Bytes that no compression could shorten; their digest."""
        with memoryview(self.map) as view:
            noise = os.urandom(1 << 20)
            for start in range(0, len(view), 1 << 20):
                end = min(len(view), start + (1 << 20))
                view[start:end] = noise[: end - start]
                noise = noise[1:] + noise[:1]
            return xxhash.xxh3_128_hexdigest(view)


class OneBuffer:
    """Room for one replica, and its holder: what a Keeper's memory Tier does, without the rest of it."""

    def __init__(self, num_bytes: int) -> None:
        self._file = SharedFile(num_bytes)
        self._is_sealed = False

    @property
    def view(self) -> memoryview:
        return memoryview(self._file.map)

    def seal(self) -> None:
        self._is_sealed = True

    def drop(self) -> None:
        self._is_sealed = False

    def make_room(self, _: ReplicaRef) -> OneBuffer:
        self.drop()
        return self

    def open_generation(self, attempt: Attempt, step: int, rank: int) -> memoryview | None:
        del attempt, step, rank
        return self.view if self._is_sealed else None


def receive(pipe: Connection, num_bytes: int, key: bytes) -> None:
    """The receiving node's process."""
    server = TransportServer(OneBuffer(num_bytes), run_id=RUN, node_id="two", host="127.0.0.1", key=key)
    pipe.send(server.address)
    pipe.recv()
    server.close()


def send(pipe: Connection, num_bytes: int, key: bytes, address: TransportAddress) -> None:
    """The sending node's process: a replica, or all of it in ranges, each time that it is told."""
    source = SharedFile(num_bytes)
    ref = ReplicaRef(
        run_id=RUN, attempt=ATTEMPT, step=1, rank=0, world_size=1, num_bytes=num_bytes, digest=source.fill()
    )
    pipe.send("ready")
    while (verb := pipe.recv()) != "end":
        if verb == "send":
            sent = send_replica(address, key, ref, source.fd, pace=None, deadline_s=DEADLINE_S)
            pipe.send(sent)
            continue
        client = ReplicaClient(address, key, RUN, deadline_s=DEADLINE_S)
        for start in range(0, num_bytes, FETCH_BYTES):
            client.fetch(ATTEMPT, 1, 0, start, min(FETCH_BYTES, num_bytes - start))
        client.close()
        pipe.send(True)


class Ours:
    """Two processes and the pipes that tell them what to do."""

    def __init__(self, num_bytes: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        address: tuple[TransportAddress, ...] = ()
        for part in (receive, send):
            here, there = spawn.Pipe()
            process = spawn.Process(target=part, args=(there, num_bytes, KEY, *address), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)
            address = (self._answer(here),)
        self.pids = [process.pid or 0 for process in self._processes]

    def tell(self, verb: str) -> None:
        self._pipes[1].send(verb)
        if not self._answer(self._pipes[1]):
            raise SystemExit("the peer held the replica already: nothing was measured")

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send("end")
            process.join(DEADLINE_S)

    def _answer(self, pipe: Connection) -> Any:
        if not pipe.poll(DEADLINE_S):
            raise SystemExit(f"no answer from the benchmark's processes within {DEADLINE_S:g} s")
        return pipe.recv()


class Plasma:
    """Two actors on two nodes; the object is freed after each turn, so that each turn carries it anew."""

    def __init__(self, num_bytes: int) -> None:
        import ray

        @ray.remote(num_cpus=1)
        class Side:
            def __init__(self, num_bytes: int) -> None:
                import numpy as np

                self.data = np.frombuffer(np.random.default_rng(1).bytes(num_bytes), np.uint8)

            def pids(self) -> tuple[int, int, str]:
                return os.getpid(), os.getppid(), ray.get_runtime_context().get_node_id()

            def put(self) -> list[Any]:
                return [ray.put(self.data)]

            def get(self, refs: list[Any]) -> int:
                return int(ray.get(refs[0]).nbytes)

        self._ray, self._num_bytes = ray, num_bytes
        self._sides: list[Any] = [
            Side.options(resources={place: 1}).remote(size)  # type: ignore[attr-defined]
            for place, size in (("one", num_bytes), ("two", 0))
        ]
        facts = ray.get([side.pids.remote() for side in self._sides], timeout=DEADLINE_S)
        if len({node for _, _, node in facts}) != 2:
            raise SystemExit("both actors are on one node: nothing would be carried")
        self.pids = [pid for actor, raylet, _ in facts for pid in (actor, raylet)]
        self._refs: list[Any] = []

    def put(self) -> None:
        self._refs = self._ray.get(self._sides[0].put.remote(), timeout=DEADLINE_S)

    def get(self) -> None:
        if self._ray.get(self._sides[1].get.remote(self._refs), timeout=DEADLINE_S) != self._num_bytes:
            raise SystemExit("the object came in another size")

    def free(self) -> None:
        self._refs = []


@contextlib.contextmanager
def two_nodes(num_bytes: int) -> Iterator[None]:
    """A head and two nodes whose object stores hold a few objects of ``num_bytes``."""
    from orchestrator.local_cluster import prepare_environment

    prepare_environment()
    import ray
    from ray.cluster_utils import Cluster

    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 10**8, "include_dashboard": False},
    )
    try:
        for place in ("one", "two"):
            cluster.add_node(num_cpus=1, object_store_memory=3 * num_bytes, resources={place: 1})
        ray.init(address=cluster.address, log_to_driver=False)
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def cpu_s(pids: list[int]) -> float:
    """User and system time of these processes so far."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / TICKS


def measure(pids: list[int], work: Callable[[], None]) -> tuple[float, float]:
    """CPU time and wall time of ``work``."""
    cpu_before_s, wall_before_s = cpu_s(pids), time.monotonic()
    work()
    return cpu_s(pids) - cpu_before_s, time.monotonic() - wall_before_s


def run(num_bytes: int, rounds: int) -> dict[str, tuple[float, float]]:
    """Medians of CPU and wall seconds a gigabyte. The first turn of each warms up and does not count."""
    turns: dict[str, list[tuple[float, float]]] = {"send": [], "fetch": [], "put": [], "get": []}
    with two_nodes(num_bytes), contextlib.closing(Ours(num_bytes)) as ours:
        plasma = Plasma(num_bytes)
        for number in range(rounds + 1):
            turn = {
                "send": measure(ours.pids, lambda: ours.tell("send")),
                "fetch": measure(ours.pids, lambda: ours.tell("fetch")),
                "put": measure(plasma.pids, plasma.put),
                "get": measure(plasma.pids, plasma.get),
            }
            plasma.free()
            print(
                f"turn {number}: " + ", ".join(f"{k} {c:.2f} s CPU {w:.2f} s" for k, (c, w) in turn.items()), flush=True
            )
            for name, figures in turn.items() if number else ():
                turns[name].append(figures)
    scale = GB / num_bytes
    return {
        name: (statistics.median(c for c, _ in taken) * scale, statistics.median(w for _, w in taken) * scale)
        for name, taken in turns.items()
    }


def figures_of(medians: dict[str, tuple[float, float]]) -> list[Figure]:
    def beside(name: str, ours_s: float, peer_s: float) -> Figure:
        ratio = ours_s / peer_s if peer_s else math.inf
        return Figure(name=name, ours=f"{ours_s:.3f} s", peer=f"{peer_s:.3f} s", ratio=ratio, limit=None)

    (send_cpu, send_wall), (fetch_cpu, fetch_wall) = medians["send"], medians["fetch"]
    (put_cpu, put_wall), (get_cpu, get_wall) = medians["put"], medians["get"]
    budget = Figure(
        name="replica: CPU-s per GB over its budget",
        ours=f"{send_cpu:.3f} s",
        peer=f"{LIMIT_CPU_S:.3f} s",
        ratio=send_cpu / LIMIT_CPU_S,
        limit=1.0,
    )
    return [
        budget,
        beside("replica: CPU-s per GB, plasma put + get", send_cpu, put_cpu + get_cpu),
        beside("replica: CPU-s per GB, plasma get alone", send_cpu, get_cpu),
        beside("replica: wall s per GB, plasma put + get", send_wall, put_wall + get_wall),
        beside("replica: wall s per GB, plasma get alone", send_wall, get_wall),
        beside("ranges of 8 MiB: CPU-s per GB, plasma get alone", fetch_cpu, get_cpu),
        beside("ranges of 8 MiB: wall s per GB, plasma get alone", fetch_wall, get_wall),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/replication.json")
    options = parser.parse_args()
    figures = figures_of(run(options.bytes, options.rounds))
    print(table(figures))
    write_json(options.out, figures)


if __name__ == "__main__":
    main()

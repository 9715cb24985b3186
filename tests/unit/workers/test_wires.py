"""Cutting the wires: only what gloo polls is shut down. Real sockets, poll sets, gloo and asyncio."""

from __future__ import annotations

import asyncio
import os
import re
import select
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, ProcessGroupGloo, Store, TCPStore

from workers.wires import StoreWire, Wires

WAIT_S = 20.0
NEVER_S = 300.0


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
        with near, far:
            near.settimeout(10.0)
            far.settimeout(10.0)
            yield near, far


@contextmanager
def polled_with_a_pipe(*watched: socket.socket) -> Iterator[None]:
    reading, writing = os.pipe()
    with select.epoll() as poll:
        poll.register(reading, select.EPOLLIN)
        for one in watched:
            poll.register(one, select.EPOLLIN)
        yield
    os.close(reading)
    os.close(writing)


def is_open(pair: tuple[socket.socket, socket.socket]) -> bool:
    try:
        pair[0].sendall(b"x")
        return pair[1].recv(1) == b"x"
    except OSError:
        return False


def test_new_connections_of_a_loop_are_cut_and_older_ones_and_listeners_are_not() -> None:
    with ExitStack() as stack:
        older = stack.enter_context(connection())
        stack.enter_context(polled_with_a_pipe(older[0]))
        wires = Wires()
        newer = stack.enter_context(connection())
        alone = stack.enter_context(connection())
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        stack.enter_context(polled_with_a_pipe(newer[0], listener))
        assert wires.note() == 2
        later = stack.enter_context(connection())
        stack.enter_context(polled_with_a_pipe(later[0]))
        assert wires.cut() == 1
        assert not is_open(newer)
        assert all(is_open(pair) for pair in (older, alone, later))
        socket.create_connection(listener.getsockname(), timeout=10.0).close()
        assert wires.cut() == 0


def test_a_number_that_is_another_sockets_by_now_is_left_alone() -> None:
    wires = Wires()
    with connection() as gone, polled_with_a_pipe(gone[0]):
        number = gone[0].fileno()
        assert wires.note() == 1
    with connection() as other, ExitStack() as stack:
        if number not in (other[0].fileno(), other[1].fileno()):
            stack.callback(os.close, os.dup2(other[0].fileno(), number))
        assert wires.cut() == 0
        assert is_open(other)


def test_asyncio_connections_are_not_gloos() -> None:
    async def note() -> int:
        server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
        wires = Wires()
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            noted = wires.note()
            writer.close()
        return noted

    assert asyncio.run(note()) == 0


@pytest.mark.parametrize("size", [2])
def test_the_connections_of_gloo_are_found(size: int) -> None:
    """Two ranks in this process: what is noted is what gloo has made."""
    wires = Wires()
    store: Store = HashStore()
    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(lambda rank: ProcessGroupGloo(store, rank, size, timedelta(seconds=20)), range(size)))
    assert wires.note() >= size
    assert wires.cut() >= 1
    del groups


def test_who_waits_for_a_key_that_never_comes_is_let_go_and_older_clients_are_not_touched() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    older = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    wire = StoreWire(server.port)
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    assert wire.note() == 1
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(client.wait, ["never"], timedelta(seconds=NEVER_S))
        assert wire.cut() == 1
        with pytest.raises(dist.DistNetworkError):
            waiting.result(WAIT_S)
    assert wire.cut() == 0
    older.set("key", "value")
    assert older.get("key") == b"value"


def test_who_waits_for_a_rank_to_connect_is_let_go() -> None:
    """The second rank tells where it listens, and then never comes."""
    told: Store = HashStore()
    with ThreadPoolExecutor(2) as threads:
        groups = list(threads.map(lambda rank: ProcessGroupGloo(told, rank, 2, timedelta(seconds=WAIT_S)), range(2)))
    del groups
    # gloo's rank with the lower address waits for the other: the highest port makes that the first one.
    address, num_found = re.subn(
        rb"\x02\x00..(?=\x7f\x00\x00\x01)", b"\x02\x00\xff\xff", told.get("0/1"), flags=re.DOTALL
    )
    assert num_found == 1
    store: Store = HashStore()
    store.set("0/1", address)  # type: ignore[arg-type]  # it takes bytes too
    wires = Wires()

    def join() -> None:
        # Where the connection ends only after gloo has taken it for the other rank's, the first call fails instead.
        with suppress(RuntimeError):
            ProcessGroupGloo(store, 0, 2, timedelta(seconds=NEVER_S))

    joining = threading.Thread(target=join, daemon=True)
    joining.start()
    store.wait(["0/0"], timedelta(seconds=WAIT_S))
    assert wires.note() == 1  # it listens before it tells where
    wires.cut(num_ranks=2)
    joining.join(WAIT_S)
    assert not joining.is_alive()

"""Cutting the wires: only what gloo polls is shut down. Real sockets, poll sets, gloo and asyncio."""

from __future__ import annotations

import asyncio
import os
import select
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import ProcessGroupGloo, Store

from workers.wires import Wires


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
    from concurrent.futures import ThreadPoolExecutor

    wires = Wires()
    store: Store = dist.HashStore()
    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(lambda rank: ProcessGroupGloo(store, rank, size, timedelta(seconds=20)), range(size)))
    assert wires.note() >= size
    assert wires.cut() >= 1
    del groups

"""The driver's end of all lifelines: one thread that knows within milliseconds whose connection has ended.

An ended connection says that the process has ended, or that the network broke it. Which of the two it was is for others
to find out (`orchestrator.vital_signs`, `orchestrator.fencing`); a line that was never there says nothing at all.
"""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field

from orchestrator.bell import Bell
from workers.lifeline import NONCE_BYTES, Hello, LifelineSpec, Role, read_hello

__all__ = ["Lifelines"]

_log = logging.getLogger(__name__)
_HELLO_S = 10.0  # a caller that has not said who it is by then is hung up on
_MAX_STRANGERS = 1024  # callers that have not said who they are yet
_MAX_CUTS = 65_536  # remembered ends of processes that nobody asks about any more
_LOOK_S = 1.0
# A machine that vanished is told by its kernel, which answers nothing any more: after 9 s, where a busy or stopped
# process is still answered for. TCP would wait for hours.
_PROBES = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
_CLOSE_S = 5.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Caller:
    """One connection. ``hello`` None: not known yet who it is."""

    socket: socket.socket
    nonce: bytes
    until: float
    received: bytes = b""
    hello: Hello | None = None


@dataclass(slots=True, kw_only=True)
class _Line:
    """What is known under one name: the connections that stand, or when the last one ended (Unix time).

    There is one a process. A node that is used again has a new agent, while the old one may still be on its way out.
    """

    node_id: str
    callers: dict[int, _Caller] = field(default_factory=dict)  # by pid
    cut_at_s: float | None = None


class Lifelines:
    """Listens on ``host``, the address at which all nodes reach this driver; `bell` rings after a line has ended. Every
    method may be called from any thread and returns at once."""

    def __init__(self, host: str) -> None:
        self.bell = Bell()
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._lines: dict[tuple[Role, str], _Line] = {}
        self._num_strangers = 0
        self._listener = socket.create_server((host, 0), backlog=_MAX_STRANGERS)
        self._listener.setblocking(False)
        self._waker, self._wake = socket.socketpair()
        self._spec = LifelineSpec(host=host, port=self._listener.getsockname()[1], key=self._key)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._waker, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="lifelines", daemon=True)
        self._thread.start()

    @property
    def spec(self) -> LifelineSpec:
        """What a process needs to hold a line."""
        return self._spec

    def is_cut(self, worker_id: str) -> bool:
        """Whether the worker's line stood once and has ended since."""
        return self.cut_at_s(worker_id) is not None

    def cut_at_s(self, worker_id: str) -> float | None:
        """Unix time at which the worker's line ended; None when it stands or never stood."""
        return self._cut_at_s(Role.WORKER, worker_id)

    def is_agent_cut(self, node_id: str) -> bool:
        """The same of the node's agent."""
        return self._cut_at_s(Role.AGENT, node_id) is not None

    def is_held(self, role: Role, name: str) -> bool:
        """Whether the line of this process stands now."""
        with self._lock:
            line = self._lines.get((role, name))
            return line is not None and bool(line.callers)

    def _cut_at_s(self, role: Role, name: str) -> float | None:
        with self._lock:
            line = self._lines.get((role, name))
            return None if line is None else line.cut_at_s

    def forget_node(self, node_id: str) -> None:
        """What was known of the node's processes counts no more, should the node be used again."""
        with self._lock:
            for key in [key for key, line in self._lines.items() if line.node_id == node_id]:
                del self._lines[key]

    def close(self) -> None:
        """Hang up on everybody."""
        self._wake.close()
        self._thread.join(timeout=_CLOSE_S)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        try:
            while True:
                ready = self._selector.select(_LOOK_S)
                if any(key.fileobj is self._waker for key, _ in ready):
                    return
                for key, _ in ready:
                    if key.fileobj is self._listener:
                        self._accept()
                    else:
                        self._hear(key.data)
                self._hang_up_on_strangers()
        except Exception:  # noqa: BLE001 - the thread's outermost edge
            _log.exception("lifelines are out of service: deaths are found by silence alone")
        finally:
            for entry in list(self._selector.get_map().values()):
                if isinstance(entry.fileobj, socket.socket):
                    entry.fileobj.close()
            self._selector.close()

    def _accept(self) -> None:
        try:
            made, _ = self._listener.accept()
        except OSError as error:
            _log.debug("a caller was gone before it was answered: %s", error)
            return
        if self._num_strangers >= _MAX_STRANGERS:
            made.close()
            return
        made.setblocking(False)
        for level, option, value in _PROBES:
            made.setsockopt(level, option, value)
        caller = _Caller(socket=made, nonce=secrets.token_bytes(NONCE_BYTES), until=time.monotonic() + _HELLO_S)
        self._num_strangers += 1
        self._selector.register(made, selectors.EVENT_READ, caller)
        try:
            made.send(caller.nonce)  # an empty send buffer takes it whole
        except OSError as error:
            self._hang_up(caller, str(error))

    def _hear(self, caller: _Caller) -> None:
        try:
            got = caller.socket.recv(4096)
        except BlockingIOError:
            return
        except OSError as error:
            self._hang_up(caller, str(error))
            return
        if not got:
            self._hang_up(caller, "it ended")
        elif caller.hello is None:
            self._identify(caller, got)

    def _identify(self, caller: _Caller, got: bytes) -> None:
        caller.received += got
        try:
            hello = read_hello(caller.received, caller.nonce, self._key)
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("a stranger at the lifelines was turned away: %s", error)
            self._hang_up(caller, str(error))
            return
        if hello is None:
            return
        caller.hello, caller.received = hello, b""
        self._num_strangers -= 1
        with self._lock:
            lines = self._lines
            line = lines.pop((hello.role, hello.name), None) or _Line(node_id=hello.node_id)
            line.callers[hello.pid], line.cut_at_s = caller, None
            lines[hello.role, hello.name] = line  # the newest are last
            ended = [name for name, line in lines.items() if not line.callers]
            for name in ended[: max(0, len(ended) - _MAX_CUTS)]:
                del lines[name]

    def _hang_up(self, caller: _Caller, why: str) -> None:
        self._selector.unregister(caller.socket)
        caller.socket.close()
        hello = caller.hello
        if hello is None:
            self._num_strangers -= 1
            return
        with self._lock:
            line = self._lines.get((hello.role, hello.name))
            if line is None or line.callers.get(hello.pid) is not caller:
                return  # the process has another one by now
            del line.callers[hello.pid]
            if line.callers:
                return
            line.cut_at_s = time.time()
        _log.debug("the lifeline of %s %s (pid %d): %s", hello.role, hello.name, hello.pid, why)
        self.bell.ring()

    def _hang_up_on_strangers(self) -> None:
        if not self._num_strangers:
            return
        now = time.monotonic()
        for entry in list(self._selector.get_map().values()):
            caller = entry.data
            if isinstance(caller, _Caller) and caller.hello is None and now > caller.until:
                self._hang_up(caller, "it did not say who it is")

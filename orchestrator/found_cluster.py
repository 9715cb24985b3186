"""Whether this machine has a Ray cluster to join where none is named: known in seconds, where Ray tries for minutes.

Ray itself remembers the last cluster of the machine, looks among its processes, and joins what it finds.
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Final

from ray._private import services  # private: no public call tells which cluster Ray would join
from ray._private.utils import read_ray_address  # private: nor which one it remembers

from orchestrator.errors import ConfigError

__all__ = ["finds_cluster"]

_log = logging.getLogger(__name__)
_PROBE_S: Final = 3.0
_PATIENCE_S = 10.0  # a head that is being started again
_PAUSE_S: Final = 0.25


def finds_cluster() -> bool:
    """Whether Ray finds a cluster whose head answers; False where there is none, or the last one is gone.

    Raises ConfigError where processes of one run here and its head does not answer at the address that Ray would ask.
    """
    remembered = read_ray_address()
    if remembered and (why := _silence(remembered)) is not None:
        _log.info("the last Ray cluster of this machine, %s, is gone: %s", remembered, why)
        return False
    try:
        # Not always the remembered address: Ray asks 127.0.0.1 by the machine's outer one, where nobody may listen.
        address = services.canonicalize_bootstrap_address("auto")
    except ConnectionError:
        return False
    if address is None:
        return False
    give_up_at_s = time.monotonic() + _PATIENCE_S
    while (why := _silence(address)) is not None:
        if time.monotonic() >= give_up_at_s:
            raise ConfigError(address, (_advice(why),))
        time.sleep(_PAUSE_S)
    return True


def _silence(address: str) -> str | None:
    """Why nobody can be reached at ``address``; None where somebody listens."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_PROBE_S).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def _advice(why: str) -> str:
    return (
        f"a Ray cluster runs on this machine, and the head that Ray expects at this address does not answer ({why}); "
        "to train beside that cluster give `--local-nodes N`, to join the one that is meant name it with "
        "`--ray-address HOST:PORT` or RAY_ADDRESS, or begin one with `ray start --head`"
    )

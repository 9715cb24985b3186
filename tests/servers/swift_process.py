"""Runs Swift's four servers in this process: swift_process.py DIRECTORY ACCOUNT:USER SECRET PORT (0: any).

Started by SwiftServer as a script, never imported: eventlet replaces the standard library's sockets here.
"""

from __future__ import annotations

import eventlet

eventlet.monkey_patch()

import errno  # noqa: E402 - everything below must see the patched standard library
import socket  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from pathlib import Path  # noqa: E402

import eventlet.wsgi  # noqa: E402
from swift.common import storage_policy, utils  # noqa: E402
from swift.common.http_protocol import SwiftHttpProtocol  # noqa: E402
from swift.common.ring import RingBuilder  # noqa: E402
from swift.common.wsgi import loadapp  # noqa: E402

__all__: list[str] = []

BACKENDS = ("account", "container", "object")
FILTERS = (
    "catch_errors",
    "gatekeeper",
    "healthcheck",
    "listing_formats",
    "s3api",
    "tempauth",
    "bulk",
    "slo",
    "dlo",
    "versioned_writes",
)
FILTER_SETTINGS = {
    "s3api": "location = us-east-1\nmax_upload_part_num = 10000\n",
    "slo": "max_manifest_segments = 10000\n",
}

PORT_WAIT_S = 15.0


def write_ring(name: str, port: int, etc: Path) -> None:
    """A ring of one device on loopback: every partition lives in DIRECTORY/srv/disk."""
    builder = RingBuilder(part_power=4, replicas=1, min_part_hours=1)
    builder.add_dev(
        {
            "id": 0,
            "region": 1,
            "zone": 1,
            "weight": 1.0,
            "device": "disk",
            "meta": "",
            "ip": "127.0.0.1",
            "port": port,
            "replication_ip": "127.0.0.1",
            "replication_port": port,
        }
    )
    builder.rebalance()
    builder.get_ring().save(str(etc / f"{name}.ring.gz"))


def write_backend(name: str, port: int, root: Path) -> None:
    (root / "etc" / f"{name}-server.conf").write_text(
        f"[DEFAULT]\nswift_dir = {root / 'etc'}\ndevices = {root / 'srv'}\nmount_check = false\n"
        f"bind_ip = 127.0.0.1\nbind_port = {port}\nrecon_cache_path = {root / 'cache'}\nlog_level = WARNING\n"
        f"[pipeline:main]\npipeline = {name}-server\n[app:{name}-server]\nuse = egg:swift#{name}\n"
    )


def write_proxy(port: int, user: str, secret: str, root: Path) -> None:
    account, _, name = user.partition(":")
    settings = FILTER_SETTINGS | {
        "tempauth": f"user_{account}_{name} = {secret} .admin\n",
        "versioned_writes": "allow_versioned_writes = true\n",
    }
    filters = "".join(f"[filter:{f}]\nuse = egg:swift#{f}\n{settings.get(f, '')}" for f in FILTERS)
    (root / "etc" / "proxy-server.conf").write_text(
        f"[DEFAULT]\nswift_dir = {root / 'etc'}\nbind_ip = 127.0.0.1\nbind_port = {port}\nlog_level = WARNING\n"
        f"[pipeline:main]\npipeline = {' '.join(FILTERS)} proxy-server\n"
        "[app:proxy-server]\nuse = egg:swift#proxy\naccount_autocreate = true\nallow_account_management = true\n"
        + filters
    )


def listen_again(port: int) -> socket.socket:
    """Listen on ``port``, 0 for any. A client that kept calling a killed server may hold its port for a moment."""
    give_up_at_s = time.monotonic() + PORT_WAIT_S
    while True:
        try:
            return eventlet.listen(("127.0.0.1", port), backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() >= give_up_at_s:
                raise
            eventlet.sleep(0.1)


def main() -> None:
    root, user, secret, port = Path(sys.argv[1]).resolve(), sys.argv[2], sys.argv[3], int(sys.argv[4])
    etc = root / "etc"
    for directory in (etc, root / "srv" / "disk", root / "cache"):
        directory.mkdir(parents=True, exist_ok=True)
    (etc / "swift.conf").write_text(
        "[swift-hash]\nswift_hash_path_suffix = loopback\nswift_hash_path_prefix = raysume\n"
        "[storage-policy:0]\nname = single\ndefault = yes\n"
    )
    utils.set_swift_dir(str(etc))
    storage_policy.reload_storage_policies()

    sockets = {"proxy": listen_again(port)}
    sockets |= {name: eventlet.listen(("127.0.0.1", 0), backlog=256) for name in BACKENDS}
    ports = {name: listener.getsockname()[1] for name, listener in sockets.items()}
    for name in BACKENDS:
        write_ring(name, ports[name], etc)
        write_backend(name, ports[name], root)
    write_proxy(ports["proxy"], user, secret, root)

    servers = [
        eventlet.spawn(
            eventlet.wsgi.server,
            sockets[name],
            loadapp(str(etc / f"{name}-server.conf")),
            log=utils.NullLogger(),
            protocol=SwiftHttpProtocol,
            capitalize_response_headers=False,
            debug=False,
        )
        for name in (*BACKENDS, "proxy")
    ]
    print("ready", ports["proxy"], flush=True)
    for server in servers:
        server.wait()


if __name__ == "__main__":
    main()

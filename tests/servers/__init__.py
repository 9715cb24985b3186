"""Real servers for tests: S3 stores and the proxies that put faults in front of them.

Every server binds loopback only, keeps its files in one temporary directory and is stopped by its own pid.
"""

from tests.servers.delay_proxy import DelayProxy
from tests.servers.haproxy import HaproxyProxy
from tests.servers.moto_server import MotoServer
from tests.servers.paced_proxy import PacedProxy
from tests.servers.process import ServerNotReady, ServerProcess
from tests.servers.quirk_proxy import QuirkProxy
from tests.servers.swift_server import SwiftServer

__all__ = [
    "DelayProxy",
    "HaproxyProxy",
    "MotoServer",
    "PacedProxy",
    "QuirkProxy",
    "ServerNotReady",
    "ServerProcess",
    "SwiftServer",
]

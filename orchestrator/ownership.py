"""Names for what outlives a killed process (mounts, network namespaces, links): they say which process they belong to.

So the next process of this machine can tell what nobody needs any more.
"""

from __future__ import annotations

import os

from storage.arena import process_incarnation

__all__ = ["is_ownerless", "owner_tag"]


def owner_tag() -> str:
    """This process, for good: its pid alone would be given to another one later."""
    return f"{os.getpid()}-{process_incarnation(os.getpid())}"


def is_ownerless(tag: str) -> bool:
    """Whether ``tag`` is an `owner_tag` whose process is gone. False for what is no tag at all."""
    pid, _, incarnation = tag.partition("-")
    if not (pid.isdigit() and incarnation.isdigit()):
        return False
    return process_incarnation(int(pid)) != int(incarnation)

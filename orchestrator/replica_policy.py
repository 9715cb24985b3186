"""Chooses for each node the peer that takes its replicas: in another failure domain where there is one. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

__all__ = ["assign_peers"]


def assign_peers(
    domains: Mapping[str, str | None], members: Collection[str], *, leaving: Collection[str] = ()
) -> dict[str, str | None]:
    """Member node -> the node that takes its replicas, None where there is no other.

    ``domains``: each node that could take some, and its failure domain, None where it is not known. Another domain
    counts for more than an even load; beyond that every node takes about as much as any other. A node that is
    ``leaving`` takes nothing.
    """
    takers = sorted((node for node in domains if node not in leaving), key=lambda node: (domains[node] or "", node))
    ring = sorted({*domains, *members}, key=lambda node: (domains.get(node) or "", node))
    place = {node: index for index, node in enumerate(ring)}
    load: Counter[str] = Counter()
    peers: dict[str, str | None] = {}
    for node in sorted(members, key=place.__getitem__):
        others = [taker for taker in takers if taker != node]
        far = [taker for taker in others if _are_apart(domains.get(taker), domains.get(node))]
        distance = {taker: (place[taker] - place[node]) % len(ring) for taker in others}
        peer = min(far or others, key=lambda taker: (load[taker], distance[taker]), default=None)
        peers[node] = peer
        if peer is not None:
            load[peer] += 1
    return peers


def _are_apart(one: str | None, other: str | None) -> bool:
    """Two nodes that say nothing of where they are may well stand in one rack."""
    return one is not None and other is not None and one != other

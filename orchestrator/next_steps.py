"""What to try next, as commands that work: made of the words that started the Run. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from orchestrator.config import WorldConfig
    from orchestrator.summary import RunSummary

__all__ = ["chaos_nodes", "next_steps"]

_OWN_PLACE = ("run.url=", "run.resume=")
_LOCAL_NODES = "--local-nodes"
_MOST_NODES = 4


def chaos_nodes(world: WorldConfig) -> int:
    """How large a local cluster is on which a node may be lost and ``world.min_workers`` still be there."""
    per_node = world.workers_per_node or 1
    return max(-(-world.min_workers // per_node) + 1, min(_MOST_NODES, -(-world.max_workers // per_node)))


def next_steps(summary: RunSummary, url: str, asked: Sequence[str], nodes: int) -> list[str]:
    """``asked``: what stood behind `raysume run`, the configuration first; empty where a script started the Run.
    ``nodes``: see `chaos_nodes`."""
    lines: list[str] = []
    again = [word for word in asked if not word.startswith(_OWN_PLACE)]
    if summary["exit_code"] != 0 and summary["commits"]:
        # With the place: it may have come from the command line, and the file's own is another run then.
        command = _command([*again[:1], f"run.url={url}", *again[1:]]) if again else "run the same script again"
        lines.append(f"{command}   # go on from the newest checkpoint")
    if summary["commits"]:
        lines += [f"raysume checkpoints {verb} {shlex.quote(url)}" for verb in ("list", "verify")]
    if again and summary["steps"] > 1 and summary["failures"] + summary["preemptions"] == 0:
        third = max(1, summary["steps"] // 3)
        chaos = [_LOCAL_NODES, str(nodes), "--chaos", f"kill-node@{third},add-node@{2 * third}"]
        lines.append(_command([*again[:1], "run.url=./outputs/chaos", *_without_nodes(again[1:]), *chaos]))
    return lines


def _command(words: Sequence[str]) -> str:
    return f"raysume run {shlex.join(words)}"


def _without_nodes(words: Sequence[str]) -> Iterator[str]:
    left_out = words.index(_LOCAL_NODES) if _LOCAL_NODES in words else len(words)
    yield from words[:left_out]
    yield from words[left_out + 2 :]

"""Mutations that know JSON: a changed value, a lost or doubled member, an absurd number, or plain bytes."""

from __future__ import annotations

import json
import random
from typing import Any

__all__ = ["mutated"]

_NUMBERS = (
    *(-1, 0, 1, 2, 255, 256, 1 << 16, (1 << 31) - 1, 1 << 32, (1 << 62) - 1, 1 << 62, 1 << 63, -(1 << 63), 1 << 64),
    *(10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), float("-inf")),
)
_TEXTS = (
    *("", ".", "..", "../../etc/passwd", "/etc/passwd", "shards/../../x", "a/./b", "a\x00b", "\ud800", "é", "x" * 2000),
    *("L9", "raw", "zstd", "shuffle-zstd", "float64", "complex128", "bool", "float8_e8m0fnu", "0" * 16, "0" * 32),
    *("own-memory", "commits/step-0000000007.a000001-00000001.json", "٣", "²", "step-0000000007"),
)
_BLOBS = (
    b"\x28\xb5\x2f\xfd\xe0" + (1 << 50).to_bytes(8, "little") + b"\x01\x00\x00",
    b"\x28\xb5\x2f\xfd\xe0" + (1 << 20).to_bytes(8, "little") + b"\x03\x00\x10\x00",
    b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00",
    b"[" * 3000,
    b'{"a":' * 300,
    b"1" * 5000,
)
MAX_BYTES = 16 << 10


def mutated(data: bytes, source: random.Random) -> bytes:
    """``data`` after one to four changes."""
    for _ in range(source.randint(1, 4)):
        data = (_json_changed if source.random() < 0.7 else _bytes_changed)(data, source)
    return data[:MAX_BYTES]


def _json_changed(data: bytes, source: random.Random) -> bytes:
    """A change in the JSON object inside ``data``; the length that may stand in two bytes before it is kept true."""
    start, stop = data.find(b"{"), data.rfind(b"}") + 1
    if start < 0 or stop <= start:
        return _bytes_changed(data, source)
    length = int.from_bytes(data[:2], "little") if start == 2 else 0
    stop = 2 + length if 0 < length <= len(data) - 2 else stop
    try:
        tree = json.loads(data[start:stop])
        text = json.dumps(_changed(tree, source)).encode("utf-8", "surrogatepass")
    except (ValueError, RecursionError):
        return _bytes_changed(data, source)
    head = len(text).to_bytes(2, "little") if length and len(text) < 1 << 16 else data[:start]
    return head + text + data[stop:]


def _changed(tree: Any, source: random.Random) -> Any:
    holders = list(_holders(tree))
    if not holders:
        return _value(source)
    holder = source.choice(holders)
    place = source.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match source.randrange(6):
        case 0:
            del holder[place]
        case 1 if isinstance(holder, list):
            holder.insert(source.randint(0, len(holder)), holder[place])
        case 2 if isinstance(holder, list):
            holder[place], holder[-1] = holder[-1], holder[place]
        case 3 if isinstance(holder[place], int):
            holder[place] += source.choice((-1, 1, 8, -8))
        case 4:
            other = source.choice(holders)
            holder[place] = json.loads(
                json.dumps(source.choice([*(other.values() if isinstance(other, dict) else other)]))
            )
        case _:
            holder[place] = _value(source)
    return tree


def _value(source: random.Random) -> Any:
    deep: Any = None
    for _ in range(source.choice((1, 50, 400))):
        deep = [deep]
    return source.choice((source.choice(_NUMBERS), source.choice(_TEXTS), None, True, [], {}, deep, {"a": [1, 2]}))


def _holders(tree: Any) -> list[Any]:
    """Every object and list with something in it."""
    found, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict | list) and node:
            found.append(node)
            waiting.extend(node.values() if isinstance(node, dict) else node)
    return found


def _bytes_changed(data: bytes, source: random.Random) -> bytes:
    place = source.randint(0, len(data))
    end = min(len(data), place + source.choice((1, 1, 2, 8, 64)))
    match source.randrange(5):
        case 0:
            return data[:place] + data[end:]
        case 1:
            return data[:place] + source.randbytes(end - place) + data[end:]
        case 2:
            return data[:place] + data[place:end] * 2 + data[end:]
        case 3:
            return data[:place] + source.choice(_BLOBS) + data[source.choice((place, end)) :]
        case _:
            flipped = data[place:end][:1]
            return (
                data[:place] + bytes(byte ^ 1 << source.randrange(8) for byte in flipped) + data[place + len(flipped) :]
            )

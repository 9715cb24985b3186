"""Checks a Ray cluster launcher file offline: Ray's own schema, and what Ray notices only once machines are running.

It launches nothing and asks no cloud. Run as `python -m orchestrator.validate_cluster FILE…`.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

__all__ = ["Problem", "validate_cluster_file"]

_Path = tuple[str | int, ...]
_COUNTS = ("min_workers", "max_workers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing wrong with a file. ``path`` is the dotted key, ``line`` counts from 1."""

    path: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"line {self.line}: {self.path}: {self.message}"


def validate_cluster_file(path: Path) -> list[Problem]:
    """Every problem found, in the order of the file; none means that `ray up` accepts it."""
    try:
        node = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        return [Problem(path="(file)", line=line, message=f"is not valid YAML: {error.problem}")]
    if not isinstance(node, yaml.MappingNode):
        return [Problem(path="(file)", line=1, message="must be a mapping with cluster_name and provider")]
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    found = [*_schema_problems(tree), *_count_problems(tree), *_head_problems(tree)]
    problems = [Problem(path=_dotted(where), line=_line(node, where), message=message) for where, message in found]
    return sorted(problems, key=lambda problem: problem.line)


def _schema_problems(tree: dict[str, Any]) -> Iterator[tuple[_Path, str]]:
    import jsonschema

    schema = json.loads(files("ray.autoscaler").joinpath("ray-schema.json").read_text(encoding="utf-8"))
    for error in jsonschema.Draft7Validator(schema).iter_errors(tree):
        where: _Path = tuple(error.absolute_path)
        known = sorted(error.schema.get("properties", {})) if isinstance(error.schema, dict) else []
        if error.validator == "additionalProperties" and known:
            for key in sorted(set(error.instance) - set(known)):
                yield (*where, key), f"is not a key here{_nearest(key, known)}"
        else:
            yield where, error.message


def _count_problems(tree: dict[str, Any]) -> Iterator[tuple[_Path, str]]:
    """Ray fills a missing per-type maximum from the global one at one place and fails on it at another."""
    total = tree.get("max_workers", 0)
    minimum = 0
    for name, node_type in _node_types(tree).items():
        where: _Path = ("available_node_types", name)
        counts = {key: node_type.get(key, 0) for key in _COUNTS}
        if not all(isinstance(count, int) for count in [*counts.values(), total]):
            continue  # the schema has said so
        if "max_workers" not in node_type:
            yield where, "has no max_workers; say how many nodes of this type there may be at most"
        elif counts["min_workers"] > counts["max_workers"]:
            message = f"min_workers {counts['min_workers']} exceeds max_workers {counts['max_workers']}"
            yield (*where, "min_workers"), message
        minimum += counts["min_workers"]
    if isinstance(total, int) and minimum > total:
        yield ("max_workers",), f"{total} is less than the min_workers of all node types together, {minimum}"


def _head_problems(tree: dict[str, Any]) -> Iterator[tuple[_Path, str]]:
    types = _node_types(tree)
    if not types:
        return
    head = tree.get("head_node_type")
    if head is None:
        yield (), f"has no head_node_type; it must name one of {', '.join(types)}"
    elif head not in types:
        message = f"{head!r} is not one of available_node_types ({', '.join(types)})"
        yield ("head_node_type",), message + _nearest(str(head), list(types))


def _node_types(tree: dict[str, Any]) -> dict[str, dict[str, Any]]:
    types = tree.get("available_node_types")
    if not isinstance(types, dict):
        return {}
    return {str(name): value for name, value in types.items() if isinstance(value, dict)}


def _nearest(key: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(key, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _dotted(where: _Path) -> str:
    return ".".join(map(str, where)) or "(file)"


def _line(node: yaml.Node, where: _Path) -> int:
    """Line of the key that ``where`` names, or of the nearest thing above it that is in the file."""
    line = node.start_mark.line + 1
    for step in where:
        if isinstance(node, yaml.MappingNode):
            pair = next(((key, value) for key, value in node.value if key.value == str(step)), None)
        elif isinstance(node, yaml.SequenceNode) and isinstance(step, int) and step < len(node.value):
            pair = (node.value[step], node.value[step])
        else:
            pair = None
        if pair is None:
            break
        line, node = pair[0].start_mark.line + 1, pair[1]
    return line


def main(arguments: Sequence[str]) -> int:
    """Print every problem of every file; 0 when there is none."""
    num_problems = 0
    for name in arguments:
        for problem in validate_cluster_file(Path(name)):
            num_problems += 1
            print(f"{name}: {problem}", file=sys.stderr)
    return 1 if num_problems or not arguments else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

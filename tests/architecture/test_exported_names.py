"""Every module says what it is for and what it offers, and stays within one screenful of responsibilities."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("orchestrator", "workers", "storage")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
ENTRY_POINTS = {"__main__"}
MAX_LINES = 400
VAGUE = re.compile(r"(Manager|Handler|Helper|Util|Engine|Processor|Context|Info)$")


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def in_repository(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_module_says_what_it_is_responsible_for() -> None:
    assert [in_repository(path) for path in SOURCES if not ast.get_docstring(tree_of(path))] == []


def test_what_a_module_exports_is_there_and_is_public() -> None:
    wrong = []
    for path in SOURCES:
        if path.stem in ENTRY_POINTS:
            continue
        module = importlib.import_module(name_of(path))
        exported = getattr(module, "__all__", None)
        if exported is None:
            wrong.append(f"{in_repository(path)} has no __all__")
            continue
        wrong += [f"{in_repository(path)} has no {name}" for name in exported if not hasattr(module, name)]
        wrong += [f"{in_repository(path)} exports {name}" for name in exported if name.startswith("_")]
        wrong += [f"{in_repository(path)} exports {name} twice" for name in set(exported) if exported.count(name) > 1]
    assert wrong == []


def test_no_file_has_more_than_400_lines() -> None:
    """A file that long holds more than one responsibility; split it."""
    lengths = {in_repository(path): len(path.read_text(encoding="utf-8").splitlines()) for path in [*SOURCES, *TESTS]}
    assert {path: length for path, length in lengths.items() if length > MAX_LINES} == {}


def test_no_class_has_a_vague_name() -> None:
    names = {
        f"{in_repository(path)}: {node.name}"
        for path in SOURCES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef) and VAGUE.search(node.name)
    }
    assert names == set()

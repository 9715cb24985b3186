"""Who may import whom, and what must stay light. Each check runs in a fresh interpreter, as a user's command would."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def loaded_after(statement: str) -> set[str]:
    """Names of the heavy packages that a statement pulls in."""
    code = f"{statement}\nimport sys\nprint(*sorted({{'torch', 'ray', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def modules_of(package: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__")


def imports_of(path: Path) -> set[str]:
    """Top packages imported anywhere in a file, inside functions too."""
    import ast

    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "broken" in done.stdout, "import-linter gave no verdict"


def test_importing_the_command_line_loads_neither_torch_nor_ray() -> None:
    assert loaded_after("import orchestrator.cli") == set()


def test_importing_the_three_packages_loads_nothing_heavy() -> None:
    assert loaded_after("import orchestrator, workers, storage") == set()


def test_the_record_half_of_storage_loads_neither_torch_nor_ray() -> None:
    """So that `verify`, `checkpoints` and `doctor` run on any machine: only the Keeper's actor and DCP are heavy."""
    light = [name for name in modules_of("storage") if name != "keeper_actor" and not name.startswith("dcp_")]
    assert loaded_after("import " + ", ".join(f"storage.{name}" for name in light)) == set()


def test_only_the_named_files_of_storage_import_torch_or_ray() -> None:
    wrong = {}
    for path in sorted((ROOT / "storage").rglob("*.py")):
        allowed = {"ray"} if path.stem == "keeper_actor" else {"torch"} if path.stem.startswith("dcp_") else set()
        wrong[path.name] = (imports_of(path) & {"torch", "ray"}) - allowed
    assert {name: names for name, names in wrong.items() if names} == {}


def test_the_driver_side_never_imports_torch() -> None:
    assert [path.name for path in (ROOT / "orchestrator").rglob("*.py") if "torch" in imports_of(path)] == []


@pytest.mark.parametrize(
    ("package", "above"), [("storage", {"workers", "orchestrator"}), ("workers", {"orchestrator"})]
)
def test_nothing_imports_upward_not_even_in_a_function(package: str, above: set[str]) -> None:
    wrong = {path.name: imports_of(path) & above for path in sorted((ROOT / package).rglob("*.py"))}
    assert {name: names for name, names in wrong.items() if names} == {}

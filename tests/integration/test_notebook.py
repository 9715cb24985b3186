"""The notebooks run from the first cell to the last.

Real: a Jupyter kernel, and in it a run on several local Ray nodes, one of them killed. Only the figures that the save
policies' notebook shows are made up here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
import pytest
from nbconvert.preprocessors import ExecutePreprocessor

from tests.bench.ablation import CONTESTANTS, write_json
from tests.bench.ablation_figures import figures_of
from tests.bench.unstable_runs import Course

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


@pytest.fixture
def own_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A kernel of the interpreter that runs this test, whatever kernels the machine offers."""
    folder = tmp_path / "jupyter" / "kernels" / "raysume-test"
    folder.mkdir(parents=True)
    arguments = ", ".join(
        f'"{part}"' for part in (sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}")
    )
    (folder / "kernel.json").write_text(f'{{"argv": [{arguments}], "display_name": "test", "language": "python"}}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "jupyter"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("RAYSUME_NOTEBOOK_OUTPUT", str(tmp_path / "outputs"))
    return "raysume-test"


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_the_elastic_scaling_notebook_runs_and_plots(own_kernel: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / "elastic_scaling.ipynb", as_version=4)
    executor = ExecutePreprocessor(timeout=360, kernel_name=own_kernel)
    executor.preprocess(notebook, {"metadata": {"path": str(NOTEBOOKS)}})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs), "no plot was drawn"
    text = "".join(output.get("text", "") for output in outputs)
    assert "60 steps" in text
    assert text.count("workers, from step") >= 2, "the killed node ended no attempt"


@pytest.mark.timeout(120)
def test_the_save_policies_notebook_reads_what_the_ablation_writes(
    own_kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course = Course(seed=1, steps=2, windows=((2, 3),))
    steps = [{"event": "step", "attempt": 1, "step": step, "step_s": 0.5, "finished_s": float(step)} for step in (1, 2)]
    figures = figures_of(steps, {"goodput": {"lost_work_s": 0.0, "recovery_s": 0.0, "total_s": 2.0}}, course)
    path = tmp_path / "ablation.json"
    write_json(path, {each.name: [figures] for each in CONTESTANTS}, [course])
    monkeypatch.setenv("RAYSUME_ABLATION", str(path))
    notebook = nbformat.read(NOTEBOOKS / "when_to_save.ipynb", as_version=4)
    executor = ExecutePreprocessor(timeout=100, kernel_name=own_kernel)
    executor.preprocess(notebook, {"metadata": {"path": str(NOTEBOOKS)}})
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    text = "".join(output.get("text", "") for output in outputs)
    assert all(each.name in text for each in CONTESTANTS)


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [cell.id for cell in notebook.cells if cell.get("outputs") or cell.get("execution_count")] == []

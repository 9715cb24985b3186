"""`.ci/install` never drags a CUDA build onto a machine without a GPU.

Real: pip and a virtual environment. Faked: the packages on offer (empty wheels) and `nvidia-smi`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def put_wheel(folder: Path, name: str, version: str, requires: tuple[str, ...] = ()) -> None:
    info = f"{name}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", f"{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")


@dataclass(frozen=True)
class Machine:
    """A machine that is offered the wheels in `wheels` and nothing else."""

    directory: Path
    venv: Path
    has_gpu: bool = False

    @property
    def wheels(self) -> Path:
        return self.directory / "wheels"

    def install(self, **environment: str) -> subprocess.CompletedProcess[str]:
        """Install torch, then a project that is not there: what is tested has happened by then."""
        tools = self.directory / "bin"
        tools.mkdir()
        smi = tools / "nvidia-smi"
        smi.write_text("#!/bin/sh\necho 'GPU 0: made up'\n" if self.has_gpu else "#!/bin/sh\nexit 9\n")
        smi.chmod(0o755)
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        clean |= {"PYTHON": sys.executable, "PIP_CONFIG_FILE": os.devnull, "PIP_NO_INDEX": "1"}
        clean |= {"PIP_FIND_LINKS": str(self.wheels), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
        return subprocess.run(
            [ROOT / ".ci" / "install", self.venv, self.directory / "no-project"],
            env=clean | environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def torch_version(self) -> str | None:
        found = sorted(self.venv.glob("lib/python3*/site-packages/torch-*.dist-info"))
        return found[0].name.removeprefix("torch-").removesuffix(".dist-info") if found else None


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made once, because that is what takes time; `machine` takes torch out again."""
    directory = tmp_path_factory.mktemp("install") / "venv"
    subprocess.run([sys.executable, "-m", "venv", directory], timeout=120, check=True)
    return directory


@pytest.fixture
def machine(tmp_path: Path, venv: Path) -> Machine:
    for installed in venv.glob("lib/python3*/site-packages/*.dist-info"):
        if not installed.name.startswith("pip-"):
            shutil.rmtree(installed)
    (tmp_path / "wheels").mkdir()
    put_wheel(tmp_path / "wheels", "torch", "2.13.0", ("nvidia-made-up-runtime",))
    put_wheel(tmp_path / "wheels", "nvidia_made_up_runtime", "13.0")
    return Machine(tmp_path, venv)


def test_without_a_gpu_a_cuda_build_alone_is_refused_with_what_to_do(machine: Machine) -> None:
    done = machine.install()
    assert done.returncode == 1
    assert "TORCH_INDEX_URL=" in done.stderr
    assert "ALLOW_CUDA=1" in done.stderr
    assert machine.torch_version() is None


def test_without_a_gpu_the_cpu_build_is_taken_where_one_is_offered(machine: Machine) -> None:
    put_wheel(machine.wheels, "torch", "2.13.0+cpu")
    machine.install()
    assert machine.torch_version() == "2.13.0+cpu"


def test_a_build_that_needs_no_cuda_packages_is_taken_whatever_its_name(machine: Machine) -> None:
    put_wheel(machine.wheels, "torch", "2.13.1")
    machine.install()
    assert machine.torch_version() == "2.13.1"


def test_with_a_gpu_the_cuda_build_is_taken(machine: Machine) -> None:
    Machine(machine.directory, machine.venv, has_gpu=True).install()
    assert machine.torch_version() == "2.13.0"


def test_who_asks_for_the_cuda_build_gets_it(machine: Machine) -> None:
    machine.install(ALLOW_CUDA="1")
    assert machine.torch_version() == "2.13.0"

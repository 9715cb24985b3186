"""A loop is found by its name from another directory, and what is wrong with a name is said. No torch, no Ray."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.loop_reference import LoopNotFound, LoopReference


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's directory that this process is not in; modules and paths are as before afterwards."""
    known = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def reference(folder: Path, text: str) -> LoopReference:
    return LoopReference.parse(text, str(folder))


def test_a_loop_is_imported_where_it_is_called_with_what_lies_beside_it(folder: Path) -> None:
    (folder / "beside_it.py").write_text("WORD = 'beside'\n")
    body = "class Loops:\n    @staticmethod\n    def train(heard):\n        heard.append(WORD)\n"
    (folder / "my_loop.py").write_text(f"from beside_it import WORD\n\n{body}")
    loop = pickle.loads(pickle.dumps(reference(folder, "my_loop:Loops.train")))
    heard: list[str] = []
    loop(heard)
    assert heard == ["beside"]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (None, "my_loop:train", "no module my_loop was found in"),
        (None, "my_loop.deep:train", "no module my_loop was found in"),
        ("def train(session): ...", "my_loop:trian", "my_loop.py has no trian; it has train"),
        ("train = 3", "my_loop:train", "it is int, not a function"),
        ("import no_such_thing", "my_loop:train", "module my_loop imports no_such_thing, which is not there"),
        ("\nraise ValueError('a bad path')", "my_loop:train", "ValueError: a bad path, at"),
        ("import sys\nsys.exit(3)", "my_loop:train", "belongs below if __name__"),
        ("def train(session:", "my_loop:train", "SyntaxError"),
    ],
)
def test_a_name_that_leads_nowhere_says_what_was_tried(folder: Path, content: str | None, name: str, said: str) -> None:
    if content is not None:
        (folder / "my_loop.py").write_text(content)
    with pytest.raises(LoopNotFound) as caught:
        reference(folder, name).load()
    assert said in str(caught.value)
    assert repr(name) in str(caught.value)
    if "was found in" in said:
        assert str(folder) in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("train", "MODULE:FUNCTION"),
        (":train", "MODULE:FUNCTION"),
        ("my loop:train", "MODULE:FUNCTION"),
        ("my_loop:", "MODULE:FUNCTION"),
        ("./src/train.py:fit", "src.train:fit"),
    ],
)
def test_what_is_no_name_is_refused_before_anything_is_imported(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(LoopNotFound, match=said):
        reference(tmp_path, name)

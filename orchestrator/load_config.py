"""Reads a run configuration: YAML file, dotted overrides, checks; every problem becomes one line a person can act on.

No shell, environment variable or template is expanded in a value: what was given is what the run sees.
"""

from __future__ import annotations

import difflib
import json
import types
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from workers.config import PrepareConfig

__all__ = ["load_config", "parse_override"]

_Tree = dict[str, Any]


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML that refuses a key written twice: one of the two values would be lost in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            name = str(key_node.value)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {name!r} is written twice", key_node.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


def load_config(path: Path, overrides: Sequence[str] = (), *, directory: Path | None = None) -> RunConfig:
    """The configuration in ``path`` with ``overrides`` (``key.sub=value``, later ones win) put over it.

    Relative paths in run.url, run.resume and of data (urls, prepare.source) are taken from ``directory`` (default: the
    working directory). Raises ConfigError with every problem found.
    """
    tree = _read_yaml(path)
    problems: list[str] = []
    for override in overrides:
        try:
            _put(tree, *parse_override(override))
        except ValueError as error:
            problems.append(str(error))
    problems += _unknown_keys(RunConfig, tree, "")
    if problems:
        raise ConfigError(str(path), tuple(problems))
    try:
        config = RunConfig.model_validate(_with_text(RunConfig, tree))
    except ValidationError as error:
        raise ConfigError(str(path), tuple(_problem_line(detail) for detail in error.errors())) from None
    return _with_absolute_paths(config, directory or Path.cwd())


def parse_override(override: str) -> tuple[tuple[str, ...], Any]:
    """``key.sub=value`` as a key path and a value read as JSON or, failing that, as YAML. Raises ValueError."""
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise ValueError(f"override {override!r}: expected key.sub=value, e.g. run.steps=200")
    field = _annotation_at(path)
    if field is not None and _is_text(field) and not text.lstrip().startswith(("'", '"')):
        return path, None if text.strip() == "null" and type(None) in get_args(field) else text
    try:
        # JSON first: YAML 1.1 reads 1e-4 as text.
        return path, json.loads(text)
    except ValueError:
        pass
    try:
        return path, yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"override {override!r}: the value is neither JSON nor YAML: {_one_line(error)}") from None


def _read_yaml(path: Path) -> _Tree:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, _names_beside(path), n=1)
        hint = f"; did you mean {path.with_name(near[0])}?" if near else ""
        raise ConfigError(str(path), (f"no such file{hint}",)) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), (f"cannot be read: {error}",)) from None
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(str(path), (f"not valid YAML: {_one_line(error)}",)) from None
    if not isinstance(tree, dict):
        raise ConfigError(str(path), (f"expected keys such as run, model and data, found {type(tree).__name__}",))
    return tree


def _names_beside(path: Path) -> list[str]:
    return [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []


def _one_line(error: yaml.YAMLError) -> str:
    return " ".join(str(error).split())


def _put(tree: _Tree, path: tuple[str, ...], value: Any) -> None:
    """Set ``value`` at ``path``, making the sections on the way."""
    here = tree
    for depth, key in enumerate(path[:-1]):
        below = here.get(key)
        if below is None:
            below = here[key] = {}
        if not isinstance(below, dict):
            dotted = ".".join(path[: depth + 1])
            raise ValueError(f"override {'.'.join(path)}: {dotted} is the value {below!r}, not a section")
        here = below
    here[path[-1]] = value


def _unknown_keys(model: type[BaseModel], tree: _Tree, prefix: str) -> Iterator[str]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        field = model.model_fields.get(str(key))
        if field is None:
            yield from _unknown_key_lines(model, str(key), value, prefix)
            continue
        below = _model_in(field.annotation)
        if below is not None and isinstance(value, dict):
            yield from _unknown_keys(below, value, f"{dotted}.")


def _unknown_key_lines(model: type[BaseModel], key: str, value: Any, prefix: str) -> Iterator[str]:
    section = difflib.get_close_matches(key, model.model_fields, n=1, cutoff=0.6)
    if isinstance(value, dict) and value and not section:
        # A section that is not one of ours: its keys say better than its name what was meant.
        for leaf in value:
            nearest = _nearest(None, str(leaf), f"{prefix}{key}.")
            yield f"unknown key {prefix}{key}.{leaf}; the nearest valid one is {nearest}"
        return
    yield f"unknown key {prefix}{key}; the nearest valid one is {_nearest(model, key, prefix)}"


def _nearest(model: type[BaseModel] | None, key: str, prefix: str) -> str:
    """The valid path most like the unknown one: a sibling when one is close, else the best of all paths."""
    siblings = () if model is None else tuple(model.model_fields)
    initials = "".join(word[:1] for word in key.split("_"))
    close = [initials] if initials in siblings else difflib.get_close_matches(key, siblings, n=1, cutoff=0.6)
    if close:
        return f"{prefix}{close[0]}"
    wanted = f"{prefix}{key}"

    def likeness(path: str) -> float:
        leaf = difflib.SequenceMatcher(None, key, path.rpartition(".")[2]).ratio()
        return max(leaf, difflib.SequenceMatcher(None, wanted, path).ratio())

    return max(_all_paths(RunConfig, ""), key=likeness)


def _all_paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield f"{prefix}{name}"
        below = _model_in(field.annotation)
        if below is not None:
            yield from _all_paths(below, f"{prefix}{name}.")


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The settings model of a field, also where the field may be null."""
    options = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    for option in options:
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _annotation_at(path: tuple[str, ...]) -> Any:
    """The declared type at ``path``; None where there is no such key, or below a free-form dictionary."""
    model: type[BaseModel] | None = RunConfig
    annotation: Any = None
    for key in path:
        if model is None or key not in model.model_fields:
            return None
        annotation = model.model_fields[key].annotation
        model = _model_in(annotation)
    return annotation


def _is_text(annotation: Any) -> bool:
    return annotation is str or (get_origin(annotation) in (Union, types.UnionType) and str in get_args(annotation))


def _with_text(model: type[BaseModel], tree: _Tree) -> _Tree:
    """Whole numbers written where text is meant (``resume: 40``) as text."""
    out = dict(tree)
    for key, value in tree.items():
        annotation = model.model_fields[key].annotation
        below = _model_in(annotation)
        if below is not None and isinstance(value, dict):
            out[key] = _with_text(below, value)
        elif _is_text(annotation) and isinstance(value, int) and not isinstance(value, bool):
            out[key] = str(value)
    return out


def _problem_line(detail: ErrorDetails) -> str:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "missing":
        return f"{path} is missing: it has no default and must be set"
    expected = detail["msg"].removeprefix("Value error, ").replace("Input should be", "expected", 1)
    value = detail["input"]
    if isinstance(value, BaseModel | dict) or not path:
        # A rule about several keys names them itself; the whole section as its value would only hide that.
        return f"{path}: {expected}" if path else expected
    return f"{path}: {value!r}: {expected}"


def _with_absolute_paths(config: RunConfig, directory: Path) -> RunConfig:
    run, data = config.run, config.data
    resume = run.resume
    if resume not in ("auto", "none") and not resume.isdigit():
        resume = _absolute(resume, directory)
    made_absolute = {
        "url": data.url and _absolute(data.url, directory),
        "prepare": _absolute_source(data.prepare, directory),
        "sources": tuple(
            source.model_copy(
                update={
                    "url": _absolute(source.url, directory),
                    "prepare": _absolute_source(source.prepare, directory),
                }
            )
            for source in data.sources
        ),
    }
    return config.model_copy(
        update={
            "run": run.model_copy(update={"url": _absolute(run.url, directory), "resume": resume}),
            "data": data.model_copy(update=made_absolute),
        }
    )


def _absolute_source(prepare: PrepareConfig | None, directory: Path) -> PrepareConfig | None:
    if prepare is None or prepare.source == "stdlib":
        return prepare
    return prepare.model_copy(update={"source": _absolute(prepare.source, directory)})


def _absolute(url: str, directory: Path) -> str:
    """A URL as it is, a relative path from ``directory``; `..` is taken out so that one place has one name."""
    if "://" in url:
        return url
    return str((directory / Path(url).expanduser()).resolve())

"""Any plain state goes to JSON and comes back equal; anything else is refused by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from workers.plain_state import NotPlain, from_plain, tensor_names, to_plain


def test_plain_values_tuples_infinities_and_tensors_survive_json() -> None:
    value = {
        "a": [1, 2.5, None, True, "text", -(10**30)],
        "betas": (0.9, (0.95,)),
        "best": float("inf"),
        "worst": -math.inf,
        "float64": np.float64(0.1),
        "tensors": [torch.arange(3), {"deep": torch.ones(())}],
    }
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(to_plain(value, "x", tensors), allow_nan=False)
    assert list(tensors) == ["x.tensors.0", "x.tensors.1.deep"]
    assert tensor_names(json.loads(text)) == list(tensors)
    back = from_plain(json.loads(text), tensors)
    assert back["tensors"][1]["deep"] is tensors["x.tensors.1.deep"]
    del back["tensors"], value["tensors"]
    assert back == value
    assert isinstance(back["betas"], tuple)


def test_not_a_number_stays_one() -> None:
    assert math.isnan(from_plain(json.loads(json.dumps(to_plain(math.nan, "x", {}))), {}))


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ({"f": lambda: None}, r"x\.f is a builtins\.function"),
        ([set()], r"x\.0 is a builtins\.set"),
        ({"a": {1: 2}}, r"x\.a\.1 is under a key of type int"),
        ({"__tensor__": "model.weight"}, r"x\.__tensor__"),
        (np.int64(3), r"x is a numpy\.int64"),
        (b"bytes", r"x is a builtins\.bytes"),
    ],
)
def test_anything_else_is_refused_by_name(value: object, name: str) -> None:
    with pytest.raises(NotPlain, match=name):
        to_plain(value, "x", {})

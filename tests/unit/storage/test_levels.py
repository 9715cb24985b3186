"""The one table of Levels, the rules a Run may add to it, and the rules that no Run may have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from storage.config import CheckpointConfig
from storage.levels import LevelTable, Treatment

M, V, STEP = "optim.layers.0.weight.exp_avg", "optim.layers.0.weight.exp_avg_sq", "optim.layers.0.weight.step"
CORE = ("model.layers.0.weight", "model.exp_avg", "rng.rank-0.cpu", "tracker.ema.weight", STEP, "anything else")


def table(fidelity: str = "lossless", *rules: dict[str, str]) -> LevelTable:
    return LevelTable.of(CheckpointConfig.model_validate({"fidelity": fidelity, "levels": rules}))


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq"])
def test_the_moments_of_an_entry_called_optimizer_are_treated_alike(key: str) -> None:
    assert table("bounded").treatment(f"optimizer.state.w.{key}", "float32") == Treatment("L2", "bounded")
    assert table("bounded").treatment(f"optimum.state.w.{key}", "float32") == Treatment("L1", "lossless")


def test_everything_is_lossless_by_default() -> None:
    for name in (M, V):
        assert table().treatment(name, "float32") == Treatment("L2", "lossless")
    for name in CORE:
        assert table().treatment(name, "float32") == Treatment("L1", "lossless")


def test_bounded_rounds_the_fp32_moments_and_nothing_else() -> None:
    bounded = table("bounded")
    for name in (M, V):
        assert bounded.treatment(name, "float32") == Treatment("L2", "bounded")
        for dtype in ("bfloat16", "float16", "float64"):
            assert bounded.treatment(name, dtype) == Treatment("L2", "lossless")
        for dtype in ("int8", "uint8", "bool", "int64"):
            assert bounded.treatment(name, dtype) == Treatment("L1", "lossless")
    for name in CORE:
        assert bounded.treatment(name, "float32") == Treatment("L1", "lossless")


def test_a_rule_keeps_one_moment_exact() -> None:
    mixed = table("bounded", {"pattern": "optim.*.exp_avg", "fidelity": "lossless"})
    assert mixed.treatment(M, "float32") == Treatment("L2", "lossless")
    assert mixed.treatment(V, "float32") == Treatment("L2", "bounded")


def test_the_first_rule_that_matches_decides_before_the_built_in_table() -> None:
    rules = (
        {"pattern": "optim.layers.0.*.exp_avg", "level": "L1"},
        {"pattern": "optim.*.exp_avg", "level": "L3"},
        {"pattern": "optim.*.trace", "fidelity": "omit"},
        {"pattern": "optim.*.grad_norm", "level": "L4"},
    )
    own = table("bounded", *rules)
    assert own.treatment(M, "float32") == Treatment("L1", "lossless")
    assert own.treatment("optim.head.exp_avg", "float32") == Treatment("L3", "lossless")
    assert own.treatment(V, "float32") == Treatment("L2", "bounded")
    assert own.treatment("optim.head.trace", "float32") == Treatment("L4", "omit")
    assert own.treatment("optim.head.grad_norm", "float32") == Treatment("L4", "omit")
    assert own.treatment("optim.head.grad_norm", "int64") == Treatment("L1", "lossless")


@pytest.mark.parametrize("lowering", [{"fidelity": "bounded"}, {"fidelity": "omit"}, {"level": "L3"}, {"level": "L4"}])
@pytest.mark.parametrize(
    "pattern",
    [
        *("model.*", "model.layers.0.weight", "model.*.exp_avg", "*", "*.exp_avg", "[mo]*.exp_avg", "opt*.exp_avg"),
        *("optim.*", "optim.*.*", "optim.*exp_avg", "optim.*.st?p", "optim.*.[s]tep", "optim.*.step", "rng.*"),
        *("tracker.ema.*", "optim.exp_avg", "?ptim.*.exp_avg"),
    ],
)
def test_a_rule_that_could_lower_the_core_is_refused_by_name(pattern: str, lowering: dict[str, str]) -> None:
    with pytest.raises(ValidationError) as caught:
        table("lossless", {"pattern": pattern, **lowering})
    assert f"rule {pattern!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ({"pattern": "optim.*.exp_avg_sq", "fidelity": "omit"}, "cannot be left out"),
        ({"pattern": "optim.*.exp_avg_sq", "tier": "memory"}, "cannot be left out"),
        ({"pattern": "model.*", "tier": "memory"}, "spelled out"),
        ({"pattern": "optim.*.trace", "tier": "memory", "level": "L1"}, "goes all the way"),
        ({"pattern": "optim.*.trace", "tier": "memory", "fidelity": "omit"}, "L4 nowhere"),
        ({"pattern": "optim.*.momentum_buffer", "level": "L4"}, "cannot be left out"),
        ({"pattern": "optim.*.momentum_buffer", "fidelity": "bounded"}, "bounded is for exp_avg and exp_avg_sq"),
        ({"pattern": "optim.*.exp_avg", "fidelity": "bounded", "level": "L1"}, "at L2 alone"),
        ({"pattern": "optim.*.trace", "fidelity": "omit", "level": "L3"}, "mean the same"),
        ({"pattern": "optim.*.trace", "fidelity": "lossless", "level": "L4"}, "mean the same"),
    ],
)
def test_rules_that_contradict_themselves_or_break_the_next_step_are_refused(rule: dict[str, str], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        table("lossless", rule)


@settings(deadline=None)
@given(
    pattern=st.text(alphabet="optim.*?[]sep_xa", max_size=24),
    lowering=st.sampled_from([{"fidelity": "bounded"}, {"fidelity": "omit"}, {"level": "L2"}, {"level": "L4"}]),
)
def test_no_rule_that_is_accepted_lowers_the_core(pattern: str, lowering: dict[str, str]) -> None:
    try:
        own = table("bounded", {"pattern": pattern, **lowering})
    except ValidationError:
        return
    for name in (*CORE, "optim.a.step", "optim.optim.step", "model.a.exp_avg"):
        for dtype in ("float32", "int64"):
            assert own.treatment(name, dtype) == Treatment("L1", "lossless")
    assert own.treatment(M, "float32").fidelity != "omit"


def test_what_a_rule_keeps_in_memory_is_of_level_3_and_in_no_checkpoint() -> None:
    own = table("lossless", {"pattern": "optim.*.trace", "tier": "memory"})
    kept = own.treatment("optim.head.trace", "float32")
    assert (kept.level, kept.tier, kept.is_in_checkpoints) == ("L3", "peer-memory", False)
    assert own.treatment(M, "float32").is_in_checkpoints
    assert own.treatment("optim.head.trace", "int64").is_in_checkpoints

"""Optimizer state and settings come back by parameter name, or not at all; real: torch's optimizers, the record path.

Models are not sharded here: what FSDP2 adds is in test_resume.py and in the integration tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from storage.errors import ManifestMismatch
from storage.memory_store import MemoryStore
from storage.sources import RestorePlan
from tests.fakes.small_training import newest_plan, save_alone
from workers.group_match import match_groups
from workers.optimizer_state import optimizer_kind
from workers.plain_state import NotPlain
from workers.resume import RestoreReport, restore
from workers.snapshot import capture
from workers.state import TrainingState

Groups = Sequence[tuple[Sequence[str], dict[str, Any]]]

SPLIT: Groups = [
    (["first.weight", "second.weight"], {"weight_decay": 0.1}),
    (["first.bias", "second.bias"], {"weight_decay": 0.0}),
]


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)


def build(
    groups: Groups = SPLIT, make: Callable[..., Optimizer] = AdamW, model: nn.Module | None = None, **options: Any
) -> TrainingState:
    model = TwoLinears() if model is None else model
    parameters = dict(model.named_parameters())
    optimizer = make(
        [{"params": [parameters[name] for name in names], **settings} for names, settings in groups], lr=0.1, **options
    )
    return TrainingState(model=model, optimizer=optimizer, scheduler=LambdaLR(optimizer, lambda _: 1.0))


def first_of(state: TrainingState) -> nn.Linear:
    assert isinstance(state.model, TwoLinears)
    return state.model.first


def train(state: TrainingState, steps: int = 2) -> None:
    for _ in range(steps):
        for index, parameter in enumerate(state.model.parameters()):
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, 0.1 * (index + 1))
        state.optimizer.step()
        state.scheduler.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.progress.step += 1


def saved(store: MemoryStore, groups: Groups = SPLIT) -> TrainingState:
    state = build(groups)
    train(state)
    save_alone(state, store)
    return state


def restored(state: TrainingState, plan: RestorePlan, store: MemoryStore) -> RestoreReport:
    return restore(state, plan, store, rank=0, world_size=1)


def entries(state: TrainingState) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name."""
    names = {id(parameter): name for name, parameter in state.model.named_parameters()}
    return {names[id(parameter)]: dict(own) for parameter, own in state.optimizer.state.items()}


def assert_same_entries(found: TrainingState, expected: TrainingState) -> None:
    here, there = entries(found), entries(expected)
    assert here.keys() == there.keys()
    for name, own in there.items():
        assert own.keys() == here[name].keys()
        for key, value in own.items():
            assert torch.equal(torch.as_tensor(here[name][key]), torch.as_tensor(value)), f"{name}.{key}"


def test_groups_and_parameters_in_another_order_go_on_by_name() -> None:
    store = MemoryStore()
    before = saved(store)
    backwards = [(list(reversed(names)), settings) for names, settings in reversed(SPLIT)]
    after = build(backwards)
    restored(after, newest_plan(store), store)
    assert_same_entries(after, before)
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.0, 0.1]
    train(before)
    train(after)
    for mine, theirs in zip(after.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


MOVED: Groups = [
    (["first.weight"], {"weight_decay": 0.1}),
    (["first.bias", "second.bias", "second.weight"], {"weight_decay": 0.0}),
]
ALL_IN_ONE: Groups = [(["first.weight", "first.bias", "second.weight", "second.bias"], {"weight_decay": 0.1})]
THIRD: Groups = [
    (["first.weight"], {"weight_decay": 0.1}),
    (["first.bias", "second.bias"], {"weight_decay": 0.0}),
    (["second.weight"], {"weight_decay": 0.3}),
]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (MOVED, r"optim\.second\.weight \(saved in group 0, weight_decay 0\.1; here in group 1, weight_decay 0\.0\)"),
        (ALL_IN_ONE, r"optim\.first\.bias \(saved in group 1, weight_decay 0\.0; here in group 0, weight_decay 0\.1\)"),
        (THIRD, r"optim\.second\.weight \(saved in group 0, weight_decay 0\.1; here in group 2, weight_decay 0\.3\)"),
    ],
    ids=["moved", "merged", "split off"],
)
def test_another_split_of_weight_decay_is_refused_with_the_parameter_and_both_groups(groups: Groups, said: str) -> None:
    store = MemoryStore()
    saved(store)
    state = build(groups)
    with pytest.raises(ManifestMismatch, match=said) as caught:
        restored(state, newest_plan(store), store)
    assert not caught.value.missing
    assert not caught.value.unexpected
    assert not state.optimizer.state


def test_a_partial_restore_takes_the_moments_by_name_and_leaves_the_settings_as_they_were_built() -> None:
    store = MemoryStore()
    before = saved(store)
    after = build(MOVED)
    report = restored(after, newest_plan(store, allow_partial=True), store)
    assert_same_entries(after, before)
    assert [group["weight_decay"] for group in after.optimizer.param_groups] == [0.1, 0.0]
    assert any("optimizer group 1 keeps the settings it was built with" in line for line in report.lines)


def test_a_new_and_a_removed_parameter_are_refused_by_name() -> None:
    store = MemoryStore()
    saved(store, SPLIT[:1])
    with pytest.raises(ManifestMismatch) as caught:
        restored(build(), newest_plan(store), store)
    assert caught.value.missing == ("optim.first.bias", "optim.second.bias")
    saved(other := MemoryStore())
    with pytest.raises(ManifestMismatch) as caught:
        restored(build(SPLIT[:1]), newest_plan(other), other)
    assert caught.value.unexpected == ("optim.first.bias", "optim.second.bias")


def test_other_settings_than_those_built_go_on_and_are_said() -> None:
    store = MemoryStore()
    saved(store)
    state = build([(names, {"weight_decay": 0.7}) for names, _ in SPLIT])
    report = restored(state, newest_plan(store), store)
    assert [group["weight_decay"] for group in state.optimizer.param_groups] == [0.1, 0.0]
    said = "optimizer group 0: weight_decay 0.1 of the checkpoint goes on; 0.7, with which it was built, does not count"
    assert said in report.lines


def test_another_optimizer_is_refused_with_both_and_a_partial_restore_leaves_it_fresh() -> None:
    store = MemoryStore()
    saved(store)
    with pytest.raises(ManifestMismatch, match=r"optim \(saved AdamW, here SGD\)"):
        restored(build(make=optim.SGD, momentum=0.9), newest_plan(store), store)
    state = build(make=optim.SGD, momentum=0.9)
    report = restored(state, newest_plan(store, allow_partial=True), store)
    assert not state.optimizer.state
    assert "betas" not in state.optimizer.param_groups[0]
    assert any("optim (saved AdamW, here SGD)" in line for line in report.lines)


def test_a_class_of_ones_own_counts_as_the_torch_optimizer_that_it_derives_from() -> None:
    class Mine(AdamW):
        pass

    class Other(Optimizer):
        pass

    parameters = [nn.Parameter(torch.zeros(1))]
    assert optimizer_kind(Mine(parameters)) == "AdamW"
    assert optimizer_kind(Other(parameters, {})) == "Other"


def test_state_of_a_layer_frozen_after_its_steps_is_there_when_it_thaws() -> None:
    """B27: two linears, both stepped, the first frozen, saved, resumed, unfrozen."""

    def run(state: TrainingState, *, store: MemoryStore | None) -> TrainingState:
        train(state)
        first_of(state).requires_grad_(False)
        train(state, 1)
        if store is not None:
            plan = save_alone(state, store)
            state = build()
            first_of(state).requires_grad_(False)
            report = restored(state, plan, store)
            assert "optimizer state tensors: saved 12, restored 12" in report.lines
        first_of(state).requires_grad_(True)
        train(state)
        return state

    torch.manual_seed(0)
    unbroken = run(build(), store=None)
    torch.manual_seed(0)
    resumed = run(build(), store=MemoryStore())
    for mine, theirs in zip(resumed.model.parameters(), unbroken.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert float(entries(resumed)["first.weight"]["step"]) == 4
    assert float(entries(resumed)["second.weight"]["step"]) == 5
    assert_same_entries(resumed, unbroken)


def test_a_partly_initialised_optimizer_stays_one() -> None:
    """Only what has been stepped has state, and no other gets any by the resume."""
    store = MemoryStore()
    state = build()
    first_of(state).requires_grad_(False)
    train(state)
    plan = save_alone(state, store)
    resumed = build()
    restored(resumed, plan, store)
    assert set(entries(resumed)) == {"second.weight", "second.bias"}
    assert_same_entries(resumed, state)
    train(resumed, 1)
    assert float(entries(resumed)["first.weight"]["step"]) == 1
    assert float(entries(resumed)["second.weight"]["step"]) == 3


def test_the_first_update_after_a_resume_before_any_step_is_a_first_update() -> None:
    """B25: 0.1000, not 0.0744, and counter 1: no dummy step made state exist."""
    store = MemoryStore()
    plan = save_alone(build([(names, {"weight_decay": 0.0}) for names, _ in SPLIT]), store)
    state = build([(names, {"weight_decay": 0.0}) for names, _ in SPLIT])
    restored(state, plan, store)
    before = first_of(state).weight.detach().clone()
    for parameter in state.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state.optimizer.step()
    update = before - first_of(state).weight.detach()
    assert update.flatten().tolist() == pytest.approx([0.1] * 9, abs=1e-6)
    assert float(entries(state)["first.weight"]["step"]) == 1


KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"momentum": 0.9}),
    "sgd-plain": (optim.SGD, {}),
    "adam-amsgrad": (optim.Adam, {"amsgrad": True}),
    "nadam": (optim.NAdam, {}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adagrad": (optim.Adagrad, {}),
    "adadelta": (optim.Adadelta, {}),
    "rmsprop": (optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {}),
    "adafactor": (optim.Adafactor, {}),
    "tensor-betas": (AdamW, {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_torch_optimizer_goes_on_as_if_never_stopped(kind: str) -> None:
    make, options = KINDS[kind]
    groups: Groups = [(names, {}) for names, _ in SPLIT]
    store = MemoryStore()
    before = build(groups, make, **options)
    train(before)
    plan = save_alone(before, store)
    after = build(groups, make, **options)
    restored(after, plan, store)
    assert_same_entries(after, before)
    train(before)
    train(after)
    for mine, theirs in zip(after.model.parameters(), before.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


class Counting(optim.SGD):
    """Keeps only a plain value for each parameter, as old optimizers kept their step."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["count"] = self.state[parameter].get("count", 0) + 1


def test_state_of_plain_values_alone_comes_back() -> None:
    store = MemoryStore()
    before = build([(names, {}) for names, _ in SPLIT], Counting)
    train(before, 3)
    plan = save_alone(before, store)
    after = build([(names, {}) for names, _ in SPLIT], Counting)
    restored(after, plan, store)
    assert {name: own["count"] for name, own in entries(after).items()} == dict.fromkeys(entries(before), 3)


def test_what_an_optimizer_keeps_where_it_has_no_name_is_refused() -> None:
    state = build()
    train(state, 1)
    state.optimizer.state["everywhere"] = {"step": 1}  # type: ignore[index]
    with pytest.raises(NotPlain, match=r"optim\.state is kept under a key .*'everywhere'"):
        capture(state, rank=0, world_size=1)
    state = build()
    train(state, 1)
    state.optimizer.state[first_of(state).weight]["history"] = [torch.zeros(3)]
    with pytest.raises(NotPlain, match=r"optim\.first\.weight\.history\.0 is a tensor of shape \(3,\)"):
        capture(state, rank=0, world_size=1)
    state = build()
    state.optimizer.param_groups[0]["mask"] = torch.zeros(2)
    with pytest.raises(NotPlain, match=r"optim\.group-0\.mask is a tensor of shape \(2,\)"):
        capture(state, rank=0, world_size=1)


class Tied(nn.Module):
    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight


@pytest.mark.parametrize("was_tied", [True, False])
def test_weights_that_are_no_longer_tied_or_newly_so_are_refused_by_name(was_tied: bool) -> None:
    def state_of(is_tied: bool) -> TrainingState:
        model = Tied(is_tied)
        return build([([name for name, _ in model.named_parameters()], {})], model=model)

    store = MemoryStore()
    state = state_of(was_tied)
    train(state)
    plan = save_alone(state, store)
    restored(state_of(was_tied), plan, store)
    with pytest.raises(ManifestMismatch) as caught:
        restored(state_of(not was_tied), plan, store)
    names = caught.value.missing if was_tied else caught.value.unexpected
    assert names == ("model.head.weight", "optim.head.weight")


def test_empty_groups_are_paired_by_place_and_never_with_one_that_has_parameters() -> None:
    saved_groups: list[dict[str, Any]] = [{"names": [], "settings": {}}, {"names": ["a"], "settings": {}}]
    assert match_groups([["a"], []], [{}, {}], saved_groups).order == (1, 0)
    assert match_groups([["a"], ["new"]], [{}, {}], saved_groups).order == (1, None)
    assert match_groups([["a"], []], [{}, {}], saved_groups[1:]).order == (0, None)

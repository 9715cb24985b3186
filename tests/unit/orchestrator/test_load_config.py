"""Configuration files and overrides. Real files in a temporary directory, nothing faked."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import ConfigError
from orchestrator.load_config import load_config, parse_override

LOCAL = Path("clusters/local/run.yaml")


def problems_of(*overrides: str, path: Path = LOCAL) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return caught.value.problems


def test_the_local_example_is_a_small_llama_with_eight_leaves_on_up_to_four_workers() -> None:
    config = load_config(LOCAL)
    assert (config.world.min_workers, config.world.max_workers) == (1, 4)
    assert config.data.num_leaves == 8
    assert (config.run.steps, config.checkpoint.every_steps, config.eval.every_steps) == (120, 10, 20)
    assert config.model.config["vocab_size"] == 2048
    assert config.data.prepare is not None
    assert config.data.prepare.source == "stdlib"


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("run.step=4", "run.steps"),
        ("checkpoint.every_step=4", "checkpoint.every_steps"),
        ("checkpoint.store.retrys=1", "checkpoint.store.retries"),
        ("optim.learning_rate=1", "optim.lr"),
        ("train.steps=4", "run.steps"),
        ("checkpoints=4", "checkpoint"),
    ],
)
def test_an_unknown_key_is_named_in_full_beside_the_nearest_valid_one(override: str, nearest: str) -> None:
    key = override.partition("=")[0]
    assert problems_of(override) == (f"unknown key {key}; the nearest valid one is {nearest}",)


def test_every_unknown_key_is_reported_at_once() -> None:
    assert len(problems_of("run.stepz=1", "seeed=2", "world.max_worker=3")) == 3


def test_each_bad_value_has_one_line_with_path_value_and_expectation() -> None:
    steps, cadence = problems_of("run.steps=0", "checkpoint.every_steps=soon")
    assert steps == "run.steps: 0: expected greater than or equal to 1"
    assert cadence.startswith("checkpoint.every_steps: 'soon': expected a valid integer")


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("run: {name: a, url: out, steps: 3}\nmodel: {config: {model_type: llama}}\n")
    assert problems_of(path=path) == ("data is missing: it has no default and must be set",)


def test_a_rule_about_two_keys_names_both_and_does_not_dump_the_section() -> None:
    (line,) = problems_of("data.micro_batch=3")
    assert line == "data: data.global_batch 16 is not a multiple of data.micro_batch 3"


def test_an_override_value_arrives_exactly_and_no_shell_touches_it() -> None:
    text = "x y; echo $HOME `id`"
    override = """model.config.a={"b": "x y; echo $HOME `id`"}"""
    assert load_config(LOCAL, [override]).model.config["a"] == {"b": text}
    whole = """model.config={"model_type": "llama", "a": {"b": "x y; echo $HOME `id`"}}"""
    assert load_config(LOCAL, [whole]).model.config == {"model_type": "llama", "a": {"b": text}}


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=1e-4", 1e-4),
        ("seed=7", 7),
        ("optim.betas=[0.9, 0.99]", [0.9, 0.99]),
        ("world.accept_joins=false", False),
        ("checkpoint.every_steps=null", None),
        ("run.name=007", "007"),
        ("run.name=true", "true"),
        ("run.url=a=b", "a=b"),
        ('run.name="quoted"', "quoted"),
        ("checkpoint.store.endpoint_url=null", None),
        ("world.resources_per_worker={CPU: 2}", {"CPU": 2}),
    ],
)
def test_override_values_are_read_by_the_type_of_their_key(override: str, value: object) -> None:
    assert parse_override(override)[1] == value


def test_the_local_disk_can_be_on_or_off_without_quotes_though_yaml_reads_booleans(tmp_path: Path) -> None:
    assert load_config(LOCAL, ["checkpoint.local_disk.mode=on"]).checkpoint.local_disk.mode == "on"
    path = tmp_path / "run.yaml"
    path.write_text(LOCAL.read_text().replace("checkpoint:", "checkpoint:\n  local_disk: {mode: off}", 1))
    assert load_config(path, []).checkpoint.local_disk.mode == "off"


def test_the_last_of_two_overrides_wins() -> None:
    assert load_config(LOCAL, ["run.steps=5", "run.steps=6"]).run.steps == 6


@pytest.mark.parametrize("override", ["run.steps", "=3", "run..steps=3", ".=1"])
def test_an_override_without_key_or_value_says_how_one_is_written(override: str) -> None:
    (line,) = problems_of(override)
    assert "expected key.sub=value" in line


def test_an_override_below_a_plain_value_names_the_value_in_the_way() -> None:
    assert problems_of("run.steps.x=3") == ("override run.steps.x: run.steps is the value 120, not a section",)


def test_relative_paths_start_at_the_given_directory_and_urls_stay_as_they_are(tmp_path: Path) -> None:
    config = load_config(
        LOCAL,
        ["run.url=../out", "data.url=s3://bucket/x", "data.prepare.source=./src", "run.resume=old"],
        directory=tmp_path / "here",
    )
    assert config.run.url == str(tmp_path / "out")
    assert config.data.url == "s3://bucket/x"
    assert config.data.prepare is not None
    assert config.data.prepare.source == str(tmp_path / "here" / "src")
    assert config.run.resume == str(tmp_path / "here" / "old")


@pytest.mark.parametrize("resume", ["auto", "none", "40"])
def test_the_words_and_steps_of_resume_are_not_paths(resume: str) -> None:
    assert load_config(LOCAL, [f"run.resume={resume}"]).run.resume == resume


def test_a_step_written_as_a_number_in_the_file_is_accepted_as_text(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(LOCAL.read_text().replace("  steps: 120", "  steps: 120\n  resume: 40"))
    assert load_config(path).run.resume == "40"


def test_a_file_that_is_not_there_suggests_its_neighbour(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("")
    (line,) = problems_of(path=tmp_path / "run.yml")
    assert line == f"no such file; did you mean {tmp_path / 'run.yaml'}?"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("run: [", "not valid YAML"),
        ("- a\n", "expected keys such as run, model and data, found list"),
        ("", "found NoneType"),
        ("run: {name: a, name: b}", "key 'name' is written twice"),
    ],
)
def test_a_file_that_is_no_configuration_says_why(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    (line,) = problems_of(path=path)
    assert said in line


def test_the_example_is_valid_without_its_comments_too() -> None:
    assert RunConfig.model_validate(load_config(LOCAL).model_dump()) == load_config(LOCAL)


def test_a_config_error_survives_pickling() -> None:
    error = ConfigError("a.yaml", ("one", "two"))
    assert str(pickle.loads(pickle.dumps(error))) == "a.yaml: 2 problems\n  - one\n  - two"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.compile=true",), "true with model.compile:"),
        (("world.threads_per_worker=null",), "true with world.threads_per_worker: null"),
        (("model.parallelism=ddp", "reproducible=exact"), "exact with model.parallelism: ddp"),
        (("checkpoint.fidelity=bounded",), "true with checkpoint.fidelity: bounded"),
        (("policy.deadline.cheaper_form=bounded",), "true with policy.deadline.cheaper_form: bounded"),
        (
            ("checkpoint.levels=[{pattern: optim.*.exp_avg, fidelity: bounded}]",),
            "'optim.*.exp_avg' of checkpoint.levels",
        ),
        (("failure.loss_spike=3",), "true with failure.loss_spike"),
    ],
)
def test_what_cannot_be_reproducible_is_refused_with_what_to_do(overrides: tuple[str, ...], message: str) -> None:
    (problem,) = problems_of("reproducible=true", *overrides)
    assert message in problem
    assert "; set " in problem or "; leave it out" in problem
    load_config(LOCAL, [override for override in overrides if not override.startswith("reproducible")])


def test_what_is_reproducible_never_rounds_its_moments_in_haste() -> None:
    assert load_config(LOCAL).policy.deadline.cheaper_form == "bounded"
    config = load_config(LOCAL, ("reproducible=true", "policy.deadline.margin_s=3"))
    assert (config.policy.deadline.cheaper_form, config.policy.deadline.margin_s) == ("none", 3)
    assert load_config(LOCAL, ("reproducible=true",)).policy.deadline.cheaper_form == "none"


@pytest.mark.parametrize(("text", "value"), [("true", True), ("exact", "exact"), ("false", False)])
def test_reproducible_is_off_on_or_exact(text: str, value: object) -> None:
    assert load_config(LOCAL).reproducible is False
    assert load_config(LOCAL, (f"reproducible={text}",)).reproducible == value

"""What `doctor` says about real trees: each kind of damage, what a resume would do, what to run next. Reads only."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from orchestrator.doctor import Diagnosis, DoctorWish, diagnose
from orchestrator.doctor_text import diagnosis_facts, diagnosis_text, next_commands
from storage.commit_log import CommitLog
from storage.errors import StorageError, StoreRefused
from storage.keys import Attempt, shard_key
from storage.local_store import LocalStore
from storage.manifest import Commit
from storage.memory_store import MemoryStore
from storage.restore import plan_restore
from storage.retrying import RetryingStore
from tests.fakes.checkpoints import RUN, TIME, attempt, commit_parts, prepare, save, write_shards
from tests.fakes.layered_checkpoints import damage_level, damage_tensor, layered_save

URL = "s3://bucket/run"


def seen(store: MemoryStore, *, deep: bool = False, newest: int | None = None) -> Diagnosis:
    before = {entry.key: store.get(entry.key) for entry in store.list("")}
    diagnosis = diagnose(store, DoctorWish(deep=deep, newest=newest, watch_s=0.0))
    assert {entry.key: store.get(entry.key) for entry in store.list("")} == before, "doctor changed something"
    json.dumps(diagnosis_facts(diagnosis, URL), allow_nan=False)
    return diagnosis


def damages(diagnosis: Diagnosis) -> list[tuple[str | None, str]]:
    return [(one.key, one.text) for one in diagnosis.findings if one.severity == "damage"]


def warnings(diagnosis: Diagnosis) -> str:
    return " ".join(one.text for one in diagnosis.findings if one.severity == "warning")


def flip(store: MemoryStore, key: str) -> None:
    content = bytearray(store.get(key))
    content[len(content) // 3] ^= 1
    store.put(key, bytes(content))


def three_saves() -> tuple[MemoryStore, list[Commit]]:
    store = MemoryStore()
    return store, [save(store, step) for step in (10, 20, 30)]


def test_a_whole_run_is_without_damage_and_goes_on_from_its_newest() -> None:
    store, _ = three_saves()
    diagnosis = seen(store, deep=True)
    assert not diagnosis.is_damaged
    assert (diagnosis.outlook.step, diagnosis.outlook.lost_steps, diagnosis.run_id) == (30, 0, RUN)
    assert "no damage found" in diagnosis_text(diagnosis, URL)
    assert next_commands(diagnosis, URL) == [f"raysume run CONFIG run.url={URL}   # goes on from step 30"]


def test_what_was_quarantined_is_told_where_the_checkpoint_itself_is_gone() -> None:
    store, commits = three_saves()
    log = CommitLog(store, RUN)
    log.quarantine(commits[0].step_key, "shards/a", "hash mismatch", TIME)
    log.uncommit(commits[0].step_key)
    text = diagnosis_text(seen(store), URL)
    assert re.search(r"quarantine/ +1 object  ", text)
    assert "note     step 10 was quarantined (shards/a: hash mismatch) and has been removed since" in text


def test_an_empty_and_a_foreign_place_are_told_apart_from_a_run() -> None:
    store = MemoryStore()
    assert seen(store).is_empty
    store.put("data/part-0.parquet", b"x")
    diagnosis = seen(store)
    assert diagnosis.is_empty
    assert diagnosis.foreign == ("data/part-0.parquet",)
    assert "but other files are" in diagnosis_text(diagnosis, URL)


def test_a_missing_shard_is_named_and_the_step_before_is_taken() -> None:
    store, commits = three_saves()
    key = shard_key(commits[-1].step_key, 1)
    store.delete([key])
    diagnosis = seen(store)
    assert damages(diagnosis) == [(key, "step 30: missing file")]
    assert (diagnosis.outlook.step, diagnosis.outlook.lost_steps) == (20, 10)
    text = diagnosis_text(diagnosis, URL)
    assert f"step 30 is passed over: {key}: missing file" in text
    assert "10 steps are trained again (the run had reached step 30)" in text


def test_a_flipped_byte_is_found_by_a_deep_look_with_expected_and_found() -> None:
    store, commits = three_saves()
    key = shard_key(commits[-1].step_key, 0)
    flip(store, key)
    assert seen(store).outlook.step == 30
    diagnosis = seen(store, deep=True)
    assert diagnosis.outlook.step == 20
    assert {where for where, _ in damages(diagnosis)} == {key}
    assert any("hash mismatch" in text and ", committed " in text for _, text in damages(diagnosis))


@pytest.mark.parametrize("cut", [0, 30])
def test_half_written_records_are_damage_and_never_end_the_look(cut: int) -> None:
    store, commits = three_saves()
    store.put(commits[2].object_key, store.get(commits[2].object_key)[:cut])
    store.put(commits[1].manifest_key, store.get(commits[1].manifest_key)[:cut])
    diagnosis = seen(store)
    assert {key for key, _ in damages(diagnosis)} == {commits[2].object_key, commits[1].manifest_key}
    assert (diagnosis.outlook.step, diagnosis.outlook.newest_committed) == (10, 30)
    assert [passed.step for passed in diagnosis.outlook.passed_over] == [30, 20]


def test_what_it_foretells_is_what_a_resume_does() -> None:
    store, commits = three_saves()
    store.delete([shard_key(commits[2].step_key, 0)])
    foretold = seen(store).outlook
    plan = plan_restore(CommitLog(store, RUN), attempt=Attempt(number=2, nonce="00000002"))
    assert plan is not None
    assert (plan.step, plan.source.attempt.number) == (foretold.step, foretold.attempt)


def test_when_nothing_is_usable_a_resume_would_refuse_and_so_says_the_doctor() -> None:
    store, commits = three_saves()
    for commit in commits:
        store.delete([shard_key(commit.step_key, rank) for rank in (0, 1)])
    diagnosis = seen(store)
    with pytest.raises(StorageError):
        plan_restore(CommitLog(store, RUN), attempt=Attempt(number=2, nonce="00000002"))
    assert diagnosis.outlook.refusal is not None
    assert diagnosis.salvage is None
    assert "only a copy elsewhere can help" in diagnosis_text(diagnosis, URL)


def test_lost_moments_in_every_step_lead_to_a_labelled_l1_only_resume() -> None:
    store = MemoryStore()
    commits = [layered_save(store, step) for step in (10, 20)]
    for commit in commits:
        damage_level(store, commit, "L2")
    diagnosis = seen(store, deep=True)
    salvage = diagnosis.salvage
    assert salvage is not None
    assert (salvage.step, salvage.whole, salvage.lost) == (20, ("L1",), ("L2",))
    text = diagnosis_text(diagnosis, URL)
    assert f"raysume run CONFIG run.url={URL} run.resume=20 run.resume_levels=L1" in text
    assert "L1 ONLY" in text
    assert "--lift" not in text


def test_a_quarantined_step_with_whole_weights_is_lifted_first() -> None:
    store = MemoryStore()
    moments_lost, weights_lost = layered_save(store, 10), layered_save(store, 20)
    damage_tensor(store, weights_lost, "model.w")
    damage_tensor(store, moments_lost, "optim.w.exp_avg")
    for commit in (weights_lost, moments_lost):
        CommitLog(store, RUN).quarantine(commit.step_key, "some/shard", "flipped", TIME)
    diagnosis = seen(store)
    assert diagnosis.salvage is not None
    assert diagnosis.salvage.step == 10
    assert next_commands(diagnosis, URL)[0] == f"raysume checkpoints quarantine {URL} 10 --lift"


def test_a_quarantined_step_that_is_whole_is_offered_whole() -> None:
    store = MemoryStore()
    CommitLog(store, RUN).quarantine(layered_save(store, 10).step_key, "some/shard", "by hand: odd", TIME)
    diagnosis = seen(store)
    commands = " ".join(next_commands(diagnosis, URL))
    assert "--lift" in commands
    assert "run.resume=10" in commands
    assert "L1" not in commands + diagnosis_text(diagnosis, URL)


def test_one_good_step_left_is_used_and_nothing_is_salvaged() -> None:
    store = MemoryStore()
    layered_save(store, 10)
    damage_level(store, layered_save(store, 20), "L2")
    diagnosis = seen(store, deep=True)
    assert (diagnosis.outlook.step, diagnosis.salvage) == (10, None)


def test_void_and_cut_off_saves_are_named_with_the_command_that_removes_them() -> None:
    store, _ = three_saves()
    write_shards(store, prepare(35))
    save(store, 40, by=attempt(2), base_step=20)
    diagnosis = seen(store)
    assert not diagnosis.is_damaged
    commands = " ".join(next_commands(diagnosis, URL))
    assert "--void" in commands
    assert "--orphans" in commands
    assert "1 save was never committed" in diagnosis_text(diagnosis, URL)


def test_only_saves_that_were_cut_off_mean_a_start_from_the_beginning() -> None:
    store = MemoryStore()
    write_shards(store, prepare(10))
    diagnosis = seen(store)
    assert not diagnosis.is_empty
    assert (diagnosis.outlook.step, diagnosis.outlook.refusal) == (None, None)
    assert "start at step 0" in diagnosis_text(diagnosis, URL)


def test_damaged_json_beside_the_checkpoints_is_named() -> None:
    store, _ = three_saves()
    store.put("run.json", b"{")
    store.put("summary.json", b"nothing")
    store.put("journal/00000001.0000000a.json", b'{"kind": "attempt", "time_utc": "", "fields": {"number": 1}}')
    store.put("journal/00000002.0000000a.json", b"{")
    diagnosis = seen(store)
    assert [key for key, _ in damages(diagnosis)] == ["run.json"]
    assert "summary.json" in warnings(diagnosis)
    assert "1 of 2 journal entries" in warnings(diagnosis)


def test_run_json_of_another_run_and_commits_of_several_are_warned_of() -> None:
    store, commits = three_saves()
    store.put("run.json", b'{"run_id": "other"}')
    stranger = commits[0].model_copy(update={"run_id": "stranger"})
    store.put(commits[0].object_key, stranger.model_dump_json().encode())
    said = warnings(seen(store))
    assert "names run other" in said
    assert "run, stranger" in said


def test_the_end_of_the_events_tells_how_far_training_had_come() -> None:
    store, _ = three_saves()
    lines = [json.dumps({"event": "step", "step": step}) for step in (41, 44)]
    store.put("events.jsonl", "\n".join([*lines, '{"event": "st']).encode())
    outlook = seen(store).outlook
    assert (outlook.newest_trained, outlook.lost_steps) == (44, 14)


def test_clocks_that_disagree_are_hinted_at() -> None:
    store = MemoryStore()
    log = CommitLog(store, RUN)
    for step, time_utc in ((10, "2026-01-01T02:00:00.000Z"), (20, "2026-01-01T00:00:00.000Z")):
        parts = prepare(step)
        write_shards(store, parts)
        commit = commit_parts(log, parts)
        store.put(commit.object_key, commit.model_copy(update={"time_utc": time_utc}).model_dump_json().encode())
    diagnosis = diagnose(store, DoctorWish(watch_s=0.0), now_s=lambda: 0.0)
    said = warnings(diagnosis)
    assert "ahead of this machine's clock" in said
    assert "step 20 (attempt 1) was committed 2 h 0 min before step 10" in said
    assert not diagnosis.is_damaged


def test_with_newest_older_ones_are_listed_but_not_read() -> None:
    store, commits = three_saves()
    store.delete([shard_key(commits[0].step_key, 0)])
    diagnosis = seen(store, newest=2)
    assert [one.report is None for one in diagnosis.examined] == [True, False, False]
    assert not diagnosis.is_damaged


def test_thousands_of_checkpoints_are_shown_in_short() -> None:
    store = MemoryStore()
    commit = save(store, 1)
    content = commit.model_copy(update={"attempt": commit.attempt})
    for step in range(2, 2002):
        other = content.model_copy(
            update={"step": step, "manifest_key": commit.manifest_key.replace("0001.", f"{step:04d}.", 1)}
        )
        store.put(other.object_key, other.model_dump_json().encode())
    diagnosis = seen(store, newest=3)
    text = diagnosis_text(diagnosis, URL)
    assert len(text.splitlines()) < 80
    assert "older ones" in text


def test_a_place_that_refuses_is_no_empty_place() -> None:
    class Closed(MemoryStore):
        def list(self, prefix: str, **_: object) -> list[object]:  # type: ignore[override]
            raise StoreRefused("list", prefix, "access denied")

    with pytest.raises(StoreRefused):
        diagnose(Closed(), DoctorWish())


def test_a_put_that_was_cut_off_on_the_local_disk_is_noticed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    save(store, 10)
    name = f".raysume-tmp-{'0' * 16}"
    (tmp_path / "shards" / name).write_bytes(b"half")
    diagnosis = diagnose(RetryingStore(store, retries=0), DoctorWish(watch_s=0.0))
    assert any(f"shards/{name}" in one.text for one in diagnosis.findings)
    assert not diagnosis.is_damaged

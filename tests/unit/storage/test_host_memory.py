from __future__ import annotations

from pathlib import Path

import pytest

from storage.host_memory import available_bytes, used_share

MEMINFO = "MemTotal:       32000 kB\nMemFree:         1000 kB\nMemAvailable:   20000 kB\n"
FREE = 20000 << 10


@pytest.mark.parametrize(
    ("limit", "used", "stat", "expected"),
    [
        (None, None, None, FREE),
        ("max", "5000", "inactive_file 100", FREE),
        ("1000000", "400000", "anon 7\ninactive_file 100000\n", 700000),
        ("1000000", "400000", None, 600000),
        ("1000000", "2000000", "inactive_file 0", 0),
        (str(1 << 40), "0", "inactive_file 0", FREE),
    ],
)
def test_what_the_machine_has_left_within_the_containers_limit(
    tmp_path: Path, limit: str | None, used: str | None, stat: str | None, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, content in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
        if content is not None:
            (tmp_path / name).write_text(content + "\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == expected


@pytest.mark.parametrize(("limit", "expected"), [("1000000", 700000), ("9223372036854771712", FREE)])
def test_the_limit_of_a_container_under_control_groups_of_the_first_version(
    tmp_path: Path, limit: str, expected: int
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("400000\n")
    (tmp_path / "memory" / "memory.stat").write_text("inactive_file 7\ntotal_inactive_file 100000\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == expected


def test_this_machine_says_how_much_it_has() -> None:
    assert available_bytes() > 0


@pytest.mark.parametrize(
    ("limit", "used", "stat", "share"),
    [
        (None, None, None, 0.375),
        ("max", "5000", "inactive_file 100", 0.375),
        ("1000000", "400000", "inactive_file 100000", 0.375),  # 0.3 of the container
        ("1000000", "900000", "inactive_file 100000", 0.8),
        ("1000000", "2000000", "inactive_file 0", 1.0),
        ("0", "0", "inactive_file 0", 0.375),
    ],
)
def test_the_share_in_use_is_that_of_the_fuller_of_machine_and_container(
    tmp_path: Path, limit: str | None, used: str | None, stat: str | None, share: float
) -> None:
    (tmp_path / "meminfo").write_text(MEMINFO)
    for name, content in (("memory.max", limit), ("memory.current", used), ("memory.stat", stat)):
        if content is not None:
            (tmp_path / name).write_text(content + "\n")
    assert used_share(tmp_path / "meminfo", tmp_path) == pytest.approx(share)

"""The storage figures, each beside its peer in one run: one table (figure, ours, peer, ratio, limit, verdict) and JSON.

A missed target is shown as missed. For an idle machine: `make bench-storage`, or parts of it with ``--only``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.bench import storage_reading, storage_saving
from tests.bench.figures import Figure, table, write_json

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT_TIMEOUT_S = 240.0


def coordinator(scratch: Path) -> list[Figure]:
    """10,000 ranks' Receipts through a real actor; `bench_commit` does it, in a process of its own."""
    out = scratch / "commit.json"
    command = [sys.executable, "-m", "tests.bench.bench_commit", "--steps", "1", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=COMMIT_TIMEOUT_S, check=False)
    if not out.exists():
        raise SystemExit(f"bench_commit ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    found = json.loads(out.read_text())
    return [
        Figure(
            name=f"coordinator, {found['ranks']} ranks: Commit after the last Receipt",
            ours=f"{found['from_last_s']:.2f} s",
            peer="-",
            ratio=found["from_last_s"],
            limit=found["limit_s"],
        ),
        Figure(
            name=f"coordinator, {found['ranks']} ranks: memory, MB",
            ours=f"{found['peak_bytes'] / 1e6:.0f} MB",
            peer="-",
            ratio=found["peak_bytes"] / 1e6,
            limit=found["limit_bytes"] / 1e6,
        ),
    ]


def parts(options: argparse.Namespace) -> dict[str, Callable[[Path], list[Figure]]]:
    return {
        "stall": lambda scratch: storage_saving.training_stall(scratch, options.rounds),
        "bytes": lambda scratch: storage_saving.stored_bytes(scratch, options.train_steps),
        "reshard": lambda scratch: storage_reading.resharding(scratch, options.gigabytes),
        "throughput": lambda scratch: storage_saving.throughput(scratch, options.megabytes),
        "corruption": storage_reading.corruption,
        "coordinator": coordinator,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ("stall", "bytes", "reshard", "throughput", "corruption", "coordinator")
    parser.add_argument("--only", nargs="+", choices=known, default=known, metavar="PART", help=", ".join(known))
    parser.add_argument("--rounds", type=int, default=5, help="saves that are timed, after two to warm up")
    parser.add_argument("--train-steps", type=int, default=200)
    parser.add_argument("--gigabytes", type=float, default=1.0, help="state of the reshard")
    parser.add_argument("--megabytes", type=int, default=64, help="state of the upload")
    parser.add_argument(
        "--scratch", default=None, help="where files lie while it runs; default: the temporary directory"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/storage.json")
    options = parser.parse_args()
    figures: list[Figure] = []
    works = parts(options)
    for name in options.only:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
            figures += works[name](Path(scratch))
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
        write_json(options.out, figures)
    print(f"\n{table(figures)}\n\nwritten to {options.out}")


if __name__ == "__main__":
    main()

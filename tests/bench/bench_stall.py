"""What a save costs training when every upload is slow: the same run with and without 20 s of delay on each upload.

A real S3 server (OpenStack Swift) behind a proxy that holds every PUT of a Shard. The stall must not feel it: the copy
into shared memory is all that training waits for. Prints both medians and their ratio, and writes JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import boto3

from tests.servers import DelayProxy, SwiftServer

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 1.10
NUM_BUFFERS = 2


def one_run(folder: Path, name: str, endpoint: str, swift: SwiftServer, *, steps: int) -> dict[str, Any]:
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": swift.access_key,
        "AWS_SECRET_ACCESS_KEY": swift.secret_key,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }
    command = [
        *(sys.executable, "-m", "orchestrator", "run", str(ROOT / "clusters/local/run.yaml"), "--local-nodes", "2"),
        *("--json", f"run.url=s3://bench/{name}", f"run.steps={steps}", "checkpoint.every_steps=5"),
        f"data.url={folder / 'data'}",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        raise SystemExit(f"a run ended with exit code {done.returncode}:\n{done.stderr[-4000:]}")
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=20.0, help="seconds added to every upload")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/stall.json")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    figures: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        directory = Path(scratch) / "swift"
        directory.mkdir()
        swift = SwiftServer(directory).start()
        stack.callback(swift.stop)
        boto3.client(
            "s3",
            endpoint_url=swift.endpoint,
            aws_access_key_id=swift.access_key,
            aws_secret_access_key=swift.secret_key,
            region_name="us-east-1",
        ).create_bucket(Bucket="bench")
        for name, delay_s in (("undelayed", 0.0), ("delayed", options.delay)):
            proxy = DelayProxy(swift.port, delay_s=delay_s, pattern=r"/shards/").start()
            stack.callback(proxy.stop)
            summary = one_run(Path(scratch), name, proxy.endpoint, swift, steps=options.steps)
            # A process maps each of its two buffers at its first use; both runs pay that once: left out of both.
            stalls = [commit["stall_s"] for commit in summary["commits"]][NUM_BUFFERS:]
            uploads = [commit["upload_s"] for commit in summary["commits"]][NUM_BUFFERS:]
            figures[name] = {
                "commits": len(summary["commits"]),
                "attempts": [attempt["cause"] for attempt in summary["attempts"]],
                "stall_median_s": statistics.median(stalls),
                "upload_median_s": statistics.median(uploads),
            }
            print(name, figures[name], flush=True)
    ratio = figures["delayed"]["stall_median_s"] / figures["undelayed"]["stall_median_s"]
    verdict = "met" if ratio <= LIMIT else "missed"
    print(f"stall, delayed over undelayed: {ratio:.2f} (limit {LIMIT:.2f}): {verdict}")
    options.out.write_text(json.dumps({"ratio": ratio, "limit": LIMIT, **figures}, indent=1))


if __name__ == "__main__":
    main()

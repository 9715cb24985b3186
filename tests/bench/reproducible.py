"""What reproducible training costs: the time of a step, plain, with fp64 sums, and with the fold, by world size.

Real: processes, gloo, FSDP2, the Session's whole step, no saves. The three modes take turns, so that whatever else the
machine does meets all of them; CPU time, of all ranks together, is what a busy machine disturbs least. With
``--digests`` only the digest of the weights at every world size is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.config import ModelConfig, Reproducible
from workers.contract import OutcomeKind
from workers.session import Session
from workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, Reproducible] = {"plain": False, "true": True, "exact": "exact"}
SEQUENCE, ROWS = 128, 512
_PATIENCE = 10  # minutes for one run, however busy the machine is


def timed(session: Session) -> None:
    """The built-in loop, with the time of each step in a file of the rank's."""
    taken = []
    for step in session.steps():
        wall, cpu = time.monotonic(), time.process_time()
        for leaf in step.leaves():
            step.backward(leaf, session.loss(leaf))
        step.apply()
        session.step_end(step)
        taken.append((time.monotonic() - wall, time.process_time() - cpu))
    path = Path(str(session.loop_config["folder"])) / f"times-{session.rank}.json"
    path.write_text(json.dumps(taken))


def settings_of(folder: str, mode: str, options: argparse.Namespace) -> WorkerSettings:
    plain = make_settings(f"{folder}/data", total_steps=options.steps)
    model = ModelConfig(
        config={
            "model_type": "llama",
            "vocab_size": 2048,
            "hidden_size": options.width,
            "intermediate_size": options.width * 8 // 3,
            "num_hidden_layers": options.layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": SEQUENCE,
            "attention_dropout": options.dropout,
        },
        compute_dtype=options.dtype,
    )
    data = plain.data.model_copy(
        update={
            "sequence_length": SEQUENCE,
            "global_batch": options.leaves * options.micro_batch,
            "micro_batch": options.micro_batch,
        }
    )
    memory = plain.checkpoint.memory.model_copy(update={"mode": "off"})
    checkpoint = plain.checkpoint.model_copy(update={"memory": memory, "every_steps": None})
    loop_config = {"folder": folder}
    return replace(
        plain, model=model, data=data, reproducible=MODES[mode], checkpoint=checkpoint, loop_config=loop_config
    )


@contextmanager
def processes(size: int) -> Iterator[tuple[Trio, Path]]:
    with tempfile.TemporaryDirectory(prefix="raysume-bench-") as folder:
        root = Path(folder)
        write_numbered_rows(str(root / "data"), ROWS, sequence_length=SEQUENCE, vocab_size=2048)
        trio = Trio(size)
        try:
            yield trio, root
        finally:
            trio.close()


@dataclass(frozen=True, kw_only=True)
class Times:
    """Of steps: ``wall_s`` on rank 0, ``cpu_s`` of all ranks together."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)


def run_once(trio: Trio, root: Path, mode: str, size: int, options: argparse.Namespace) -> tuple[Times, str]:
    """The times of each step but the first, and the digest of the weights after the last."""
    trio.make(settings_of(str(root), mode, options), root / "run", timed)
    attempt, ranks = trio.start(size), range(size)
    asked = (trio.ended(attempt, ranks) for _ in range(_PATIENCE))
    ended = next((found for found in asked if None not in found), [])
    if not ended or any(one.outcome.kind is not OutcomeKind.FINISHED for one in ended):
        raise RuntimeError(f"{mode} at {size} ranks: {ended[0].outcome.cause if ended else 'no end in sight'}")
    digest = ended[0].outcome.weights_digest
    assert digest is not None
    times = [json.loads((root / f"times-{rank}.json").read_text())[1:] for rank in ranks]
    cpu_s = [sum(cpu for _, cpu in step) for step in zip(*times, strict=True)]
    return Times(wall_s=[wall for wall, _ in times[0]], cpu_s=cpu_s), digest


def step_times(options: argparse.Namespace) -> list[dict[str, Any]]:
    sizes: list[int] = options.sizes
    times = {(mode, size): Times() for mode in MODES for size in sizes}
    with processes(max(sizes)) as (trio, root):
        for turn in range(options.turns):
            for size in sizes:
                for mode in MODES:
                    taken, _ = run_once(trio, root, mode, size, options)
                    times[mode, size].wall_s.extend(taken.wall_s)
                    times[mode, size].cpu_s.extend(taken.cpu_s)
                    wall_s, cpu_s = statistics.median(taken.wall_s), statistics.median(taken.cpu_s)
                    print(f"turn {turn}: {size} ranks, {mode}: {wall_s:.3f} s a step, {cpu_s:.3f} s CPU", flush=True)
    return [_row(size, {mode: times[mode, size] for mode in MODES}) for size in sizes]


def _row(size: int, times: dict[str, Times]) -> dict[str, Any]:
    row: dict[str, Any] = {"world_size": size, "steps": len(times["plain"].wall_s)}
    for name in ("wall_s", "cpu_s"):
        taken = {mode: getattr(one, name) for mode, one in times.items()}
        medians = {mode: statistics.median(one) for mode, one in taken.items()}
        row[f"plain_{name}"] = medians["plain"]
        for mode in MODES:
            row[f"{mode}_{name}_quartiles"] = statistics.quantiles(taken[mode], n=4)
            row[f"{mode}_{name}_over_plain"] = medians[mode] / medians["plain"]
    return row


def digests(options: argparse.Namespace) -> dict[str, dict[int, str]]:
    sizes: list[int] = options.sizes
    with processes(max(sizes)) as (trio, root):
        return {mode: {size: run_once(trio, root, mode, size, options)[1] for size in sizes} for mode in MODES}


def print_digests(found: dict[str, dict[int, str]]) -> None:
    for mode, by_size in found.items():
        for size, digest in by_size.items():
            print(f"{mode:6} {size} ranks  {digest}")
        print(f"{mode:6} {len(set(by_size.values()))} digests at {len(by_size)} world sizes")


def print_times(rows: Sequence[dict[str, Any]]) -> None:
    print("| ranks | plain, CPU-s of all ranks | true | exact | plain, wall | true | exact |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [str(row["world_size"])]
        for name in ("cpu_s", "wall_s"):
            cells.append(f"{row[f'plain_{name}']:.3f} s")
            cells += [f"{row[f'{mode}_{name}_over_plain']:.2f}x" for mode in ("true", "exact")]
        print(f"| {' | '.join(cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--digests", action="store_true", help="only the digest at each world size")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--leaves", type=int, default=8)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out", type=Path, default=ROOT / "outputs/bench/reproducible.json")
    options = parser.parse_args()
    options.sizes = options.sizes or ([1, 2, 3, 4, 5, 6] if options.digests else [1, 2, 4])
    found: dict[str, Any] = {"options": {name: value for name, value in vars(options).items() if name != "out"}}
    if options.digests:
        found["digests"] = digests(options)
        print_digests(found["digests"])
    else:
        found["step_times"] = step_times(options)
        print_times(found["step_times"])
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

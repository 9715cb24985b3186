"""What reproducible training costs: the time of a step, plain, with fp64 sums, and with the fold, by world size.

Real: processes, gloo, FSDP2, the Session's whole step, no saves. The three modes take turns, so that whatever else the
machine does meets all of them. With ``--digests`` only the digest of the weights at every world size is shown.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fakes.rank_processes import Trio
from tests.fakes.token_datasets import write_numbered_rows
from tests.fakes.worker_settings import make_settings
from workers.config import ModelConfig, Reproducible
from workers.contract import OutcomeKind
from workers.settings import WorkerSettings

ROOT = Path(__file__).resolve().parents[2]
MODES: dict[str, Reproducible] = {"plain": False, "true": True, "exact": "exact"}
SEQUENCE, ROWS = 128, 512


def settings_of(data_url: str, mode: str, options: argparse.Namespace) -> WorkerSettings:
    plain = make_settings(data_url, total_steps=options.steps)
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
    return replace(plain, model=model, data=data, reproducible=MODES[mode], checkpoint=checkpoint)


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


def run_once(trio: Trio, root: Path, mode: str, size: int, options: argparse.Namespace) -> tuple[list[float], str]:
    """The time of each step but the first, and the digest of the weights after the last."""
    trio.make(settings_of(str(root / "data"), mode, options), root / "run")
    ended = trio.run(size)
    if any(one.outcome.kind is not OutcomeKind.FINISHED for one in ended):
        raise RuntimeError(f"{mode} at {size} ranks: {ended[0].outcome.cause}")
    digest = ended[0].outcome.weights_digest
    assert digest is not None
    return [report.step_s for report in ended[0].reports[1:]], digest


def step_times(options: argparse.Namespace) -> list[dict[str, Any]]:
    sizes: list[int] = options.sizes
    times: dict[tuple[str, int], list[float]] = {(mode, size): [] for mode in MODES for size in sizes}
    with processes(max(sizes)) as (trio, root):
        for turn in range(options.turns):
            for size in sizes:
                for mode in MODES:
                    taken, _ = run_once(trio, root, mode, size, options)
                    times[mode, size] += taken
                    print(f"turn {turn}: {size} ranks, {mode}: median {statistics.median(taken):.3f} s", flush=True)
    return [_row(size, {mode: times[mode, size] for mode in MODES}) for size in sizes]


def _row(size: int, times: dict[str, list[float]]) -> dict[str, Any]:
    medians = {mode: statistics.median(taken) for mode, taken in times.items()}
    return {
        "world_size": size,
        "steps": len(times["plain"]),
        "plain_s": medians["plain"],
        **{f"{mode}_over_plain": medians[mode] / medians["plain"] for mode in ("true", "exact")},
        **{f"{mode}_quartiles_s": statistics.quantiles(taken, n=4) for mode, taken in times.items()},
    }


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
    print("| ranks | plain step | true | exact |\n|---|---|---|---|")
    for row in rows:
        ratios = " | ".join(f"{row[f'{mode}_over_plain']:.2f}x" for mode in ("true", "exact"))
        print(f"| {row['world_size']} | {row['plain_s']:.3f} s | {ratios} |")


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

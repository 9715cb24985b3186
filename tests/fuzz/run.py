"""Coverage-guided fuzzing of one target, for as long as you like: `python -m tests.fuzz.run TARGET FOLDER SECONDS`.

Needs `pip install atheris`, which is no dependency of the tests. New inputs go to FOLDER; a crash is written beside it.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["storage"]):
    from tests.fuzz.mutation import mutated
    from tests.fuzz.seeds import seeds_of
    from tests.fuzz.targets import TARGETS


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the inputs are changed by us, half by libFuzzer."""
    source = random.Random(seed)
    return mutated(data, source)[:max_size] if source.random() < 0.5 else atheris.Mutate(data, max_size)


def main() -> None:
    name, folder, seconds = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    folder.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds_of(name)):
        (folder / f"seed-{number}").write_bytes(seed)
    options = [f"-max_total_time={seconds}", "-rss_limit_mb=1024", "-timeout=10", "-max_len=16384"]
    atheris.Setup(
        [sys.argv[0], *options, f"-artifact_prefix={folder}-crash-", str(folder)], TARGETS[name], custom_mutator=mutate
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()

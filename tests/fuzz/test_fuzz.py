"""Untrusted bytes into every parser of stored data: valid ones, hostile ones, the kept corpus and fresh mutations.

Nothing but refusals comes out, in bounded memory (each target runs in a child with an address space limit).
"""

from __future__ import annotations

import logging
import multiprocessing
import random
import resource
import time
import traceback
from multiprocessing.connection import Connection

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.mutation import mutated
from tests.fuzz.seeds import hostile, seeds_of
from tests.fuzz.targets import ENCODINGS, TARGETS, shard_is_good

MEMORY_BYTES = 1 << 30
SLOWEST_S = 5.0
CHILD_S = 120.0


@pytest.mark.parametrize("target", TARGETS)
def test_the_corpus_is_refused_or_read_in_bounded_memory(target: str) -> None:
    assert _in_child(target, seeds_of(target)) == ""


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_are_refused_or_read_in_bounded_memory(target: str) -> None:
    seeds, source = seeds_of(target), random.Random(7)
    assert _in_child(target, [mutated(source.choice(seeds), source) for _ in range(2000)]) == ""


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(source=st.randoms(use_true_random=False), data=st.data())
def test_no_mutation_is_an_accident(target: str, source: random.Random, data: st.DataObject) -> None:
    TARGETS[target](mutated(data.draw(st.sampled_from(seeds_of(target))), source))


def test_what_is_valid_is_accepted_and_what_is_hostile_is_not() -> None:
    inputs = seeds_of("shard")
    assert all(shard_is_good(content) for content in inputs[: len(ENCODINGS)])
    assert hostile("shard")
    assert not any(shard_is_good(content) for content in hostile("shard"))


def _in_child(target: str, inputs: list[bytes]) -> str:
    """What went wrong, or nothing."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_feed, args=(target, inputs, theirs))
    child.start()
    theirs.close()
    try:
        assert ours.poll(CHILD_S), f"{target}: no answer in {CHILD_S} s"
        said: str = ours.recv()
    except EOFError:
        said = f"{target}: the child ended without a word"
    finally:
        child.kill()
        child.join()
    return said


def _feed(target: str, inputs: list[bytes], answer: Connection) -> None:
    logging.disable(logging.CRITICAL)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    for content in inputs:
        started_at_s = time.thread_time()
        try:
            TARGETS[target](content)
        except BaseException:  # noqa: BLE001 - told to the test, with the input
            answer.send(f"{content!r}\n{traceback.format_exc()}")
            return
        if time.thread_time() - started_at_s > SLOWEST_S:
            answer.send(f"slow: {content!r}")
            return
    answer.send("")

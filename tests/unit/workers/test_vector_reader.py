"""The CPU's way of reading a step vector; the CUDA device's is tests/gpu's."""

from __future__ import annotations

import torch

from workers.vector_reader import VectorReader

CPU = torch.device("cpu")


class LateSum:
    """Doubles the vector in the call of `wait`, as a sum over two like ranks that is over only then."""

    def __init__(self, vector: torch.Tensor) -> None:
        self._vector = vector
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        self._vector.mul_(2.0)


def test_a_sum_on_the_cpu_is_waited_for_when_it_is_read_and_not_before() -> None:
    reader = VectorReader(CPU)
    vector = reader.upload([1.0, 2.0**52 + 1.0])
    work = LateSum(vector)
    reading = reader.begin(vector, work)
    assert work.num_waits == 0
    assert reading.words() == [2.0, 2.0**53 + 2.0]
    assert work.num_waits == 1


def test_words_go_up_in_double_precision() -> None:
    words = [0.1, float(2**48 - 1)]
    vector = VectorReader(CPU).upload(words)
    assert (vector.dtype, vector.device, vector.tolist()) == (torch.float64, CPU, words)

"""How the chunks of one tensor cover it: gathered rank by rank in little memory, checked, and put in the shortest form.

Pure geometry: no Receipt, no store. Covered means exactly once; what is wrong is returned in words, for the caller to
raise as its own error.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import prod

from storage.manifest import MAX_CHUNKS, ChunkPlace, RowBlocks, TensorLayout

__all__ = ["LayoutFold", "cover_problem", "layout_problem"]

_MAX_ELEMENTS = 1 << 58  # of at most 16 bytes each: byte counts stay below 2**62
_SHORTEST_RULE = 64  # fewer chunks are listed one by one, which people read more easily
_NOBODY = -1

_Box = tuple[tuple[int, ...], tuple[int, ...]]


class LayoutFold:
    """The chunks of one tensor as the Receipts bring them, in any order.

    Most tensors are cut into equal runs of rows. For those it keeps one number a chunk (who has it), whatever else it
    is told: 10,000 Receipts of a large model would not fit into memory as objects.
    """

    __slots__ = (
        "_bound",
        "_dim",
        "_dtype",
        "_first_rank",
        "_last",
        "_level",
        "_odd",
        "_owners",
        "_shape",
        "_size",
        "_usual",
    )

    def __init__(self, rank: int, layout: TensorLayout) -> None:
        self._first_rank = rank
        self._dtype, self._shape, self._level = layout.dtype, layout.shape, layout.level
        self._bound: float | None = None
        self._dim = self._size = 0
        self._usual: tuple[int, ...] | None = None
        self._last: tuple[int, ...] | None = None
        self._owners = array("i")
        self._odd: dict[_Box, int] = {}

    def add(self, rank: int, layout: TensorLayout, max_blocks: int) -> str | None:
        """Take the chunks of ``rank``; returns what is wrong with them. Of identical chunks the lowest rank's stays."""
        if (layout.dtype, layout.shape, layout.level) != (self._dtype, self._shape, self._level):
            return (
                f"is {layout.dtype} {layout.shape} {layout.level} on rank {rank} but "
                f"{self._dtype} {self._shape} {self._level} on rank {self._first_rank}"
            )
        if isinstance(layout.chunks, RowBlocks):
            return f"comes from rank {rank} as a rule; a Receipt lists its chunks one by one"
        if layout.bound is not None:
            self._bound = max(layout.bound, self._bound or 0.0)
        for chunk in layout.chunks:
            if chunk.rank != rank:
                return f"comes from rank {rank} with a chunk of rank {chunk.rank}"
            if 0 not in chunk.sizes:
                self._place(rank, chunk.offsets, chunk.sizes, max_blocks)
        return None

    def finish(self) -> TensorLayout | str:
        """The layout, or what is wrong with it."""
        if prod(self._shape) >= _MAX_ELEMENTS:
            return f"of shape {self._shape} has {prod(self._shape)} elements, at most {_MAX_ELEMENTS} can be kept"
        odd, self._odd = self._odd, {}
        for (offsets, sizes), rank in odd.items():
            self._place(rank, offsets, sizes, 0)  # those that came before the rule was known
        is_regular = bool(self._owners) and not self._odd and _NOBODY not in self._owners
        chunks: tuple[ChunkPlace, ...] | RowBlocks | None = self._rule() if is_regular else None
        if chunks is None:
            chunks = tuple(self._places())
            problem = None if is_regular else cover_problem(self._shape, chunks)
            if problem is not None:
                return problem
        return TensorLayout.model_construct(
            dtype=self._dtype, shape=self._shape, level=self._level, bound=self._bound, chunks=chunks
        )

    def _place(self, rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...], max_blocks: int) -> None:
        if self._usual is None and max_blocks:
            self._learn(offsets, sizes, max_blocks)
        block = self._block_of(offsets, sizes)
        if block is not None:
            owner = self._owners[block]
            self._owners[block] = rank if owner == _NOBODY else min(owner, rank)
            return
        box = (offsets, sizes)
        self._odd[box] = min(rank, self._odd.get(box, rank))

    def _block_of(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> int | None:
        """The number of the block of the regular cut that this chunk is, if it is one."""
        if sizes not in (self._usual, self._last) or len(offsets) != len(sizes):
            return None
        start = offsets[self._dim]
        block, rest = divmod(start, self._size)
        if rest or block >= len(self._owners) or sum(offsets) != start:
            return None
        return block if sizes == (self._last if block == len(self._owners) - 1 else self._usual) else None

    def _learn(self, offsets: tuple[int, ...], sizes: tuple[int, ...], max_blocks: int) -> None:
        """Take this chunk for one of a regular cut, if it can be one that is not the last."""
        shape = self._shape
        if not shape or not len(offsets) == len(sizes) == len(shape):
            return
        cut = [dim for dim, size in enumerate(sizes) if size != shape[dim]] or [0]
        dim, size = cut[0], sizes[cut[0]]
        if len(cut) > 1 or (offsets[dim] and offsets[dim] + size >= shape[dim]):
            return
        num = -(-shape[dim] // size)
        if not 0 < num <= max_blocks:
            return
        self._dim, self._size = dim, size
        self._owners = array("i", [_NOBODY]) * num
        self._usual = (*shape[:dim], size, *shape[dim + 1 :])
        self._last = (*shape[:dim], shape[dim] - (num - 1) * size, *shape[dim + 1 :])

    def _blocks(self, first_rank: int = 0, rank_step: int = 0) -> RowBlocks:
        return RowBlocks(shape=self._shape, dim=self._dim, size=self._size, first_rank=first_rank, rank_step=rank_step)

    def _rule(self) -> RowBlocks | None:
        """The short form of a whole regular cut, where the ranks follow each other evenly."""
        owners = self._owners
        if len(owners) < _SHORTEST_RULE:
            return None
        num, first, step = len(owners), owners[0], owners[1] - owners[0]
        if step < 0 or owners[-1] != first + (num - 1) * step:
            return None
        even = array("i", range(first, first + num * step, step)) if step else array("i", [first]) * num
        if owners != even:
            return None
        return self._blocks(first, step)

    def _places(self) -> list[ChunkPlace]:
        places = [
            ChunkPlace.model_construct(rank=rank, offsets=offsets, sizes=sizes)
            for (offsets, sizes), rank in self._odd.items()
        ]
        if self._owners:
            blocks = self._blocks()
            for index, owner in enumerate(self._owners):
                if owner != _NOBODY:
                    place = blocks[index]
                    places.append(ChunkPlace.model_construct(rank=owner, offsets=place.offsets, sizes=place.sizes))
        places.sort(key=lambda place: place.offsets)
        return places


def layout_problem(layout: TensorLayout, world_size: int) -> str | None:
    """What is wrong with a stored layout, or None. Bounded by its own size, never by a number in it."""
    shape, chunks = layout.shape, layout.chunks
    if prod(shape) >= _MAX_ELEMENTS:
        return f"of shape {shape} has {prod(shape)} elements, at most {_MAX_ELEMENTS} can be kept"
    if isinstance(chunks, RowBlocks):
        if chunks.shape != shape or chunks.dim >= len(shape):
            return f"of shape {shape} is cut along dimension {chunks.dim} of {chunks.shape}"
        if not 0 < len(chunks) <= MAX_CHUNKS:
            return f"of shape {shape} is cut into {len(chunks)} chunks, at most {MAX_CHUNKS} are read"
        last = chunks.first_rank + (len(chunks) - 1) * chunks.rank_step
        return None if last < world_size else f"has a chunk of rank {last}, the world size is {world_size}"
    beyond = max((chunk.rank for chunk in chunks), default=0)
    if beyond >= world_size:
        return f"has a chunk of rank {beyond}, the world size is {world_size}"
    return cover_problem(shape, chunks)


def cover_problem(shape: tuple[int, ...], chunks: Sequence[ChunkPlace]) -> str | None:
    """Inside the tensor, disjoint, and of its volume together: then the chunks cover it exactly once."""
    for chunk in chunks:
        if not len(chunk.offsets) == len(chunk.sizes) == len(shape):
            return (
                f"has {len(shape)} dimensions, the chunk of rank {chunk.rank} has "
                f"{len(chunk.offsets)} offsets and {len(chunk.sizes)} sizes"
            )
        if any(offset + size > limit for offset, size, limit in zip(chunk.offsets, chunk.sizes, shape, strict=True)):
            return f"of shape {shape}: the chunk of {_where(chunk)} reaches outside"
    problem = _overlap_problem(shape, chunks)
    if problem is not None:
        return problem
    covered, volume = sum(prod(chunk.sizes) for chunk in chunks), prod(shape)
    if covered != volume:
        return f"of shape {shape} has a gap: {covered} of {volume} elements were saved"
    return None


def _overlap_problem(shape: tuple[int, ...], chunks: Sequence[ChunkPlace]) -> str | None:
    """Sweep along the dimension that is cut most often, comparing only chunks that meet there."""
    if len(chunks) < 2:
        return None
    axis = max(range(len(shape)), key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}), default=None)
    if axis is None:
        return f"has no dimensions but {len(chunks)} different chunks"
    active: list[ChunkPlace] = []
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[axis]):
        start = chunk.offsets[axis]
        active = [other for other in active if other.offsets[axis] + other.sizes[axis] > start]
        other = _first_overlap(chunk, active)
        if other is not None:
            return f"is covered twice: the chunks of {_where(other)} and {_where(chunk)} overlap"
        active.append(chunk)
    return None


def _first_overlap(chunk: ChunkPlace, others: Iterable[ChunkPlace]) -> ChunkPlace | None:
    for other in others:
        edges = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
        if all(a < b + b_size and b < a + a_size for a, a_size, b, b_size in edges):
            return other
    return None


def _where(chunk: ChunkPlace) -> str:
    return f"rank {chunk.rank} at {chunk.offsets} of {chunk.sizes}"

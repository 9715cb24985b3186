"""What two Manifests say differently."""

from __future__ import annotations

from storage.diff import diff_manifests
from storage.manifest import ChunkPlace, Manifest, TensorLayout
from tests.fakes.checkpoints import prepare


def manifest(**changes: object) -> Manifest:
    return prepare(10).manifest().model_copy(update=changes)


def layout(shape: tuple[int, ...], dtype: str = "float32") -> TensorLayout:
    place = ChunkPlace(rank=0, offsets=tuple(0 for _ in shape), sizes=shape)
    return TensorLayout(dtype=dtype, shape=shape, level="L1", chunks=(place,))


def test_a_checkpoint_does_not_differ_from_itself() -> None:
    found = diff_manifests(manifest(), manifest())
    assert found.has_same_layout
    assert (found.metadata, found.state, found.common) == ((), (), ("w",))


def test_tensors_are_told_apart_by_name_shape_and_type() -> None:
    a = manifest(tensors={"gone": layout((2,)), "flat": layout((4,)), "wide": layout((3,)), "same": layout((5,))})
    b = manifest(
        tensors={"new": layout((2,)), "flat": layout((2, 2)), "wide": layout((3,), "bfloat16"), "same": layout((5,))}
    )
    found = diff_manifests(a, b)
    assert (found.added, found.removed) == (("new",), ("gone",))
    assert found.reshaped == ("flat: (4,) -> (2, 2)",)
    assert found.retyped == ("wide: float32 -> bfloat16",)
    assert found.common == ("same", "wide")
    assert not found.has_same_layout


def test_settings_are_compared_path_by_path() -> None:
    a = manifest(metadata={"config": {"seed": 1, "optim": {"lr": 0.1}, "old": None}})
    b = manifest(metadata={"config": {"seed": 1, "optim": {"lr": 0.2}, "new": [1]}})
    assert [str(change) for change in diff_manifests(a, b).metadata] == [
        "metadata.config.new: only in B: [1]",
        "metadata.config.old: only in A: None",
        "metadata.config.optim.lr: 0.1 -> 0.2",
    ]


def test_long_text_that_grew_is_shown_by_its_end() -> None:
    a, b = manifest(metadata={"text": "x" * 5000}), manifest(metadata={"text": "x" * 5000 + " and more"})
    (line,) = map(str, diff_manifests(a, b).metadata)
    assert "and more" in line
    assert len(line) < 600


def test_another_cut_of_the_same_tensors_is_no_difference_of_layout() -> None:
    assert diff_manifests(
        prepare(10, world_size=2).manifest(), prepare(10, world_size=4, rows_per_rank=4).manifest()
    ).has_same_layout

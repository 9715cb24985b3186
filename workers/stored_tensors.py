"""The tensors of one Checkpoint by stored name, filled in place, this rank's parts only.

Which of them are wanted is the caller's business; where their bytes come from is the reader's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from storage.dcp_calls import load_tensors
from storage.dcp_reader import ManifestReader
from storage.dcp_writer import named_dtype
from storage.manifest import Manifest, TensorLayout

__all__ = ["StoredTensors"]


class StoredTensors:
    """``layouts``: what the Checkpoint holds."""

    def __init__(self, reader: ManifestReader, manifest: Manifest) -> None:
        self._reader = reader
        self.layouts: Mapping[str, TensorLayout] = manifest.tensors

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill ``tensors``, each under its stored name."""
        if tensors:
            planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            load_tensors(tensors, self._reader, planner)

    def empty(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU as the Checkpoint describes ``name``."""
        layout = self.layouts[name]
        return torch.zeros(layout.shape, dtype=named_dtype(layout.dtype), device="cpu")

"""Settings of saving and keeping Checkpoints. Checked at birth, immutable after."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

__all__ = ["CheckpointConfig", "StoreConfig"]


class StoreConfig(BaseModel):
    """How the object store is reached. Credentials come from the environment, never from here."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint_url: str | None = Field(None, description="S3 endpoint for stores other than AWS (else AWS_ENDPOINT_URL)")
    deadline_s: float = Field(
        120.0, gt=0, description="longest one transfer may take before it is given up and retried"
    )
    retries: int = Field(5, ge=0, le=100, description="retries of one transfer, with backoff and jitter")


class CheckpointConfig(BaseModel):
    """When Checkpoints are saved, how they are encoded and how many are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: int | None = Field(None, ge=1, description="fixed cadence in steps; null lets the save policy decide")
    every_s: float = Field(600.0, gt=0, description="cadence of the time policy in seconds, where every_steps is null")
    keep: int = Field(3, ge=1, description="Checkpoints kept (1 and 2 are accepted with a warning)")
    encoding: Literal["raw", "zstd", "shuffle-zstd"] = "shuffle-zstd"
    zstd_level: int = Field(1, ge=-5, le=19)
    frame_bytes: int = Field(1 << 20, ge=1 << 16, le=1 << 26, description="largest raw frame; small chunks use less")
    final_timeout_s: float = Field(600.0, gt=0, description="longest wait for the last Commit before the run fails")
    leave_timeout_s: float = Field(60.0, gt=0, description="longest wait for the Commit of a planned leave")
    orphan_grace_s: float = Field(3600.0, ge=0, description="age at which Shards no Commit names are swept")
    store: StoreConfig = StoreConfig()

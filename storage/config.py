"""Settings of saving and keeping Checkpoints. Checked at birth, immutable after."""

from __future__ import annotations

from typing import Final, Literal, Self
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

__all__ = ["CheckpointConfig", "Fidelity", "LevelRule", "LocalDiskConfig", "MemoryConfig", "StoreConfig"]

Fidelity = Literal["lossless", "bounded", "omit"]

_MOMENTS: Final = ("exp_avg", "exp_avg_sq")
_NEVER_OMITTED: Final = (*_MOMENTS, "max_exp_avg_sq", "momentum_buffer")
_OPTIMIZER: Final = ("optim.", "optimizer.")


class StoreConfig(BaseModel):
    """How the object store is reached. Credentials come from the environment, never from here."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    endpoint_url: str | None = Field(None, description="S3 endpoint for stores other than AWS (else AWS_ENDPOINT_URL)")
    addressing: Literal["auto", "path", "virtual"] = Field(
        "auto", description="bucket in the path or in the host name; auto: path where an endpoint is given"
    )
    deadline_s: float = Field(
        30.0, gt=0, description="longest wait for an answer; a large transfer gets its bytes over min_bytes_per_s more"
    )
    min_bytes_per_s: float = Field(2e6, gt=0, description="slowest transfer that is waited for")
    retries: int = Field(5, ge=0, le=100, description="retries of one transfer, with backoff and jitter")

    @field_validator("endpoint_url")
    @classmethod
    def _holds_no_credentials(cls, value: str | None) -> str | None:
        parts = urlsplit(value or "")
        if "@" in parts.netloc or parts.query:
            raise ValueError("credentials do not belong in the endpoint: set them in the environment")
        return value


class LocalDiskConfig(BaseModel):
    """The local-disk Tier of a node: encoded Shards on their way to the store (the spool) and the newest ones kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "on", "off"] = Field(
        "auto",
        description="auto: on where run.url is an object store and the disk has room; on: refuse to start without",
    )
    directory: str | None = Field(
        None, description="where; null: a directory of this Run under the system's temporary one"
    )
    max_bytes: int = Field(16 << 30, ge=1 << 20, description="quota of one node for one Run")
    keep_free_bytes: int = Field(
        2 << 30, ge=0, description="space left free on that file system, whatever the quota says"
    )
    direct_io: bool = Field(True, description="O_DIRECT where the file system takes it; quietly buffered where not")

    @field_validator("mode", mode="before")
    @classmethod
    def _without_quotes(cls, value: object) -> object:
        """YAML reads a bare ``on`` as true and ``off`` as false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class MemoryConfig(BaseModel):
    """The memory Tier: the newest Snapshots stay in shared memory, each with a replica in a peer Keeper's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mode: Literal["auto", "on", "off"] = Field(
        "auto", description="auto: as much of it as fits, what does not is said; on: refuse to start where it does not"
    )
    every_steps: int | None = Field(
        None, ge=1, description="a Snapshot in memory every so many steps; null: as often as max_slowdown allows"
    )
    max_slowdown: float = Field(
        0.01, gt=0, le=0.5, description="share of the training time that Snapshots in memory may cost"
    )
    replicate: bool = Field(True, description="keep a copy of each in the memory of a node in another failure domain")
    domain_label: str = Field(
        "ray.io/availability-zone", description="Ray node label that names a failure domain above the node"
    )
    bandwidth_bytes_per_s: float | None = Field(
        None, gt=0, description="most that one node sends for replicas; null: no cap"
    )
    max_host_memory: float = Field(
        0.5, gt=0, le=0.9, description="share of a node's free memory that Snapshots and replicas may take"
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _without_quotes(cls, value: object) -> object:
        """YAML reads a bare ``on`` as true and ``off`` as false."""
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


class LevelRule(BaseModel):
    """How the tensors whose Checkpoint name matches ``pattern`` are kept. The first rule that matches decides."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pattern: str = Field(min_length=1, description="shell pattern over the stored name, e.g. optim.*.exp_avg")
    level: Literal["L1", "L2", "L3", "L4"] | None = Field(None, description="null: as the built-in table says")
    fidelity: Fidelity | None = Field(None, description="null: as checkpoint.fidelity and the Level say")
    tier: Literal["object-storage", "memory"] | None = Field(
        None, description="how far it goes; memory: kept in the memory Tier alone, in no Checkpoint; null: all the way"
    )

    @model_validator(mode="after")
    def _keeps_the_core(self) -> Self:
        problem = self._problem()
        if problem is not None:
            raise ValueError(f"checkpoint.levels rule {self.pattern!r}: {problem}")
        return self

    @property
    def is_omission(self) -> bool:
        """Whether what matches is not stored."""
        return self.fidelity == "omit" or self.level == "L4"

    @property
    def stays_in_memory(self) -> bool:
        """Whether what matches is in Snapshots in memory, but in no Checkpoint."""
        return self.tier == "memory"

    def _problem(self) -> str | None:
        """Why no Run may have this rule. Weights, buffers, trackers, random state and step counters stay L1."""
        if self.level in (None, "L1") and self.fidelity in (None, "lossless") and self.tier != "memory":
            return None
        # With a literal end, no name outside the optimizer's state and no other entry of it can match.
        start, _, key = self.pattern.rpartition(".")
        if not start.startswith(_OPTIMIZER) or any(sign in key for sign in "*?[]"):
            return (
                "a rule that lowers a Level or Tier, rounds or omits must be optim.<pattern>.<entry> with the entry "
                "spelled out, e.g. optim.*.exp_avg: everything else is L1 and kept exactly"
            )
        if key == "step":
            return "step counters are L1 and kept exactly"
        if self.fidelity == "bounded" and (key not in _MOMENTS or self.level not in (None, "L2")):
            return f"bounded is for {' and '.join(_MOMENTS)} at L2 alone"
        if self.stays_in_memory and (self.is_omission or self.level == "L1"):
            return "tier memory is for what is stored at L2 or L3: L1 goes all the way, L4 nowhere"
        if (self.is_omission or self.stays_in_memory) and key in _NEVER_OMITTED:
            return f"{key} cannot be left out: the step after a resume would not be the Run's; use bounded instead"
        if self.is_omission and (self.level not in (None, "L4") or self.fidelity not in (None, "omit")):
            return "omit and L4 mean the same, not stored; leave the other one null"
        return None


class CheckpointConfig(BaseModel):
    """When Checkpoints are saved, how they are encoded and how many are kept."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    every_steps: int | None = Field(
        None, ge=1, description="fixed cadence in steps; where this and every_s are null the save policies decide"
    )
    every_s: float | None = Field(None, gt=0, description="fixed cadence in seconds, from one save to the next")
    keep: int = Field(3, ge=1, description="Checkpoints kept (1 and 2 are accepted with a warning)")
    archive_every_h: float | None = Field(
        None, gt=0, description="besides `keep`: one Checkpoint of every so many hours is never deleted; null: none"
    )
    fidelity: Literal["lossless", "bounded"] = Field(
        "lossless", description="bounded: optimizer moments may be rounded within `moment_bound`, verified as stored"
    )
    moment_bound: float = Field(
        1e-3, gt=0, le=0.1, description="largest relative L2 error of the next update, for each tensor"
    )
    levels: tuple[LevelRule, ...] = Field((), description="rules that come before the built-in table")
    encoding: Literal["raw", "zstd", "shuffle-zstd", "planes-zstd"] = "planes-zstd"
    zstd_level: int = Field(1, ge=-5, le=19)
    frame_bytes: int = Field(1 << 20, ge=1 << 16, le=1 << 26, description="largest raw frame; small chunks use less")
    final_timeout_s: float = Field(
        600.0,
        gt=0,
        description="longest wait for the last Commit before the run fails; time of an outage is not counted",
    )
    leave_timeout_s: float = Field(60.0, gt=0, description="longest wait for the Commit of a planned leave")
    orphan_grace_s: float = Field(3600.0, ge=0, description="age at which Shards no Commit names are swept")
    max_outage_s: float = Field(
        1800.0, gt=0, description="longest the store may stay away before the run ends (exit code 16)"
    )
    max_failed_saves: int | None = Field(
        None, ge=1, description="saves in a row that may fail before the run ends (exit code 16); null: any number"
    )
    proof: bool = Field(True, description="take a probe's loss at every save, and again after each load from the store")
    verify: Literal["load", "digests", "off"] = Field(
        "load", description="what is done in the background with each Checkpoint, where it can be loaded: see the docs"
    )
    verify_load_per_core: float = Field(
        0.7, ge=0, description="verifying begins where the driver's machine is less busy than this, by its load average"
    )
    verify_after_s: float = Field(
        900.0, ge=0, description="age at which one is verified however busy it is, where no newer one was"
    )
    memory: MemoryConfig = MemoryConfig()
    local_disk: LocalDiskConfig = LocalDiskConfig()
    store: StoreConfig = StoreConfig()

    @field_validator("verify", mode="before")
    @classmethod
    def _without_quotes(cls, value: object) -> object:
        """YAML reads a bare ``off`` as false."""
        return "off" if value is False else value

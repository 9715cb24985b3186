"""Settings of the training side: model, data, optimizer, evaluation. Checked at birth, immutable after."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

from workers.mix_weights import whole_weights

__all__ = [
    "ActivationCheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimConfig",
    "PrepareConfig",
    "Reproducible",
    "SourceConfig",
]

Reproducible = bool | Literal["exact"]
"""Whether a Run has the same bits at any world size: not meant to, in practice, or by an ordered fold of gradients."""


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ActivationCheckpointConfig(_Settings):
    """Recomputes activations of every k-th block in backward. Nothing to do with a Checkpoint of the Run."""

    enabled: bool = False
    every_kth_block: int = Field(1, ge=1)


class ModelConfig(_Settings):
    """Any Hugging Face causal LM: `config` is handed to AutoConfig.for_model (needs `model_type`).

    Left out where a user's own loop makes the model.
    """

    config: dict[str, JsonValue] = {}
    parallelism: Literal["fsdp", "hsdp", "ddp"] = Field(
        "fsdp",
        description="fsdp shards the state over all workers; hsdp over groups of shard_size, which hold it alike; "
        "ddp keeps it whole on each: for small models",
    )
    shard_size: int | None = Field(
        None, ge=1, description="hsdp: workers that share one copy of the state; more where the World is no multiple"
    )
    compare_replicas: bool = Field(
        True, description="digest what every worker holds whole, and refuse a save whose digests differ"
    )
    compute_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    activation_checkpointing: ActivationCheckpointConfig = ActivationCheckpointConfig()
    compile: bool = False

    @model_validator(mode="after")
    def _has_model_type(self) -> Self:
        if self.config and not isinstance(self.config.get("model_type"), str):
            raise ValueError("model.config needs a model_type, e.g. llama")
        if (self.shard_size is None) != (self.parallelism != "hsdp"):
            raise ValueError(f"model.shard_size goes with parallelism hsdp and nothing else, not {self.parallelism}")
        return self


class PrepareConfig(_Settings):
    """How a dataset that does not exist yet is made (as `raysume data prepare` would)."""

    source: str = Field("stdlib", description="'stdlib', or a file or folder of text, JSONL, Parquet or source code")
    vocab_size: int = Field(2048, ge=257)
    max_bytes: int | None = Field(None, ge=1, description="stop reading the source after this many bytes of text")
    format: Literal["parquet", "arrow"] = Field("parquet", description="compressed, or read with nothing to undo")


class SourceConfig(_Settings):
    """One dataset of a mix: its weight over the sum of all weights is its share of the samples, exactly."""

    url: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0, allow_inf_nan=False)
    name: str = Field("", description="what errors and Checkpoints call it; left out: the last part of the url")
    prepare: PrepareConfig | None = None

    @property
    def label(self) -> str:
        return self.name or self.url.rstrip("/").rpartition("/")[2]


class DataConfig(_Settings):
    """Token data and the batch. A leaf is one micro-batch of one fixed shape, numbered within the global batch."""

    url: str = Field("", description="the dataset; or give `sources`")
    prepare: PrepareConfig | None = None
    sources: tuple[SourceConfig, ...] = Field((), description="several datasets, mixed by weight; or give `url`")
    sequence_length: int = Field(ge=2)
    global_batch: int = Field(ge=1, description="sequences per optimizer step, whatever the world size")
    micro_batch: int = Field(1, ge=1, description="sequences per leaf; divides global_batch")
    num_workers: int = Field(0, ge=0, description="loader processes per rank")
    prefetch: int = Field(
        2, ge=0, description="leaves read ahead, per loader process if there are any; 0: each is read when it is needed"
    )
    shuffle: Literal["rows", "blocks"] = Field(
        "rows",
        description="blocks: whole row groups, and rows within a window of them; each is then read once an epoch",
    )
    shuffle_window_groups: int = Field(16, ge=1, description="row groups whose rows are mixed by shuffle: blocks")
    validation_fraction: float = Field(0.01, ge=0.0, lt=0.5)
    allow_changed: bool = Field(
        False, description="go on although the data's fingerprint differs from the Checkpoint's"
    )

    @model_validator(mode="after")
    def _leaves_are_whole(self) -> Self:
        if self.global_batch % self.micro_batch:
            raise ValueError(
                f"data.global_batch {self.global_batch} is not a multiple of data.micro_batch {self.micro_batch}"
            )
        return self

    @model_validator(mode="after")
    def _names_its_data(self) -> Self:
        if bool(self.url) == bool(self.sources):
            raise ValueError("exactly one of data.url and data.sources names the data")
        if self.prepare is not None and self.sources:
            raise ValueError("data.prepare goes with data.url; in data.sources each source has a prepare of its own")
        labels = [source.label for source in self.sources]
        if len(set(labels)) != len(labels):
            raise ValueError(f"two of data.sources are called alike, give each a name of its own: {', '.join(labels)}")
        if self.num_workers and not self.prefetch:
            raise ValueError("loader processes read ahead: with data.num_workers, data.prefetch is at least 1")
        whole_weights([source.weight for source in self.mix])
        return self

    @property
    def mix(self) -> tuple[SourceConfig, ...]:
        """The sources; the dataset at ``url`` is a mix of one."""
        return self.sources or (SourceConfig(url=self.url, name="data", prepare=self.prepare),)

    @property
    def num_leaves(self) -> int:
        """Leaves per optimizer step."""
        return self.global_batch // self.micro_batch

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence_length


class OptimConfig(_Settings):
    """AdamW with linear warm-up, then cosine decay to `min_lr_ratio` of the peak at the last step."""

    lr: float = Field(3e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0)
    warmup_steps: int = Field(10, ge=0)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    clip_norm: float = Field(1.0, gt=0)
    loss_scaling: bool | None = Field(
        None, description="scale the loss against underflow; left out: where model.compute_dtype is float16"
    )


class EvalConfig(_Settings):
    """Evaluation on the held-out split."""

    every_steps: int | None = Field(None, ge=1)
    num_leaves: int = Field(8, ge=1, description="micro-batches evaluated, fixed whatever the world size")

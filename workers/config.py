"""Settings of the training side: model, data, optimizer, evaluation. Checked at birth, immutable after."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue, model_validator

__all__ = [
    "ActivationCheckpointConfig",
    "DataConfig",
    "EvalConfig",
    "ModelConfig",
    "OptimConfig",
    "PrepareConfig",
    "Reproducible",
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
    parallelism: Literal["fsdp", "ddp"] = Field(
        "fsdp", description="fsdp shards the state over all workers; ddp keeps it whole on each: for small models"
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
        return self


class PrepareConfig(_Settings):
    """How a dataset that does not exist yet is made (as `raysume data prepare` would)."""

    source: str = Field("stdlib", description="'stdlib', or a file or folder of text, JSONL, Parquet or source code")
    vocab_size: int = Field(2048, ge=257)
    max_bytes: int | None = Field(None, ge=1, description="stop reading the source after this many bytes of text")


class DataConfig(_Settings):
    """Token data and the batch. A leaf is one micro-batch of one fixed shape, numbered within the global batch."""

    url: str
    prepare: PrepareConfig | None = None
    sequence_length: int = Field(ge=2)
    global_batch: int = Field(ge=1, description="sequences per optimizer step, whatever the world size")
    micro_batch: int = Field(1, ge=1, description="sequences per leaf; divides global_batch")
    num_workers: int = Field(0, ge=0, description="loader processes per rank")
    prefetch: int = Field(2, ge=1)
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

"""Settings of a tiny Run for tests: a Llama of two layers, four leaves a step."""

from __future__ import annotations

from storage.config import CheckpointConfig, MemoryConfig
from workers.config import DataConfig, EvalConfig, ModelConfig
from workers.settings import SignalSettings, WorkerSettings

__all__ = ["TINY_LLAMA", "make_settings"]

TINY_LLAMA = ModelConfig(
    config={
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32,
        "tie_word_embeddings": False,
    }
)


def make_settings(
    data_url: str,
    *,
    every_steps: int | None = None,
    eval_every: int | None = None,
    total_steps: int = 6,
    memory_every: int | None = None,
    signals_every: int = 10,
) -> WorkerSettings:
    """The data must be packed to 16 tokens with ids below 257. ``memory_every``: the memory Tier's cadence."""
    return WorkerSettings(
        run_id="run",
        seed=5,
        total_steps=total_steps,
        model=TINY_LLAMA,
        data=DataConfig(url=data_url, sequence_length=16, global_batch=8, micro_batch=2),
        signals=SignalSettings(every_steps=signals_every, device_share=0.97, host_share=0.95),
        eval=EvalConfig(every_steps=eval_every, num_leaves=4),
        checkpoint=CheckpointConfig(every_steps=every_steps, memory=MemoryConfig(mode="on", every_steps=memory_every)),
    )

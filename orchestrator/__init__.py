"""The driver side: decides about nodes, workers and saves. Loads no torch."""

__all__: list[str] = []

"""Bytes: encoded, placed, recorded, read back, verified and deleted."""

__all__: list[str] = []

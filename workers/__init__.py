"""What runs inside each training process."""

__all__: list[str] = []

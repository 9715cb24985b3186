"""What runs inside each training process."""

from workers.own_packages import import_beside

__all__: list[str] = []

import_beside("storage")

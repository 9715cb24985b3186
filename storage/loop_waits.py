"""Waiting on an event loop for what other threads bring about: any number of waits cost no thread.

It knows neither Keepers nor Ray; what changes, and when it is enough, its caller says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["wait_on_loop"]


async def wait_on_loop(
    watch: Callable[[Callable[[], None]], Callable[[], None]], is_reached: Callable[[], bool], timeout_s: float
) -> bool:
    """Until ``is_reached``, asked anew after each change, or for ``timeout_s``; whether it is.

    ``watch`` has its argument called, from any thread, after each change, and returns the call that ends this.
    """
    loop = asyncio.get_running_loop()
    changed = asyncio.Event()

    def note() -> None:
        loop.call_soon_threadsafe(changed.set)

    end = watch(note)
    until = loop.time() + timeout_s
    try:
        while not is_reached():
            try:
                await asyncio.wait_for(changed.wait(), until - loop.time())
            except TimeoutError:
                return is_reached()
            changed.clear()
        return True
    finally:
        end()

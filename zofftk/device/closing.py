"""What happens to a device whose owner is dropped without having closed it."""

from __future__ import annotations

import logging
import threading
import weakref
from typing import Any

from zofftk.device.base import Device

logger = logging.getLogger("zofftk")


def close_when_gone(owner: object, device: Device, memory: Any) -> None:
    """When `owner` is collected, or the process exits, close `device`; its copies end before `memory` is let go."""
    weakref.finalize(owner, _close, device, memory)


def _close(device: Device, memory: Any) -> None:
    if device.runs_here():  # the collector came by on one of its own threads, which it could not wait for
        threading.Thread(target=_close, args=(device, memory), name="zofftk-close", daemon=True).start()
        return
    try:
        device.close()
    except Exception as error:  # nobody is left who could be told
        logger.debug("a device was not closed properly: %s", error)

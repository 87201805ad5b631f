"""Former name of the package `worker_device`. Deprecated: the next release removes this module."""

import sys

from worker_device import Choice, choose_device, device_for_worker
from worker_device.__main__ import main

__all__ = ["Choice", "choose_device", "device_for_worker", "main"]

if __name__ == "__main__":
    sys.exit(main())

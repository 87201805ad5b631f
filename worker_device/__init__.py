"""Choose a GPU for a worker process. Standard library only; does not initialize CUDA.

    DEVICE=$(python -m worker_device --worker-id "$WORKER_ID")        # cuda:1
    eval "$(python -m worker_device --worker-id "$WORKER_ID" --env)"  # only this GPU, as cuda:0

In the worker itself: `worker_device.device_for_worker(worker_id)`.
"""

from worker_device.choice import Choice, choose_device, device_for_worker

__all__ = ["Choice", "choose_device", "device_for_worker"]

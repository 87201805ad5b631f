"""The node agent: reads GPUs through NVML. Not built yet."""

"""Reads the GPUs through NVML. Only `agent.gpu.nvml` imports pynvml."""

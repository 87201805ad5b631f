"""The node agent: reads GPUs through NVML and reports their load, health and tenants."""

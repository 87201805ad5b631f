"""Write to the API server and to other replicas: Events, wakes, Leases and messages."""

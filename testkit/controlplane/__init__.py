"""Real control plane and Prometheus, and the scenarios' world on them."""

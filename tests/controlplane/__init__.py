"""A real control plane without machines: etcd, kube-apiserver, kube-scheduler, Prometheus, kwok."""

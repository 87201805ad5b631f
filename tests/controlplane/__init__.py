"""Tests of the real control plane: etcd, kube-apiserver, kube-scheduler, Prometheus, kwok."""

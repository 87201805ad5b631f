"""The HTTP verbs that kube-scheduler calls."""

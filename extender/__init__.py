"""idlegpu: a kube-scheduler extender that places GPU pods on GPUs that are really idle."""

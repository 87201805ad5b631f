"""Finds the pods that hold and use each GPU, from the kubelet and `/proc`, and foreign use."""

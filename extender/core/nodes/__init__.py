"""Nodes and pods: the inventory, names, labels, and the snapshot of the fleet."""

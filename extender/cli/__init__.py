"""The command line `idlegpu`, also `kubectl idlegpu`: asks an extender, and shows what it says."""

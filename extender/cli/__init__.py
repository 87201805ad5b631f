"""The command line `idlegpu` (or `kubectl idlegpu`): query an extender and print its answers."""

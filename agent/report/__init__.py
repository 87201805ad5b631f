"""The report of a node: the contract with the extender, the verdicts in it, and a table of it."""

"""Fakes of the node agent's inputs and of the extender that receives its reports."""

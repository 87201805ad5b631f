"""How settings are described, read and checked; what there is to set is in extender/config.py."""

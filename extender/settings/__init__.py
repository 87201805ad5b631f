"""Models that describe, parse and validate settings; `extender/config.py` joins them."""

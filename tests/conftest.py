"""Fixtures that more than one folder of tests uses."""

import asyncio

from hypothesis import HealthCheck, settings

pytest_plugins = ["tests.controlplane.fixtures"]

# hypothesis asks for the current loop, and asyncio makes one that nobody closes unless told that
# there is none: each async test brings its own.
asyncio.set_event_loop(None)

# How long an example takes says how busy the machine is, not whether the code is right.
settings.register_profile(
    "idlegpu", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("idlegpu")

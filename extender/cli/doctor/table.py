"""All checks, by code."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from extender.cli.doctor import checks
from extender.cli.doctor.findings import Check

CHECKS: Final[tuple[Check, ...]] = tuple(
    sorted(
        (
            value
            for module in iter_modules(checks.__path__, f"{checks.__name__}.")
            for value in vars(import_module(module.name)).values()
            if isinstance(value, Check)
        ),
        key=lambda check: check.code,
    )
)

"""Variants of the installation."""

from testkit.controlplane.shipped import COMPONENTS, MANIFESTS, OVERLAYS

VARIANTS = [MANIFESTS, MANIFESTS / "rbac", *sorted(OVERLAYS.iterdir())]
EVERY_COMPONENT = sorted(folder.name for folder in COMPONENTS.iterdir())

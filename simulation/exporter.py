"""Serve the metrics of a simulated fleet at `/metrics?node=NAME`."""

import argparse
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from simulation.dcgm import CONTENT_TYPE, render
from simulation.demo_fleet import big_fleet, demo_fleet
from simulation.fleet import SimulatedFleet
from simulation.nodes import ExporterState, FleetError, SimulatedNode
from testkit.serving import serve

FLEET: Final = web.AppKey("fleet", SimulatedFleet)

_DCGM_PORT: Final = 9400
"""dcgm-exporter's port, which appears in the `instance` label."""


def build_app(fleet: SimulatedFleet) -> web.Application:
    """Build the exporter's application."""
    app = web.Application()
    app[FLEET] = fleet
    app.router.add_get("/metrics", _metrics)
    app.router.add_get("/health", _health)
    return app


@asynccontextmanager
async def run_exporter(fleet: SimulatedFleet, port: int = 0) -> AsyncIterator[str]:
    """Serve a fleet's metrics on 127.0.0.1 while the context is open.

    Args:
        fleet: the fleet; may be changed meanwhile.
        port: the port, 0 for any free port.

    Yields:
        The base URL.
    """
    async with serve(build_app(fleet), port=port) as url:
        yield url


def instance_of(node: SimulatedNode) -> str:
    """Return the `instance` label of a node's exporter, `address:9400`."""
    return f"{node.spec.address}:{_DCGM_PORT}"


async def _health(_: web.Request) -> web.Response:
    return web.Response(text="OK")


async def _metrics(request: web.Request) -> web.Response:
    fleet = request.app[FLEET]
    try:
        node = fleet.node(request.query.get("node", ""))
    except FleetError as error:
        raise web.HTTPNotFound(text=str(error)) from error
    if node.exporter is ExporterState.DOWN and request.transport is not None:
        request.transport.abort()
    return web.Response(text=_body(fleet, node), headers={"Content-Type": CONTENT_TYPE})


def _body(fleet: SimulatedFleet, node: SimulatedNode) -> str:
    """Return the metrics of a node, or raise the HTTP error that its exporter state requires."""
    match node.exporter:
        case ExporterState.UP:
            return render(node.spec, fleet.views(node.name))
        case ExporterState.EMPTY:
            return ""
        case ExporterState.MISSING:
            raise web.HTTPNotFound(text="this exporter is configured as missing")
        case ExporterState.ERROR | ExporterState.DOWN:
            raise web.HTTPInternalServerError(text="this exporter is configured to fail")


def main() -> None:
    """Serve a fleet from the command line until interrupted."""
    parser = argparse.ArgumentParser(prog="python -m simulation.exporter", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=_DCGM_PORT, help="port to listen on")
    parser.add_argument("--nodes", type=int, default=0, help="nodes of a big fleet; 0: the demo's")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    fleet = big_fleet(nodes=options.nodes) if options.nodes else demo_fleet()
    web.run_app(build_app(fleet), host=options.host, port=options.port)


if __name__ == "__main__":
    main()

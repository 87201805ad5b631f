"""Minimal extender in Python: it parses the request and returns the names.

`python -m bench.trivial --port N` answers /filter with the names of the request or the first of
them, and /prioritize with the same score for each. Like the extender it uses aiohttp, uvloop and
orjson.
"""

import argparse
from typing import Final

import orjson
import uvloop
from aiohttp import web

from extender.webhook.handlers import _is_gone

MAX_BODY_BYTES: Final = 1 << 28
ANSWERED: Final = web.AppKey("answered", set[str])
"""UIDs of the pods whose filter call was answered in time."""
SHORTLIST: Final[web.AppKey[int | None]] = web.AppKey("shortlist")
"""Number of nodes in filter's answer, None for all."""


async def answer_filter(request: web.Request) -> web.Response:
    """Pass all candidates, or the first `SHORTLIST` ones."""
    arguments = orjson.loads(await request.read())
    answer = {
        "Nodes": None,
        "NodeNames": arguments["NodeNames"][: request.app[SHORTLIST]],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    body = orjson.dumps(answer)
    if not _is_gone(request):  # counted by the same rule as the extender's answers
        request.app[ANSWERED].add(arguments["Pod"]["metadata"]["uid"])
    return web.Response(body=body, content_type="application/json")


async def answer_prioritize(request: web.Request) -> web.Response:
    """Give every candidate the same score."""
    arguments = orjson.loads(await request.read())
    answer = [{"Host": name, "Score": 5} for name in arguments["NodeNames"]]
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def answer_state(request: web.Request) -> web.Response:
    """Return the number of pods whose filter call was answered in time."""
    return web.Response(text=f"{len(request.app[ANSWERED])}\n")


def build_app(shortlist: int = 0) -> web.Application:
    """Build the application; filter answers the first `shortlist` nodes, all if it is 0."""
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[ANSWERED] = set()
    app[SHORTLIST] = shortlist or None
    app.add_routes(
        [
            web.post("/filter", answer_filter),
            web.post("/prioritize", answer_prioritize),
            web.get("/healthz", answer_state),
        ]
    )
    return app


def main() -> None:
    """Serve until a signal ends the process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shortlist", type=int, default=0, help="0 for all")
    arguments = parser.parse_args()
    uvloop.install()
    web.run_app(
        build_app(arguments.shortlist),
        host="127.0.0.1",
        port=arguments.port,
        access_log=None,
        print=lambda *_: None,
    )


if __name__ == "__main__":
    main()

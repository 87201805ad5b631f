"""The plainest extender in Python: it parses the question and gives the names back.

`python -m bench.trivial --port N` answers /filter with the names it was asked about, or so many of
the first, and /prioritize with the same score for each, on what the extender too is built from:
aiohttp, uvloop and orjson.
"""

import argparse
from typing import Final

import orjson
import uvloop
from aiohttp import web

from extender.webhook.abandoned import is_gone

MAX_BODY_BYTES: Final = 1 << 28
ANSWERED: Final = web.AppKey("answered", set[str])
"""UIDs of the pods about which filter was answered in time."""
SHORTLIST: Final[web.AppKey[int | None]] = web.AppKey("shortlist")
"""So many of the first nodes are named, None for all."""


async def answer_filter(request: web.Request) -> web.Response:
    """Pass every candidate, or so many of the first."""
    question = orjson.loads(await request.read())
    answer = {
        "Nodes": None,
        "NodeNames": question["NodeNames"][: request.app[SHORTLIST]],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    body = orjson.dumps(answer)
    if not is_gone(request):  # counted by the same rule as the extender's answers
        request.app[ANSWERED].add(question["Pod"]["metadata"]["uid"])
    return web.Response(body=body, content_type="application/json")


async def answer_prioritize(request: web.Request) -> web.Response:
    """Give every candidate the same score."""
    question = orjson.loads(await request.read())
    answer = [{"Host": name, "Score": 5} for name in question["NodeNames"]]
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def answer_state(request: web.Request) -> web.Response:
    """Say about how many pods filter was answered in time."""
    return web.Response(text=f"{len(request.app[ANSWERED])}\n")


def build_app(shortlist: int = 0) -> web.Application:
    """Return what serves; of the names so many of the first are given back, 0 for all."""
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
    """Serve until a signal ends it."""
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

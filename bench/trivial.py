"""The least that an extender in Python can do: parse the question, give the names back.

`python -m bench.trivial --port N` answers /filter with the names it was asked about and /prioritize
with the same score for each, on what the extender too is built from: aiohttp, uvloop and orjson.
"""

import argparse
from typing import Final

import orjson
import uvloop
from aiohttp import web

MAX_BODY_BYTES: Final = 1 << 28
ASKED: Final = web.AppKey("asked", set[str])
"""UIDs of the pods that filter was asked about."""
SHORTLIST: Final[web.AppKey[int | None]] = web.AppKey("shortlist")


async def answer_filter(request: web.Request) -> web.Response:
    """Pass every candidate, or so many of the first."""
    question = orjson.loads(await request.read())
    request.app[ASKED].add(question["Pod"]["metadata"]["uid"])
    answer = {
        "Nodes": None,
        "NodeNames": question["NodeNames"][: request.app[SHORTLIST]],
        "FailedNodes": {},
        "FailedAndUnresolvableNodes": {},
        "Error": "",
    }
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def answer_prioritize(request: web.Request) -> web.Response:
    """Give every candidate the same score."""
    question = orjson.loads(await request.read())
    answer = [{"Host": name, "Score": 5} for name in question["NodeNames"]]
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


async def answer_state(request: web.Request) -> web.Response:
    """Say about how many pods filter was asked."""
    return web.Response(text=f"{len(request.app[ASKED])}\n")


def main() -> None:
    """Serve until a signal ends it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--shortlist", type=int, default=0, help="0 for all")
    arguments = parser.parse_args()
    app = web.Application(client_max_size=MAX_BODY_BYTES)
    app[ASKED] = set()
    app[SHORTLIST] = arguments.shortlist or None
    app.add_routes(
        [
            web.post("/filter", answer_filter),
            web.post("/prioritize", answer_prioritize),
            web.get("/healthz", answer_state),
        ]
    )
    uvloop.install()
    web.run_app(app, host="127.0.0.1", port=arguments.port, access_log=None, print=lambda *_: None)


if __name__ == "__main__":
    main()

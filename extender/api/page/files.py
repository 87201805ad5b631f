"""Static files of the page, read once and served with a strict content security policy."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Final

from aiohttp import hdrs, web

FOLDER: Final = Path(__file__).parent / "static"
INDEX: Final = "index.html"

TYPES: Final[Mapping[str, str]] = MappingProxyType(
    {
        ".html": "text/html; charset=utf-8",
        ".css": "text/css; charset=utf-8",
        ".js": "text/javascript; charset=utf-8",
        ".svg": "image/svg+xml",
    }
)

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
"""No inline scripts or styles, no other origins, and no text that becomes markup."""

SAFE_HEADERS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
        hdrs.CACHE_CONTROL: "no-cache",  # the browser revalidates each file by its ETag
    }
)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class _File:
    body: bytes
    kind: str
    tag: str


def file_routes() -> list[web.RouteDef]:
    """Return the routes of the page's files, and redirects to the page."""
    files = {path.name: _read(path) for path in sorted(FOLDER.iterdir()) if path.suffix in TYPES}
    routes = [web.get(f"/page/{name}", _serving(file)) for name, file in files.items()]
    if INDEX in files:
        routes.append(web.get("/page/", _serving(files[INDEX])))
    return [*routes, web.get("/page", _to("page/")), web.get("/", _to("page/"))]


def _read(path: Path) -> _File:
    body = path.read_bytes()
    return _File(body=body, kind=TYPES[path.suffix], tag=f'"{sha256(body).hexdigest()[:20]}"')


def _serving(file: _File) -> Handler:
    async def serve(request: web.Request) -> web.StreamResponse:
        headers = {**SAFE_HEADERS, hdrs.ETAG: file.tag}
        if request.headers.get(hdrs.IF_NONE_MATCH) == file.tag:
            return web.Response(status=304, headers=headers)
        return web.Response(body=file.body, headers={**headers, hdrs.CONTENT_TYPE: file.kind})

    return serve


def _to(where: str) -> Handler:
    """Return a handler that redirects to a relative path, which works behind a proxy too."""

    async def redirect(_: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={**SAFE_HEADERS, hdrs.LOCATION: where})

    return redirect

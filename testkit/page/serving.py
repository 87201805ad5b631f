"""The page on a real server, and a real browser that opens it."""

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

from aiohttp import web
from playwright.async_api import (
    Browser,
    BrowserContext,
    ConsoleMessage,
    Page,
    WebError,
    async_playwright,
    expect,
)

from extender.api.access import Access
from extender.api.caller import SESSION_PATH
from extender.api.page.routes import PageRoutes as OurPage
from extender.server.readiness import SourceStatus
from extender.server.redaction import SEES_ALL, Viewer
from testkit.controlplane.process import free_port
from testkit.page.chromium import chromium
from testkit.world import World

WAIT_MS = 60_000
"""Long timeout of conditions: tests of the page do not assert speed."""

expect.set_options(timeout=WAIT_MS)

DESK, PHONE = {"width": 1440, "height": 900}, {"width": 390, "height": 844}

CHANGED: Final[WeakSet[Page]] = WeakSet()
"""Pages with a stopped clock or held answers, which `looking_at` does not use again."""
_idle: Final[WeakKeyDictionary[Browser, Page]] = WeakKeyDictionary()
"""Page of each browser that no test uses: opening another one costs a second of CPU."""


@dataclass
class Server:
    """Server of a world's webhooks, API and page on its own port.

    Attributes:
        world: the world that it serves.
        viewer: rights of the caller.
        sources: state of the sources.
        plots: queries of plots to a Prometheus.
        access: token check; None to require no token.
        port: port of 127.0.0.1.
        requested: methods and paths of received requests.
        page: the page; a new one after each start.
    """

    world: World
    viewer: Viewer = SEES_ALL
    sources: list[SourceStatus] = field(default_factory=list)
    plots: Any = None
    access: Access | None = None
    port: int = field(default_factory=free_port)
    requested: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start serving."""
        app = self.world.build_app(viewer=self.viewer)
        app.middlewares.append(self._note)
        if self.access is None:
            app.router.add_get(SESSION_PATH, _without_token)
        else:
            app.middlewares.append(self.access.guard())
            app.add_routes(self.access.routes())
        self.page = self.make_page()
        self.page.add_to(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.5)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self._task = asyncio.create_task(self.page.run())

    def make_page(self) -> OurPage:
        """Build a page that is not served yet."""
        return OurPage(
            self.world.fleet,
            self.world.history,
            states=self._states,
            clock=lambda: self.world.now,
            yield_control=lambda: asyncio.sleep(0),
            plots=self.plots,
        )

    async def stop(self) -> None:
        """Stop serving."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._runner.cleanup()

    def _states(self) -> Iterable[SourceStatus]:
        return self.sources

    @web.middleware
    async def _note(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.requested.append(f"{request.method} {request.path}")
        response: web.StreamResponse = await handler(request)
        return response


async def _without_token(_: web.Request) -> web.StreamResponse:
    """Answer like a server that needs no token."""
    return web.json_response({"user": None, "sees_all": True, "namespaces": []})


@asynccontextmanager
async def serving(world: World, **rest: Any) -> AsyncIterator[Server]:
    """Serve a world while the context is open."""
    server = Server(world, **rest)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


class Faults:
    """Faults of a page: errors, policy violations, and forbidden requests.

    Requests to other hosts, and requests that change anything except the session, are forbidden.

    Attributes:
        found: faults so far.
        allowed: prefixes of console messages that are not faults of the page: the browser writes
            them when a request fails.
    """

    def __init__(self, url: str) -> None:
        self.found: list[str] = []
        self.allowed: tuple[str, ...] = ()
        self._url = url

    def watch(self, context: BrowserContext) -> None:
        """Watch every page of a context, until `end`."""
        context.on("request", self._note_request)
        context.on("console", self._note_console)
        context.on("weberror", self._note_error)

    def end(self, context: BrowserContext) -> None:
        """Watch the pages no more."""
        context.remove_listener("request", self._note_request)
        context.remove_listener("console", self._note_console)
        context.remove_listener("weberror", self._note_error)

    def _note_error(self, error: WebError) -> None:
        self.found.append(f"error: {error.error}")

    def _note_request(self, request: Any) -> None:
        if not request.url.startswith(self._url):
            self.found.append(f"request: {request.url}")
        is_session = request.url == f"{self._url}{SESSION_PATH}"
        if request.method not in {"GET", "HEAD"} and not is_session:
            self.found.append(f"method: {request.method} {request.url}")

    def _note_console(self, message: ConsoleMessage) -> None:
        is_fault = message.type in {"error", "warning"}
        if is_fault and not message.text.startswith(self.allowed or ("\0",)):
            self.found.append(f"console: {message.text}")


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """Run a browser while the context is open."""
    program = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=program.path,
            env=dict(program.environment),
            args=["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"],
        )
        try:
            yield browser
        finally:
            await browser.close()


def looking(
    browser: Browser, server: Server, query: str = "", **options: Any
) -> AbstractAsyncContextManager[tuple[Page, Faults]]:
    """Open the page of a server: see `looking_at`."""
    return looking_at(browser, f"{server.url}/page/{query}", **options)


@asynccontextmanager
async def looking_at(
    browser: Browser, url: str, **options: Any
) -> AsyncIterator[tuple[Page, Faults]]:
    """Open a page, and check at the end that it had no faults.

    Without options it may be the page of an earlier test, cleared.

    Args:
        url: URL of the page, e.g. with `?view=holders`.
        options: options of the browser's context.
    """
    faults = Faults(url.partition("/page/")[0])
    page = None if options else _idle.pop(browser, None)
    if page is None:
        page = await _new_page(browser, **options)
    context = page.context
    faults.watch(context)
    try:
        await page.goto(url)
        yield page, faults
    except BaseException:
        await context.close()
        raise
    faults.end(context)
    if options or page in CHANGED or browser in _idle or len(context.pages) > 1:
        await context.close()
    else:
        await _clear(page)
        _idle[browser] = page
    if faults.found:
        raise AssertionError("\n".join(faults.found))


async def _new_page(browser: Browser, **options: Any) -> Page:
    """Open a page in a context of its own."""
    context = await browser.new_context(**{"viewport": DESK, **options})
    context.set_default_timeout(WAIT_MS)
    page = await context.new_page()
    # The browser reports a policy violation to the page itself, besides the console.
    await page.add_init_script(
        "addEventListener('securitypolicyviolation', (event) => "
        "console.error(`policy: ${event.violatedDirective} ${event.blockedURI}`));"
    )
    return page


async def _clear(page: Page) -> None:
    """Remove what a test has left in a page."""
    await page.evaluate(
        "() => { try { localStorage.clear(); sessionStorage.clear(); } catch { /* no origin */ } }"
    )
    await page.unroute_all()
    await page.mouse.move(0, 0)
    await page.goto("about:blank")
    await page.context.clear_cookies()

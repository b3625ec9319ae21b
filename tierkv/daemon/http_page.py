"""The page for operators at ``/``: static files that carry no data, so they need no token. What the page shows it asks
for like anybody else, with the token that its reader gave.

The browser is told to load nothing from elsewhere and to run no script but these.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final

from aiohttp import web

PAGE: Final = "/"
FOLDER: Final = "/page/"
INDEX: Final = "index.html"

TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Page:
    """Reads its files once. Immutable after that."""

    def __init__(self, *, needs_token: bool) -> None:
        folder = files("tierkv.daemon") / "page"
        self._files = {
            one.name: (one.read_bytes(), TYPES[suffix])
            for one in folder.iterdir()
            if (suffix := one.name[one.name.rfind(".") :]) in TYPES
        }
        if needs_token:  # the page then asks its reader for it first
            body, content_type = self._files[INDEX]
            self._files[INDEX] = body.replace(b"<html ", b'<html data-token="needed" ', 1), content_type

    @property
    def paths(self) -> frozenset[str]:
        """What is answered without a token."""
        return frozenset({PAGE, *(FOLDER + name for name in self._files if name != INDEX)})

    def add_to(self, app: web.Application) -> None:
        for path in sorted(self.paths):
            app.router.add_get(path, self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        body, content_type = self._files[INDEX if request.path == PAGE else request.path[len(FOLDER) :]]
        return web.Response(body=body, headers={"Content-Type": content_type, **HEADERS})

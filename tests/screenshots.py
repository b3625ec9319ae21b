"""Takes the pictures of the page that the documentation shows: ``python -m tests.screenshots docs/img``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser import running_browser
from tests.page_support import Traffic, watched_daemon
from tests.test_page import opened

LOOK_MS = 45_000
"""So long the traffic is watched before the picture is taken: the chart then has something to show."""
SHOTS = {
    "page-light": {"viewport": {"width": 1180, "height": 1100}, "color_scheme": "light"},
    "page-dark": {"viewport": {"width": 1180, "height": 1100}, "color_scheme": "dark"},
    "page-narrow": {"viewport": {"width": 375, "height": 1100}, "color_scheme": "light"},
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as place,
        watched_daemon(Path(place)) as daemon,
        running_browser() as browser,
    ):
        with Traffic(daemon):
            for name, context in SHOTS.items():
                with opened(browser, daemon, **context) as watched:
                    print(f"{name}: watching for {LOOK_MS / 1000:g} s")
                    watched.page.wait_for_timeout(LOOK_MS)
                    watched.page.screenshot(path=folder / f"{name}.png")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

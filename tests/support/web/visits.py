"""A visitor with a real browser, Debian's Chromium, who notes everything that a page should not do."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Playwright, Request, ViewportSize

from tests.support.web.hostile_text import SENTINEL

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOW_TO_GET_ONE = "there is no Chromium here: on Debian and Ubuntu, apt install chromium"
DESKTOP: ViewportSize = {"width": 1280, "height": 900}
PHONE: ViewportSize = {"width": 360, "height": 740}
PATIENCE_MILLISECONDS = 90_000
_ARGUMENTS = (
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


def launch(playwright: Playwright) -> Browser:
    """A browser without a window, of the system's own."""
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # As root, Chromium cannot have one.
    return playwright.chromium.launch(executable_path=CHROMIUM, args=[*_ARGUMENTS, *sandbox])


class Visit:
    """One visitor's tab, of a site whose ``origin`` alone may be asked for anything.

    ``complaints`` has what the page did that it should not: errors and warnings of its scripts, requests to others,
    dialogs.
    """

    def __init__(self, page: Page, origin: str) -> None:
        self.page = page
        self.origin = origin
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.set_default_timeout(PATIENCE_MILLISECONDS)
        page.on("console", self._on_console)
        page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        page.on("dialog", self._on_dialog)
        page.on("popup", lambda other: self.complaints.append(f"it opened {other.url}"))
        page.context.on("request", self._on_request)

    def _on_console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(f"console: {message.text} ({message.location})")

    def _on_dialog(self, dialog: Dialog) -> None:
        self.complaints.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def _on_request(self, request: Request) -> None:
        self.requests.append(request.url)
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.complaints.append(f"it asked for {request.url}")

    def open(self, path: str = "/") -> Page:
        """Load a page; with scripts, until they have taken over."""
        answer = self.page.goto(self.origin + path, wait_until="load")
        assert answer is not None
        assert answer.status == 200, f"{path} answers {answer.status}"
        return self.page

    def wait_until_live(self) -> None:
        self.page.locator("#connection.live").wait_for()

    def names(self) -> set[str]:
        """Of the peers in the table; with scripts, of those in view."""
        return set(self.page.locator("#peer-table tbody th").all_inner_texts())

    def check(self) -> None:
        assert self.complaints == [], self.complaints
        assert self.page.evaluate(f"window.{SENTINEL}") is None, "text of a peer was executed"

    def assert_no_sideways_scrolling(self) -> None:
        """Nothing sticks out of the page."""
        widths = self.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
        assert widths[0] <= widths[1], f"{self.page.url} is {widths[0]} px wide in a window of {widths[1]} px"


@contextlib.contextmanager
def visiting(
    browser: Browser,
    url: str,
    *,
    is_dark: bool = False,
    size: ViewportSize = DESKTOP,
    with_scripts: bool = True,
    permissions: Sequence[str] = (),
) -> Iterator[Visit]:
    """A visitor of one site, in a profile of its own; nothing may have been wrong when they leave."""
    parts = urlsplit(url)
    context = browser.new_context(
        color_scheme="dark" if is_dark else "light", viewport=size, java_script_enabled=with_scripts,
        has_touch=size is PHONE, reduced_motion="reduce", locale="en-GB", timezone_id="Etc/UTC",
    )  # fmt: skip
    try:
        if permissions:
            context.grant_permissions(list(permissions))
        visit = Visit(context.new_page(), f"{parts.scheme}://{parts.netloc}")
        yield visit
        visit.check()
    finally:
        context.close()


def screenshot(page: Page, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=path, full_page=True, animations="disabled", caret="hide")

"""A browser for all tests here, and a folder for pictures."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from tests.support.tools import unavailable
from tests.support.web.visits import CHROMIUM, HOW_TO_GET_ONE, launch


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    unavailable("" if CHROMIUM else HOW_TO_GET_ONE, "chromium")
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go: the folder in ``P2PTRAIN_SCREENSHOTS``, or one that pytest keeps for a while."""
    asked = os.environ.get("P2PTRAIN_SCREENSHOTS")
    return Path(asked) if asked else tmp_path_factory.mktemp("screenshots")

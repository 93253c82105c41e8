"""A real browser without a window: Chromium, driven by its own chromedriver.

    def test_something(browser):
        browser.get(url)
        assert browser.execute_script("return document.title") == "Scans"

chromedriver is a server like the others here: when it ends, however it ends, the browser does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import httpx
from selenium import webdriver
from selenium.webdriver.remote.client_config import ClientConfig

from support import binaries
from support.binaries import DEB_ROOT, Binary
from support.process import HOST, ServerProcess, free_port, new_folder

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    # A container's /dev/shm may have 64 MiB, and the page would be killed.
    "--disable-dev-shm-usage",
    # The browser ends when the other end of the pipe does: nobody is left behind.
    "--remote-debugging-pipe",
)

# Nothing that is asked of a page here takes a second; a loaded machine is slow.
WITHIN_S = 30


class Chromedriver(ServerProcess):
    """Starts browsers."""

    def probe(self) -> None:
        answer = httpx.get(f"{self.url}/status", timeout=5)
        assert answer.json()["value"]["ready"]

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def environment(self) -> dict[str, str]:
        """Its own home, and fonts: of unpacked packages nobody but us knows where they are."""
        fonts = self.folder / "fonts.conf"
        folders = [Path("/usr/share/fonts"), DEB_ROOT / "usr/share/fonts"]
        told = "".join(f"<dir>{folder}</dir>" for folder in folders)
        fonts.write_text(f"<fontconfig>{told}<cachedir>{self.folder}</cachedir></fontconfig>")
        return {**super().environment(), "HOME": str(self.folder), "FONTCONFIG_FILE": str(fonts)}


class Browser(webdriver.Remote):
    """A browser with a new, empty profile, and the server that drives it."""

    def __init__(self, server: Chromedriver, chromium: Binary) -> None:
        options = webdriver.ChromeOptions()
        options.binary_location = str(chromium.path)
        for flag in _flags(server.folder):
            options.add_argument(flag)
        self.server = server
        super().__init__(
            server.url,
            options=options,
            client_config=ClientConfig(server.url, timeout=2 * WITHIN_S),
        )
        self.set_page_load_timeout(WITHIN_S)
        self.set_script_timeout(WITHIN_S)

    def stop(self) -> None:
        self.quit()
        self.server.stop()


def _flags(folder: Path) -> Sequence[str]:
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    return [*FLAGS, *sandbox, f"--user-data-dir={folder / 'profile'}"]


def start_browser() -> Browser:
    chromium = binaries.find("chromium")
    driver, port = binaries.chromedriver(chromium), free_port()
    server = Chromedriver(driver, [f"--port={port}"], port, new_folder("chromium")).start()
    try:
        return Browser(server, chromium)
    except BaseException:
        server.stop()
        raise

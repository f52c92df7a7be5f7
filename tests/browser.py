"""Pages in a headless browser, where there is one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def dump(target: Path, profile: Path, size: str = "1500,900") -> tuple[str, str]:
    """The page's DOM after its scripts ran, and what the console said."""
    browser = next((found for found in map(shutil.which, BROWSERS) if found), None)
    if browser is None:
        pytest.skip("no browser: install one with apt-get install chromium")
    quiet = ["quic", "background-networking", "component-update", "sync", "gpu"]
    command = [browser, "--headless", "--no-sandbox", "--no-first-run", *(f"--disable-{what}" for what in quiet)]
    command += [f"--user-data-dir={profile}", f"--window-size={size}", "--enable-logging=stderr", "--virtual-time-budget=2000"]
    done = subprocess.run([*command, "--dump-dom", target.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


def shown(target: Path) -> dict[str, Any]:
    """The data that a page of the tools carries."""
    (text,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', target.read_text(), re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def assert_alone(target: Path) -> None:
    """No network, no other file: nothing in the page loads anything."""
    markup = target.read_text().replace("http://www.w3.org/2000/svg", "")  # a name, not an address
    assert not re.search(r"https?://|<link|<img|\bsrc=|@import|\burl\((?![#\"$])|fetch\(|XMLHttp|include ", markup)

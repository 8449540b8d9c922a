"""A real browser for tests of pages: the machine's chromium, driven by playwright. Without one, tests are skipped."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from playwright.async_api import BrowserContext, Page, async_playwright

ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
DESKTOP, PHONE = (1280, 900), (360, 740)
TIMEOUT_MS = 30_000
"""Longest wait for anything on the page: the machine may be busy."""

UNNAMED = """() => [...document.querySelectorAll("a, button, input, select, textarea, [tabindex='0']")]
  .filter((one) => one.checkVisibility())
  .filter((one) => !(one.ariaLabel || one.labels?.length || one.textContent.trim()))
  .map((one) => one.outerHTML.slice(0, 200))"""
"""What can be operated and has no name for those who do not see it."""

PALE = """() => {
  const parsed = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, index) => sum + c * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (one) => {
    for (; one; one = one.parentElement) {
      const [r, g, b, alpha = 1] = parsed(getComputedStyle(one).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const said = [...document.querySelectorAll("body *")].filter((one) => one.checkVisibility() && !one.disabled
    && [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()));
  return said.map((one) => {
    const style = getComputedStyle(one);
    const [a, b] = [light(parsed(one.namespaceURI.endsWith("svg") ? style.fill : style.color)), light(ground(one))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.outerHTML.slice(0, 120)];
  }).filter(([ratio]) => ratio < 4.5);
}"""
"""Text whose contrast with what is behind it is below 4.5, which WCAG 2.2 AA asks for."""


@dataclass
class Watched:
    """A page, and what went wrong on it: errors of scripts and policies, and addresses elsewhere."""

    page: Page
    context: BrowserContext
    errors: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def shot(self, name: str, *, full: bool = False, of: str = "") -> None:
        """Takes a picture into the folder that TANDEM_SCREENSHOTS names, if it names one; `of`: of this element."""
        folder = os.environ.get("TANDEM_SCREENSHOTS")
        if folder and of:
            await self.page.locator(of).screenshot(path=Path(folder) / f"{name}.png")
        elif folder:
            await self.page.screenshot(path=Path(folder) / f"{name}.png", full_page=full)

    async def is_too_wide(self) -> bool:
        """Whether one would have to scroll sideways."""
        return bool(await self.page.evaluate("document.documentElement.scrollWidth > innerWidth"))


@asynccontextmanager
async def browser_page(size: tuple[int, int] = DESKTOP) -> AsyncIterator[Watched]:
    """A page in a browser of its own. Skips the test where there is no chromium."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no chromium on PATH")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        async with async_playwright() as playwright:
            context = await playwright.chromium.launch_persistent_context(
                folder,
                executable_path=chromium,
                headless=True,
                args=ARGUMENTS,
                viewport={"width": size[0], "height": size[1]},
            )
            try:
                page = context.pages[0]
                page.set_default_timeout(TIMEOUT_MS)
                watched = Watched(page, context)
                page.on("console", lambda said: said.type == "error" and watched.errors.append(said.text))
                page.on("pageerror", lambda error: watched.errors.append(str(error)))
                page.on("request", lambda request: watched.asked.append(request.url))
                yield watched
            finally:
                await context.close()

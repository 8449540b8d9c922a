"""The dashboard of a whole cluster under load, clicked through in a real browser; pictures where somebody wants some.

Some requests are refused, and one loses its decode worker. The pictures of the documents are made by

TANDEM_SCREENSHOTS=docs/images python -m pytest -m slow tests/integration/system/test_dashboard.py
"""

import asyncio
import contextlib
import os
import random
import re
import signal
import urllib.error
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from playwright.async_api import expect

from benchmarks.cluster import Cluster, running_cluster
from tests.browser import PALE, PHONE, TIMEOUT_MS, UNNAMED, browser_page

PREFIX = "class Parser:\n    def __init__(self, text):\n        self.text = text\n" * 6
NUM_CLIENTS = 6
SHARE_REFUSED = 0.1
NUM_ENDED = 20
"""The page has something to show by then."""
SECONDS_SHOWN = 90 if os.environ.get("TANDEM_SCREENSHOTS") else 10
WAIT_S = 300
TALL, WIDE = (1100, 1460), (1100, 900)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
expect.set_options(timeout=4 * TIMEOUT_MS)


@contextlib.asynccontextmanager
async def load(url: str) -> AsyncIterator[None]:
    """Some clients that ask one thing after another: long and short, with and without a shared beginning."""
    chance = random.Random(1)

    async def client(http: httpx.AsyncClient) -> None:
        while True:
            prompt = (PREFIX if chance.random() < 0.6 else "") + chance.choice(("def ", "import os\n", "# read ")) * 9
            body = {"prompt": prompt, "max_tokens": chance.choice((8, 40, 160)), "ignore_eos": True}
            body["user"], body["stream"] = chance.choice(("acme", "globex")), False
            headers = {"x-service-class": chance.choice(("interactive", "normal", "batch"))}
            if chance.random() < SHARE_REFUSED:
                body["model"] = "a-model-that-is-not-served"
            reply = await http.post("/v1/completions", json=body, headers=headers)
            if reply.is_error:
                await asyncio.sleep(0.5)  # it was told to come back later

    async with httpx.AsyncClient(base_url=url, timeout=None) as http:
        clients = [asyncio.create_task(client(http)) for _ in range(NUM_CLIENTS)]
        try:
            yield
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)


def has_enough(shown: dict[str, Any]) -> bool:
    """Whether there is something to see."""
    seconds = [running for running in shown["series"]["running"] if running]
    return shown["last_number"] >= NUM_ENDED and len(seconds) >= SECONDS_SHOWN


async def lose_a_decode_worker(cluster: Cluster) -> None:
    """Kills the decode worker of a long answer until an answer has continued at another one."""
    async with httpx.AsyncClient(base_url=cluster.http, timeout=None) as http:
        for number in range(20):
            request_id = f"long-{number}"
            body = {"prompt": PREFIX, "max_tokens": 600, "ignore_eos": True}
            asked = asyncio.create_task(http.post("/v1/completions", json=body, headers={"x-request-id": request_id}))
            async with asyncio.timeout(WAIT_S):
                while not (pid := await asyncio.to_thread(decode_pid, cluster, request_id)) and not asked.done():  # noqa: ASYNC110 - the gateway's
                    await asyncio.sleep(0.05)
            if pid:
                os.kill(pid, signal.SIGKILL)
            assert (await asked).status_code == 200
            page = await asyncio.to_thread(cluster.get, f"/dashboard/requests/{request_id}")
            if any(len(answer["attempts"]) > 1 for answer in page["answers"]):
                return
    raise AssertionError("no answer lost its worker")


def decode_pid(cluster: Cluster, request_id: str) -> int:
    """Returns the process that generates a request's answer; 0 while none does."""
    try:
        return cluster.decode_pid(request_id)
    except (urllib.error.HTTPError, StopIteration, KeyError):
        return 0


async def test_a_cluster_under_load_is_seen() -> None:
    with running_cluster("--kv-pages", "192", "--threads", "1", prefill=2, decode=2) as cluster:
        async with load(cluster.http), browser_page(TALL) as watched:
            page = watched.page
            await page.goto(f"{cluster.http}/dashboard")
            await expect(page.locator("#link")).to_have_text("live")
            async with asyncio.timeout(WAIT_S):
                while not has_enough(await asyncio.to_thread(cluster.get, "/dashboard/data")):  # noqa: ASYNC110 - its state
                    await asyncio.sleep(1.0)
            await expect(page.locator(".worker")).to_have_count(4)
            # Somebody has pages in use, and the pages of each add up.
            await expect(page.locator("#topology")).to_contain_text(re.compile(r"[1-9][0-9]* used, "))
            for words in await page.locator(".worker .pages").all_inner_texts():
                counts = [int(number) for number in re.findall("[0-9]+", words)]
                assert sum(counts[:-1]) == counts[-1] == 192, words
            for chart in ("Time to first token", "Time per later token", "Tokens per second"):
                values = await page.locator(".chart", has_text=chart).locator(".value").all_inner_texts()
                assert any(re.match("[1-9.]", value) for value in values), (chart, values)
            await lose_a_decode_worker(cluster)
            await expect(page.locator(".worker .state", has_text="ready")).to_have_count(4)
            for words in ("refused", "finished"):
                await expect(page.locator("#list tbody")).to_contain_text(words)
            await page.select_option("#span", "60")
            await watched.shot("dashboard")
            assert await page.evaluate(PALE) == []
            await page.emulate_media(color_scheme="dark")
            await watched.shot("dashboard-dark")
            assert await page.evaluate(PALE) == []
            await page.emulate_media(color_scheme="light")
            assert await page.evaluate(UNNAMED) == []

            await page.fill("#q", "prefill- decode-")
            await (
                page.locator("#list tbody tr", has_text=re.compile("prefill-. → decode"))
                .first.locator("button")
                .click()
            )
            for phase in ("queue", "route", "prefill", "transfer", "decode"):
                await expect(page.locator(".waterfall tbody")).to_contain_text(phase)
            await expect(page.locator("#story")).to_contain_text("prefill worker")
            await watched.shot("dashboard-story")
            await page.keyboard.press("Escape")

            await page.fill("#ask-tokens", "12")
            await page.click("#ask-send")
            await expect(page.locator("#ask-status")).to_contain_text("ended by")
            await expect(page.locator("#ask-figures")).to_contain_text(re.compile(r"TTFT\s*[0-9.]+ (ms|s)"))

            await page.set_viewport_size({"width": PHONE[0], "height": 2 * PHONE[1]})
            await page.evaluate("scrollTo(0, 0)")
            await expect(page.locator(".plot").first).to_have_attribute("width", re.compile("^3[0-9][0-9]$"))
            assert not await watched.is_too_wide()
            await watched.shot("dashboard-phone")
            assert watched.errors == []


async def test_decisions_of_the_autoscaler_are_explained() -> None:
    scaling = ("--autoscale=1:4", "--scale-every=1", "--scale-start-up=10", "--scale-settle=5", "--scale-headroom=10")
    with running_cluster("--kv-pages", "192", "--threads", "1", *scaling) as cluster:
        async with load(cluster.http), browser_page(WIDE) as watched:
            page = watched.page
            await page.goto(f"{cluster.http}/dashboard")
            ordered = page.locator("#decisions li", has_text=re.compile("ordered [0-9]:[0-9] in place of"))
            await expect(ordered.first).to_be_visible(timeout=WAIT_S * 1000)
            await expect(ordered.first.locator(".note")).to_contain_text(
                re.compile("becomes [0-9]:[0-9].*requests/s within .* prefill and .* decode workers")
            )
            await page.click("#pause")  # What comes while a picture is taken would move what is on it.
            await watched.shot("dashboard-decisions", of="#decisions-box")
            assert await page.evaluate(PALE) == []
            assert watched.errors == []

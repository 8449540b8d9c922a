"""`python -m tests.machines.prices`: decode workers behind links of different rates, and what requests were promised.

Prompts of 1,200 and 2,500 tokens go to a cluster of one prefill worker and two decode workers, the first of them behind
a slow link. It prints where each request went, when its second token was predicted and when it came; then, while
nothing is sent, how much the slow link is tried with, and how long it takes until its recovery is noticed. That is left
out where nothing went over the slow link; with `--remote` the first prompts do. Exit code 1 if a prediction was off by
more than a quarter, and by more than a busy machine explains, after ten requests (`off`; `not_close` counts a quarter
alone), or the recovery was not noticed within 30 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway.observability.history import PRICE_PARTS
from tests.machines import bed
from tests.machines.link import Conditions
from tests.machines.network import Network, NotPermitted
from tests.machines.scenarios import MBIT

SIZES = (1200, 2500)
NEW_TOKENS = 8
LEARNING = 10
"""Requests after which predictions are to be right."""
OFF_BY, OFF_BY_S = 0.25, 0.25
"""Most errors of a prediction; the seconds are for the machine, whose own steps vary by as much while it is busy."""
NOTICED_S, QUIET_S = 30.0, 25.0
SLOW, FAST = "decode-0", "decode-1"


@dataclass(frozen=True)
class Seen:
    """What became of one request: seconds since its workers were chosen until each token, of its wait for the prompts
    before it, and of the pages' way; predicted and seen.
    """

    num_tokens: int
    prefill: str
    decode: str
    is_remote: bool
    predicted_queue_s: float
    queue_s: float
    predicted_first_s: float
    first_s: float
    predicted_s: float
    seen_s: float
    transfer_s: float
    exposed_s: float

    @property
    def is_kept(self) -> bool:
        """Whether the second token came when it was predicted, or so little later that the machine may be why."""
        return self.is_close or abs(self.seen_s - self.predicted_s) <= OFF_BY_S

    @property
    def is_close(self) -> bool:
        """Whether the second token came when it was predicted, on a machine that does nothing else."""
        return abs(self.seen_s - self.predicted_s) <= OFF_BY * max(self.seen_s, self.predicted_s)


def make_model(folder: Path, num_layers: int) -> Path:
    """A small Llama with random weights and much KV for what it computes: 4 KiB a token and layer."""
    import torch
    import transformers

    from tests.faults.harness import DEMO_MODEL

    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=num_layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=[1, 2],
        tie_word_embeddings=True,
        torch_dtype="float32",
    )
    torch.manual_seed(1)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    return folder


async def ask(cluster: bed.Bed, num_tokens: int, chance: random.Random) -> Seen:
    """One request with a prompt of its own, and what the gateway remembers of it."""
    from tests.faults.client import Answer, http_generate, http_json

    address = cluster["gateway-0"].http
    prompt = [chance.randrange(300, 2000) for _ in range(num_tokens)]
    body = {"model": "default", "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0, "stream": True}
    models = await http_json(address, "/v1/models")
    body |= {"model": models["data"][0]["id"], "ignore_eos": True}
    answer = Answer()
    async with asyncio.timeout(240):
        await http_generate(address, body, answer)
    story = await story_of(address, answer.request_id)
    attempt = story["answers"][0]["attempts"][-1]
    return Seen(
        num_tokens,
        attempt["prefill"],
        attempt["decode"],
        bool(attempt["prefill"]),
        attempt["parts_us"].get(PRICE_PARTS["prefill_queue_s" if attempt["prefill"] else "decode_queue_s"], 0) / 1e6,
        attempt["waited_us"] / 1e6,
        attempt["predicted_ttft_us"] / 1e6,
        attempt["actual_ttft_us"] / 1e6,
        attempt["predicted_second_us"] / 1e6,
        attempt["actual_second_us"] / 1e6,
        attempt["predicted_exposed_us"] / 1e6,
        attempt["exposed_us"] / 1e6,
    )


async def story_of(address: str, request_id: str) -> Any:
    """What the gateway remembers of a request that has just ended; a moment later than its client knows of the end."""
    from tests.faults.client import Refused, http_json

    async with asyncio.timeout(10):
        while True:
            try:
                return await http_json(address, f"/dashboard/requests/{request_id}")
            except Refused:
                await asyncio.sleep(0.05)


async def links(cluster: bed.Bed) -> dict[str, Any]:
    """What the gateway knows of the prefill worker's links."""
    from tests.faults.client import http_json

    data = await http_json(cluster["gateway-0"].http, "/dashboard/data")
    told: dict[str, Any] = next(worker["links"] for worker in data["workers"] if worker["id"] == "prefill-0")
    return told


async def run(cluster: bed.Bed, network: Network, *, num_requests: int, at_once: int, seed: int) -> dict[str, Any]:
    """Requests, quiet, recovery."""
    await cluster.ready()
    chance, seen = random.Random(seed), []
    sizes = [SIZES[number % len(SIZES)] for number in range(num_requests)]
    while len(seen) < num_requests:
        batch = sizes[len(seen) : len(seen) + at_once]
        for one in await asyncio.gather(*(ask(cluster, size, chance) for size in batch)):
            seen.append(one)
            sys.stderr.write(
                f"{json.dumps(asdict(one))}{'' if one.is_close else '  off' if one.is_kept else '  OFF'}\n"
            )
    before = await links(cluster)
    figures: dict[str, Any] = {
        "requests": [asdict(one) for one in seen],
        "ways": Counter(f"{'remote' if one.is_remote else 'local'} {one.decode}" for one in seen),
        "links": before,
    }
    later = [one for one in seen[LEARNING:]]
    figures["later"] = len(later)
    figures["off"] = sum(not one.is_kept for one in later)
    figures["not_close"] = sum(not one.is_close for one in later)
    if later:
        figures["median_ratio"] = round(statistics.median(one.seen_s / one.predicted_s for one in later), 3)
    if SLOW in before:
        figures |= await recover(cluster, network, before[SLOW]["bytes_per_s"])
    return figures


async def recover(cluster: bed.Bed, network: Network, slow_bytes_per_s: float) -> dict[str, Any]:
    """How much a slow link is tried with while nothing is sent, and when its recovery is noticed."""
    passed = network.counts()[f"prefill-0>{SLOW}"][0]
    await asyncio.sleep(QUIET_S)
    packets = network.counts()[f"prefill-0>{SLOW}"][0] - passed
    before = (await links(cluster))[SLOW]["bytes_per_s"]
    network.set(["prefill-0"], [SLOW], Conditions(delay_s=0.001))
    began_s, noticed_s = time.monotonic(), None
    while noticed_s is None and time.monotonic() - began_s < 2 * NOTICED_S:
        await asyncio.sleep(0.25)
        if (await links(cluster))[SLOW]["bytes_per_s"] > 4 * before:
            noticed_s = round(time.monotonic() - began_s, 2)
    return {
        "quiet_packets": packets,
        "quiet_s": QUIET_S,
        "believed_mbit": [round(rate * 8 / 1e6, 1) for rate in (slow_bytes_per_s, before)],
        "noticed_s": noticed_s,
        "mbit_afterwards": round((await links(cluster))[SLOW]["bytes_per_s"] * 8 / 1e6, 1),
    }


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines.prices", description=__doc__)
    parser.add_argument("--mbit", type=float, default=30.0, help=f"of the link to {SLOW}")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--at-once", type=int, default=2, help="requests that go together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--remote", action="store_true", help="no decode worker computes a prompt itself")
    parser.add_argument("--decode", type=int, default=2, help="decode workers; with 1 there is only the slow link")
    parser.add_argument("--layers", type=int, default=3, help="of the model: 4 KiB of KV a token each")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    settings = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory() as folder, Network(_machines(settings.decode)) as network:
            bed.become_clients(network)
            figures = _figures(network, Path(folder), settings)
    except NotPermitted as error:
        sys.stdout.write(f"skipped: machines cannot be made here: {error}\n")
        return 0
    if settings.json:
        settings.json.write_text(json.dumps(figures, indent=1) + "\n")
    sys.stdout.write(json.dumps({name: value for name, value in figures.items() if name != "requests"}) + "\n")
    noticed_s = figures.get("noticed_s", 0.0)
    return 0 if not figures["off"] and noticed_s is not None and noticed_s <= NOTICED_S else 1


def _machines(num_decode: int) -> Sequence[str]:
    return bed.machine_names(gateways=1, prefill=1, decode=num_decode)


def _figures(network: Network, folder: Path, settings: argparse.Namespace) -> dict[str, Any]:
    network.set(["prefill-0"], [SLOW], Conditions(bytes_per_s=settings.mbit * MBIT, delay_s=0.001))
    flags = {"gateway": ["--local-prefill-tokens=0"]} if settings.remote else {}
    model = make_model(folder, settings.layers)
    with bed.Bed(
        network=network,
        gateways=1,
        prefill=1,
        decode=settings.decode,
        kv_pages=2048,
        flags=flags,
        model=model,
    ) as cluster:
        work = run(cluster, network, num_requests=settings.requests, at_once=settings.at_once, seed=settings.seed)
        figures = asyncio.run(work)
        warnings = [line for line in cluster.lines("gateway-0") if "second token was expected" in line]
        figures["warnings"] = len(warnings)
        sys.stderr.write("".join(f"{line}\n" for line in warnings[:5]))
        cluster.keep_logs = False
        return figures


if __name__ == "__main__":
    sys.exit(main())

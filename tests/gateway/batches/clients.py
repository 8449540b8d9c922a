"""What clients of batches do, and what they find."""

import asyncio
import contextlib
import json

import openai

from tests.waiting import HANG_LIMIT_S

ANSWER = [71, 72, 73]
"""Token ids of every answer."""
OVER = ("completed", "failed", "expired", "cancelled")
BATCH_CLASS = 4


def client_of(system, key="none"):
    return openai.AsyncOpenAI(base_url=f"{system.base_url}/v1", api_key=key, max_retries=0)


def row(number, **body):
    return {
        "custom_id": f"row-{number}",
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": [5 + number, 6, 7], "max_tokens": 3, **body},
    }


def jsonl(rows):
    return b"".join(json.dumps(each).encode() + b"\n" for each in rows)


async def created(client, rows, *, endpoint="/v1/completions", **fields):
    content = rows if isinstance(rows, bytes) else jsonl(rows)
    file = await client.files.create(file=("rows.jsonl", content), purpose="batch")
    return await client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


async def until_status(client, batch, *statuses, timeout_s=HANG_LIMIT_S):
    async with asyncio.timeout(timeout_s):
        while True:
            with contextlib.suppress(openai.InternalServerError):  # Redis may be away
                now = await client.batches.retrieve(batch.id)
                if now.status in statuses:
                    return now
            await asyncio.sleep(0.02)


async def until_completed(client, batch, num_rows):
    async with asyncio.timeout(HANG_LIMIT_S):
        while (await client.batches.retrieve(batch.id)).request_counts.completed < num_rows:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def lines(client, file_id):
    text = "" if file_id is None else (await client.files.content(file_id)).text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def counts(batch):
    so_far = batch.request_counts
    return so_far.total, so_far.completed, so_far.failed


def asked(system):
    """Outcome → number of the rows that had it."""
    (family,) = system.gateway.metrics.batch_rows.collect()
    return {each.labels["outcome"]: each.value for each in family.samples if each.name.endswith("_total")}


async def answered_once(client, batch, num_rows):
    """Asserts that the batch is complete and that each of its rows has one result, a good one."""
    batch = await until_status(client, batch, *OVER)
    assert batch.status == "completed", batch
    assert counts(batch) == (num_rows, num_rows, 0)
    assert batch.error_file_id is None
    results = await lines(client, batch.output_file_id)
    assert sorted(line["custom_id"] for line in results) == sorted(f"row-{number}" for number in range(num_rows))
    assert {line["response"]["body"]["choices"][0]["text"] for line in results} == {"cde"}
    return results

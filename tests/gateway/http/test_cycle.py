"""What one answer looks like on the wire."""

import asyncio

from tests.waiting import HANG_LIMIT_S

BODY = b'{"prompt": "a", "stream": true}'


async def test_http_1_0_gets_a_stream_without_chunks(make_system, worker_type, pair_type, tokenizer):
    system = await make_system()
    pair = pair_type([*tokenizer.encode("ok", add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    reader, writer = await asyncio.open_connection("127.0.0.1", system.gateway.http_port)
    headers = b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(BODY)
    writer.write(b"POST /v1/completions HTTP/1.0\r\n" + headers + BODY)
    async with asyncio.timeout(HANG_LIMIT_S):
        head, _, events = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert events.startswith(b"data: {")
    assert events.endswith(b"data: [DONE]\n\n")

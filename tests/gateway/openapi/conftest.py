"""A gateway whose answers are held against the document."""

import pytest

ANSWER = "hello world, naïve café"


@pytest.fixture
async def system(make_system, worker_type, pair_type, tokenizer):
    system = await make_system(embeddings="on")
    pair = pair_type([*tokenizer.encode(ANSWER, add_special_tokens=False).ids, 1])
    await system.add(worker_type("decode", "decode-0", pair.decode))
    await system.add(worker_type("prefill", "prefill-0", pair.prefill))
    return system

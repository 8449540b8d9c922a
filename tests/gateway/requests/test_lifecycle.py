"""What is left of a request when it is over: nothing."""

import contextlib
import gc
import weakref

from gateway.requests.call import Call
from gateway.types import AskedSampling

ANSWER = [5, 6, 7, 1]


async def test_a_call_that_is_over_is_freed_without_the_collector_of_cycles(make_system, pair_type):
    system = await make_system()
    await system.add_pair(pair_type(ANSWER))
    requests = system.gateway.requests
    call = Call(operation="text_completion", prompts=[[5, 6, 7]], sampling=AskedSampling(max_tokens=100))
    gc.disable()
    try:
        with await requests.accept(call) as accepted:
            async with contextlib.aclosing(requests.run(accepted.specs[0])) as deltas:
                token_ids = [token_id async for delta in deltas for token_id in delta.token_ids]
        kept = [weakref.ref(accepted)]
        del accepted, deltas
        assert token_ids == ANSWER
        assert [one() for one in kept] == [None]
    finally:
        gc.enable()

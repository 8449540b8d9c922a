"""A prefix that another worker holds, fetched against computed: `python -m benchmarks.pull [--tokens 3000]`.

A whole cluster of two prefill workers and one decode worker, which take turns. In each trial a first prompt leaves its
pages on one prefill worker. Two further requests, whose prompts begin with the same tokens and end otherwise, go to the
other one: the first may be given the pages, the second has a salt of its own, so that nothing of it is held anywhere.
Their answers must be the same. `--turns` measures the next turn of a conversation, whose prompt and answer only the
decode worker holds, in the same way. The model is a random Llama of some 100 million parameters, unless one is given.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import Answer, Cluster, collect, request, running_cluster
from benchmarks.random_model import FIRST_TOKEN_ID, make_served_model
from benchmarks.report import Ratio, add_arguments, leave

VOCABULARY = 2000
"""Token ids below this are in every model that is measured."""
HEARD_S = 0.5
"""Until gateways have heard of new pages."""
SETTINGS = {"TANDEM_ROUTING": "round_robin", "TANDEM_LOCAL_PREFILL_TOKENS": "0"}


def words(rng: random.Random, count: int) -> list[int]:
    """Returns random token ids."""
    return [rng.randrange(FIRST_TOKEN_ID, VOCABULARY) for _ in range(count)]


async def ask(stub: Any, prompt: Sequence[int], *, salt: str, max_tokens: int) -> Answer:
    """Returns a whole greedy answer, and has gateways hear of its pages."""
    message = request(prompt, max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    message.cache_salt = salt
    answer = await collect(stub, message)
    await asyncio.sleep(HEARD_S)
    return answer


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns the figures of all trials."""
    rows = []
    async with cluster.inference() as stub:
        for trial in range(arguments.trials + 1):
            rng = random.Random(trial)
            num_said = arguments.answer_tokens if arguments.turns else 1
            prompt = words(rng, arguments.tokens - num_said + 1)
            first = await ask(stub, prompt, salt=f"held {trial}", max_tokens=num_said)
            longer = [*prompt, *first.token_ids, *words(rng, arguments.new_tokens)]
            pulled = await ask(stub, longer, salt=f"held {trial}", max_tokens=arguments.answer_tokens)
            # The turn of the worker that has computed the first prompt, so that each kind has the same worker.
            await ask(stub, words(rng, 16), salt=f"turn {trial}", max_tokens=1)
            computed = await ask(stub, longer, salt=f"new {trial}", max_tokens=arguments.answer_tokens)
            assert pulled.usage is not None, "a finished answer has its usage"
            assert computed.usage is not None, "a finished answer has its usage"
            row = {
                "pulled_s": pulled.ttft_s,
                "computed_s": computed.ttft_s,
                "cached_tokens": pulled.usage.cached_tokens,
                "is_equal": pulled.token_ids == computed.token_ids,
            }
            assert not computed.usage.cached_tokens, "the second prompt was to be computed"
            if trial:  # The first one finds links and kernels cold.
                rows.append(row)
    return rows


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=3000, help="tokens of the prefix")
    parser.add_argument("--new-tokens", type=int, default=50, help="tokens behind it")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--turns", action="store_true", help="the next turn of a conversation")
    parser.add_argument("--model", type=Path)
    add_arguments(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder:
        model = arguments.model or make_served_model(Path(folder), "float32")
        with running_cluster("--threads", "1", model=model, prefill=2, decode=1, settings=SETTINGS) as cluster:
            rows = uvloop.run(measure(cluster, arguments))
    for row in rows:
        print(
            f"pulled {row['pulled_s'] * 1e3:8.1f} ms, {row['cached_tokens']} tokens not computed; "
            f"computed {row['computed_s'] * 1e3:8.1f} ms; {'equal' if row['is_equal'] else 'DIFFERENT'} answers"
        )
    ratio = statistics.median(row["computed_s"] / row["pulled_s"] for row in rows)
    print(f"first token of a prefix of {arguments.tokens} tokens held elsewhere: {ratio:.1f} times as soon")
    leave(arguments, "pull", {"trials": rows}, {"computed over pulled": Ratio(ratio)})
    if not all(row["is_equal"] for row in rows):
        sys.exit("answers differ")


if __name__ == "__main__":
    main()

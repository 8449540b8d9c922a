"""What the turns of a chat cost: `python -m benchmarks.multi_turn [--turns 10] [--chats 4]`.

Several conversations at a time on 2P2D with the gateway's own routing. For each turn it prints how many tokens the
prompt has, how many of them are new (the user's words and the answer's last token, whose KV nobody has computed yet),
and how many were computed. The limit is the new ones; whole pages are shared, so up to 15 more are computed. A prefill
worker never sees the answer that a decode worker gave, so a turn that lands there computes that too.
"""

import argparse
import asyncio
import random
import statistics
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cluster import Cluster, collect, request, running_cluster
from benchmarks.report import Ratio, add_arguments, leave
from demo import DEMO_MODEL


async def chat(stub: Any, turns: int, new_tokens: int, answer_tokens: int, seed: int) -> list[dict[str, int]]:
    """One conversation: every prompt is the one before it, its answer, and new words."""
    rng = random.Random(seed)
    prompt: list[int] = []
    rows = []
    for _ in range(turns):
        known = len(prompt)
        prompt = prompt + [rng.randrange(10, 2000) for _ in range(new_tokens)]
        message = request(prompt, max_tokens=answer_tokens, temperature=0.0, ignore_eos=True)
        answer = await collect(stub, message)
        assert answer.usage is not None, "a finished answer has its usage"
        computed = len(prompt) - answer.usage.cached_tokens
        # The last token of the last answer has no KV yet.
        rows.append({"prompt": len(prompt), "new": len(prompt) - known + (known > 0), "computed": computed})
        prompt += answer.token_ids
        await asyncio.sleep(0.3)  # a reader's pause, in which gateways hear of the pages
    return rows


async def measure(cluster: Cluster, arguments: argparse.Namespace) -> list[list[dict[str, int]]]:
    """All conversations."""
    async with cluster.inference() as stub:
        chats = [
            chat(stub, arguments.turns, arguments.new_tokens, arguments.answer_tokens, seed)
            for seed in range(arguments.chats)
        ]
        return await asyncio.gather(*chats)


def main() -> None:
    """Measure, print, and write the figures as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--chats", type=int, default=4, help="conversations at a time")
    parser.add_argument("--new-tokens", type=int, default=60, help="the user's words of a turn")
    parser.add_argument("--answer-tokens", type=int, default=40)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    add_arguments(parser)
    arguments = parser.parse_args()
    with running_cluster("--threads", "1", model=arguments.model, prefill=2, decode=2) as cluster:
        chats = uvloop.run(measure(cluster, arguments))
    print("turn  prompt  new  computed (mean of chats, most)")
    for turn, rows in enumerate(zip(*chats, strict=True), start=1):
        computed = [row["computed"] for row in rows]
        print(
            f"{turn:4}  {rows[0]['prompt']:6}  {rows[0]['new']:3}  {statistics.mean(computed):6.1f}  {max(computed):4}"
        )
    total = [sum(row[name] for rows in chats for row in rows) for name in ("prompt", "new", "computed")]
    print(
        f"all: {total[0]} tokens in prompts, {total[1]} new, {total[2]} computed: {total[2] / total[1]:.2f} (limit 1)"
    )
    ratios = {"computed over new": Ratio(total[2] / total[1], lower_is_better=True)}
    leave(arguments, "multi_turn", {"chats": chats}, ratios)


if __name__ == "__main__":
    main()

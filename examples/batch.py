"""Many prompts, a bounded number at a time: one prompt a line on standard input, one line of JSON for each, in order.

python examples/batch.py [--address 127.0.0.1:50051] [--concurrency 8] [--max-tokens 50] < prompts.txt
"""

import argparse
import asyncio
import json
import sys

from tandem_client import AsyncClient, Request, TandemError


async def main() -> None:
    """Asks for all and prints each as soon as those before it have come."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=50)
    arguments = parser.parse_args()
    prompts = [line.rstrip("\n") for line in sys.stdin]
    places = asyncio.Semaphore(arguments.concurrency)
    async with AsyncClient(arguments.address, timeout_s=300) as client:

        async def ask(prompt: str) -> dict[str, object]:
            async with places:
                request = Request(prompt, max_tokens=arguments.max_tokens, temperature=0, service_class="batch")
                try:
                    answer = await client.generate(request)
                except TandemError as error:
                    return {"prompt": prompt, "error": error.code.name, "message": error.message}
            return {"prompt": prompt, "text": answer.text, "tokens": len(answer.token_ids)}

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(ask(prompt)) for prompt in prompts]
            for task in tasks:
                print(json.dumps(await task, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

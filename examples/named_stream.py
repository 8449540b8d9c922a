"""A stream with a name: it continues where it was when a gateway dies. The same key again gives the same answer again.

python examples/named_stream.py --key order-4711 "class Stack:" [--addresses 127.0.0.1:50051,127.0.0.1:50052]
"""

import argparse
import asyncio
import sys

from tandem_client import AsyncClient, Request, Unavailable


async def main() -> None:
    """Shows the text on standard output and what is known of the request on standard error."""
    parser = argparse.ArgumentParser()
    parser.add_argument("prompt")
    parser.add_argument("--key", required=True)
    parser.add_argument("--addresses", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=200)
    arguments = parser.parse_args()
    request = Request(arguments.prompt, max_tokens=arguments.max_tokens, seed=1, idempotency_key=arguments.key)
    async with AsyncClient(arguments.addresses) as client, client.stream(request) as stream:
        try:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        except Unavailable as error:
            sys.exit(
                f"\nno gateway could continue: {error.message}\n"
                f"client.resume({stream.request_id!r}, {stream.next_index}) does when one is back"
            )
    print(f"request {stream.request_id}, model {stream.model}, {stream.next_index} tokens", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(main())

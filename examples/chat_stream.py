"""A conversation in the terminal: each line of standard input is answered, as it is generated. Ctrl-C stops an answer.

python examples/chat_stream.py [--address 127.0.0.1:50051] [--max-tokens 100]
"""

import argparse
import sys

from tandem_client import Client, Request, TandemError


def main() -> None:
    """Reads, asks, shows."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", default="127.0.0.1:50051")
    parser.add_argument("--max-tokens", type=int, default=100)
    arguments = parser.parse_args()
    # gRPC takes the prompt as it is; a model with a chat template of its own wants that instead of these two words.
    conversation = ""
    with Client(arguments.address, timeout_s=120) as client:
        for line in sys.stdin:
            conversation += f"User: {line.strip()}\nAssistant:"
            request = Request(conversation, max_tokens=arguments.max_tokens, temperature=0.7, stop=["\nUser:"])
            try:
                with client.stream(request) as stream:
                    for delta in stream:
                        conversation += delta.text
                        print(delta.text, end="", flush=True)
            except KeyboardInterrupt:
                pass  # leaving the stream has cancelled the call
            except TandemError as error:
                sys.exit(f"\n{error.code.name}: {error.message}")
            conversation += "\n"
            print()


if __name__ == "__main__":
    main()

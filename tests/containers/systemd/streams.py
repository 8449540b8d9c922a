"""Streams answers until a file exists, and compares each with the first one of its prompt: `streams.py FILE`.

Needs nothing but the standard library: it runs inside a container. Prints what happened as JSON.
"""

import http.client
import json
import sys
import threading
from pathlib import Path

CLIENTS = 4
PROMPTS = [f"def function_{number}(" for number in range(6)]
ENDED = Path(sys.argv[1])
known: dict[str, str] = {}
failures: list[str] = []
answers: list[str] = []


def ask(prompt: str) -> str:
    """Returns the text of a stream. Raises OSError, HTTPException and RuntimeError."""
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", 8000, timeout=60)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        lines = answer.read().decode().splitlines()
    finally:
        connection.close()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    if answer.status != 200 or events[-1:] != ["[DONE]"]:
        raise RuntimeError(f"{answer.status}: {lines[-3:]}")
    return "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])


def run(turn: int) -> None:
    """Asks again and again."""
    while not ENDED.exists():
        turn += 1
        prompt = PROMPTS[turn % len(PROMPTS)]
        try:
            text = ask(prompt)
        except (OSError, http.client.HTTPException, RuntimeError) as error:
            failures.append(repr(error))
            continue
        answers.append(text)
        if text != known[prompt]:
            failures.append(f"{text!r} is not {known[prompt]!r}")


known.update({prompt: ask(prompt) for prompt in PROMPTS})
clients = [threading.Thread(target=run, args=(number,)) for number in range(CLIENTS)]
for client in clients:
    client.start()
for client in clients:
    client.join()
said = json.dumps({"answers": len(answers), "failures": failures[:5]})
sys.stdout.write(f"{said}\n")

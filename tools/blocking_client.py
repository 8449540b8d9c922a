#!/usr/bin/env python3
"""Writes client/tandem_client/blocking.py, the client without asyncio, from aio.py: only words differ.

usage: tools/blocking_client.py [--check]      (--check: exit status 1 if the file is not what would be written)

What differs in more than words is in calls_aio.py and calls_blocking.py. The library `unasync` replaces the same words
of the language, but not those of docstrings, and would be a dependency in place of this table.
"""

import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).resolve().parents[1] / "client"
SOURCE, TARGET = CLIENT / "tandem_client" / "aio.py", CLIENT / "tandem_client" / "blocking.py"
DOCSTRING = '''"""The blocking client, which tools/blocking_client.py writes from aio.py: change that one.

It starts no thread, and may be used beside asyncio.
"""
'''
SENTENCES = {
    "`async with`, or `close` it.": "`with`, or `close` it. Any number of threads may use it.",
    "An async iterator whose `aclose` cancels the call; also an async context manager that does.": (
        "An iterator whose `close` cancels the call, from any thread; also a context manager that does."
    ),
    "A task that waits": "A thread that waits",
    "whether it was cancelled.": "whether it was cancelled, by whichever thread.",
}
WORDS = {
    r"\basync (?=(with|for|def)\b)": "",
    r"\bawait ": "",
    r"\bAsync(?=(Client|Stream|AnswerStream|Iterator)\b)": "",
    r"\b__a(?=(enter|exit|iter|next)__)": "__",
    r"\bStopAsyncIteration\b": "StopIteration",
    r"\baclose\b": "close",
    r"\bcalls_aio\b": "calls_blocking",
}


def blocking(text: str) -> str:
    """The blocking client's source from the asyncio client's."""
    text = DOCSTRING + text.split('"""\n', 1)[1]
    for sentence, other in SENTENCES.items():
        if text.count(sentence) != 1:
            raise SystemExit(f"{SOURCE.name} has this not once: {sentence}")
        text = text.replace(sentence, other)
    for word, other in WORDS.items():
        text = re.sub(word, other, text)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> int:
    """Writes or compares."""
    text = blocking(SOURCE.read_text())
    if "--check" in sys.argv[1:]:
        return 0 if TARGET.exists() and TARGET.read_text() == text else 1
    TARGET.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())

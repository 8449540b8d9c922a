"""OpenAI's Codex CLI: a turn of its agent by /v1/responses, and the next one of the same conversation."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

from checks import KEY, MODEL, URL, check, finish

CODEX = Path("node_modules/.bin/codex").resolve()
HOME, PLACE = Path("home").resolve(), Path("place").resolve()
LIMIT_S = 240


def codex(*words):
    done = subprocess.run(
        [CODEX, *words],
        cwd=PLACE,
        env={**os.environ, "CODEX_HOME": str(HOME), "CODEX_API_KEY": KEY, "OPENAI_API_KEY": KEY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-400:] + done.stderr[-400:]
    return done.stdout


def turn(*words):
    told = codex(
        "exec", *words, "--skip-git-repo-check", "--json", "-m", MODEL, "-c", f'openai_base_url="{URL}/v1"', "Hello"
    )
    events = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    (completed,) = (event for event in events if event["type"] == "turn.completed")
    assert completed["usage"]["output_tokens"], told
    return completed["usage"]["input_tokens"]


for folder in (HOME, PLACE):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
first = []


@check("a turn")
def begins():
    first.append(turn())


@check("the next turn of the conversation")
def resumes():
    assert turn("resume", "--last") > first[0]


finish(re.sub("[^0-9.]", "", codex("--version")))

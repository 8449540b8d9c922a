"""Open WebUI, started as its documentation says, and the calls that its page makes of it for a conversation."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import httpx
from checks import KEY, MODEL, URL, check, finish

READY_S = 240.0
SETTINGS = {
    "OPENAI_API_BASE_URL": f"{URL}/v1",
    "OPENAI_API_KEY": KEY,
    "WEBUI_AUTH": "False",
    "ENABLE_OLLAMA_API": "False",
    "DATA_DIR": os.path.abspath("data"),
    # No models of its own, which it would load from a hub.
    "RAG_EMBEDDING_ENGINE": "openai",
    "BYPASS_EMBEDDING_AND_RETRIEVAL": "True",
    "OFFLINE_MODE": "True",
    "HF_HUB_OFFLINE": "1",
}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "How is the weather?"}], "max_tokens": 16}

shutil.rmtree("data", ignore_errors=True)
with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
program = os.path.join(os.path.dirname(sys.executable), "open-webui")
with open("open-webui.log", "wb") as log:
    server = subprocess.Popen(
        [program, "serve", "--host", "127.0.0.1", "--port", str(port)],
        env={**os.environ, **SETTINGS},
        stdout=log,
        stderr=log,
    )
page = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)


def wait_until_ready():
    until_s = time.monotonic() + READY_S
    while time.monotonic() < until_s and server.poll() is None:
        try:
            if page.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise SystemExit("Open WebUI did not start: see open-webui.log")


try:
    wait_until_ready()
    signed_in = page.post("/api/v1/auths/signin", json={"email": "", "password": ""})
    page.headers["authorization"] = f"Bearer {signed_in.raise_for_status().json()['token']}"

    @check("its list of models has ours")
    def models():
        assert MODEL in [model["id"] for model in page.get("/api/models").raise_for_status().json()["data"]]

    @check("an answer")
    def answer():
        told = page.post("/api/chat/completions", json={**ASKED, "stream": False}).raise_for_status().json()
        assert told["choices"][0]["message"]["content"]

    @check("an answer, streamed")
    def streamed():
        with page.stream("POST", "/api/chat/completions", json={**ASKED, "stream": True}) as response:
            response.raise_for_status()
            lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "[DONE]"
        parts = [json.loads(line) for line in lines[:-1]]
        assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts if part.get("choices"))

    @check("the title of a conversation")
    def title():
        messages = [*ASKED["messages"], {"role": "assistant", "content": "It rains."}]
        told = page.post("/api/v1/tasks/title/completions", json={"model": MODEL, "messages": messages})
        assert told.raise_for_status().json()["choices"][0]["message"]["content"]
finally:
    server.terminate()
    server.wait()
finish(importlib.metadata.version("open-webui"))

"""Continuous batching of OpenVINO GenAI behind the least of an HTTP server: a peer of `end_to_end`.

    python -P benchmarks/openvino_server.py MODEL --threads 2

It prints `ready PORT`, and answers POST `{"prompt": [ids], "max_tokens": n}` with a stream of events, one for each step
that gave the request tokens: `data: {"tokens": [ids]}`. It runs in an environment of its own, so it imports nothing of
this project.
"""

import argparse
import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import openvino
import openvino_genai

CACHE_GIB = 1


class Engine:
    """The pipeline and the thread that steps it; `begin` may be called from any other."""

    def __init__(self, model: Path, threads: int) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GIB
        properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(str(model), scheduler, "CPU", properties)
        self._new: SimpleQueue[tuple[list[int], int, SimpleQueue[list[int]]]] = SimpleQueue()
        self._numbers = itertools.count()
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, prompt: list[int], num_tokens: int) -> "SimpleQueue[list[int]]":
        """Where the tokens of the answer come, step by step."""
        tokens: SimpleQueue[list[int]] = SimpleQueue()
        self._new.put((prompt, num_tokens, tokens))
        return tokens

    def _run(self) -> None:
        running: list[tuple[Any, SimpleQueue[list[int]]]] = []
        while True:
            while not running or not self._new.empty():
                prompt, num_tokens, tokens = self._new.get()
                config = openvino_genai.GenerationConfig(max_new_tokens=num_tokens, ignore_eos=True, do_sample=False)
                inputs = openvino.Tensor(np.array([prompt], dtype=np.int64))
                running.append((self._pipeline.add_request(next(self._numbers), inputs, config), tokens))
            self._pipeline.step()
            for handle, tokens in running:
                while handle.can_read():
                    tokens.put([token for output in handle.read().values() for token in output.generated_ids])
            running = [entry for entry in running if entry[0].get_status() == openvino_genai.GenerationStatus.RUNNING]


def main() -> None:
    """Load the model and serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="exported folder")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    engine = Engine(arguments.model, arguments.threads)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            tokens = engine.begin(asked["prompt"], asked["max_tokens"])
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            num_left = asked["max_tokens"]
            while num_left > 0:
                new = tokens.get()
                num_left -= len(new)
                event = b'data: {"tokens": %b}\n\n' % json.dumps(new).encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
            self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"ready {server.server_port}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

"""A load generator that others wrote, against a whole cluster: does it complete, and what does it measure?

`python -m benchmarks.public_load aiperf [--program PATH] [--requests N]`, the same with `guidellm`. The generators are
not among this project's dependencies, since they need other versions of what it needs; each gets an environment of its
own:

    python3.11 -m venv aiperf   && aiperf/bin/pip install aiperf==0.13.0                       # 1.2 GB
    python3.11 -m venv guidellm && guidellm/bin/pip install guidellm==0.8.1 'torch==2.13.0'    # 1.5 GB, torch for CPUs

It starts `tandem up` with the demo model, or takes the server at `--url`, whose model's folder is `--model`. Ends with
1 unless every request was answered.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cluster import running_cluster

MODEL = Path(__file__).parent.parent / "demo" / "model"
MODEL_NAME = "tandem-demo"
CONCURRENCY = 4
PROMPT_TOKENS = 64
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Outcome:
    """What a generator says of a run. Times in seconds, the median."""

    num_completed: int
    num_failed: int
    ttft_s: float
    itl_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class Generator:
    """`command(program, url, model, name, num_requests, folder)` runs it; `read(folder)` finds what it said."""

    command: Callable[[str, str, Path, str, int, Path], list[str]]
    read: Callable[[Path], Outcome]
    environment: Mapping[str, str]


def main() -> int:
    """Runs one generator."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("generator", choices=GENERATORS)
    parser.add_argument("--program", help="where it is; default: on the path")
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--url", help="a running server instead of one of its own")
    parser.add_argument("--model", type=Path, default=MODEL, help="the folder of its model, for the tokenizer")
    parser.add_argument("--model-name", default=MODEL_NAME)
    asked = parser.parse_args()
    generator = GENERATORS[asked.generator]
    with _server(asked.url) as url, tempfile.TemporaryDirectory() as folder:
        command = generator.command(
            asked.program or asked.generator, url, asked.model.resolve(), asked.model_name, asked.requests, Path(folder)
        )
        print(" ".join(command), flush=True)
        subprocess.run(command, check=True, env={**os.environ, **generator.environment})
        outcome = generator.read(Path(folder))
    print(
        f"\n{outcome.num_completed} of {asked.requests} requests completed, {outcome.num_failed} failed; "
        f"time to first token {1e3 * outcome.ttft_s:.0f} ms, between tokens {1e3 * outcome.itl_s:.1f} ms, "
        f"{outcome.tokens_per_s:.0f} tokens/s"
    )
    return 0 if outcome.num_completed == asked.requests and not outcome.num_failed else 1


@contextlib.contextmanager
def _server(url: str | None) -> Iterator[str]:
    if url is not None:
        yield url
        return
    with running_cluster() as cluster:
        yield cluster.http


def _aiperf_command(program: str, url: str, model: Path, name: str, num_requests: int, folder: Path) -> list[str]:
    return [
        *(program, "profile", "--model", name, "--url", url, "--endpoint-type", "chat", "--streaming"),
        *("--tokenizer", str(model), "--request-count", str(num_requests), "--concurrency", str(CONCURRENCY)),
        *("--synthetic-input-tokens-mean", str(PROMPT_TOKENS), "--output-tokens-mean", str(ANSWER_TOKENS)),
        # The template adds tokens to a prompt that only the server sees, and a short answer would be another load.
        *("--use-server-token-count", "--extra-inputs", "ignore_eos:true"),
        *("--ui", "simple", "--artifact-dir", str(folder)),
    ]


def _aiperf_outcome(folder: Path) -> Outcome:
    told = json.loads((folder / "profile_export_aiperf.json").read_text())
    num_answered = round(told["request_count"]["avg"])
    return Outcome(
        num_completed=num_answered,
        num_failed=round(told["completed_request_count"]["avg"]) - num_answered,
        ttft_s=told["time_to_first_token"]["p50"] / 1e3,
        itl_s=told["inter_token_latency"]["p50"] / 1e3,
        tokens_per_s=told["output_token_throughput"]["avg"],
    )


def _guidellm_command(program: str, url: str, model: Path, name: str, num_requests: int, folder: Path) -> list[str]:
    return [
        *(program, "run", "--backend", f"kind=openai_http,target={url}"),
        *("--profile", f"kind=concurrent,streams={CONCURRENCY}"),
        *("--constraint", f"kind=max_requests,count={num_requests}"),
        *("--tokenizer", f"kind=hf_auto,model={model}"),
        *("--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={ANSWER_TOKENS}"),
        *("--output", f"kind=json,path={folder / 'out.json'}", "--disable-progress"),
    ]


def _guidellm_outcome(folder: Path) -> Outcome:
    (run,) = json.loads((folder / "out.json").read_text())["benchmarks"]
    metrics: dict[str, Any] = run["metrics"]
    totals = metrics["request_totals"]
    return Outcome(
        num_completed=totals["successful"],
        num_failed=totals["errored"],
        ttft_s=metrics["time_to_first_token_ms"]["successful"]["median"] / 1e3,
        itl_s=metrics["inter_token_latency_ms"]["successful"]["median"] / 1e3,
        tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
    )


GENERATORS = {
    "aiperf": Generator(_aiperf_command, _aiperf_outcome, {}),
    "guidellm": Generator(_guidellm_command, _guidellm_outcome, {"HF_HUB_OFFLINE": "1"}),
}

if __name__ == "__main__":
    sys.exit(main())

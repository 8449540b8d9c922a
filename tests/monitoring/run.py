"""A real Prometheus watches a real cluster under load: `make test-monitoring`.

Starts `tandem up` with the demo model, Prometheus with the committed rules, Alertmanager's check of its example, and
promtool's tests of every alert. Then each rule and each query of each dashboard is evaluated: none may fail, and none
may show nothing unless its panel says why it may. Exit status: 0 where all of this holds.

    python -m tests.monitoring.run [--seconds 90] [--quick]
"""

import argparse
import contextlib
import http.server
import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from benchmarks.cluster import running_cluster
from gateway.access.keys import ApiKey, digest_of_key, new_key, toml_entry
from tests.free_ports import free_port
from tests.monitoring.deployed_files import FOLDER, RULES, TEST_FILES, panel_queries

TOOLS = ("prometheus", "promtool", "amtool")
SCRAPE_S = 1
START_LIMIT_S = 60.0
RECORDED_S = 30.0
RECORDED_HEADER = (
    "# Series of a cluster under load, written by `make test-monitoring ARGS=--record=FILE` for tests/deploy."
)


class Api:
    """Prometheus' HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **fields: str) -> Any:
        query = f"?{urllib.parse.urlencode(fields)}" if fields else ""
        with urllib.request.urlopen(f"{self._url}/{path}{query}", timeout=30) as answer:
            return json.load(answer)["data"]

    def is_up(self) -> bool:
        with contextlib.suppress(OSError):
            return bool(self.get("status/buildinfo"))
        return False


class Sink(http.server.BaseHTTPRequestHandler):
    """A collector of traces that takes everything and keeps nothing."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        pass


def check_files(*, is_quick: bool) -> bool:
    """Returns whether the committed files pass Prometheus' and Alertmanager's own checks, and promtool the tests."""
    commands = [
        ["promtool", "check", "config", "prometheus.yml"],
        ["amtool", "check-config", "alertmanager.yml"],
    ]
    if not is_quick:
        commands.append(["promtool", "test", "rules", *TEST_FILES])
    found = [subprocess.run(command, cwd=FOLDER, check=False).returncode for command in commands]
    return found == [0] * len(commands)


@contextlib.contextmanager
def collector() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@contextlib.contextmanager
def prometheus(folder: Path, gateway: str, key: str) -> Iterator[Api]:
    """Runs Prometheus with the committed configuration: only addresses, the key and the pace are others."""
    (folder / "metrics.key").write_text(key)
    shown = {"type": "Bearer", "credentials_file": str(folder / "metrics.key")}
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
    config["rule_files"] = [str(FOLDER / name) for name in config["rule_files"]]
    del config["alerting"]
    for job in config["scrape_configs"]:
        job["authorization"] = shown
        for static in job.get("static_configs", ()):
            static["targets"] = [gateway]
        for discovery in job.get("http_sd_configs", ()):
            discovery["url"] = discovery["url"].replace("127.0.0.1:8000", gateway)
            discovery |= {"authorization": shown, "refresh_interval": f"{SCRAPE_S}s"}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--web.listen-address=127.0.0.1:{port}"]
    command += [f"--storage.tsdb.path={folder / 'data'}", "--enable-feature=exemplar-storage"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        api, limit_s = Api(port), time.monotonic() + START_LIMIT_S
        while not api.is_up():
            if process.poll() is not None or time.monotonic() > limit_s:
                raise SystemExit((folder / "prometheus.log").read_text())
            time.sleep(0.1)
        yield api
    finally:
        process.terminate()
        process.wait(30)


def ask(gateway: str, key: str, body: dict[str, Any]) -> int:
    request = urllib.request.Request(f"http://{gateway}/v1/completions", json.dumps(body).encode(), method="POST")
    request.add_header("content-type", "application/json")
    request.add_header("authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def load(gateway: str, keys: list[str], stop: threading.Event, counts: dict[int, int]) -> None:
    """Asks until it is stopped: prompts of several lengths that share beginnings, and one that is wrong in 40."""
    number = 0
    while not stop.is_set():
        number += 1
        body: dict[str, Any] = {
            "prompt": "def add(a, b):\n    return a + b\n\n" * (1 + number % 6) + f"def f{number}(",
            "max_tokens": -1 if number % 40 == 0 else 8 + number % 40,
            "temperature": 0.7,
            "service_class": ("interactive", "normal", "low")[number % 3] if number % 2 else "normal",
        }
        status = ask(gateway, keys[number % len(keys)], body)
        counts[status] = counts.get(status, 0) + 1


def has_points(result: list[dict[str, Any]]) -> bool:
    return any(math.isfinite(float(value)) for series in result for _, value in series["values"])


def check_queries(api: Api, began_s: float) -> tuple[int, list[str]]:
    """Returns how many queries were asked, and what is wrong with them."""
    wrong, empty, number = [], [], 0
    for where, why, expr in panel_queries("20s"):
        number += 1
        try:
            fields = {"start": f"{began_s:.0f}", "end": f"{time.time():.0f}", "step": "2s"}
            result = api.get("query_range", query=expr, **fields)["result"]
        except urllib.error.HTTPError as error:
            wrong.append(f"{where}: {json.load(error).get('error')}: {expr}")
            continue
        if not has_points(result):
            (empty if why else wrong).append(f"{where}: empty{f', since {why}' if why else f': {expr}'}")
    for line in empty:
        print(f"  {line}")
    return number, wrong


def check_rules(api: Api) -> tuple[int, list[str]]:
    """Returns how many rules there are, and those that fail, were never evaluated, or fire in a sound cluster."""
    rules = [rule for group in api.get("rules")["groups"] for rule in group["rules"]]
    wrong = []
    for rule in rules:
        if rule["health"] != "ok":
            wrong.append(f"{rule['name']}: {rule['health']}: {rule.get('lastError')}")
        if rule.get("state") == "firing":
            wrong.append(f"{rule['name']} fires in a sound cluster: {rule['alerts']}")
    return len(rules), wrong


def check_targets(api: Api, expected: dict[str, int]) -> list[str]:
    """Returns what is wrong with the targets: each is to be up, and as many as there are processes."""
    targets = api.get("targets")["activeTargets"]
    wrong = [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets if target["health"] != "up"]
    for job, number in expected.items():
        found = sum(target["labels"]["job"] == job for target in targets)
        if found != number:
            wrong.append(f"{job} has {found} targets, not {number}")
    return wrong


def check_exemplars(api: Api, began_s: float) -> list[str]:
    """Returns what is wrong with the way from latencies to traces."""
    wrong = []
    for metric in ("tandem_time_to_first_token_seconds_bucket", "tandem_request_duration_seconds_bucket"):
        found = api.get("query_exemplars", query=metric, start=f"{began_s:.0f}", end=f"{time.time():.0f}")
        traces = {exemplar["labels"]["trace_id"] for series in found for exemplar in series["exemplars"]}
        print(f"  {metric}: {len(traces)} traces")
        if not traces:
            wrong.append(f"{metric} leads to no trace")
    return wrong


def record(api: Api, path: Path) -> None:
    """Writes the series that the rules and dashboards read as input of promtool. Counters continue to grow."""
    exprs = [query.expr for query in panel_queries()] + [rule["expr"] for rule in RULES]
    names = "|".join(sorted(set(re.findall(r"\b(?:tandem|process)_\w+|\bup\b", " ".join(exprs)))))
    before = values(api, names)
    time.sleep(RECORDED_S)
    lines = []
    for series, value in values(api, names).items():
        is_counter = re.match(r"\w+_(total|sum|count|bucket)\b", series)
        growth = f"+{value - before.get(series, value):.10g}" if is_counter else ""
        lines.append(f"- {{series: '{series}', values: \"{value:.10g}{growth}x20\"}}")
    path.write_text("\n".join([RECORDED_HEADER, *sorted(lines)]) + "\n")


def values(api: Api, names: str) -> dict[str, float]:
    """Returns the value of each series. A histogram is reduced to its first bucket with events and its last one."""
    result = api.get("query", query=f'{{__name__=~"{names}"}}')["result"]
    found, histograms = dict[str, float](), set[str]()
    for one in sorted(result, key=lambda one: float(one["metric"].get("le", "0"))):
        labels, value = one["metric"], float(one["value"][1])
        text = ",".join(f'{label}="{labels[label]}"' for label in sorted(labels) if label not in ("__name__", "le"))
        name = f"{labels['__name__']}{{{text}"
        if "le" not in labels:
            found[f"{name}}}"] = value
        elif labels["le"] == "+Inf" or (value and name not in histograms):
            histograms.add(name)
            found[f'{name},le="{labels["le"]}"}}'] = value
    return {series: value for series, value in found.items() if math.isfinite(value)}


def watch(folder: Path, seconds: float, recorded: Path | None) -> list[str]:
    """Runs the cluster, its load and Prometheus. Returns all that is wrong."""
    admin, users = new_key(), [new_key(), new_key()]
    keys = [ApiKey(digest_of_key(admin), "ops", is_admin=True)]
    for key, tenant in zip(users, ("acme", "trial"), strict=True):
        keys.append(ApiKey(digest_of_key(key), tenant, service_class="interactive"))  # the load asks for this class too
    file = folder / "keys.toml"
    file.write_text("\n".join(map(toml_entry, keys)))
    with contextlib.ExitStack() as stack:
        traces = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": stack.enter_context(collector()),
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        }
        flags = ("--api-keys", str(file), "--metrics-port", "0", "--threads", "1")
        cluster = stack.enter_context(running_cluster(*flags, decode=2, settings=traces))
        gateway = cluster.http.removeprefix("http://")
        api = stack.enter_context(prometheus(folder, gateway, admin))
        began_s, stop, counts = time.time(), threading.Event(), dict[int, int]()
        threads = [threading.Thread(target=load, args=(gateway, users, stop, counts)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        wrong = check_targets(api, {"tandem-gateway": 1, "tandem-workers": 3})
        num_rules, wrong_rules = check_rules(api)
        num_queries, wrong_queries = check_queries(api, began_s)
        wrong += [*wrong_rules, *wrong_queries, *check_exemplars(api, began_s)]
        if recorded:
            record(api, recorded)
        stop.set()
        for thread in threads:
            thread.join()
        print(f"{num_rules} rules, {num_queries} queries; requests by status: {counts}")
        if set(counts) - {200, 400}:
            wrong.append(f"requests failed: {counts}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="Time under load before the queries are asked.")
    parser.add_argument("--quick", action="store_true", help="Leaves promtool's tests of the rules out.")
    parser.add_argument("--record", type=Path, help="Also writes the series that rules and dashboards read to a file.")
    arguments = parser.parse_args()
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        print(f"{', '.join(missing)} not found; on Debian: apt install prometheus prometheus-alertmanager")
        return 1
    is_good = check_files(is_quick=arguments.quick)
    with tempfile.TemporaryDirectory(prefix="tandem-monitoring-") as folder:
        wrong = watch(Path(folder), arguments.seconds, arguments.record)
    for line in wrong:
        print(f"WRONG {line}")
    return 0 if is_good and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())

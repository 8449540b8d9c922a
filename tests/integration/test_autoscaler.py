"""Two copies of the autoscaler beside `tandem up` with real workers: one acts, whatever becomes of the other one."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.cluster.embedded_redis import EmbeddedRedis
from tests.integration.test_up import Running, up, wait_until
from tests.planning.autoscaler.copies import Copies, check_chain, copies_of

__all__ = ["up"]

PROMPTS = ("def main():", "import os\n\ndef read(path):", "class Queue:", "for i in range(10):")
ANSWER = {"max_tokens": 300, "ignore_eos": True}
NUM_CLIENTS = 24
LEASE_S = 5.0
"""What the processes of a busy machine may take to do what is due."""


class Asked:
    """Clients that ask one thing after the other, and what they got."""

    def __init__(self, cluster: Running) -> None:
        self._cluster = cluster
        self._expected = {prompt: cluster.complete(prompt=prompt, **ANSWER) for prompt in PROMPTS}
        self.num_answers = 0

    @contextmanager
    def by_clients(self) -> Iterator[None]:
        """Asks while the scope lasts; each answer must come, and be the one that it was before."""
        is_over = threading.Event()

        def ask(number: int) -> int:
            count = 0
            while not is_over.is_set():
                prompt = PROMPTS[(number + count) % len(PROMPTS)]
                assert self._cluster.complete(prompt=prompt, **ANSWER) == self._expected[prompt]
                count += 1
            return count

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            answers: list[Future[int]] = [pool.submit(ask, number) for number in range(NUM_CLIENTS)]
            try:
                yield
            finally:
                is_over.set()
            self.num_answers += sum(answer.result() for answer in answers)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_copies_that_are_killed_frozen_or_without_redis_take_each_decision_once_and_lose_no_answer(
    up: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    with EmbeddedRedis() as redis:
        cluster = up(f"--redis={redis.url}")
        scaling = ("--scale-every=1", "--scale-start-up=6", "--scale-settle=3", "--max-workers=4")
        flags = [f"--gateways={cluster.url}", f"--redis={redis.url}", f"--lease={LEASE_S:g}", *scaling]
        with copies_of(tmp_path, flags) as copies:
            _go_through(cluster, redis, copies)


def _go_through(cluster: Running, redis: EmbeddedRedis, copies: Copies) -> None:
    def num_workers() -> int:
        return len([one for one in cluster.workers().values() if one["state"] == "ready"])

    asked = Asked(cluster)
    first = copies.start("first")
    wait_until(lambda: first.acts)
    second = copies.start("second")
    wait_until(lambda: second.waits)

    with asked.by_clients():
        wait_until(lambda: len(first.orders()) > 0)
        first.kill()
        wait_until(lambda: second.acts)
        wait_until(lambda: num_workers() == 4)
    third = copies.start("third")
    wait_until(lambda: num_workers() == 2, 120)
    assert second.orders()
    assert third.waits

    second.send(signal.SIGSTOP)
    with asked.by_clients():
        wait_until(lambda: third.acts)
        wait_until(lambda: num_workers() == 4)
        num_orders = len(second.orders())
        second.send(signal.SIGCONT)
        wait_until(lambda: second.waits)

        redis.kill()
        time.sleep(10)  # longer than a lease: nobody acts by then
        assert second.waits
        assert third.waits
        redis.start()
        wait_until(lambda: second.acts or third.acts)
    wait_until(lambda: num_workers() == 2, 120)
    assert len(second.orders()) == num_orders or second.acts

    orders = check_chain(copies.all, first="1:1")
    assert len(orders) >= 4
    assert asked.num_answers > 100

"""A worker's look at its GPU: on a thread, told when something has changed; nobody waits for a driver that hangs."""

import threading

import pytest

from services.runtime.clock import ManualClock
from services.runtime.gpu_facts import GpuFacts
from tests.fake_nvml import LOST, NOT_FOUND, Nvml
from tests.waiting import HANG_LIMIT_S
from worker import gpu as gpu_watch
from worker.gpu import SILENT_S, GpuWatch, gpu_message, watch_gpu
from worker.nvml import GpuReader, open_gpu

LIMIT_S = HANG_LIMIT_S


class Readings:
    """Opens the reader of a fake GPU; each reading waits for its turn."""

    def __init__(self, **errors):
        self.nvml = Nvml(**errors)
        self.turns = threading.Semaphore(0)
        self.is_reading = threading.Event()
        self.is_over = threading.Semaphore(0)

    def open(self):
        reader = open_gpu("GPU-1", nvml=self.nvml)
        return reader and _Waiting(self, reader)

    def one(self):
        """Lets a reading through, and returns when the watch continues after it."""
        self.turns.release()
        assert self.is_over.acquire(timeout=LIMIT_S)


class _Waiting:
    def __init__(self, readings, reader):
        self.readings, self.reader = readings, reader
        self.is_first = True

    def read(self):
        if not self.is_first:
            self.readings.is_over.release()
        self.is_first = False
        self.readings.is_reading.set()
        assert self.readings.turns.acquire(timeout=LIMIT_S)
        self.readings.is_reading.clear()
        return self.reader.read()

    def read_use(self):
        return self.reader.read_use()

    def close(self):
        self.reader.close()
        self.readings.is_over.release()


@pytest.fixture
def readings():
    return Readings()


@pytest.fixture
def watch(readings):
    watch = GpuWatch(readings.open, read_every_s=0.0)
    yield watch
    readings.turns.release(100)
    watch.release()
    watch._thread.join(LIMIT_S)


def test_what_has_changed_is_another_message_and_nothing_else_is(watch, readings):
    assert (watch.message(), watch.use()) == (None, None)
    readings.one()
    first = watch.message()
    assert (first.temperature_c, first.num_uncorrected, first.total_bytes) == (41.0, 0, 85_520_809_984)
    assert first.HasField("is_remap_pending")
    readings.one()
    assert watch.message() is first
    readings.nvml.errors = {name: LOST for name in readings.nvml.answers}
    readings.one()
    lost = watch.message()
    assert (lost.is_lost, lost.HasField("temperature_c"), lost.HasField("num_uncorrected")) == (True, False, False)


def test_the_end_gives_back_what_was_opened(watch, readings):
    readings.one()
    assert readings.nvml.num_open > 0
    readings.turns.release(100)
    watch.release()
    watch._thread.join(LIMIT_S)
    assert readings.nvml.num_open == 0


def test_a_reading_that_hangs_is_a_gpu_that_does_not_answer_and_does_not_keep_the_worker(readings):
    clock = ManualClock()
    watch = GpuWatch(readings.open, read_every_s=0.0, clock=clock)
    readings.one()
    good = watch.message()
    assert readings.is_reading.wait(LIMIT_S)
    clock.advance(SILENT_S - 0.1)
    assert watch.message() is good
    assert watch.use().power_w == 412.0
    clock.advance(0.1)
    assert (watch.message().is_lost, watch.message() is watch.message()) == (True, True)
    assert watch.use() is None
    watch.release()
    assert (watch._thread.is_alive(), watch._thread.daemon) == (True, True)
    # It answers after all.
    readings.turns.release(100)
    watch._thread.join(LIMIT_S)
    assert not watch.message().is_lost


def test_a_gpu_that_hangs_when_it_is_opened_is_not_known(monkeypatch):
    may_open = threading.Event()

    def open_late():
        assert may_open.wait(LIMIT_S)
        return None

    clock = ManualClock()
    watch = GpuWatch(open_late, clock=clock)
    clock.advance(60)
    assert watch.message() is None
    watch.release()
    may_open.set()
    watch._thread.join(LIMIT_S)


def test_where_nobody_can_be_asked_the_thread_ends():
    watch = GpuWatch(Readings(nvmlDeviceGetHandleByUUID=NOT_FOUND).open)
    watch._thread.join(LIMIT_S)
    assert not watch._thread.is_alive()
    assert watch.message() is None
    watch.release()


def test_a_fault_of_the_reader_ends_the_watch_and_not_the_worker(readings, monkeypatch, caplog):
    clock = ManualClock()
    monkeypatch.setattr(GpuReader, "read", lambda self: 1 / 0)
    watch = GpuWatch(readings.open, clock=clock)
    readings.one()
    watch._thread.join(LIMIT_S)
    clock.advance(60)
    assert watch.message() is None
    assert readings.nvml.num_open == 0
    assert "the GPU is no longer watched" in caplog.text


def test_a_fault_of_the_figures_that_nothing_depends_on_ends_them_and_not_the_watch(
    watch, readings, monkeypatch, caplog
):
    readings.one()
    monkeypatch.setattr(GpuReader, "read_use", lambda self: 1 / 0)
    readings.nvml.errors = {name: LOST for name in readings.nvml.answers}
    readings.one()
    assert (watch.message().is_lost, watch.use()) == (True, None)
    readings.one()
    assert watch._thread.is_alive()
    assert [record.message for record in caplog.records] == ["how much the GPU does is no longer read"]


def test_the_gpu_of_a_uuid_is_watched_and_without_one_there_is_no_thread(monkeypatch):
    nvml = Nvml()
    monkeypatch.setattr(gpu_watch, "open_gpu", lambda device: open_gpu(device, nvml=nvml))
    num_threads = threading.active_count()
    assert watch_gpu(None) is None
    assert threading.active_count() == num_threads
    assert nvml.calls == []
    watch = watch_gpu("GPU-1234")
    watch.release()
    watch._thread.join(LIMIT_S)
    assert ("nvmlDeviceGetHandleByUUID", ("GPU-1234",)) in nvml.calls
    assert nvml.num_open == 0


def test_what_is_not_said_does_not_travel():
    assert gpu_message(GpuFacts()).ListFields() == []

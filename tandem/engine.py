"""The engine of this process: a loaded model, its thread, and the token-by-token news of each sequence.

Prompts and answers are computed here as a decode worker computes them that is given no prefill worker.
"""

from collections.abc import Callable, Hashable, Mapping

from decode_worker.config import DecodeWorkerConfig
from decode_worker.engine_loop import decode_loop
from decode_worker.mask_pace import PacedMasks
from services.engine.rehearsal import load_rehearsed_engine
from services.engine.steps.limits import SequenceLimits
from services.engine.steps.sequence import Grammar, Pooling, Sampling, Sequence
from services.engine.thread import EngineThread
from services.runtime.clock import SYSTEM_CLOCK
from services.runtime.config import did_you_mean, read, settings_of
from services.runtime.errors import ConfigError, TandemError, WorkerUnavailable
from worker.engine import Advance, DecodeReport

MAX_SWAP_BYTES = 1 << 30
STOP_TIMEOUT_S = 30.0
NO_SALT = b""
"""All prompts of a program share what is computed of equal beginnings."""
USABLE = frozenset(
    {
        *("dtype", "device", "page_size", "kv_pages", "kv_memory", "gpu_memory_share", "host_tier_memory", "threads"),
        *("tensor_parallel", "pipeline_parallel", "share_weights", "max_batch", "chunk_tokens", "swap_memory", "cores"),
    }
)
"""Settings of a decode worker that are about computing; the others are about a cluster."""

Listener = Callable[[Advance | TandemError], None]
"""Called on the engine thread with each step of a sequence, or with the end of the engine. Does not block."""


def worker_settings(model: str, settings: Mapping[str, object]) -> DecodeWorkerConfig:
    """Returns a decode worker's settings from values by name, such as kv_memory="4GiB". Raises ConfigError."""
    known = [setting.name for setting in settings_of(DecodeWorkerConfig) if setting.name in USABLE]
    for name in settings:
        if name not in known:
            raise ConfigError(f"LLM has no setting {name!r:.100}{did_you_mean(name, known)}; it has {', '.join(known)}")
    texts = {name: str(value) for name, value in settings.items() if value is not None}
    return read(DecodeWorkerConfig, {**texts, "id": "llm", "model": model}, environ={})


class LocalEngine:
    """Computes sequences on a thread of its own. Raises ModelError or ConfigError when the model cannot be loaded."""

    def __init__(self, settings: DecodeWorkerConfig) -> None:
        self._parts = load_rehearsed_engine(**settings.engine_settings())
        try:
            swap_bytes = settings.swap_memory
            if swap_bytes is None:
                swap_bytes = min(self._parts.pool.num_pages * self._parts.pool.layout.page_bytes, MAX_SWAP_BYTES)
            self._loop = decode_loop(
                self._parts,
                self._on_report,
                max_batch=settings.max_batch,
                chunk_tokens=settings.chunk_tokens,
                swap_bytes=swap_bytes,
                clock=SYSTEM_CLOCK,
                features=[PacedMasks()],
            )
        except BaseException:
            self._parts.close()
            raise
        self.max_batch = settings.max_batch
        self._listeners: dict[Hashable, Listener] = {}
        self._thread = EngineThread(self._loop.step, on_fatal=self._on_fatal, name="tandem engine")
        self._thread.start()

    @property
    def limits(self) -> SequenceLimits:
        """What a sequence may be at most."""
        return self._parts.limits

    def begin(
        self,
        key: Hashable,
        prompt_token_ids: list[int],
        *,
        sampling: Sampling,
        listener: Listener,
        grammar: Grammar | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """Puts a sequence in line; the listener hears of it until `free`, its end or the engine's. From any thread.

        Each sequence that must keep to a grammar has one of its own. One with a `pooling` is embedded, not answered.
        """
        sequence = Sequence(key, prompt_token_ids, sampling=sampling, grammar=grammar)
        sequence.pooling = pooling

        def start() -> None:
            self._listeners[key] = listener
            self._loop.start(sequence, salt=NO_SALT)

        begun = self._thread.submit(start)
        begun.add_done_callback(lambda done: self._refused(done.exception(), listener))

    def free(self, key: Hashable) -> None:
        """Forgets a sequence and frees its pages; unknown keys are ignored. From any thread."""

        def end() -> None:
            self._listeners.pop(key, None)
            self._loop.free(key)

        self._thread.submit(end)

    def close(self) -> None:
        """Ends the thread and gives the model's memory back. May be called again."""
        self._thread.stop(timeout_s=STOP_TIMEOUT_S)
        self._end(WorkerUnavailable("the engine was closed"))
        self._parts.close()

    def _on_report(self, report: DecodeReport) -> None:
        for advance in report.advances:
            listener = self._listeners.get(advance.key)
            if listener is None:
                continue
            if advance.finish_reason is not None or isinstance(advance.outcome, Exception):
                del self._listeners[advance.key]
            listener(advance)

    def _on_fatal(self, error: BaseException) -> None:
        self._end(WorkerUnavailable(f"the engine failed: {type(error).__name__}: {error}"))

    def _end(self, error: TandemError) -> None:
        listeners, self._listeners = self._listeners, {}
        for listener in listeners.values():
            listener(error)

    @staticmethod
    def _refused(error: BaseException | None, listener: Listener) -> None:
        if isinstance(error, TandemError):
            listener(error)
        elif error is not None:
            listener(WorkerUnavailable(f"the engine refused the request: {type(error).__name__}"))

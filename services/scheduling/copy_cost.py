"""The choice between copying KV pages back from the host's memory and computing them again, by measured costs."""

from collections.abc import Callable

from services.scheduling.prediction import LinkSpeed, PrefillSpeed, TransferMeter

DEFAULT_COPY = LinkSpeed(latency_s=5e-5, bytes_per_s=4e9)
"""The assumed speed of copies to the host's memory or back, until it is measured: about what one core copies."""
TRY_AGAIN = 32
"""One in this many copies that seem too dear is made nevertheless, so that a bad measurement is found out."""

REHEARSED_PAGES = (1, 8, 32, 1, 8, 32)
"""Pages of each rehearsed copy; more copies than services.scheduling.prediction.NUM_BEFORE_DOUBT."""


class CopyMeter:
    """How fast pages are copied between the pool and the host's memory."""

    def __init__(self) -> None:
        self._meter = TransferMeter(DEFAULT_COPY)
        self._num_too_dear = 0

    @property
    def speed(self) -> LinkSpeed:
        """The best guess so far."""
        return self._meter.speed

    def rehearse(self, copy: Callable[[int], int], clock_s: Callable[[], float]) -> None:
        """Measures before anything depends on it, since the first observations are not doubted.

        `copy` copies about as many pages as it is told and returns the bytes that it has copied.
        """
        copy(max(REHEARSED_PAGES))  # memory that was never touched is slow the first time
        for num_pages in REHEARSED_PAGES:
            start_s = clock_s()
            num_bytes = copy(num_pages)
            end_s = clock_s()
            self.observe(num_bytes, end_s - start_s, end_s)

    def observe(self, num_bytes: int, time_s: float, now_s: float) -> None:
        """Takes a copy of `num_bytes` bytes that took `time_s` seconds and was done at `now_s`."""
        self._meter.observe(num_bytes, time_s, now_s)

    def is_cheaper_than_computing(
        self, num_tokens: int, *, num_tokens_before: int, num_bytes: int, prefill: PrefillSpeed
    ) -> bool:
        """Whether to copy the KV of tokens, `num_bytes`, instead of computing it in a step that is made anyway."""
        compute_s = prefill.time_s(num_tokens, num_tokens_before) - prefill.overhead_s
        return self._is_cheaper(num_bytes, compute_s)

    def is_cheaper_than_sending(self, num_bytes: int, link: LinkSpeed) -> bool:
        """Whether to copy pages instead of having them sent by another worker that holds them."""
        return self._is_cheaper(num_bytes, link.time_s(num_bytes))

    def _is_cheaper(self, num_bytes: int, other_s: float) -> bool:
        if self.speed.time_s(num_bytes) < other_s:
            return True
        self._num_too_dear += 1
        return self._num_too_dear % TRY_AGAIN == 0

"""Decode steps over memory at fixed addresses, which a CUDA graph per batch bucket can replay.

The host packs the inputs of a step into one buffer and copies it to the device at once. The captured function reads
everything from fixed addresses, chooses the next tokens, and writes them to a fixed address too. The next step may read
them from there before the host has received them. Does not depend on sequences or plans.

A bucket is a number of rows. Unused rows are padding: their length is 0, and they write nothing. Graphs of all buckets
share one memory pool. Without a CUDA device, the same function is called over the same memory instead of being
replayed, so that everything except the capture is tested without a GPU.

Legend: B rows, V vocabulary, W splits of all rows, P positions.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from services.engine.cache.pool import PagePool, num_pages_for
from services.engine.gpu.attention_triton import DecodeRows, DecodeScratch, num_splits
from services.engine.gpu.decoder import DecodeStep, TritonDecoder
from services.engine.gpu.sampling_triton import Choices, choose
from services.runtime.errors import InvariantViolated

MAX_ROWS = 256
NO_FEED = -1

# Number of steps whose host memory the device may still access: the running step, the step launched ahead of the host,
# and the step being packed.
_NUM_SLOTS = 3
_ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Row:
    """One sequence's part of a step: its token at `position`, and pages for all tokens up to it.

    If `feed_row` is not NO_FEED, the token is the choice of that row in the previous step, and `token_id` is ignored.
    `sampling_triton.Choices` describes `noise_key`, `temperature`, and `min_p_margin`.
    """

    token_id: int
    position: int
    page_ids: SequenceOf[int]
    noise_key: int
    temperature: float
    min_p_margin: float
    feed_row: int = NO_FEED


class Capture(Protocol):
    """Turns a function over fixed memory into a function that repeats its work."""

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that repeats `function`. May call `function` any number of times for this."""
        ...


def call_again(function: Callable[[], None]) -> Callable[[], None]:
    """Returns the function itself. Implements Capture for devices without graphs."""
    return function


class GraphCapture:
    """Captures CUDA graphs that share one memory pool.

    Capture the largest first, so that the others reuse its memory.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], None]:
        """Calls the function twice to compile kernels and initialize libraries, and captures a third call."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may copy pages during the capture. Only calls of this thread must be capturable.
        with torch.cuda.graph(graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay


def buckets(max_rows: int) -> list[int]:
    """Returns the numbers of rows that have a graph: 1, 2, 4, 8, 16, 24 … and `max_rows`."""
    return sorted({*(n for n in (1, 2, 4, 8) if n < max_rows), *range(16, max_rows, 8), max_rows})


class Launched:
    """A step that is running or complete on the device."""

    def __init__(self, tokens: torch.Tensor, num_rows: int, done: "torch.cuda.Event | None") -> None:
        self._tokens = tokens
        self._num_rows = num_rows
        self._done = done

    def wait(self) -> None:
        """Waits until the device has completed the step."""
        if self._done is not None:
            self._done.synchronize()

    def tokens(self) -> list[int]:
        """Waits for the step. Returns each row's token or NOTHING_CHOSEN. Read it before you launch two more steps."""
        self.wait()
        chosen: list[int] = self._tokens[: self._num_rows].tolist()
        return chosen


class DecodeGraphs:
    """The decode steps of one model on one pool, for one thread and one CUDA stream at a time.

    `logits` (float32, [max_rows, V]) and the sampled tokens belong to the most recently launched step.
    """

    def __init__(
        self,
        decoder: TritonDecoder,
        pool: PagePool,
        rope: torch.Tensor,
        *,
        max_rows: int = MAX_ROWS,
        capture: Capture | None = None,
    ) -> None:
        """Expects the rotary table of the model's full context in `rope`. Its address must not change."""
        config, device = decoder.config, pool.data.device
        self._decoder = decoder
        self._pool = pool
        self._rope = rope
        self._page_size = pool.layout.page_size
        self._max_rows = max_rows
        self._num_heads, self._head_dim = config.num_heads, config.head_dim
        max_pages = min(num_pages_for(config.context_length_tokens, self._page_size), pool.num_pages)
        self._packing = _Packing(max_rows, max_rows * max_pages)
        self._inputs = self._packing.empty(device)
        self._slots = [_Slot(self._packing, max_rows, device) for _ in range(_NUM_SLOTS)]
        self._num_launched = 0
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self.logits = torch.zeros(max_rows, config.vocab_size, dtype=torch.float32, device=device)
        # Enough for all pages of the pool. Rows that share pages may need more, and are then computed without a graph.
        num_shared_splits = num_splits(pool.num_pages * self._page_size) + max_rows
        self._scratch = DecodeScratch.empty(num_shared_splits, self._num_heads, self._head_dim, device)
        self._replays: dict[int, Callable[[], None]] = {}
        self._capture_all(capture or (GraphCapture(device) if device.type == "cuda" else call_again))

    @property
    def max_rows(self) -> int:
        """Maximum number of rows in a step."""
        return self._max_rows

    @torch.inference_mode()
    def launch(self, rows: SequenceOf[Row]) -> Launched:
        """Launches a step on the device without waiting for it.

        Raises InvariantViolated for no rows, too many rows, or a row with too few pages.
        """
        if not 1 <= len(rows) <= self._max_rows:
            raise InvariantViolated(f"a decode step has {len(rows)} rows, it must have 1 to {self._max_rows}")
        slot, num_step_splits = self._send(rows)
        bucket = next(size for size in self._replays if size >= len(rows))
        if num_step_splits <= self._scratch.num_splits:
            self._replays[bucket]()
        else:
            device = self._pool.data.device
            self._compute(bucket, DecodeScratch.empty(num_step_splits, self._num_heads, self._head_dim, device))
        return slot.receive(self._tokens, len(rows))

    def _send(self, rows: SequenceOf[Row]) -> "tuple[_Slot, int]":
        slot = self._slots[self._num_launched % _NUM_SLOTS]
        self._num_launched += 1
        slot.wait()
        num_bytes, num_step_splits = self._packing.pack(slot.inputs, rows, self._page_size)
        self._inputs[:num_bytes].copy_(slot.inputs[:num_bytes], non_blocking=True)
        return slot, num_step_splits

    @torch.inference_mode()
    def _capture_all(self, capture: Capture) -> None:
        """Captures all graphs with padding only, because the capture calls a function repeatedly."""
        self._send([])
        sizes = buckets(self._max_rows)
        largest_first = {size: capture(functools.partial(self._compute, size, self._scratch)) for size in sizes[::-1]}
        self._replays = {size: largest_first[size] for size in sizes}

    def _compute(self, bucket: int, scratch: DecodeScratch) -> None:
        """Reads the input buffer and writes the logits and the tokens. This is the captured function."""
        part = self._packing.parts(self._inputs, bucket)
        fed = self._tokens[part["feed_rows"].clamp(min=0)].clamp(min=0)
        step = DecodeStep(
            token_ids=torch.where(part["feed_rows"] < 0, part["token_ids"], fed),
            positions=part["positions"],
            slot_mapping=part["slot_mapping"],
            rows=DecodeRows(part["context_lens"], part["table_starts"], part["page_ids"], part["split_starts"]),
            scratch=scratch,
            pool_data=self._pool.data,
            rope=self._rope,
        )
        logits = self.logits[:bucket]
        logits.copy_(self._decoder.decode(step))
        choices = Choices(part["noise_keys"], part["temperatures"], part["min_p_margins"])
        choose(logits, choices, self._tokens[:bucket])


class _Slot:
    """Host memory of one step: the inputs to copy to the device, and the tokens copied back."""

    def __init__(self, packing: "_Packing", max_rows: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        self.inputs = packing.empty(torch.device("cpu"), pin_memory=is_cuda)
        self._tokens = torch.zeros(max_rows, dtype=torch.int32, pin_memory=is_cuda)
        self._done = torch.cuda.Event() if is_cuda else None

    def wait(self) -> None:
        """Waits until the device no longer needs this memory."""
        if self._done is not None:
            self._done.synchronize()

    def receive(self, tokens: torch.Tensor, num_rows: int) -> Launched:
        """Copies the chosen tokens to the host after all launched work."""
        self._tokens[:num_rows].copy_(tokens[:num_rows], non_blocking=True)
        if self._done is not None:
            self._done.record()
        return Launched(self._tokens, num_rows, self._done)


class _Packing:
    """Layout of a step's inputs in one buffer. Offsets are equal for all buckets, and page IDs are last."""

    _PER_ROW = (
        ("noise_keys", torch.int64),
        ("slot_mapping", torch.int64),
        ("temperatures", torch.float64),
        ("min_p_margins", torch.float64),
        ("token_ids", torch.int32),
        ("feed_rows", torch.int32),
        ("positions", torch.int32),
        ("context_lens", torch.int32),
        ("table_starts", torch.int32),
        ("split_starts", torch.int32),
    )

    def __init__(self, max_rows: int, max_page_ids: int) -> None:
        self._max_rows = max_rows
        self._places: dict[str, tuple[int, torch.dtype]] = {}
        self._num_bytes = 0
        for name, dtype in self._PER_ROW:
            self._add(name, dtype, max_rows + 1)  # split_starts has one more element than rows
        self._add("page_ids", torch.int32, max_page_ids)

    def empty(self, device: torch.device, *, pin_memory: bool = False) -> torch.Tensor:
        """Allocates the input buffer of a step, in bytes."""
        return torch.zeros(self._num_bytes, dtype=torch.uint8, device=device, pin_memory=pin_memory)

    def parts(self, inputs: torch.Tensor, num_rows: int) -> dict[str, torch.Tensor]:
        """Returns views of the inputs of the first rows, by name."""
        parts = {}
        for name, (start, dtype) in self._places.items():
            part = inputs[start:].view(-1)
            if name == "page_ids":
                parts[name] = part.view(dtype)
            else:
                count = num_rows + (name == "split_starts")
                parts[name] = part[: count * dtype.itemsize].view(dtype)
        return parts

    def pack(self, inputs: torch.Tensor, rows: SequenceOf[Row], page_size: int) -> tuple[int, int]:
        """Fills the input buffer, padding included. Returns (bytes used, splits of all rows)."""
        parts = {name: part.numpy() for name, part in self.parts(inputs, self._max_rows).items()}
        num_rows = len(rows)
        positions = np.array([row.position for row in rows], dtype=np.int64)
        num_pages = positions // page_size + 1
        for row, count in zip(rows, num_pages.tolist(), strict=True):
            if len(row.page_ids) < count or row.position < 0:
                raise InvariantViolated(f"a decode row at position {row.position} has {len(row.page_ids)} pages")
        ends = np.cumsum(num_pages)
        starts = ends - num_pages
        page_ids = parts["page_ids"]
        last_pages = np.empty(num_rows, dtype=np.int64)
        for index, (row, start, count) in enumerate(zip(rows, starts.tolist(), num_pages.tolist(), strict=True)):
            page_ids[start : start + count] = row.page_ids[:count]
            last_pages[index] = row.page_ids[count - 1]
        lens = parts["context_lens"]
        lens[:num_rows], lens[num_rows:] = positions + 1, 0
        parts["table_starts"][:num_rows], parts["table_starts"][num_rows:] = starts, 0
        parts["positions"][:num_rows], parts["positions"][num_rows:] = positions, 0
        slots = parts["slot_mapping"]
        slots[:num_rows], slots[num_rows:] = last_pages * page_size + positions % page_size, -1
        parts["split_starts"][0] = 0
        np.cumsum([*map(num_splits, lens.tolist())], out=parts["split_starts"][1:])
        for name, values, padding in (
            ("token_ids", [row.token_id for row in rows], 0),
            ("feed_rows", [row.feed_row for row in rows], NO_FEED),
            ("noise_keys", [row.noise_key for row in rows], 0),
            ("temperatures", [row.temperature for row in rows], 0.0),
            ("min_p_margins", [row.min_p_margin for row in rows], 0.0),
        ):
            parts[name][:num_rows], parts[name][num_rows:] = values, padding
        num_page_ids = int(ends[-1]) if num_rows else 0
        num_bytes = self._places["page_ids"][0] + num_page_ids * torch.int32.itemsize
        return num_bytes, int(parts["split_starts"][-1])

    def _add(self, name: str, dtype: torch.dtype, count: int) -> None:
        self._places[name] = (self._num_bytes, dtype)
        num_bytes = count * dtype.itemsize
        self._num_bytes += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

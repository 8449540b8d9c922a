"""Binding to the compiled kernels: structures, argument checks, and calls. Does not depend on a model architecture.

Calls release the GIL and use as many threads as torch. Results do not depend on the number of threads.

Legend: T packed tokens, B sequences, K input features, N output features, H KV heads, L layers, S slots of a page,
Hq query heads, D head_dim.
"""

import ctypes
import functools
from collections.abc import Sequence as SequenceOf
from pathlib import Path

import numpy as np
import torch

from services.engine.kernels.build import KernelsUnavailable, build_library, source_digest
from services.engine.kernels.ready import ready_library
from services.engine.steps.guesses import LEVELS, Draw
from services.runtime.errors import InvariantViolated

_I64 = ctypes.c_int64
_POINTER = ctypes.c_void_p

_ERRORS = {
    1: "a token id is outside the vocabulary",
    2: "a position is outside the model's context",
    3: "a slot is outside the page pool",
    4: "the sequences' lengths contradict each other or their page tables",
    5: "a page id is outside the page pool",
    6: "a logits index is outside the step",
}


class LinearArgs(ctypes.Structure):
    """Mirrors `Linear` of gemm.h."""

    _fields_ = (("packed", _POINTER), ("bias", _POINTER), ("out_features", _I64), ("in_features", _I64))


class LayerArgs(ctypes.Structure):
    """Mirrors `Layer` of tandem.cpp."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("post_norm", _POINTER),
        ("qkv", LinearArgs),
        ("output", LinearArgs),
        ("gate_up", LinearArgs),
        ("down", LinearArgs),
    )


class HeadsArgs(ctypes.Structure):
    """Mirrors `Heads` of attention.h."""

    _fields_ = (
        ("num_heads", _I64),
        ("num_kv_heads", _I64),
        ("head_dim", _I64),
        ("num_layers", _I64),
        ("scale", ctypes.c_float),
    )


class DecoderArgs(ctypes.Structure):
    """Mirrors `Decoder` of tandem.cpp."""

    _fields_ = (
        ("heads", HeadsArgs),
        ("norm_eps", ctypes.c_float),
        ("vocab_size", _I64),
        ("hidden_size", _I64),
        ("intermediate_size", _I64),
        ("embedding", _POINTER),
        ("final_norm", _POINTER),
        ("lm_head", LinearArgs),
        ("layers", ctypes.POINTER(LayerArgs)),
    )


class BatchArgs(ctypes.Structure):
    """Mirrors `Batch` of attention.h."""

    _fields_ = (
        ("query_start", _POINTER),
        ("context_lens", _POINTER),
        ("page_tables", _POINTER),
        ("num_sequences", _I64),
        ("max_pages", _I64),
        ("pool", _POINTER),
        ("num_pages", _I64),
        ("page_size", _I64),
    )


class StepArgs(ctypes.Structure):
    """Mirrors `Step` of tandem.cpp."""

    _fields_ = (
        ("batch", BatchArgs),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("slot_mapping", _POINTER),
        ("logits_indices", _POINTER),
        ("num_tokens", _I64),
        ("num_logits", _I64),
        ("rope", _POINTER),
        ("rope_positions", _I64),
        ("logits", _POINTER),
        ("workspace", _POINTER),
        ("num_states", _I64),
        ("states", _POINTER),
    )


class PlaceArgs(ctypes.Structure):
    """Mirrors `Place` of parts.cpp."""

    _fields_ = (
        ("batch", BatchArgs),
        ("heads", HeadsArgs),
        ("layer", _I64),
        ("query_norm", _POINTER),
        ("key_norm", _POINTER),
        ("norm_eps", ctypes.c_float),
        ("positions", _POINTER),
        ("slot_mapping", _POINTER),
        ("num_tokens", _I64),
        ("rope", _POINTER),
        ("rope_positions", _I64),
    )


class GuessesArgs(ctypes.Structure):
    """Mirrors `Guesses` of guess.h."""

    _fields_ = (
        ("draws", _POINTER),
        ("limits", _POINTER),
        ("token_ids", _POINTER),
        ("positions", _POINTER),
        ("slot_mapping", _POINTER),
        ("context_lens", _POINTER),
        ("most", _I64),
        ("chosen", _POINTER),
        ("probabilities", _POINTER),
        ("num_chosen", _POINTER),
    )


DRAW = np.dtype(
    {
        "names": ["seed", "position", "temperature", "min_p", "top_p", "top_k"],
        "formats": [np.uint64, np.int64, np.float64, np.float64, np.float64, np.int64],
    },
    align=True,
)
"""Layout of `Draw` in choose.h, for values of services.engine.steps.guesses.Draw."""


TOO_CLOSE, NOT_FINITE = -1, -2
"""Values of `NoChoice` in tandem.cpp."""

LIMIT = np.dtype(
    {
        "names": ["most", "chances", "next", "least"],
        "formats": [np.int64, (np.float32, LEVELS), np.float32, np.float32],
    },
    align=True,
)
"""Layout of `Limit` in guess.h, for values of services.engine.steps.guesses.Limit."""

_INT = ctypes.c_int
_SIGNATURES = {
    "tandem_arithmetic": (ctypes.c_char_p, ()),
    "tandem_packed_elements": (_I64, (_I64, _I64, _INT)),
    "tandem_pack": (None, (_POINTER, _I64, _I64, _POINTER, _INT, _INT)),
    "tandem_linear": (None, (ctypes.POINTER(LinearArgs), _POINTER, _I64, _POINTER, _INT, _INT, _INT)),
    "tandem_attention": (
        _INT,
        (ctypes.POINTER(BatchArgs), ctypes.POINTER(HeadsArgs), _I64, _POINTER, _POINTER, _INT, _INT),
    ),
    "tandem_place": (_INT, (ctypes.POINTER(PlaceArgs), _POINTER, _POINTER, _INT, _INT)),
    "tandem_norm": (None, (_POINTER, _POINTER, ctypes.c_float, _I64, _I64, _POINTER, _INT, _INT)),
    "tandem_activate": (None, (_POINTER, _I64, _I64, _POINTER, _INT, _INT)),
    "tandem_workspace_elements": (_I64, (ctypes.POINTER(DecoderArgs), _I64, _I64)),
    "tandem_guess": (
        _INT,
        (ctypes.POINTER(DecoderArgs), ctypes.POINTER(StepArgs), ctypes.POINTER(GuessesArgs), _INT, _INT),
    ),
    "tandem_choose": (None, (_POINTER, _I64, _POINTER, _POINTER, _I64, _POINTER, _INT)),
    "tandem_forward": (_INT, (ctypes.POINTER(DecoderArgs), ctypes.POINTER(StepArgs), _INT, _INT)),
}


class Kernels:
    """The loaded library.

    `arithmetic` identifies everything except the inputs that affects results: the instructions in use and the sources.
    """

    def __init__(self, path: Path) -> None:
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise KernelsUnavailable(f"the compiled kernels cannot be loaded ({error})") from error
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, arguments
        self._library = library
        self.arithmetic = f"{library.tandem_arithmetic().decode()}/{source_digest()}"

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """Packs weight [N, K] into the layout of `linear`. Returns a flat tensor of the same dtype."""
        out_features, in_features = weight.shape
        is_bfloat16 = _is_bfloat16(weight)
        size = self._library.tandem_packed_elements(out_features, in_features, is_bfloat16)
        packed = torch.empty(size, dtype=weight.dtype)
        source = weight.contiguous()
        self._library.tandem_pack(
            pointer(source), out_features, in_features, pointer(packed), is_bfloat16, torch.get_num_threads()
        )
        return packed

    def linear(self, linear: LinearArgs, x: torch.Tensor, *, out_dtype: torch.dtype) -> torch.Tensor:
        """Returns x [T, K] times the packed weight: [T, N] in `out_dtype`, which is the dtype of x or float32."""
        rows = check_tensor(x, x.dtype, shape=(x.shape[0], linear.in_features))
        if out_dtype not in (x.dtype, torch.float32):
            raise InvariantViolated(f"a linear layer over {x.dtype} cannot give {out_dtype}")
        y = torch.empty(x.shape[0], linear.out_features, dtype=out_dtype)
        kinds = (_is_bfloat16(x), int(out_dtype != x.dtype))
        self._library.tandem_linear(linear, rows, x.shape[0], pointer(y), *kinds, torch.get_num_threads())
        return y

    def attention(self, q: torch.Tensor, layer: int, *, batch: BatchArgs, heads: HeadsArgs) -> torch.Tensor:
        """Returns the attention of q [T, Hq, D] over one layer, [T, Hq, D].

        Raises InvariantViolated for an invalid batch.
        """
        out = torch.empty_like(q)
        code = self._library.tandem_attention(
            batch, heads, layer, pointer(q), pointer(out), _is_bfloat16(q), torch.get_num_threads()
        )
        _raise_for(code)
        return out

    def place(self, place: PlaceArgs, qkv: torch.Tensor) -> torch.Tensor:
        """Writes the keys and values of qkv [T, (Hq + 2 H) D] to the pool. Returns the queries, normed and rotated.

        The queries are [T, Hq, D]. Overwrites qkv. Raises InvariantViolated, before any write, if the step is invalid.
        """
        heads = place.heads
        width = (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim
        source = check_tensor(qkv, qkv.dtype, shape=(place.num_tokens, width))
        q = torch.empty(place.num_tokens, heads.num_heads, heads.head_dim, dtype=qkv.dtype)
        _raise_for(self._library.tandem_place(place, source, pointer(q), _is_bfloat16(q), torch.get_num_threads()))
        return q

    def norm(self, x: torch.Tensor, weight: torch.Tensor, *, eps: float) -> torch.Tensor:
        """Returns the RMSNorm of each row of x [T, K]."""
        rows, size = x.shape
        weights = check_tensor(weight, x.dtype, shape=(size,))
        out = torch.empty_like(x)
        kinds = (_is_bfloat16(x), torch.get_num_threads())
        self._library.tandem_norm(pointer(x), weights, eps, rows, size, pointer(out), *kinds)
        return out

    def activate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Returns silu(gate) * up, [T, K], for gate_up [T, 2 K] with the gate first."""
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype)
        kinds = (_is_bfloat16(out), torch.get_num_threads())
        self._library.tandem_activate(pointer(gate_up), rows, width // 2, pointer(out), *kinds)
        return out

    def forward(self, decoder: DecoderArgs, step: StepArgs, dtype: torch.dtype) -> None:
        """Runs a decoder step. Raises InvariantViolated, before any write, if the step is invalid."""
        is_bfloat16 = int(dtype == torch.bfloat16)
        _raise_for(self._library.tandem_forward(decoder, step, is_bfloat16, torch.get_num_threads()))

    def guess(self, decoder: DecoderArgs, step: StepArgs, guesses: GuessesArgs, dtype: torch.dtype) -> None:
        """Runs a step of one token per sequence, chooses the next tokens, and repeats with those.

        Raises InvariantViolated if the step is invalid or would exceed its page tables.
        """
        is_bfloat16 = int(dtype == torch.bfloat16)
        _raise_for(self._library.tandem_guess(decoder, step, guesses, is_bfloat16, torch.get_num_threads()))

    def choose(self, logits: torch.Tensor, rows: SequenceOf[int], draws: SequenceOf[Draw]) -> list[int]:
        """Chooses a token for each of these rows of logits [B, V] float32. Ignores top-k and top-p.

        Returns the same tokens as `services.engine.sampling`, or NOT_FINITE for an invalid row, or TOO_CLOSE if
        rounding could affect the choice.
        """
        source = check_tensor(logits, torch.float32, shape=tuple(logits.shape))
        if not all(0 <= row < logits.shape[0] for row in rows):
            raise InvariantViolated("a choice was wanted of a row that is not there")
        chosen = np.empty(len(rows), np.int64)
        wanted, how = np.array(rows, np.int64), np.array(draws, DRAW)
        num_threads = min(torch.get_num_threads(), len(rows))
        self._library.tandem_choose(
            source,
            logits.shape[1],
            wanted.ctypes.data,
            how.ctypes.data,
            len(rows),
            chosen.ctypes.data,
            num_threads,
        )
        token_ids: list[int] = chosen.tolist()
        return token_ids

    def workspace_elements(self, decoder: DecoderArgs, *, num_tokens: int, num_logits: int) -> int:
        """Returns the size of a step's workspace, in elements of the model's dtype."""
        return int(self._library.tandem_workspace_elements(decoder, num_tokens, num_logits))


@functools.cache
def load_kernels() -> Kernels:
    """Returns this process's kernels. The first call builds and checks them. Raises KernelsUnavailable."""
    return open_kernels()


def open_kernels(*, cache_dir: Path | None = None) -> Kernels:
    """Loads and checks the installation's precompiled library, or else a library compiled in `cache_dir`.

    Raises KernelsUnavailable.
    """
    kernels = Kernels(ready_library() or build_library(cache_dir=cache_dir))
    check_arithmetic(kernels)
    return kernels


def check_arithmetic(kernels: Kernels) -> None:
    """Raises KernelsUnavailable unless linear layers are correct and rows are independent on this machine.

    This detects a compiler or processor that computes different results.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        for in_features in (96, 75):
            weight = torch.randn(70, in_features, generator=generator).to(dtype)
            x = torch.randn(37, in_features, generator=generator).to(dtype)
            packed = kernels.pack(weight)
            linear = linear_args(packed, None, shape=(70, in_features))
            together = kernels.linear(linear, x, out_dtype=torch.float32)
            apart = [kernels.linear(linear, row[None], out_dtype=torch.float32) for row in x]
            expected = (x.double() @ weight.double().T).float()
            if not torch.allclose(together, expected, rtol=tolerance, atol=tolerance):
                raise KernelsUnavailable("the compiled kernels compute wrong results on this machine")
            if not torch.equal(together, torch.cat(apart)):
                raise KernelsUnavailable("the compiled kernels' rows depend on each other on this machine")


def linear_args(packed: torch.Tensor, bias: torch.Tensor | None, *, shape: tuple[int, int]) -> LinearArgs:
    """Returns the structure of a packed weight of `shape` [N, K] and a float32 bias. The tensors must outlive it."""
    return LinearArgs(pointer(packed), None if bias is None else pointer(bias), *shape)


def batch_args(
    pool_data: torch.Tensor, query_start: torch.Tensor, context_lens: torch.Tensor, page_tables: torch.Tensor
) -> BatchArgs:
    """Returns the structure of an AttentionBatch over a pool [N, H, L, 2, S, D]. The tensors must outlive it."""
    num_sequences = context_lens.shape[0]
    return BatchArgs(
        check_tensor(query_start, torch.int32, shape=(num_sequences + 1,)),
        check_tensor(context_lens, torch.int32, shape=(num_sequences,)),
        check_tensor(page_tables, torch.int32, shape=(num_sequences, page_tables.shape[-1])),
        num_sequences,
        page_tables.shape[-1],
        pointer(pool_data),
        pool_data.shape[0],
        pool_data.shape[4],
    )


def check_tensor(tensor: torch.Tensor, dtype: torch.dtype, *, shape: tuple[int, ...]) -> int:
    """Returns the tensor's address. Raises InvariantViolated for an unexpected dtype, shape, or layout."""
    if tensor.dtype != dtype or tensor.shape != shape:
        raise InvariantViolated(
            f"a kernel was given {tensor.dtype} {list(tensor.shape)} where it reads {dtype} {list(shape)}"
        )
    return pointer(tensor)


def pointer(tensor: torch.Tensor) -> int:
    """Returns the address of a contiguous CPU tensor."""
    if not tensor.is_contiguous() or not tensor.is_cpu:
        raise InvariantViolated("a kernel was given a tensor that is not contiguous or not in host memory")
    return tensor.data_ptr()


def _is_bfloat16(tensor: torch.Tensor) -> int:
    if tensor.dtype not in (torch.float32, torch.bfloat16):
        raise InvariantViolated(f"the CPU kernels do not compute in {tensor.dtype}")
    return int(tensor.dtype == torch.bfloat16)


def _raise_for(code: int) -> None:
    if code:
        raise InvariantViolated(f"a step was refused by the kernels: {_ERRORS.get(code, code)}")

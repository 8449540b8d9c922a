"""Step times: closed forms fitted to measurements, by name, or a linear model from a few numbers."""

import csv
import gzip
import json
import statistics
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

from planning.simulator.fitting import fitted
from planning.simulator.laws import BatchedLaw, LayeredLaw, LayerTimes, LinearLaw, StepLaw, Table
from services.runtime.errors import ConfigError
from services.scheduling.prediction import DecodeSpeed, LinkSpeed, PrefillSpeed

PROFILES_FOLDER = Path(__file__).resolve().parents[1] / "step_times"

DEFAULT_LINK = LinkSpeed(0.002, 25e9)
"""Between workers of which no link was measured."""

KV_BYTES_PER_TOKEN = {
    # 2 (K and V) × layers × KV heads × head dimension × 2 bytes
    "llama-3.1-8b": 2 * 32 * 8 * 128 * 2,
    "llama-3.1-70b": 2 * 80 * 8 * 128 * 2,
    "opt-13b": 2 * 40 * 40 * 128 * 2,
    "opt-66b": 2 * 64 * 72 * 128 * 2,
    "llama2-70b": 2 * 80 * 8 * 128 * 2,
    "bloom-176b": 2 * 70 * 112 * 128 * 2,
}
ALIASES = {
    "llama-3.1-8b": "h100-llama-3.1-8b-bf16-tp1",
    "llama-3.1-70b": "h100-llama-3.1-70b-bf16-tp8",
    "opt-13b": "a100-opt-13b-tp1",
    "opt-66b": "a100-opt-66b-tp4",
}


@dataclass(frozen=True, slots=True)
class Profile:
    """How fast one worker is, and bytes of KV for each token; `errors` say how well the law fits its measurements.

    `link` None: unknown. `decode_law` is that of a worker that decodes, where its prompts take another time than those
    of a prefill worker. `outside_s` are seconds before the first token that a request spends outside workers: where a
    prefill worker computes its prompt, and where the decode worker does.
    """

    name: str
    law: StepLaw
    kv_bytes_per_token: int
    errors: tuple[str, ...] = ()
    link: LinkSpeed | None = None
    decode_law: StepLaw | None = None
    outside_s: tuple[float, float] = (0.0, 0.0)


def profile(name: str, folder: Path = PROFILES_FOLDER) -> Profile:
    """Returns a measured profile. Raises ConfigError that lists the names if this one does not exist."""
    known = profiles(folder)
    full_name = ALIASES.get(name, name)
    if full_name not in known:
        names = ", ".join([*ALIASES, *sorted(known)])
        raise ConfigError(f"there is no profile {name!r} in {folder}; there are: {names or 'none'}")
    return known[full_name]


def profiles(folder: Path = PROFILES_FOLDER) -> dict[str, Profile]:
    """All measured profiles by their full names. Raises ConfigError naming file, row and field."""
    return {
        **_read(folder / "aiconfigurator" / "aic_llama31_fits.csv", _aiconfigurator),
        **_read(folder / "distserve" / "profiler-a100-80g.distserve.json", _distserve),
        **_read(folder / "splitwise" / "medians.csv", _splitwise),
        **{
            name: one
            for file in sorted((folder / "llmservingsim").glob("*.csv.gz"))
            for name, one in _read(file, partial(_layered, file.name.removesuffix(".csv.gz"))).items()
        },
    }


def linear_profile(
    prefill_tokens_per_s: float, prefill_overhead_s: float, decode: DecodeSpeed, kv_bytes_per_token: int
) -> Profile:
    """A prompt takes a fixed time and a time for each token; a decode step is one line."""
    prefill = PrefillSpeed(prefill_overhead_s, 1 / prefill_tokens_per_s)
    return Profile("linear", LinearLaw(prefill, decode, decode), kv_bytes_per_token)


def _read(file: Path, parse: Callable[[str], Mapping[str, Profile]]) -> Mapping[str, Profile]:
    try:
        content = file.read_bytes()
        return parse((gzip.decompress(content) if file.suffix == ".gz" else content).decode())
    except FileNotFoundError:
        return {}
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read ({type(error).__name__})") from None
    except KeyError as error:
        raise ConfigError(f"{file}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} is not a table of step times: {error}") from None


def _aiconfigurator(text: str) -> dict[str, Profile]:
    """Prefill ms(n) = a + b·n + c·n²; decode ms(B, C) = (a if B ≤ knee else d + e·B) + f·C."""
    found = {}
    for row in csv.DictReader(text.splitlines()):
        model = row["model"].lower().removeprefix("meta-").removesuffix("-instruct-fp8")
        chip = row["system"].partition("_")[0]
        name = f"{chip}-{model}-{row['precision']}-tp{row['tp']}"
        context_s = float(row["decode_f_ms_per_ctx_token"]) / 1e3
        small = DecodeSpeed(float(row["decode_a_ms"]) / 1e3, 0.0, context_s)
        large = DecodeSpeed(float(row["decode_d_ms"]) / 1e3, float(row["decode_e_ms_per_seq"]) / 1e3, context_s)
        prefill = PrefillSpeed(
            float(row["prefill_a_ms"]) / 1e3,
            float(row["prefill_b_ms_per_tok"]) / 1e3,
            float(row["prefill_c_ms_per_tok2"]) / 1e3,
        )
        # Only the weights of the fp8 rows are in eight bits; keys and values stay at sixteen.
        law = LinearLaw(prefill, small, large, int(row["knee_batch"]))
        errors = (f"prefill: mean {row['prefill_mape_pct']} %", f"decode: mean {row['decode_mape_pct']} %")
        found[name] = Profile(name, law, KV_BYTES_PER_TOKEN[model], errors)
    return found


def _distserve(text: str) -> dict[str, Profile]:
    """Prefill ms = a + b·Σn + c·Σn²; decode ms = a + b·C + c·B, by other factors from a threshold of sequences on."""
    found = {}
    for model_id, by_tp in json.loads(text).items():
        model = model_id.rpartition("/")[2]
        for tp, row in by_tp.items():
            name = f"a100-{model}-tp{tp}"
            prefill = PrefillSpeed(*(float(factor) / 1e3 for factor in row["prefill"]))
            lines = []
            for regime in ("decoding_smallbs", "decoding_largebs"):
                fixed_ms, context_ms, sequence_ms = row[regime]
                lines.append(DecodeSpeed(fixed_ms / 1e3, sequence_ms / 1e3, context_ms / 1e3))
            law = LinearLaw(prefill, lines[0], lines[1], int(row["decoding_large_small_bs_threshold"]) - 1)
            found[name] = Profile(name, law, KV_BYTES_PER_TOKEN[model])
    return found


def _splitwise(text: str) -> dict[str, Profile]:
    """The medians as splitwise-sim takes them: n sequences decode as fast as what is behind n prompt tokens."""
    prompts: dict[str, dict[int, list[float]]] = {}
    tokens: dict[str, dict[int, list[float]]] = {}
    models = {}
    for row in csv.DictReader(text.splitlines()):
        name = f"splitwise-{row['hardware'].partition('-')[0]}-{row['model']}-tp{row['tp']}"
        models[name] = row["model"]
        batch_tokens = int(row["prompt_tokens"]) * int(row["batch"])
        prompts.setdefault(name, {}).setdefault(batch_tokens, []).append(float(row["prompt_ms"]) / 1e3)
        tokens.setdefault(name, {}).setdefault(batch_tokens, []).append(float(row["token_ms"]) / 1e3)
    return {
        name: Profile(name, BatchedLaw(_medians(prompts[name]), _medians(tokens[name])), KV_BYTES_PER_TOKEN[model])
        for name, model in models.items()
    }


def _medians(rows: Mapping[int, list[float]]) -> Table:
    return Table((place, statistics.median(values)) for place, values in rows.items())


@cache
def _layered(name: str, text: str) -> dict[str, Profile]:
    """Parts of steps, measured alone: dense layers and outputs as tables, attention by closed forms."""
    rows: dict[str, list[tuple[int, int, float]]] = {}
    for row in csv.DictReader(text.splitlines()):
        places = int(row["tokens"]), int(row["context_tokens"] or 0)
        rows.setdefault(row["part"], []).append((*places, float(row["time_us"]) / 1e6))
    prompts = fitted(
        [(1.0, float(n), float(n) * (n + 2 * before), float(before)) for n, before, _ in rows["prompt"]],
        [time_s for *_, time_s in rows["prompt"]],
    )
    by_batch: dict[int, list[tuple[int, float]]] = {}
    for batch, context_tokens, time_s in rows["decode"]:
        by_batch.setdefault(batch, []).append((context_tokens, time_s))
    decodes = {
        batch: fitted([(1.0, float(context)) for context, _ in some], [time_s for _, time_s in some])
        for batch, some in by_batch.items()
    }
    times = LayerTimes(
        dense=Table((n, time_s) for n, _, time_s in rows["dense"]),
        outputs=Table((n, time_s) for n, _, time_s in rows["output"]),
        prompt_attention=prompts.factors,
        decode_attention=tuple((batch, *decodes[batch].factors) for batch in sorted(decodes)),
    )
    worst = max(decodes, key=lambda batch: decodes[batch].mean_error)
    errors = (f"attention of prompts: {prompts}", f"attention of {worst} sequences, the worst batch: {decodes[worst]}")
    model = name.split("-", 2)[2].rpartition("-bf16")[0]
    return {name: Profile(name, LayeredLaw(times), KV_BYTES_PER_TOKEN[model], errors)}

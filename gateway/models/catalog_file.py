"""The models file: which models a cluster serves, under which names, and what stands in for each. Plain data.

    [[model]]
    name = "large"                # what clients call it; the workers' --model-name
    path = "models/large"         # checkpoint folder; a relative one begins at this file's folder; or hf://ORG/MODEL
    aliases = ["default"]         # other names for it
    fallback = ["small"]          # tried in this order where "large" is overloaded or has no worker
    fallback_after_s = 1.0        # longest wait for room before that
    fallback_kept = true          # before others, a kept answer to the same request may stand in
    fallback_max_tokens = 256     # after others, a shorter answer of its own may
    engine = "vllm"               # what computes it in the workers that `tandem up` starts; --engine if not said
    lora = {sql = "loras/sql"}    # with vLLM: adapters, by the names that clients use
    prefill = 1                   # how many of these are started
    decode = 2
    share = "small ones"          # models with one word here have the same workers, by turns; the first says how many
    tier = {name = "auto", stronger = "larger", check = ["finished"]}   # gateway/models/tiers.py

Reads the file and nothing that it names; what is in a model's folder is `gateway.models.model_files`' business.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Never

from msgspec import Meta, Struct

from gateway.models.tiers import CLASSIFIER_PATTERN, CheckName, Tier, load_classifier
from services.hub.source import model_source
from services.runtime import toml_file
from services.runtime.adapters import MAX_ADAPTERS
from services.runtime.engines import VLLM
from services.runtime.errors import ConfigError

MAX_FILE_BYTES = 2**20
MAX_MODELS = 64
MAX_PATTERN_CHARS = 1000
MAX_NAMES = 64
"""Aliases of one model, and entries of one fallback chain."""
MAX_WORKERS = 256
MIN_FALLBACK_AFTER_S = 0.05
"""A worker needs a moment to say whether it has room."""
MAX_FALLBACK_AFTER_S = 86_400.0
DEFAULT_FALLBACK_AFTER_S = 1.0

_Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,255}\Z")]
_PATH = r"^(?!(hf|s3)://)[^\x00]+\Z|^hf://[^/\x00]+/[^/\x00]+\Z|^s3://[a-z0-9.-]+/[^\x00?#]+\Z"
_Wait = Annotated[float, Meta(ge=MIN_FALLBACK_AFTER_S, le=MAX_FALLBACK_AFTER_S)]
_Names = Annotated[list[_Name], Meta(max_length=MAX_NAMES)]


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """One `[[model]]` of the file.

    `fallbacks` are names of models, in the order in which they are tried; `fallback_after_s` is how long a request that
    may fall back waits for room, in seconds. `keeps_answers`: kept answers stand in too; `fallback_max_tokens`: so do
    answers of its own of at most this many tokens; None: those do not. `num_prefill` and `num_decode` are workers, and
    `engine` is what computes in them; None: not said.
    """

    name: str
    path: Path
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    fallback_after_s: float = DEFAULT_FALLBACK_AFTER_S
    keeps_answers: bool = False
    fallback_max_tokens: int | None = None
    num_prefill: int | None = None
    num_decode: int | None = None
    engine: str | None = None
    lora: Mapping[str, Path] = field(default_factory=dict)
    """The folder of each adapter by the name that clients use."""
    tier: Tier | None = None
    """A name for requests that this model answers unless a stronger one should, and when that is."""
    share: str = ""
    """Models with one word here have the same workers, one model at a time. Empty: it has workers of its own."""


class _TierTable(Struct, forbid_unknown_fields=True):
    """A model's `tier` as it is written."""

    name: _Name
    stronger: _Name
    long_prompt_chars: Annotated[int, Meta(ge=1)] | None = None
    classifier: Annotated[str, Meta(pattern=CLASSIFIER_PATTERN)] | None = None
    check: Annotated[list[CheckName], Meta(max_length=2)] = []
    pattern: Annotated[str, Meta(min_length=1, max_length=MAX_PATTERN_CHARS)] | None = None

    def tier(self) -> Tier:
        """The tier. Raises ConfigError for a pattern or a classifier that cannot be used."""
        try:
            pattern = None if self.pattern is None else re.compile(self.pattern)
        except re.error as error:
            raise ConfigError(f"pattern: {error}") from error
        classifier = None if self.classifier is None else load_classifier(self.classifier)
        tier = Tier(self.name, self.stronger, self.long_prompt_chars, classifier, tuple(self.check), pattern)
        if not (tier.has_check or classifier or self.long_prompt_chars):
            raise ConfigError("check, pattern, classifier or long_prompt_chars must say when the stronger one answers")
        return tier


class _ModelTable(Struct, forbid_unknown_fields=True):
    """A [[model]] as it is written."""

    name: _Name
    path: Annotated[str, Meta(pattern=_PATH)]
    aliases: _Names = []
    fallback: _Names = []
    fallback_after_s: Annotated[float, Meta(ge=MIN_FALLBACK_AFTER_S, le=MAX_FALLBACK_AFTER_S)] = (
        DEFAULT_FALLBACK_AFTER_S
    )
    fallback_kept: bool = False
    fallback_max_tokens: Annotated[int, Meta(ge=1)] | None = None
    prefill: Annotated[int, Meta(ge=0, le=MAX_WORKERS)] | None = None
    decode: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None = None
    engine: Literal["native", "vllm"] | None = None
    lora: Annotated[dict[_Name, Annotated[str, Meta(pattern=r"^[^\x00]+\Z")]], Meta(max_length=MAX_ADAPTERS)] = {}
    tier: _TierTable | None = None
    share: Annotated[str, Meta(pattern=r"^\S[^\x00-\x1f]{0,63}\Z")] = ""

    def entry(self, folder: Path) -> ModelEntry:
        """The model; a relative path begins at `folder`."""
        return ModelEntry(
            name=self.name,
            path=model_source().parse(self.path) if "://" in self.path else folder / Path(self.path).expanduser(),
            aliases=tuple(self.aliases),
            fallbacks=tuple(self.fallback),
            fallback_after_s=self.fallback_after_s,
            keeps_answers=self.fallback_kept,
            fallback_max_tokens=self.fallback_max_tokens,
            num_prefill=self.prefill,
            num_decode=self.decode,
            engine=self.engine,
            lora={name: folder / Path(path).expanduser() for name, path in self.lora.items()},
            tier=None if self.tier is None else self.tier.tier(),
            share=self.share,
        )


class _File(Struct, forbid_unknown_fields=True):
    model: Annotated[list[_ModelTable], Meta(min_length=1, max_length=MAX_MODELS)]


def read_models_file(path: Path) -> tuple[ModelEntry, ...]:
    """The models in the file's order, at least one. Raises ConfigError that names file, key and rule."""
    return parse_models(toml_file.read_text(path, "the models file", max_bytes=MAX_FILE_BYTES), file=path)


def parse_models(text: str, *, file: Path) -> tuple[ModelEntry, ...]:
    """The models of the file's text. `file` is named in errors, and relative paths begin at its folder."""
    try:
        entries = tuple(table.entry(file.parent) for table in toml_file.parse(text, _File).model)
        _check_folders(entries)
        _check_names(entries)
        _check_fallbacks(entries)
        _check_tiers(entries)
        _check_shares(entries)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    return entries


def _refuse(field: str, value: object, rule: str) -> Never:
    raise ConfigError(f"{field} is {str(value)!r} but must be {rule}")


def _check_folders(entries: Sequence[ModelEntry]) -> None:
    for number, entry in enumerate(entries):
        if not entry.path.is_dir():
            _refuse(f"model[{number}].path", entry.path, "a folder that exists")
        for name, folder in entry.lora.items():
            if not folder.is_dir():
                _refuse(f"model[{number}].lora.{name}", folder, "a folder that exists")


def _check_names(entries: Sequence[ModelEntry]) -> None:
    """Every name and alias means one model."""
    named: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if entry.name in named:
            _refuse(f"model[{number}].name", entry.name, f"another name than that of {named[entry.name]}")
        named[entry.name] = f"model[{number}]"
    for number, entry in enumerate(entries):
        for position, alias in enumerate(entry.aliases):
            place = f"model[{number}].aliases[{position}]"
            if alias in named:
                _refuse(place, alias, f"another name than {named[alias]} has already")
            named[alias] = place
        others = [(f"lora.{name}", name) for name in entry.lora]
        if entry.tier is not None:
            others.append(("tier.name", entry.tier.name))
        for key, name in others:
            place = f"model[{number}].{key}"
            if name in named:
                _refuse(place, name, f"another name than {named[name]} has already")
            named[name] = place


def _check_tiers(entries: Sequence[ModelEntry]) -> None:
    """The stronger model of a tier is another one of the file."""
    names = [entry.name for entry in entries]
    for number, entry in enumerate(entries):
        if entry.tier is not None and entry.tier.stronger not in set(names) - {entry.name}:
            place, rule = f"model[{number}].tier.stronger", "the name (no alias) of another model of this file"
            _refuse(place, entry.tier.stronger, f"{rule}: {', '.join(names)}")


def _check_shares(entries: Sequence[ModelEntry]) -> None:
    """The first of the models that share workers says how many these are; this project's engine computes them all."""
    first: dict[str, str] = {}
    for number, entry in enumerate(entries):
        if not entry.share:
            continue
        if entry.engine == VLLM:
            _refuse(f"model[{number}].engine", VLLM, "native where models share workers: vLLM cannot change its model")
        name = first.setdefault(entry.share, entry.name)
        for key, count in (("prefill", entry.num_prefill), ("decode", entry.num_decode)):
            if name != entry.name and count is not None:
                _refuse(f"model[{number}].{key}", count, f"left out: {name}, which shares its workers, says it")


def _check_fallbacks(entries: Sequence[ModelEntry]) -> None:
    """Every fallback is another model, once, and no model falls back to itself by way of others.

    The chain of a model is its own list; still two models that stand in for one another would only pass overload to
    and fro.
    """
    chains = {entry.name: entry.fallbacks for entry in entries}
    for number, entry in enumerate(entries):
        for position, name in enumerate(entry.fallbacks):
            place = f"model[{number}].fallback[{position}]"
            if name not in chains:
                _refuse(place, name, f"the name (no alias) of a model of this file: {', '.join(chains)}")
            if name in entry.fallbacks[:position]:
                _refuse(place, name, "named only once")
            way = _way(chains, name, entry.name)
            if way is not None:
                cycle = " -> ".join((entry.name, *way))
                _refuse(place, name, f"a model that does not fall back to this one again ({cycle})")


def _way(chains: Mapping[str, Sequence[str]], start: str, goal: str) -> list[str] | None:
    """Names along the fallbacks from `start` to `goal`, both included; None without a way. Unknown names end it."""
    ways = [[start]]
    seen = {start}
    while ways:
        way = ways.pop()
        if way[-1] == goal:
            return way
        for name in chains.get(way[-1], ()):
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return None

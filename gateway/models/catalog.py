"""The models of this gateway, loaded: their names, limits, tokenizers and what stands in for each.

Knows no worker and no request. Nothing changes after the start.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from gateway.limits import MAX_NAME_CHARS, MAX_TOKENIZE_CHARS, ModelLimits, check_text
from gateway.models.catalog_file import DEFAULT_FALLBACK_AFTER_S, ModelEntry
from gateway.models.embedding import EmbeddingRule, read_rule
from gateway.models.model_files import read_model_files
from gateway.models.sampling_defaults import AUTO, read_defaults
from gateway.models.tiers import Tier
from gateway.models.tokenizer import ModelTokenizer
from gateway.models.turns import Turns
from services.runtime.errors import InvalidRequest, NotFound
from services.runtime.model_facts import ModelFacts


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """One model. `fallbacks` are names of others, in the order in which they are tried.

    Token ids mean the same in two models with the same `tokenizer_fingerprint`.
    """

    name: str
    limits: ModelLimits
    eos_token_ids: tuple[int, ...]
    tokenizer: ModelTokenizer
    tokenizer_fingerprint: str = ""
    facts: ModelFacts | None = None
    """The facts that its workers must agree with; None: nothing is compared."""
    aliases: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()
    """Names under which the model answers as one of its adapters has changed it."""
    fallbacks: tuple[str, ...] = ()
    fallback_after_s: float = DEFAULT_FALLBACK_AFTER_S
    keeps_answers: bool = False
    """Whether an answer that was kept may stand in for a new one."""
    fallback_max_tokens: int | None = None
    """The most tokens of an answer of its own that stands in for a longer one; None: no such answer does."""
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    """Values for requests without these fields, by the fields' names."""
    embedding: EmbeddingRule | str = "nothing is known of it"
    """How it embeds texts, or why it does not."""
    tier: Tier | None = None
    """The name under which it answers unless a stronger model should, and when that is."""
    share: str = ""
    """The word of the models that have the same workers by turns. Empty: it has workers of its own."""


class ModelCatalog:
    """All models, by name and alias; at least one. Names must be unique, as `gateway.models.catalog_file` checks."""

    def __init__(self, models: Sequence[ServedModel], *, max_tokenize_chars: int = MAX_TOKENIZE_CHARS) -> None:
        assert models
        self.max_tokenize_chars = max_tokenize_chars
        """The most characters of a text that becomes tokens for their own sake."""
        self._models = {model.name: model for model in models}
        self._by_any_name = {name: model for model in models for name in _names(model)}
        self._only = models[0] if len(models) == 1 else None

    def __iter__(self) -> Iterator[ServedModel]:
        """The models in the order of the file."""
        return iter(self._models.values())

    def __getitem__(self, name: str) -> ServedModel:
        """Returns the model of this very name. Raises KeyError for an alias."""
        return self._models[name]

    def names(self) -> Iterator[tuple[str, ServedModel]]:
        """(any name, model) for all of them; a model's own name comes before its aliases, and they before adapters."""
        return iter(self._by_any_name.items())

    def name_of(self, name: str | None) -> str:
        """Returns the own name of the model that a client means, which need not exist.

        A name that no model has stays as it is. Raises InvalidRequest where a name is needed.
        """
        model = self._by_any_name.get(name) if name else self.resolve(None)
        return model.name if model is not None else name or ""

    def adapter_of(self, name: str | None) -> str:
        """Returns the adapter that a client means by a model's name; empty: none."""
        model = self._by_any_name.get(name) if name else None
        return name if name and model is not None and name in model.adapters else ""

    def tier_of(self, name: str | None) -> tuple[str, Tier] | None:
        """Returns the cheap model of the tier with this name, and the tier; None: it is no tier's."""
        model = self._by_any_name.get(name) if name else None
        return (model.name, model.tier) if model is not None and model.tier and model.tier.name == name else None

    def resolve(self, name: str | None) -> ServedModel:
        """Returns the model that a client means; without a name, the only one.

        Raises NotFound for a name that no model has, InvalidRequest where a name is needed.
        """
        if not name:
            if self._only is not None:
                return self._only
            raise InvalidRequest(
                "model is missing, and this server has several; /v1/models lists them",
                field="model",
                code="missing_required_parameter",
            )
        model = self._by_any_name.get(name)
        if model is None:
            check_text(name, field_name="model")
            raise NotFound(f"the model {name[:MAX_NAME_CHARS]!r} does not exist", field="model", code="model_not_found")
        return model


def _names(model: ServedModel) -> Iterator[str]:
    yield model.name
    yield from model.aliases
    yield from sorted(model.adapters)
    if model.tier is not None:
        yield model.tier.name


def load_catalog(
    entries: Sequence[ModelEntry],
    *,
    max_tokenize_chars: int = MAX_TOKENIZE_CHARS,
    generation_config: str = AUTO,
    embeddings: str = AUTO,
) -> ModelCatalog:
    """Reads every model's folder. Raises ModelError with one sentence that says what to do.

    `generation_config` says where defaults of sampling come from, as for
    `gateway.models.sampling_defaults.read_defaults`; `embeddings` says which models embed texts, as for
    `gateway.models.embedding.read_rule`.
    """
    turns = Turns()
    models = [_load(entry, turns, generation_config, embeddings) for entry in entries]
    return ModelCatalog(models, max_tokenize_chars=max_tokenize_chars)


@functools.lru_cache(maxsize=256)
def header_value(text: str) -> str:
    """Returns a text about models as a header can carry it: what is not printable ASCII is quoted."""
    return quote(text, safe=_SAFE)


_SAFE = "".join(chr(code) for code in range(0x20, 0x7F) if chr(code) != "%")


def _load(entry: ModelEntry, turns: Turns, generation_config: str, embeddings: str) -> ServedModel:
    files = read_model_files(entry.path)
    return ServedModel(
        name=entry.name,
        limits=ModelLimits(files.facts.vocab_size, files.facts.context_length_tokens),
        eos_token_ids=files.facts.eos_token_ids,
        tokenizer=ModelTokenizer(files, turns=turns),
        tokenizer_fingerprint=files.facts.tokenizer,
        facts=files.facts,
        aliases=entry.aliases,
        adapters=frozenset(entry.lora),
        fallbacks=entry.fallbacks,
        fallback_after_s=entry.fallback_after_s,
        keeps_answers=entry.keeps_answers,
        fallback_max_tokens=entry.fallback_max_tokens,
        sampling_defaults=read_defaults(entry.path, generation_config),
        embedding=read_rule(entry.path, embeddings),
        tier=entry.tier,
        share=entry.share,
    )

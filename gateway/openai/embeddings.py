"""The bodies of requests for vectors, scores and ranks, as OpenAI, vLLM, Jina and Cohere spell them, and of answers.

What may be asked is checked here as far as it needs no model.
"""

import base64
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgspec

from gateway.limits import (
    DEFAULT_SERVICE_CLASS,
    MAX_AFFINITY_CHARS,
    MAX_INPUTS,
    MAX_NAME_CHARS,
    MAX_PRIORITY,
    SERVICE_CLASSES,
)
from gateway.openai.answers import Exact
from gateway.openai.requests import MODEL, parse_members
from gateway.openai.shapes import ABSENT, TOKEN_ID, bounded, flag, list_of, said
from gateway.requests.call import Call
from gateway.vectors.embedder import OPERATION
from gateway.wishes import MAX_MS
from services.runtime.errors import InvalidRequest

_TEXTS = list_of({"type": "string"}, MAX_INPUTS)
_INPUT = [{"type": "string"}, _TEXTS, list_of(TOKEN_ID), list_of(list_of(TOKEN_ID), MAX_INPUTS)]
_DOCUMENT = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
_DOCUMENTS = list_of({"anyOf": [{"type": "string"}, _DOCUMENT]}, MAX_INPUTS - 1)
_REFUSED = {
    "embedding_type": "use encoding_format",
    "embedding_types": "use encoding_format",
    "images": "this server reads text only",
    "input_type": "write the model's instruction into the text",
    "instruction": "write it into the text",
    "late_chunking": "each text is embedded by itself",
    "messages": "send a text",
    "normalized": "the checkpoint says whether vectors are normalized",
    "normalize": "the checkpoint says whether vectors are normalized",
    "output_dimension": "use dimensions",
    "output_dtype": "vectors have 32-bit numbers",
    "prompt_name": "write the model's instruction into the text",
    "rank_fields": "send the texts themselves",
    "task": "write the model's instruction into the text",
    "truncate": "use truncate_prompt_tokens",
    "use_activation": "scores are cosines",
}
"""Members of other servers' requests that would change the answer, and what to do instead."""


class VectorBody(msgspec.Struct, kw_only=True):
    """The members of all requests for vectors."""

    model: Annotated[str | None, MODEL] = None
    user: Annotated[str | None, said("Accepted; any prefill worker computes it.", maxLength=MAX_AFFINITY_CHARS)] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        said("Only this many tokens of a text are kept, its last; -1: as many as the model takes.", minimum=-1),
    ] = None
    priority: Annotated[int | None, bounded("As of chats.", -MAX_PRIORITY, MAX_PRIORITY, 0)] = None
    service_class: Annotated[
        str | None, said("As of chats.", **{"enum": [*SERVICE_CLASSES, "", None], ABSENT: DEFAULT_SERVICE_CLASS})
    ] = None
    tenant: Annotated[str | None, said("As of chats.", pattern=f"^[A-Za-z0-9_.:-]{{0,{MAX_NAME_CHARS}}}$")] = None
    cache_salt: Annotated[str | None, said("As of chats.", minLength=1, maxLength=MAX_NAME_CHARS)] = None
    request_timeout_ms: Annotated[int | None, bounded("As of chats.", 1, MAX_MS)] = None

    def call_of(self, prompts: Sequence[str | Sequence[int]], field: str) -> Call:
        """Returns the call for these texts, which `field` names. Raises InvalidRequest."""
        most = self.truncate_prompt_tokens
        if most is not None and most != -1 and most < 1:
            raise InvalidRequest(
                "truncate_prompt_tokens must be -1 or at least 1", field="truncate_prompt_tokens", code="invalid_value"
            )
        return Call(
            operation=OPERATION,
            model=self.model,
            prompts=prompts,
            prompt_field=field,
            priority=self.priority or 0,
            service_class=self.service_class or "",
            tenant=self.tenant or "",
            affinity_key=self.user or "",
            cache_salt=self.cache_salt or "",
            most_prompt_tokens=most,
        )


class EmbeddingRequest(VectorBody, kw_only=True):
    """Body of POST /v1/embeddings."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("input",)

    input: Annotated[
        Any, said(f"A text, token ids, or a list of either: each becomes a vector, {MAX_INPUTS} at most.", anyOf=_INPUT)
    ] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        said("A list of numbers, or base64 of little-endian 32-bit numbers.", **{ABSENT: "float"}),
    ] = None
    dimensions: Annotated[
        int | None,
        said("The first numbers of each vector are kept, normalized again, where the model is made for it.", minimum=1),
    ] = None

    def call(self) -> Call:
        """Returns the call that it asks for. Raises InvalidRequest."""
        given = self.input
        if given is None:
            raise _missing("input")
        kinds = set(map(type, given)) if isinstance(given, list) else set()
        if isinstance(given, str):
            prompts: list[Any] = [given]
        elif kinds in ({str}, {list}):
            prompts = given
        elif kinds and not kinds & {str, list}:
            prompts = [given]
        else:
            raise InvalidRequest(
                "input must be a text, token ids, or a list of either, and not empty",
                field="input",
                code="invalid_value",
            )
        return self.call_of(prompts, "input")


class ScoreRequest(VectorBody, kw_only=True):
    """Body of POST /v1/score."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("text_1", "text_2")

    text_1: Annotated[str | list[str] | None, said("A text, or as many as in `text_2`.", anyOf=_INPUT[:2])] = None
    text_2: Annotated[str | list[str] | None, said("A text, or texts.", anyOf=_INPUT[:2])] = None
    queries: Annotated[str | list[str] | None, said("Another name of `text_1`.", anyOf=_INPUT[:2])] = None
    documents: Annotated[str | list[str] | None, said("Another name of `text_2`.", anyOf=_INPUT[:2])] = None

    def pairs(self) -> list[tuple[str, str]]:
        """Returns the pairs of texts to compare. Raises InvalidRequest."""
        first = _texts(self.text_1 if self.text_1 is not None else self.queries, "text_1")
        second = _texts(self.text_2 if self.text_2 is not None else self.documents, "text_2")
        if len(first) == 1:
            first *= len(second)
        if len(first) != len(second):
            raise InvalidRequest(
                "text_1 must have one text, or as many as text_2", field="text_1", code="invalid_value"
            )
        return list(zip(first, second, strict=True))


class RerankRequest(VectorBody, kw_only=True):
    """Body of POST /v1/rerank and its like."""

    REQUIRED: ClassVar[tuple[str, ...]] = ("query", "documents")

    query: Annotated[str | None, said("The text that documents are compared with.")] = None
    documents: Annotated[list[Any] | None, said("Texts, or objects with a `text`.", **_DOCUMENTS)] = None
    top_n: Annotated[int | None, said("How many of the best are shown. Absent or 0: all.", minimum=0)] = None
    return_documents: Annotated[bool | None, flag("Each result has its text.", default=True)] = None

    def texts(self) -> list[str]:
        """Returns the documents' texts. Raises InvalidRequest."""
        if self.query is None:
            raise _missing("query")
        if not self.documents:
            raise _missing("documents")
        if self.top_n is not None and self.top_n < 0:
            raise InvalidRequest("top_n must be at least 0", field="top_n", code="invalid_value")
        texts = [one.get("text") if isinstance(one, dict) else one for one in self.documents]
        for place, text in enumerate(texts):
            if not isinstance(text, str):
                name = f"documents[{place}]"
                raise InvalidRequest(f"{name} must be a text, or have one as text", field=name, code="invalid_value")
        return [str(text) for text in texts]


class VectorUsage(Exact):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Exact):
    """One vector: numbers, or base64 of them."""

    index: int
    object: Literal["embedding"]
    embedding: list[float] | str


class EmbeddingList(Exact):
    """The answer of /v1/embeddings."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: VectorUsage


class Score(Exact):
    """How alike two texts are: the cosine of their vectors, -1 to 1."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Exact):
    """The answer of /v1/score."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: VectorUsage


class RankedText(Exact):
    """The text of a result."""

    text: str


class RankResult(Exact, omit_defaults=True):
    """A document, by its place in the request, and how near to the query it is: a cosine."""

    index: int
    relevance_score: float
    document: RankedText | None = None


class Ranking(Exact):
    """The answer of /v1/rerank: the best document first."""

    id: str
    model: str
    results: list[RankResult]
    usage: VectorUsage


Body = TypeVar("Body", bound=VectorBody)


def read_vector_body(body: bytes, body_type: type[Body]) -> tuple[Body, list[str]]:
    """Returns the request and the names of ignored members. Raises InvalidRequest that names the member."""
    request, ignored = parse_members(body, body_type)
    for name in ignored:
        if name in _REFUSED:
            raise InvalidRequest(
                f"{name} is not supported by this server: {_REFUSED[name]}", field=name, code="unsupported_parameter"
            )
    return request, ignored


def embedding_json(index: int, vector: bytes, *, encoding_format: str | None) -> bytes:
    """Returns one entry of the list of embeddings."""
    shown = base64.b64encode(vector).decode() if encoding_format == "base64" else numbers_of(vector).tolist()
    return msgspec.json.encode(Embedding(index=index, object="embedding", embedding=shown))


def numbers_of(vector: bytes) -> "array[float]":
    """Returns the numbers of a vector as workers send it."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def _texts(given: str | list[str] | None, field: str) -> list[str]:
    if not given and given != "":
        raise _missing(field)
    return [given] if isinstance(given, str) else list(given)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} is missing", field=field, code="missing_required_parameter")

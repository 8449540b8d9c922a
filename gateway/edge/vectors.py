"""Vectors of texts over HTTP, and what follows of them: how alike two texts are, and which are nearest to a query."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from operator import mul
from typing import TypeVar

import msgspec

from gateway.access.door import FrontDoor
from gateway.access.keys import ApiKey
from gateway.edge.http_calls import complete_call
from gateway.http.bodies import Bodies, Claim
from gateway.http.exchange import Exchange
from gateway.models.catalog import header_value
from gateway.openai.embeddings import (
    EmbeddingRequest,
    RankedText,
    Ranking,
    RankResult,
    RerankRequest,
    Score,
    ScoreList,
    ScoreRequest,
    VectorBody,
    VectorUsage,
    embedding_json,
    numbers_of,
    read_vector_body,
)
from gateway.requests.call import AcceptedCall, Call
from gateway.requests.lifecycle import Requests
from gateway.vectors.embedder import EmbeddedTexts, Embedder

VECTORS_AT_A_TIME = 8
"""Vectors that are dealt with before others get their turn: a few milliseconds."""
MAX_WHOLE_BYTES = 1 << 20
"""An answer with more bytes of vectors is written while the client reads it: in JSON they take five times as much."""

Body = TypeVar("Body", bound=VectorBody)
Item = TypeVar("Item")


class VectorPages:
    """The endpoints for embeddings, scores and ranks."""

    def __init__(self, requests: Requests, embedder: Embedder, *, door: FrontDoor, bodies: Bodies) -> None:
        self._requests = requests
        self._embedder = embedder
        self._door = door
        self._bodies = bodies

    async def embeddings(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers the vectors of texts."""
        with self._bodies.claim(key.tenant) as claim:
            request = await self._read(exchange, claim, EmbeddingRequest)
            accepted, embedded = await self._embed(exchange, key, claim=claim, request=request, call=request.call())
        end = msgspec.json.encode({"model": accepted.model, "usage": _usage(embedded)})
        parts = _parts(embedded.vectors, end, encoding_format=request.encoding_format)
        if sum(map(len, embedded.vectors)) > MAX_WHOLE_BYTES:
            with exchange:
                await exchange.answer_in_parts(parts)
        else:
            await exchange.answer(200, b"".join([part async for part in parts]))

    async def score(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers how alike the texts of each pair are."""
        with self._bodies.claim(key.tenant) as claim:
            request = await self._read(exchange, claim, ScoreRequest)
            pairs = request.pairs()
            places = {text: place for place, text in enumerate(dict.fromkeys(text for pair in pairs for text in pair))}
            call = request.call_of(list(places), "text_2")
            accepted, embedded = await self._embed(exchange, key, claim=claim, request=request, call=call)
        vectors = embedded.vectors
        scores = [
            Score(index=index, object="score", score=_cosine(vectors[places[first]], vectors[places[second]]))
            async for index, (first, second) in in_turns(list(enumerate(pairs)))
        ]
        answer = ScoreList(
            id=f"score-{accepted.request_id}",
            object="list",
            created=int(time.time()),
            model=accepted.model,
            data=scores,
            usage=_usage(embedded),
        )
        await exchange.answer(200, msgspec.json.encode(answer))

    async def rerank(self, exchange: Exchange, key: ApiKey) -> None:
        """Answers the documents in the order of how near they are to a query."""
        with self._bodies.claim(key.tenant) as claim:
            request = await self._read(exchange, claim, RerankRequest)
            texts = request.texts()
            call = request.call_of([request.query or "", *texts], "documents")
            accepted, embedded = await self._embed(exchange, key, claim=claim, request=request, call=call)
        query, *vectors = embedded.vectors
        found = [
            RankResult(
                index=index,
                relevance_score=_cosine(query, vector),
                document=None if request.return_documents is False else RankedText(text=texts[index]),
            )
            async for index, vector in in_turns(list(enumerate(vectors)))
        ]
        found.sort(key=lambda one: -one.relevance_score)
        answer = Ranking(
            id=f"rerank-{accepted.request_id}",
            model=accepted.model,
            results=found[: request.top_n or None],
            usage=_usage(embedded),
        )
        await exchange.answer(200, msgspec.json.encode(answer))

    async def _read(self, exchange: Exchange, claim: Claim, body_type: type[Body]) -> Body:
        """Returns the request. Raises InvalidRequest, and what `Exchange.read_body` raises."""
        request, ignored = await self._bodies.read(
            claim, exchange.read_body, lambda body: read_vector_body(body, body_type)
        )
        if ignored:
            exchange.add_header(b"x-tandem-ignored", ",".join(ignored))
        return request

    async def _embed(
        self, exchange: Exchange, key: ApiKey, *, claim: Claim, request: VectorBody, call: Call
    ) -> tuple[AcceptedCall, EmbeddedTexts]:
        """Has a call's texts embedded, normalized in any case where they are to be compared."""
        complete_call(exchange, call, timeout_ms=request.request_timeout_ms)
        self._door.let_in(call, key, model=self._requests.catalog.name_of(call.model))
        if isinstance(request, EmbeddingRequest):
            order = self._embedder.order_for(call, request.dimensions)
        else:
            order = self._embedder.order_for(call)._replace(is_normalized=True)
        with exchange, await self._requests.accept(call) as accepted:
            claim.release()
            exchange.name(accepted.request_id)
            exchange.add_trace(accepted.span.told_traceparent)
            exchange.add_limits(call.ticket)
            exchange.add_header(b"x-tandem-model", header_value(accepted.model))
            return accepted, await self._embedder.vectors(accepted, order)


async def in_turns(items: Sequence[Item]) -> AsyncIterator[Item]:
    """Yields the items, and lets others have the event loop now and then."""
    for place, item in enumerate(items):
        if place % VECTORS_AT_A_TIME == VECTORS_AT_A_TIME - 1:
            await asyncio.sleep(0)
        yield item


async def _parts(vectors: Sequence[bytes], end: bytes, *, encoding_format: str | None) -> AsyncIterator[bytes]:
    """Yields the answer with these vectors, and the members of the JSON object `end`."""
    yield b'{"object":"list","data":['
    async for index, vector in in_turns(list(enumerate(vectors))):
        yield (b"," if index else b"") + embedding_json(index, vector, encoding_format=encoding_format)
    yield b"]," + end[1:]


def _cosine(first: bytes, second: bytes) -> float:
    """Returns the cosine of two vectors of length 1, at most 1 whatever was rounded."""
    cosine: float = sum(map(mul, numbers_of(first), numbers_of(second)))
    return max(-1.0, min(1.0, cosine))


def _usage(embedded: EmbeddedTexts) -> VectorUsage:
    return VectorUsage(prompt_tokens=embedded.num_prompt_tokens, total_tokens=embedded.num_prompt_tokens)

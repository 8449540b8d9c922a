"""What one gateway stores for clients, put together: the store, what keeps and generates answers, and the routes."""

from collections.abc import Callable
from typing import NamedTuple

from starlette.routing import Route

from gateway.config import GatewayConfig
from gateway.http.bodies import Bodies
from gateway.http.exchange import App
from gateway.models.catalog import ModelCatalog
from gateway.stored.background import Background
from gateway.stored.chats import StoredChats
from gateway.stored.chats_api import ChatsApi
from gateway.stored.conversations import Conversations
from gateway.stored.conversations_api import ConversationsApi
from gateway.stored.keeping import ResponseKeeper
from gateway.stored.responses_api import ResponsesApi
from services.cluster.answers import AnswerRoom, AnswerStore
from services.cluster.redis_store import Store


class Keepers(NamedTuple):
    """What keeps the answers of requests."""

    responses: ResponseKeeper
    chats: StoredChats


class StoredResponses:
    """`app_of` makes the HTTP API as the owner of the API key with a digest sees it.

    `on_refusal` is told the name of a limit that refuses.
    """

    def __init__(
        self,
        store: Store,
        config: GatewayConfig,
        *,
        gateway_incarnation: str,
        app_of: Callable[[str], App],
        catalog: ModelCatalog,
        on_refusal: Callable[[str], None],
    ) -> None:
        room = AnswerRoom(config.tenant_answer_storage, config.answer_storage)
        self.answers = AnswerStore(store, room=room, life_s=config.stored_answer_s)
        self.background = Background(
            self.answers,
            gateway_incarnation=gateway_incarnation,
            app_of=app_of,
            num_places=config.background_responses if config.stored_answer_s else 0,
        )
        self._chats = StoredChats(self.answers, on_refusal=on_refusal)
        self._conversations = Conversations(self.answers, on_refusal=on_refusal)
        self.keepers: Keepers | None = None
        """None where nothing is to be stored."""
        if config.stored_answer_s:
            responses = ResponseKeeper(
                self.answers,
                self.background,
                catalog=catalog,
                comment_s=config.stream_comment_s,
                on_refusal=on_refusal,
            )
            self.keepers = Keepers(responses, self._chats)

    def routes(self, bodies: Bodies) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        can_store = self.keepers is not None
        return [
            *ResponsesApi(None if self.keepers is None else self.keepers.responses).routes(),
            *ChatsApi(self._chats, bodies=bodies).routes(),
            *ConversationsApi(self._conversations, bodies=bodies, can_store=can_store).routes(),
        ]

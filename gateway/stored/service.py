"""The stored responses of one gateway put together: their store, what keeps and generates them, and their routes."""

from collections.abc import Callable

from starlette.routing import Route

from gateway.config import GatewayConfig
from gateway.http.exchange import App
from gateway.models.catalog import ModelCatalog
from gateway.stored.background import Background
from gateway.stored.keeping import ResponseKeeper
from gateway.stored.responses_api import ResponsesApi
from services.cluster.answers import AnswerRoom, AnswerStore
from services.cluster.redis_store import Store


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
        self.keeper: ResponseKeeper | None = None
        """None where no responses are to be stored."""
        if config.stored_answer_s:
            self.keeper = ResponseKeeper(
                self.answers,
                self.background,
                catalog=catalog,
                comment_s=config.stream_comment_s,
                on_refusal=on_refusal,
            )

    def routes(self) -> list[Route]:
        """Returns the routes for the HTTP API, which asks for the key."""
        return ResponsesApi(self.keeper).routes()

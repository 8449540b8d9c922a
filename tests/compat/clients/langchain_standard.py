"""LangChain's standard tests of chat models that ask a server, with ChatOpenAI pointed at it; for pytest."""

from checks import KEY, MODEL, URL
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChats(ChatModelIntegrationTests):
    """Asks by way of /v1/chat/completions."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {
            "model": MODEL,
            "base_url": f"{URL}/v1",
            "api_key": KEY,
            # LangChain asks nobody but OpenAI itself for usage in streams, unless it is told to.
            "stream_usage": True,
            # The demo model would call without end where it must call.
            "model_kwargs": {"parallel_tool_calls": False},
        }


class TestResponses(TestChats):
    """Asks by way of /v1/responses."""

    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": True}

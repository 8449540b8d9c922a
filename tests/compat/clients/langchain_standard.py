"""LangChain's standard tests of chat models, with ChatOpenAI pointed at the server; for pytest."""

from checks import KEY, MODEL, URL
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests


class TestIntegration(ChatModelIntegrationTests):
    """The tests that ask the server."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY}


class TestResponses(TestIntegration):
    """Asks by way of /v1/responses."""

    @property
    def chat_model_params(self):
        return {**super().chat_model_params, "use_responses_api": True}


class TestUnit(ChatModelUnitTests):
    """The tests that ask nobody."""

    @property
    def chat_model_class(self):
        return ChatOpenAI

    @property
    def chat_model_params(self):
        return {"model": MODEL, "base_url": f"{URL}/v1", "api_key": KEY}

"""guidance by its ways to a server: a regex, a choice, a grammar, a schema each, as far as the way has them."""

import json
import re
from importlib.metadata import version

import guidance
from checks import KEY, MODEL, URL, check, finish
from guidance import assistant, gen, select, user
from guidance.models import OpenAI
from guidance.models.experimental import SglangModel, VLLMModel

HOW = {"base_url": f"{URL}/v1", "api_key": KEY, "echo": False}
# Its fourth way, by LiteLLM, fails before it asks: it copies what this LiteLLM no longer lets be copied.
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}


WAYS = {
    "vLLM": lambda: VLLMModel(MODEL, **HOW),
    "SGLang": lambda: SglangModel(MODEL, **HOW),
    "OpenAI": lambda: OpenAI(MODEL, **HOW),
}


def asked(way, wanted):
    model = WAYS[way]()
    with user():
        model += "Where?"
    with assistant():
        model += wanted
    return model["answer"]


for way in WAYS:

    @check(f"{way}: any text")
    def text(way=way):
        assert asked(way, gen("answer", max_tokens=8)) is not None

    @check(f"{way}: a schema")
    def schema(way=way):
        assert json.loads(asked(way, guidance.json("answer", schema=SCHEMA)))["city"] in ("Rome", "Oslo")

    if way == "OpenAI":
        continue  # guidance itself refuses the other three there

    @check(f"{way}: a regex")
    def regex(way=way):
        assert re.fullmatch("(Rome|Oslo) [0-9]{2}", asked(way, gen("answer", regex="(Rome|Oslo) [0-9]{2}")))

    @check(f"{way}: a choice")
    def choice(way=way):
        assert asked(way, select(["Rome", "Oslo"], name="answer")) in ("Rome", "Oslo")

    @check(f"{way}: a grammar")
    def grammar(way=way):
        model = WAYS[way]()
        with user():
            model += "Where?"
        with assistant():
            model += "in " + select(["Rome", "Oslo"], name="city") + " with " + gen("number", regex="[1-9]{2}")
        assert model["city"] in ("Rome", "Oslo")
        assert re.fullmatch("[1-9]{2}", model["number"])


finish(version("guidance"))

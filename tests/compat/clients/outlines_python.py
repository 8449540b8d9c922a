"""outlines by its three ways to a server: a regex, a choice, a grammar, a schema each, as far as the way has them."""

import re
from importlib.metadata import version
from typing import Literal

import openai
import outlines
from checks import KEY, MODEL, URL, check, finish
from outlines.types import CFG, Regex
from pydantic import BaseModel

ASKED = "Where?"
GRAMMAR = {"vLLM": 'start: "in " CITY\nCITY: "Rome" | "Oslo"', "SGLang": 'root ::= "in " ("Rome" | "Oslo")'}
WAYS = {"vLLM": outlines.from_vllm, "SGLang": outlines.from_sglang, "OpenAI": outlines.from_openai}


class Place(BaseModel, extra="forbid"):
    city: Literal["Rome", "Oslo"]
    number: Literal[1, 2]


for name, way in WAYS.items():
    model = way(openai.OpenAI(base_url=f"{URL}/v1", api_key=KEY), MODEL)

    @check(f"{name}: any text")
    def text(model=model):
        assert isinstance(model(ASKED, max_tokens=8), str)

    @check(f"{name}: a schema")
    def schema(model=model):
        assert Place.model_validate_json(model(ASKED, Place, max_tokens=100)).city

    @check(f"{name}: streamed")
    def streamed(model=model):
        assert Place.model_validate_json("".join(model.stream(ASKED, Place, max_tokens=100)))

    if name == "OpenAI":
        continue  # outlines itself refuses the other three there

    @check(f"{name}: a regex")
    def regex(model=model):
        assert re.fullmatch("(Rome|Oslo) [0-9]{2}", model(ASKED, Regex("(Rome|Oslo) [0-9]{2}"), max_tokens=60))

    @check(f"{name}: a choice")
    def choice(model=model):
        assert model(ASKED, Literal["Rome", "Oslo"], max_tokens=60) in ("Rome", "Oslo")

    @check(f"{name}: a grammar")
    def grammar(model=model, text=GRAMMAR[name]):
        assert model(ASKED, CFG(text), max_tokens=60) in ("in Rome", "in Oslo")


finish(version("outlines"))

"""The document, and whether values keep to it."""

import json
from typing import Any

import jsonschema_rs

from gateway.openapi.document import document

DOCUMENT = json.loads(json.dumps(document(asks_for_keys=False)))


def schema_of(path: str, status: int = 200, media_type: str = "application/json", method: str = "post") -> Any:
    return DOCUMENT["paths"][path][method]["responses"][str(status)]["content"][media_type]["schema"]


def check(value: Any, schema: Any) -> None:
    jsonschema_rs.validate({**schema, "components": DOCUMENT["components"]}, value)

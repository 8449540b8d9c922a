import random
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.utils._http as hub_http
import pytest
from huggingface_hub import constants

from services.hub import fetching
from tests.hub_server import Hub, serving


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with one model, and a cache of its own."""
    monkeypatch.setattr(fetching, "FIRST_WAIT_S", 0.001)
    weights = random.Random(7).randbytes(3_000_000)
    files = {
        "config.json": b'{"a": 1}',
        "tokenizer.json": b"{}",
        "model.safetensors": weights,
        "README.md": b"not wanted",
        "consolidated.safetensors": weights[:9],
    }
    with serving(Hub(files)) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        yield running
        hub_http.close_session()

import io
import json
from pathlib import Path

import pytest

from cli.models import ModelsSettings, run
from services.hub.models import CachedModel

FOUND = [
    CachedModel("org/model", "main", 1_234_567_890, True, Path("/c/1")),
    CachedModel("b/c", "v1", 5, False, Path("/c/2")),
]


def shown(settings: ModelsSettings) -> str:
    stream = io.StringIO()
    assert run(settings, stream) == 0
    return stream.getvalue()


def test_models_with_their_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.models.cached_models", lambda: iter(FOUND))
    assert shown(ModelsSettings()).splitlines() == [
        "MODEL      REVISION  SIZE        STATE       FOLDER",
        "org/model  main      1,234.6 MB  whole       /c/1",
        "b/c        v1            0.0 MB  incomplete  /c/2",
    ]
    assert json.loads(shown(ModelsSettings(json=True)))[1]["num_bytes"] == 5


def test_none_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.models.cached_models", lambda: iter(()))
    assert "tandem serve ORG/MODEL" in shown(ModelsSettings())

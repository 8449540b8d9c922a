"""A gateway of a model that embeds, with prefill workers that do what scripts say."""

import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def embedding_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model as sentence-transformers writes one that embeds."""
    folder = tmp_path_factory.mktemp("embedding") / "tiny"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "matryoshka_dimensions": [2]}))
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": ""} for kind in ("Transformer", "Normalize")]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


Make = Callable[..., Awaitable[Any]]


@pytest.fixture
def make_embedding(make_system: Make, embedding_model: Path, worker_type: Any) -> Make:
    """A gateway of a model that embeds, with prefill workers that do what the scripts say; none decodes."""

    async def make(*scripts: Any, **settings: Any) -> Any:
        system = await make_system(model=embedding_model, **settings)
        for number, script in enumerate(scripts):
            await system.add(worker_type("prefill", f"prefill-{number}", script, on_embed=script))
        return system

    return make

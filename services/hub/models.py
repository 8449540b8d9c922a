"""A model's folder on this machine, wherever the model is; and the models that were brought here before."""

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from services.hub.source import S3Model, served_name, source_of

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model that is on this machine; `num_bytes` are those of the files that belong to this revision."""

    name: str
    revision: str
    num_bytes: int
    is_whole: bool
    folder: Path


def local_model(path: Path) -> Path:
    """Returns the folder of the model that a setting names, bringing it here where it is elsewhere.

    How far that is goes to standard error. Raises ModelError, with what to do.
    """
    source = source_of(path)
    if source is None:
        return path
    # The libraries behind these take long to import, and most models are folders.
    from services.hub.progress import Meter

    meter = Meter(sys.stderr)
    if isinstance(source, S3Model):
        from services.hub.s3 import local_objects

        return local_objects(source, meter)
    from services.hub.huggingface import local_snapshot

    return local_snapshot(source, meter)


def with_local_model(settings: S) -> S:
    """Returns the settings of a program with the folders of its model and of its draft, and with the model's name.

    Raises ModelError.
    """
    named: Any = settings
    draft: Path | None = getattr(settings, "draft_model", None)
    if draft is not None and source_of(draft) is not None:
        named = replace(named, draft_model=local_model(draft))
    if named.model is None or source_of(named.model) is None:
        return cast(S, named)
    name = named.model_name or served_name(named.model)
    return cast(S, replace(named, model=local_model(named.model), model_name=name))


def cached_models() -> Iterator[CachedModel]:
    """All models of the hub's cache and of S3's, by name."""
    from services.hub.huggingface import cache_folder, is_whole
    from services.hub.s3 import s3_folder

    for repository in sorted(cache_folder().glob("models--*--*")):
        name = repository.name.removeprefix("models--").replace("--", "/", 1)
        revisions = {
            reference.read_text().strip(): reference
            for reference in (repository / "refs").rglob("*")
            if reference.is_file()
        }
        for snapshot in sorted((repository / "snapshots").glob("*")):
            reference = revisions.get(snapshot.name)
            revision = snapshot.name[:12] if reference is None else str(reference.relative_to(repository / "refs"))
            yield CachedModel(name, revision, _size(snapshot), is_whole(repository, snapshot), snapshot)
    for listing in sorted(s3_folder().glob("*/**/.whole")):
        folder = listing.parent
        name = f"s3://{folder.parent.relative_to(s3_folder())}"
        yield CachedModel(name, folder.name, _size(folder), True, folder)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.exists() and not os.path.isdir(path))

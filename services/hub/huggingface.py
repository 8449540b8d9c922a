"""Repositories of the Hugging Face hub in the hub's own cache folder, which other programs share.

`huggingface_hub` says what a repository holds, shows the token for it and knows where the cache is: HF_ENDPOINT,
HF_TOKEN, HF_HOME and HF_HUB_OFFLINE hold as everywhere. It does not continue a download of an earlier process and
compares no digests; `services.hub.fetching` does.
"""

import fnmatch
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import httpx2
from huggingface_hub import HfApi, constants, get_session
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoSibling
from huggingface_hub.utils._headers import build_hf_headers

from services.hub.fetching import RemoteFile, Report, WrongDigest, digest_of, fetch
from services.hub.source import HubModel
from services.runtime.errors import ModelError

WANTED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model")
"""Files that serving reads, at the top of a repository."""
UNWANTED = ("consolidated*.safetensors",)
"""Weights a second time, in another program's layout."""
WHOLE = "tandem-whole.json"
"""Beside a repository's blobs: the digests of those that were compared, and the commits that are whole."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a repository's folder in the cache."""

    folder: Path
    digests: frozenset[str] = frozenset()
    commits: frozenset[str] = frozenset()

    @classmethod
    def read(cls, folder: Path) -> "_Known":
        """Returns what an earlier process has noted; nothing of a file that cannot be read."""
        try:
            found = json.loads((folder / WHOLE).read_text())
            return cls(folder, frozenset(found["digests"]), frozenset(found["commits"]))
        except (OSError, ValueError, KeyError, TypeError):
            return cls(folder)

    def write(self, digests: Sequence[str], commit: str) -> None:
        """Notes that a commit is whole, with the digests of its files."""
        noted = {"digests": sorted(self.digests | {*digests}), "commits": sorted(self.commits | {commit})}
        partial = self.folder / f"{WHOLE}.{os.getpid()}"
        partial.write_text(json.dumps(noted))
        os.replace(partial, self.folder / WHOLE)


def cache_folder() -> Path:
    """Returns the hub's cache folder."""
    return Path(constants.HF_HUB_CACHE)


def repository_folder(name: str) -> Path:
    """Returns the folder of a repository in the cache."""
    return cache_folder() / f"models--{name.replace('/', '--')}"


def is_whole(repository: Path, snapshot: Path) -> bool:
    """Returns whether all files of a snapshot that serving reads are in the cache."""
    return snapshot.name in _Known.read(repository).commits or _looks_whole(snapshot)


def local_snapshot(model: HubModel, report: Report) -> Path:
    """Returns the folder of a repository's files, brought here first if they are missing. Raises ModelError."""
    known = _Known.read(repository_folder(model.name))
    if constants.HF_HUB_OFFLINE:
        return _cached(model, known, "HF_HUB_OFFLINE is set")
    try:
        info = HfApi().model_info(model.name, revision=model.revision, files_metadata=True, timeout=30.0)
    except GatedRepoError as error:
        raise ModelError(
            f"{model.name} needs its licence to be accepted: do so on {constants.ENDPOINT}, "
            "and give the token of that account as HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ModelError(f"{model.name} has no revision {model.revision!r} on {constants.ENDPOINT}") from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            f"{model.name} is neither a folder here nor a model on {constants.ENDPOINT}; a private one needs HF_TOKEN"
        ) from error
    except (HfHubHTTPError, httpx2.TransportError, OfflineModeIsEnabled) as error:
        return _cached(model, known, f"{constants.ENDPOINT} does not answer ({_reason(error)})")
    assert info.sha is not None, "asked for by revision, it has a commit"
    return _bring(model, info.sha, info.siblings or [], known=known, report=report)


def _reason(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _cached(model: HubModel, known: _Known, why: str) -> Path:
    """The snapshot that is here. Raises ModelError where it is not, or not whole."""
    reference = known.folder / "refs" / model.revision
    commit = reference.read_text().strip() if reference.is_file() else model.revision
    folder = known.folder / "snapshots" / commit
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit) or not folder.is_dir():
        raise ModelError(f"{model.name} is not in {cache_folder()}, and {why}")
    if commit not in known.commits and not _looks_whole(folder):
        raise ModelError(f"{model.name} is in {cache_folder()} without all of its files, and {why}")
    logger.warning("%s is taken from %s without asking the hub: %s", model.name, folder, why)
    return folder


def _looks_whole(folder: Path) -> bool:
    """Whether a snapshot that another program brought has a configuration, a tokenizer and all weights."""
    index = folder / "model.safetensors.index.json"
    try:
        weights = (
            set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
        )
    except (ValueError, KeyError, AttributeError):
        return False
    return all((folder / name).is_file() for name in ("config.json", "tokenizer.json", *map(str, weights)))


def _bring(model: HubModel, commit: str, siblings: Sequence[RepoSibling], *, known: _Known, report: Report) -> Path:
    files = list(_files(model, commit, siblings, known.folder / "blobs"))
    if not any(file.name.endswith(".safetensors") for file in files):
        raise ModelError(f"{model.name} on {constants.ENDPOINT} has no weights as safetensors, which are what is read")
    for file in files:
        if file.place.exists() and file.digest not in known.digests:
            _compare(file, report)
    fetch(files, report=report, client=get_session())
    snapshot = known.folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    for file in files:
        link, target = snapshot / file.name, Path("..", "..", "blobs", file.place.name)
        if not link.is_symlink() or Path(os.readlink(link)) != target:
            partial = snapshot / f"{file.name}.{os.getpid()}"
            partial.symlink_to(target)
            os.replace(partial, link)
    if model.revision != commit:
        reference = known.folder / "refs" / model.revision
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(commit)
    known.write([file.digest for file in files], commit)
    return snapshot


def _files(model: HubModel, commit: str, siblings: Sequence[RepoSibling], blobs: Path) -> Iterator[RemoteFile]:
    for each in siblings:
        name = each.rfilename
        is_wanted = any(fnmatch.fnmatchcase(name, pattern) for pattern in WANTED) and "/" not in name
        if not is_wanted or any(fnmatch.fnmatchcase(name, pattern) for pattern in UNWANTED):
            continue
        size = each.lfs.size if each.lfs is not None else each.size
        digest = each.lfs.sha256 if each.lfs is not None else each.blob_id
        if size is None or digest is None or re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest) is None:
            raise ModelError(f"{constants.ENDPOINT} does not say the size and the digest of {name} of {model.name}")
        url = f"{constants.ENDPOINT}/{model.name}/resolve/{commit}/{quote(name)}"
        algorithm = "git" if each.lfs is None else "sha256"
        yield RemoteFile(name, size, blobs / digest, url, algorithm=algorithm, digest=digest, headers=build_hf_headers)


def _compare(file: RemoteFile, report: Report) -> None:
    """Reads a file that another program brought, once. Raises WrongDigest, and removes it, where it is another one."""
    with file.place.open("rb") as stream:
        found = digest_of(file, stream).hexdigest()
    if found != file.digest:
        file.place.unlink()
        raise WrongDigest(
            f"{file.name} in {file.place.parent} is not {file.digest} but {found}; it was removed: try again"
        )
    report(file, file.size_bytes)

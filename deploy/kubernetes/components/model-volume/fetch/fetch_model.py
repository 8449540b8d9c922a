"""Fetches a model's files by name, checks their digest, and only then gives them their place; needs Python alone.

`fetch_model.py fetch --endpoint URL --revision COMMIT --digest sha256:… --into FOLDER NAME` and
`fetch_model.py digest FOLDER`. FETCH_TOKEN, where it is set, is shown to the endpoint. A fetch that was interrupted
keeps the files that it had. Exit status: 0 where the folder has the digest, 1 where it does not, 2 for wrong arguments.
"""

import argparse
import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

WANTED = (".json", ".safetensors", ".jinja", ".model", ".txt")
"""Endings of the files that a model consists of: no programs, and no weights in pickles."""
CHUNK_BYTES = 1 << 20
TIMEOUT_S = 60
MAX_LIST_BYTES = 16 << 20


class FetchError(Exception):
    """What went wrong, in a sentence for the operator."""


def digest_of(folder: Path) -> str:
    """Returns the digest of a folder: that of its files' names and digests, in the order of the names.

    It is what `find . -type f | sort | xargs sha256sum | sha256sum` prints in the folder, with LC_ALL=C.
    """
    whole = hashlib.sha256()
    names = sorted(f"./{path.relative_to(folder).as_posix()}" for path in folder.rglob("*") if path.is_file())
    for name in names:
        with (folder / name).open("rb") as file:
            whole.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {name}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def fetch(endpoint: str, name: str, revision: str, *, digest: str, into: Path) -> None:
    """Makes `into` the folder of the model with this digest. Raises FetchError, and leaves nothing at `into` then."""
    if into.exists():
        if digest_of(into) == digest:
            print(f"{into} has the digest already")
            return
        raise FetchError(f"{into} exists and is not {digest}: give the new model another folder")
    partial = into.with_name(f".{into.name}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    wanted = sorted(_wanted(endpoint, name, revision))
    for stale in [path for path in partial.rglob("*") if path.is_file()]:
        if stale.relative_to(partial).as_posix() not in wanted:
            stale.unlink()
    for file in wanted:
        if not (partial / file).exists():
            _download(f"{endpoint}/{name}/resolve/{revision}/{urllib.parse.quote(file)}", partial / file)
    found = digest_of(partial)
    if found != digest:
        shutil.rmtree(partial)
        raise FetchError(f"the files of {name} at {revision} are {found}, not {digest}: they were removed")
    partial.rename(into)
    print(f"{into} has {len(wanted)} files of {name} at {revision}, {digest}")


def _wanted(endpoint: str, name: str, revision: str) -> Iterator[str]:
    with _open(f"{endpoint}/api/models/{name}/revision/{revision}") as answer:
        try:
            siblings = json.loads(answer.read(MAX_LIST_BYTES))["siblings"]
            files = [str(sibling["rfilename"]) for sibling in siblings]
        except (ValueError, KeyError, TypeError) as error:
            raise FetchError(f"{endpoint} answered with something else than a list of files") from error
    for file in files:
        path = PurePosixPath(file)
        if not re.fullmatch(r"[A-Za-z0-9_.\-/]{1,512}", file) or path.is_absolute() or ".." in path.parts:
            raise FetchError(f"{endpoint} lists a file with the name {file!r}, which would lie outside of the model")
        if path.suffix in WANTED and not any(part.startswith(".") for part in path.parts):
            yield str(path)
    if not any(file.endswith(".safetensors") for file in files):
        raise FetchError(f"{name} at {revision} has no weights in safetensors")


def _download(url: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _open(url) as answer:
        expected = answer.headers.get("content-length")
        try:
            with unfinished.open("wb") as file:
                shutil.copyfileobj(answer, file, CHUNK_BYTES)
        except (http.client.IncompleteRead, TimeoutError, ConnectionError) as error:
            raise FetchError(f"{url} broke off: {error}") from error
        except OSError as error:
            raise FetchError(f"{path} cannot be written: {error.strerror}") from error
    size = unfinished.stat().st_size
    if expected is not None and size != int(expected):
        unfinished.unlink()
        raise FetchError(f"{url} broke off after {size} of {expected} bytes")
    unfinished.rename(path)
    print(f"fetched {path.name}, {size} bytes", flush=True)


def _open(url: str) -> http.client.HTTPResponse:
    headers = {"user-agent": "tandem-fetch"}
    request = urllib.request.Request(url, headers=headers)
    if token := os.environ.get("FETCH_TOKEN"):
        # Not sent on to the storage to which the hub redirects.
        request.add_unredirected_header("authorization", f"Bearer {token}")
    try:
        answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        raise FetchError(f"{url} answered {error.code} {error.reason}") from error
    except OSError as error:
        raise FetchError(f"{url} does not answer: {error}") from error
    return answer


def main() -> int:
    """Does what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("digest")
    one.add_argument("folder", type=Path)
    one = commands.add_parser("fetch")
    for flag in ("--endpoint", "--revision", "--digest", "--into"):
        one.add_argument(flag, required=True)
    one.add_argument("name")
    given = parser.parse_args()
    if given.command == "digest":
        print(digest_of(given.folder))
        return 0
    if not given.endpoint.startswith(("https://", "http://")):
        parser.error(f"--endpoint is {given.endpoint!r} but must begin with https:// or http://")
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", given.digest):
        parser.error(f"--digest is {given.digest!r} but must be sha256: and 64 hex digits")
    if not re.fullmatch(r"[A-Za-z0-9_.\-]+(/[A-Za-z0-9_.\-]+)?", given.name):
        parser.error(f"the model is {given.name!r} but must be NAME or OWNER/NAME")
    try:
        endpoint = given.endpoint.rstrip("/")
        fetch(endpoint, given.name, given.revision, digest=given.digest, into=Path(given.into))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where a model is, as a setting says it: a folder, ORG/MODEL of the Hugging Face hub, or a place in S3. No network.

A setting's value is a `Path` in each case, so that it can be passed on as any folder is: `hf:/ORG/MODEL@REVISION` and
`s3:/BUCKET/PREFIX` stand for what `services.hub.models.local_model` brings to this machine.
"""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from services.runtime.kinds import Kind

HUB, S3 = "hf:", "s3:"
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_NAME = re.compile(rf"(?:hf:/{{1,2}})?({_NAME}/{_NAME})(?:@([A-Za-z0-9][A-Za-z0-9._/-]{{0,255}}))?")
_S3_NAME = re.compile(r"s3:/{1,2}([a-z0-9][a-z0-9.-]{1,62})/([^\x00?#]{1,1024})")
RULE = "a folder, ORG/MODEL or ORG/MODEL@REVISION of the Hugging Face hub, s3://BUCKET/PREFIX or file:///FOLDER"


@dataclass(frozen=True, slots=True)
class HubModel:
    """A repository of the Hugging Face hub; `revision` is a branch, a tag or a commit."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class S3Model:
    """The objects of a bucket below a prefix."""

    bucket: str
    prefix: str


def model_source() -> Kind[Path]:
    """A model's folder, or its name where no such folder exists."""
    return dataclasses.replace(Kind(_parse, RULE), metavar="MODEL")


def source_of(path: Path) -> HubModel | S3Model | None:
    """Returns which remote model a setting's value stands for, or None for a folder."""
    scheme, *rest = path.parts or ("",)
    if scheme == HUB:
        name, _, revision = "/".join(rest).partition("@")
        return HubModel(name, revision or "main")
    if scheme == S3:
        return S3Model(rest[0], "/".join(rest[1:]))
    return None


def served_name(path: Path) -> str:
    """Returns the name that clients use for a model where none is given: the hub's name, or its folder's."""
    source = source_of(path)
    if isinstance(source, HubModel):
        return source.name
    name = path.resolve().name if source is None else path.name
    return re.sub(r"\s+", "-", name) or "model"


def _parse(value: str) -> Path:
    if not value or "\0" in value:
        raise ValueError
    if value.startswith("s3:/"):
        if (found := _S3_NAME.fullmatch(value)) is None or not found[2].strip("/"):
            raise ValueError
        return Path(S3, found[1], found[2].strip("/"))
    if value.startswith("file://"):
        parts = urlsplit(value)
        if parts.netloc not in ("", "localhost") or not parts.path:
            raise ValueError
        return Path(unquote(parts.path))
    found = _HUB_NAME.fullmatch(value)
    is_named = value.startswith("hf:/")
    if is_named and found is None:
        raise ValueError
    if found is None or (not is_named and Path(value).exists()):
        folder = Path(value).expanduser()
        # Without its ./ a folder that does not exist yet would be taken for a name by the next process.
        return folder if folder.exists() or not _HUB_NAME.fullmatch(str(folder)) else folder.absolute()
    return Path(HUB, found[1] + (f"@{found[2]}" if found[2] else ""))

from datetime import UTC, datetime
from pathlib import Path

import pytest

from services.hub.fetching import CutOff, RemoteFile, WrongDigest
from services.hub.models import cached_models, local_model
from services.hub.s3 import local_objects, signed
from services.hub.source import S3Model, model_source
from tests.hub_server import Hub

MODEL = S3Model("bucket", "models/one")


@pytest.fixture(autouse=True)
def _store(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "AWS_ACCESS_KEY_ID",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_ENDPOINT_URL_S3",
        "AWS_REGION",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_ENDPOINT_URL", hub.url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def quiet(file: RemoteFile, num_bytes: int) -> None:
    pass


def test_the_objects_below_a_prefix_come_and_stay(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cuts = [1_000_000]
    folder = local_model(model_source().parse("s3://bucket/models/one"))
    assert (folder / "model.safetensors").read_bytes() == hub.files["model.safetensors"]
    assert "model.safetensors: 3.0 of 3.0 MB" in capsys.readouterr().err
    hub.asked.clear()
    assert local_objects(MODEL, quiet) == folder
    assert hub.asked == []
    assert [model.name for model in cached_models()] == ["s3://bucket/models/one"]
    hub.files["config.json"] = b"changed"
    assert local_objects(MODEL, quiet) != folder


def test_another_content_than_listed_is_refused(hub: Hub) -> None:
    hub.lies["config.json"] = b'{"a": 9}'
    with pytest.raises(WrongDigest, match=r"config\.json"):
        local_objects(MODEL, quiet)


@pytest.mark.parametrize("size", ["many", "-1", "1e9", "9" * 5000, "\u0663"])
def test_a_size_that_is_no_number_is_told_and_nothing_is_fetched(hub: Hub, size: str) -> None:
    hub.sizes["config.json"] = size
    with pytest.raises(CutOff, match=r"answers what is no listing of S3: '.*' is no size"):
        local_objects(MODEL, quiet)
    assert not [path for path in hub.asked if "config.json" in str(path)]


def test_a_refusal_is_told(hub: Hub) -> None:
    hub.status = 403
    with pytest.raises(CutOff, match="answers 403 Forbidden; see AWS_ACCESS_KEY_ID"):
        local_objects(MODEL, quiet)


def test_requests_are_signed_as_amazons_own_example_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # "GET Bucket (List Objects)" of Amazon's page on signature calculations for the Authorization header.
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    headers = signed(
        "https://examplebucket.s3.amazonaws.com/?max-keys=2&prefix=J", now=datetime(2013, 5, 24, tzinfo=UTC)
    )
    assert headers["authorization"].endswith(
        "Signature=34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"
    )
    assert "SignedHeaders=host;x-amz-content-sha256;x-amz-date" in headers["authorization"]


def test_with_a_key_each_request_is_signed(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    local_objects(MODEL, quiet)
    assert len(hub.signatures) > 3
    assert all(each.startswith("AWS4-HMAC-SHA256 Credential=k/") for each in hub.signatures)

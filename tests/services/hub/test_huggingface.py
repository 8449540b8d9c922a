"""A model of the hub comes whole or not at all, from a hub that breaks off, lies, refuses and goes away."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from decode_worker.config import DecodeWorkerConfig
from services.hub.fetching import CutOff, NoRoom, RemoteFile, WrongDigest
from services.hub.huggingface import local_snapshot, repository_folder
from services.hub.models import cached_models, with_local_model
from services.hub.source import HubModel
from services.runtime.config import read
from services.runtime.errors import ModelError
from tests.hub_server import COMMIT, Hub, git_digest

MODEL = HubModel("org/model", "main")
WEIGHTS = "model.safetensors"


def quiet(file: RemoteFile, num_bytes: int) -> None:
    pass


def ranges(hub: Hub) -> list[str]:
    return [asked for name, asked in hub.asked if name == WEIGHTS]


def test_what_serving_reads_lands_in_the_hubs_own_layout(hub: Hub) -> None:
    seen: list[tuple[str, int]] = []
    folder = local_snapshot(MODEL, lambda file, num_bytes: seen.append((file.name, num_bytes)))
    assert folder == repository_folder("org/model") / "snapshots" / COMMIT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: hub.files[name] for name in ("config.json", "tokenizer.json", WEIGHTS)
    }
    assert (folder / "config.json").resolve().name == git_digest(hub.files["config.json"])
    assert (folder.parents[1] / "refs" / "main").read_text() == COMMIT
    assert seen[-1][1] == len(hub.files[seen[-1][0]])
    hub.asked.clear()
    assert local_snapshot(MODEL, quiet) == folder
    assert hub.asked == []
    (found,) = cached_models()
    assert (found.name, found.revision, found.is_whole) == ("org/model", "main", True)
    assert found.num_bytes == 3_000_000 + 8 + 2


def test_a_draft_model_may_be_named_too(hub: Hub, tmp_path: Path) -> None:
    texts = {"id": "d", "model": str(tmp_path), "speculative": "draft"}
    named = with_local_model(read(DecodeWorkerConfig, {**texts, "draft_model": "org/model"}, environ={}))
    assert named.draft_model == repository_folder("org/model") / "snapshots" / COMMIT
    assert (named.model, named.model_name) == (tmp_path, None)
    here = read(DecodeWorkerConfig, {**texts, "draft_model": str(tmp_path)}, environ={})
    assert with_local_model(here) is here


def test_a_download_that_is_cut_off_twice_continues_where_it_was(hub: Hub) -> None:
    hub.cuts = [1_000_000, 500_000]
    folder = local_snapshot(MODEL, quiet)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert ranges(hub) == ["", "bytes=1000000-", "bytes=1500000-"]


def test_a_later_start_continues_what_an_earlier_one_left(hub: Hub) -> None:
    hub.cuts = [700_000, *[0] * 6]
    with pytest.raises(CutOff, match="a later try continues it"):
        local_snapshot(MODEL, quiet)
    assert not list(repository_folder("org/model").glob("snapshots/*/*"))
    hub.asked.clear()
    folder = local_snapshot(MODEL, quiet)
    assert ranges(hub) == ["bytes=700000-"]
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


def test_a_source_without_ranges_begins_again(hub: Hub) -> None:
    hub.cuts, hub.has_ranges = [1_000_000], False
    folder = local_snapshot(MODEL, quiet)
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]


@pytest.mark.parametrize("name", [WEIGHTS, "config.json"])
@pytest.mark.parametrize("change", ["flipped", "longer", "shorter"])
def test_what_is_not_as_announced_is_refused_and_removed(hub: Hub, name: str, change: str) -> None:
    right = hub.files[name]
    hub.lies = {name: {"flipped": b"X" + right[1:], "longer": right + b"more", "shorter": right[:-1]}[change]}
    with pytest.raises((WrongDigest, CutOff)) as caught:
        local_snapshot(MODEL, quiet)
    assert name in caught.value.message
    assert not list(repository_folder("org/model").glob("snapshots/*/*"))
    hub.lies = {}
    folder = local_snapshot(MODEL, quiet)
    assert (folder / name).read_bytes() == right


def test_no_room_is_said_before_the_first_byte(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 3_000_000 + (64 << 20)})
    monkeypatch.setattr("services.hub.fetching.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(NoRoom, match=r"2\.9 MiB have to be downloaded and .* has 66\.9 MiB free"):
        local_snapshot(MODEL, quiet)
    assert hub.asked == []


def test_a_file_that_another_program_brought_is_compared_once(hub: Hub) -> None:
    folder = local_snapshot(MODEL, quiet)
    (folder.parents[1] / "tandem-whole.json").unlink()
    (folder / "config.json").resolve().write_bytes(b'{"a": 2}')
    with pytest.raises(WrongDigest, match="was removed: try again"):
        local_snapshot(MODEL, quiet)
    assert json.loads((local_snapshot(MODEL, quiet) / "config.json").read_text()) == {"a": 1}


def test_without_a_network_what_is_here_serves(hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="is not in"):
        local_snapshot(MODEL, quiet)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = local_snapshot(MODEL, quiet)
    hub.status = 503
    assert local_snapshot(MODEL, quiet) == folder
    assert "does not answer" in caplog.text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_snapshot(MODEL, quiet) == folder
    assert local_snapshot(HubModel("org/model", COMMIT), quiet) == folder
    (folder.parents[1] / "tandem-whole.json").unlink()
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match="without all of its files"):
        local_snapshot(MODEL, quiet)


def test_a_private_model_needs_its_token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_secret"
    with pytest.raises(ModelError, match="a private one needs HF_TOKEN"):
        local_snapshot(MODEL, quiet)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (local_snapshot(MODEL, quiet) / WEIGHTS).is_file()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (HubModel("org/other", "main"), "org/other is neither a folder here nor a model on"),
        (HubModel("org/model", "v9"), "has no revision 'v9'"),
    ],
)
def test_what_does_not_exist_is_named(hub: Hub, model: HubModel, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        local_snapshot(model, quiet)


def test_a_model_without_safetensors_is_refused(hub: Hub) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(ModelError, match="no weights as safetensors"):
        local_snapshot(MODEL, quiet)
    assert Path(constants.HF_HUB_CACHE).exists() is False

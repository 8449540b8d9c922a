"""The client's stubs are the server's, and its own shapes are those of the messages that they stand for."""

import subprocess
import sys
from pathlib import Path

import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2
from tandem_client.protos import cluster_pb2, inference_pb2, wire_pb2

from protos import cluster_pb2 as server_cluster_pb2
from protos import inference_pb2 as server_inference_pb2
from tests.waiting import HANG_LIMIT_S

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "client" / "tandem_client"


@pytest.mark.parametrize("name", ["inference_pb2.py", "inference_pb2.pyi", "cluster_pb2.py", "cluster_pb2.pyi"])
def test_the_copies_are_the_servers_byte_for_byte(name: str) -> None:
    assert (PACKAGE / "protos" / name).read_bytes() == (ROOT / "protos" / name).read_bytes(), "run make proto"


def test_a_request_has_the_fields_of_sampling_and_their_comments() -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "client_fields.py", "--check"], check=True)


def test_both_may_be_imported_in_one_process() -> None:
    for ours, theirs in ((inference_pb2, server_inference_pb2), (cluster_pb2, server_cluster_pb2)):
        assert vars(ours)["DESCRIPTOR"] is vars(theirs)["DESCRIPTOR"]
    assert vars(inference_pb2)["GenerateRequest"] is vars(server_inference_pb2)["GenerateRequest"]


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (wire_pb2.Status, status_pb2.Status),
        (wire_pb2.ErrorInfo, error_details_pb2.ErrorInfo),
        (wire_pb2.RetryInfo, error_details_pb2.RetryInfo),
        (wire_pb2.BadRequest, error_details_pb2.BadRequest),
        (wire_pb2.BadRequest.FieldViolation, error_details_pb2.BadRequest.FieldViolation),
        (wire_pb2.HealthCheckRequest, health_pb2.HealthCheckRequest),
        (wire_pb2.HealthCheckResponse, health_pb2.HealthCheckResponse),
    ],
    ids=lambda message: message.DESCRIPTOR.full_name,
)
def test_the_shapes_fit(ours: type, theirs: type) -> None:
    known = {field.number: field for field in theirs.DESCRIPTOR.fields}
    for field in ours.DESCRIPTOR.fields:
        assert (field.name, field.type, field.is_repeated) == (
            known[field.number].name,
            known[field.number].type,
            known[field.number].is_repeated,
        )


def test_the_words_of_health_are_the_same() -> None:
    ours = wire_pb2.HealthCheckResponse.ServingStatus.items()
    assert ours == health_pb2.HealthCheckResponse.ServingStatus.items()


_BARE = """
import importlib.abc, sys

class Only(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        allowed = {"tandem_client", "grpc", "google", "typing_extensions"} | sys.stdlib_module_names
        if name.partition(".")[0] not in allowed or name.startswith(("google.rpc", "google.api")):
            raise ImportError(name)

sys.meta_path.insert(0, Only())
sys.path.insert(0, sys.argv[1])
import tandem_client
with tandem_client.Client("127.0.0.1:1") as client:
    print(client.is_serving())
"""


def test_it_needs_only_grpcio_and_protobuf() -> None:
    bare = [sys.executable, "-c", _BARE, str(ROOT / "client")]
    done = subprocess.run(bare, capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False, cwd="/")
    assert (done.stdout, done.stderr) == ("False\n", "")

"""The public protos against those of the last release, and that the comparison sees each way to break a program."""

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from hypothesis import given
from hypothesis import strategies as st

from tests.waiting import HANG_LIMIT_S

TOOL = Path(__file__).resolve().parents[2] / "tools" / "proto_compat.py"


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("proto_compat", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compat = _load()
RELEASED = FileDescriptorSet.FromString(compat.RELEASED.read_bytes())


def test_programs_of_the_last_release_still_work() -> None:
    assert compat.breaks(RELEASED, compat.current()) == []


def test_the_release_holds_every_public_service() -> None:
    services = {service.name: len(service.method) for file in RELEASED.file for service in file.service}
    assert services.keys() == {"Inference", "Cluster"}
    assert min(services.values()) >= 3


def test_the_command_says_what_is_broken() -> None:
    done = subprocess.run(
        [sys.executable, str(TOOL), "check"], capture_output=True, text=True, timeout=HANG_LIMIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_command_fails_for_a_break(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = _copy()
    del _message(now, "Usage").field[0]
    monkeypatch.setattr(compat, "current", lambda: now)
    assert compat.main(["check"]) == 1
    assert capsys.readouterr().err == "error: field Usage.prompt_tokens = 1 is gone\n"


def _copy() -> FileDescriptorSet:
    copy = FileDescriptorSet()
    copy.CopyFrom(RELEASED)
    return copy


def _file(files: FileDescriptorSet) -> FileDescriptorProto:
    return next(file for file in files.file if file.name == "protos/inference.proto")


def _message(files: FileDescriptorSet, name: str) -> DescriptorProto:
    return next(message for message in _file(files).message_type if message.name == name)


def _field(files: FileDescriptorSet, message: str, name: str) -> FieldDescriptorProto:
    return next(field for field in _message(files, message).field if field.name == name)


def _drop(repeated: Any, name: str) -> None:
    del repeated[next(index for index, entry in enumerate(repeated) if entry.name == name)]


def _method(files: FileDescriptorSet, name: str) -> Any:
    return next(method for method in _file(files).service[0].method if method.name == name)


def _set(target: Callable[[FileDescriptorSet], Any], name: str, value: Any) -> Callable[[FileDescriptorSet], None]:
    return lambda files: setattr(target(files), name, value)


BREAKS: dict[str, tuple[Callable[[FileDescriptorSet], None], str]] = {
    "field gone": (
        lambda files: _drop(_message(files, "GenerateRequest").field, "tenant"),
        "field GenerateRequest.tenant = 7 is gone",
    ),
    "field renamed": (
        _set(lambda files: _field(files, "Usage", "queue_s"), "name", "wait_s"),
        "field Usage.queue_s = 4: its name was queue_s and is wait_s",
    ),
    "field renumbered": (
        _set(lambda files: _field(files, "Usage", "queue_s"), "number", 44),
        "field Usage.queue_s = 4 is gone",
    ),
    "field of another type": (
        _set(lambda files: _field(files, "Usage", "queue_s"), "type", FieldDescriptorProto.TYPE_FLOAT),
        "field Usage.queue_s = 4: its type was double and is float",
    ),
    "field of another message": (
        _set(lambda files: _field(files, "GenerateResponse", "usage"), "type_name", ".tandem.v1.Model"),
        "field GenerateResponse.usage = 7: its type was .tandem.v1.Usage and is .tandem.v1.Model",
    ),
    "field repeated no more": (
        _set(lambda files: _field(files, "TokenIds", "ids"), "label", FieldDescriptorProto.LABEL_OPTIONAL),
        "field TokenIds.ids = 1: its label was repeated and is optional",
    ),
    "field always present": (
        _set(lambda files: _field(files, "SamplingParams", "seed"), "proto3_optional", False),
        "field SamplingParams.seed = 7: its presence was optional and is plain",
    ),
    "field out of its oneof": (
        lambda files: _field(files, "GenerateRequest", "text").ClearField("oneof_index"),
        "field GenerateRequest.text = 3: its oneof was prompt and is none",  # prose: ok, a value,
    ),
    "message gone": (lambda files: _drop(_file(files).message_type, "TopLogprob"), "message TopLogprob is gone"),
    "map's value of another type": (
        lambda files: setattr(
            _message(files, "SamplingParams").nested_type[0].field[1], "type", FieldDescriptorProto.TYPE_DOUBLE
        ),
        "field SamplingParams.LogitBiasEntry.value = 2: its type was float and is double",
    ),
    "map no more": (
        lambda files: _message(files, "SamplingParams").nested_type[0].options.ClearField("map_entry"),
        "message SamplingParams.LogitBiasEntry was made for a map",
    ),
    "enum gone": (lambda files: _drop(_file(files).enum_type, "FinishReason"), "enum FinishReason is gone"),
    "value gone": (
        lambda files: _drop(_file(files).enum_type[0].value, "FINISH_REASON_LENGTH"),
        "enum FinishReason: the value FINISH_REASON_LENGTH = 2 is gone",
    ),
    "value renumbered": (
        lambda files: setattr(_file(files).enum_type[0].value[3], "number", 9),
        "enum FinishReason: the value FINISH_REASON_CANCELLED = 3 is gone",
    ),
    "service gone": (lambda files: _drop(_file(files).service, "Inference"), "service Inference is gone"),
    "method gone": (
        lambda files: _drop(_file(files).service[0].method, "Resume"),
        "method Inference.Resume is gone",
    ),
    "method of another request": (
        _set(lambda files: _method(files, "Resume"), "input_type", ".tandem.v1.GenerateRequest"),
        "method Inference.Resume was (.tandem.v1.ResumeRequest) returns (stream .tandem.v1.GenerateResponse) "
        "and is (.tandem.v1.GenerateRequest) returns (stream .tandem.v1.GenerateResponse)",
    ),
    "method of another response": (
        _set(lambda files: _method(files, "Tokenize"), "output_type", ".tandem.v1.Model"),
        "method Inference.Tokenize was (.tandem.v1.TokenizeRequest) returns (.tandem.v1.TokenizeResponse) "
        "and is (.tandem.v1.TokenizeRequest) returns (.tandem.v1.Model)",
    ),
    "method streams no more": (
        _set(lambda files: _method(files, "Resume"), "server_streaming", False),
        "method Inference.Resume was (.tandem.v1.ResumeRequest) returns (stream .tandem.v1.GenerateResponse) "
        "and is (.tandem.v1.ResumeRequest) returns (.tandem.v1.GenerateResponse)",
    ),
    "package": (
        _set(_file, "package", "tandem.v2"),
        "file protos/inference.proto: its package was tandem.v1 and is tandem.v2",
    ),
    "syntax": (
        _set(_file, "syntax", "editions"),
        "file protos/inference.proto: its syntax was proto3 and is editions",
    ),
    "file gone": (
        lambda files: _drop(files.file, "protos/inference.proto"),
        "file protos/inference.proto is gone",
    ),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_break_is_named(name: str) -> None:
    change, expected = BREAKS[name]
    now = _copy()
    change(now)
    assert compat.breaks(RELEASED, now) == [expected]


def test_what_was_reserved_stays_so() -> None:
    released = _copy()
    usage = _message(released, "Usage")
    usage.reserved_range.add(start=20, end=22)
    usage.reserved_name.append("old")
    assert compat.breaks(released, RELEASED) == [
        "message Usage: numbers 20 to 21 are no longer reserved",
        "message Usage: the name old is no longer reserved",
    ]
    wider = _copy()
    wider.CopyFrom(released)
    _message(wider, "Usage").reserved_range[0].end = 30
    assert compat.breaks(released, wider) == []


def test_what_was_added_is_fine() -> None:
    now = _copy()
    file = _file(now)
    _message(now, "Usage").field.add(
        name="new", number=99, type=FieldDescriptorProto.TYPE_BOOL, label=FieldDescriptorProto.LABEL_OPTIONAL
    )
    file.message_type.add(name="New")
    file.enum_type[0].value.add(name="FINISH_REASON_NEW", number=99)
    file.enum_type.add(name="NewEnum")
    file.service.add(name="NewService")
    file.service[0].method.add(name="New", input_type=".tandem.v1.New", output_type=".tandem.v1.New")
    now.file.add(name="protos/new.proto")
    now.file.sort(key=lambda entry: entry.name, reverse=True)
    assert compat.breaks(RELEASED, now) == []


@given(st.data())
def test_any_field_that_is_taken_away_or_renumbered_is_missed(data: st.DataObject) -> None:
    now = _copy()
    file = data.draw(st.sampled_from(list(now.file)), label="file")
    message = data.draw(st.sampled_from([entry for entry in file.message_type if entry.field]), label="message")
    index = data.draw(st.integers(0, len(message.field) - 1), label="field")
    field = message.field[index]
    title = f"field {message.name}.{field.name} = {field.number} is gone"
    if data.draw(st.booleans(), label="renumbered"):
        field.number += 1000
    else:
        del message.field[index]
    assert compat.breaks(RELEASED, now) == [title]

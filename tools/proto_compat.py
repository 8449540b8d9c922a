"""Whether programs made for the last release still understand the public protos.

`check` compares the committed stubs with `protos/released.binpb` and names everything that was taken away or changed:
a field's number, name, type, presence or oneof, an enum's values, a message, a service, a method or its types. What was
added is fine. `release` writes the file anew, as part of a release. Internal protos are not in it: processes of one
cluster are of one version.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from google.protobuf import descriptor_pb2
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
    ServiceDescriptorProto,
)

ROOT = Path(__file__).resolve().parents[1]
RELEASED = ROOT / "protos" / "released.binpb"


def current() -> FileDescriptorSet:
    """The public protos as their committed stubs have them."""
    sys.path.insert(0, str(ROOT))
    from protos import cluster_pb2, inference_pb2

    files = FileDescriptorSet()
    for module in (cluster_pb2, inference_pb2):
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def breaks(released: FileDescriptorSet, now: FileDescriptorSet) -> list[str]:
    """What a program that was made for `released` would miss in `now`, a sentence each; empty: nothing."""
    files = {file.name: file for file in now.file}
    found: list[str] = []
    for file in released.file:
        if file.name not in files:
            found.append(f"file {file.name} is gone")
        else:
            found += _file_breaks(file, files[file.name])
    return found


def _file_breaks(before: FileDescriptorProto, now: FileDescriptorProto) -> Iterator[str]:
    for fact in ("package", "syntax"):
        if getattr(before, fact) != getattr(now, fact):
            yield f"file {before.name}: its {fact} was {getattr(before, fact)} and is {getattr(now, fact)}"
    messages = {message.name: message for message in now.message_type}
    for message in before.message_type:
        yield from _message_breaks(message.name, message, messages.get(message.name))
    enums = {enum.name: enum for enum in now.enum_type}
    for enum in before.enum_type:
        yield from _enum_breaks(enum.name, enum, enums.get(enum.name))
    services = {service.name: service for service in now.service}
    for service in before.service:
        yield from _service_breaks(service, services.get(service.name))


def _message_breaks(name: str, before: DescriptorProto, now: DescriptorProto | None) -> Iterator[str]:
    if now is None:
        yield f"message {name} is gone"
        return
    fields = {field.number: field for field in now.field}
    for field in before.field:
        title = f"field {name}.{field.name} = {field.number}"
        if field.number not in fields:
            yield f"{title} is gone"
        else:
            was, is_now = _field_facts(before, field), _field_facts(now, fields[field.number])
            for fact in was:
                if was[fact] != is_now[fact]:
                    yield f"{title}: its {fact} was {was[fact]} and is {is_now[fact]}"
    if before.options.map_entry != now.options.map_entry:
        yield f"message {name} was {'' if before.options.map_entry else 'not '}made for a map"
    for kept in before.reserved_range:
        if not any(wide.start <= kept.start and kept.end <= wide.end for wide in now.reserved_range):
            yield f"message {name}: numbers {kept.start} to {kept.end - 1} are no longer reserved"
    for kept_name in sorted(set(before.reserved_name) - set(now.reserved_name)):
        yield f"message {name}: the name {kept_name} is no longer reserved"
    nested = {message.name: message for message in now.nested_type}
    for message in before.nested_type:
        yield from _message_breaks(f"{name}.{message.name}", message, nested.get(message.name))
    enums = {enum.name: enum for enum in now.enum_type}
    for enum in before.enum_type:
        yield from _enum_breaks(f"{name}.{enum.name}", enum, enums.get(enum.name))


def _field_facts(message: DescriptorProto, field: FieldDescriptorProto) -> dict[str, str]:
    """What programs rely on, in words. An `optional` field has a oneof too, of the compiler's own: no news."""
    oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""
    return {
        "name": field.name,
        "type": field.type_name or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower(),
        "label": FieldDescriptorProto.Label.Name(field.label).removeprefix("LABEL_").lower(),
        "presence": "optional" if field.proto3_optional else "plain",
        "oneof": "none" if not oneof or oneof == f"_{field.name}" else oneof,
    }


def _enum_breaks(name: str, before: EnumDescriptorProto, now: EnumDescriptorProto | None) -> Iterator[str]:
    if now is None:
        yield f"enum {name} is gone"
        return
    values = {(value.number, value.name) for value in now.value}
    for value in before.value:
        if (value.number, value.name) not in values:
            yield f"enum {name}: the value {value.name} = {value.number} is gone"


def _service_breaks(before: ServiceDescriptorProto, now: ServiceDescriptorProto | None) -> Iterator[str]:
    if now is None:
        yield f"service {before.name} is gone"
        return
    methods = {method.name: method for method in now.method}
    for method in before.method:
        title = f"method {before.name}.{method.name}"
        if method.name not in methods:
            yield f"{title} is gone"
        elif (was := _signature(method)) != (is_now := _signature(methods[method.name])):
            yield f"{title} was {was} and is {is_now}"


def _signature(method: MethodDescriptorProto) -> str:
    request = "stream " * method.client_streaming + method.input_type
    response = "stream " * method.server_streaming + method.output_type
    return f"({request}) returns ({response})"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0: fine; 1: something is broken."""
    parser = argparse.ArgumentParser(description="Compares the public protos with those of the last release.")
    parser.add_argument("what", choices=("check", "release"))
    what = parser.parse_args(arguments).what
    now = current()
    if what == "release":
        RELEASED.write_bytes(now.SerializeToString(deterministic=True))
        return 0
    found = breaks(descriptor_pb2.FileDescriptorSet.FromString(RELEASED.read_bytes()), now)
    for line in found:
        sys.stderr.write(f"error: {line}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

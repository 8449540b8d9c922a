#!/usr/bin/env python3
"""Fills in the parameters of sampling in the client's Request, from the message in protos/inference.proto.

usage: tools/client_fields.py [--check]      (--check: exit status 1 if the file is not what would be written)
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "protos" / "inference.proto"
VALUES = ROOT / "client" / "tandem_client" / "values.py"

BEGIN = "    # From the message SamplingParams, by tools/client_fields.py.\n"
END = "    # To here.\n"
TYPES = {
    "uint32": ("int", "0"),
    "int32": ("int", "0"),
    "int64": ("int", "0"),
    "float": ("float", "0.0"),
    "bool": ("bool", "False"),
    "string": ("str", '""'),
}


def fields(proto: str) -> str:
    """Returns the dataclass fields for the message, with its comments as their docstrings."""
    message = re.search(r"\nmessage SamplingParams \{\n(.*?)\n\}", proto, re.DOTALL)
    assert message is not None
    found = re.findall(r"((?: +//.*\n)+) +(\w.*?) (\w+) = \d+;", message[1])
    return "".join(f"    {name}: {_annotated(kind)}\n{_docstring(comment)}" for comment, kind, name in found)


def _annotated(kind: str) -> str:
    """Returns a field's type and its default, as Python writes them."""
    if kind.startswith("map<"):
        key, value = (TYPES[each][0] for each in kind.removeprefix("map<").removesuffix(">").split(", "))
        return f"Mapping[{key}, {value}] = field(default_factory=dict)"
    label, _, name = kind.rpartition(" ")
    python_type, zero = TYPES[name]
    defaults = {
        "repeated": f"Sequence[{python_type}] = ()",
        "optional": f"{python_type} | None = None",
        "": f"{python_type} = {zero}",
    }
    return defaults[label]


def _docstring(comment: str) -> str:
    text = " ".join(line.strip().removeprefix("//").strip() for line in comment.splitlines())
    text = text.replace("Absent:", "None:")
    return textwrap.fill(f'"""{text}"""', 116, initial_indent="    ", subsequent_indent="    ") + "\n"


def main() -> int:
    """Writes or compares."""
    text = VALUES.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = before + BEGIN + fields(PROTO.read_text()) + END + after
    if "--check" in sys.argv[1:]:
        return 0 if made == text else 1
    VALUES.write_text(made)
    return 0


if __name__ == "__main__":
    sys.exit(main())

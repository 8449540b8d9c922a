"""Other people's clients and suites against one `tandem up`: each in an environment of its own, from its package.

usage: python -m tests.compat.run [NAMES…] [--write]      (--write: the matrix of docs/clients.md)

A check that fails though `tests/compat/expected.toml` does not say so, or that passes though it does, is an error; one
whose reason begins with "by chance" may do either.
"""

import argparse
import json
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.cluster import Cluster, running_cluster
from demo import DEMO_MODEL
from tests.compat.programs import ENVIRONMENTS, LONG_MODEL, MODEL, PROGRAMS, ROOT, Findings, Missing

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "clients.md"
ALIASES = ["test", "gpt-3.5-turbo", "gpt-3.5-turbo-instruct", "gpt-4.1"]
"""Names that suites have in their requests."""
BY_CHANCE = "by chance"
LONG_CONTEXT_TOKENS = 65536
BEGIN, END = "<!-- matrix -->\n", "<!-- end -->"


def main() -> int:
    """Runs the programs and compares what they find with what is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PROGRAMS)}; none: all")
    parser.add_argument("--write", action="store_true", help="write the matrix of docs/clients.md")
    arguments = parser.parse_args()
    names = arguments.names or [*PROGRAMS]
    expected = tomllib.loads((HERE / "expected.toml").read_text())
    found: dict[str, Findings] = {}
    num_mistakes = 0
    for model, file in _models().items():
        asked = [name for name in names if PROGRAMS[name].model == model]
        if asked:
            with running_cluster("--models", str(file), "--threads", "1", "--embeddings", "on") as cluster:
                for name in asked:
                    try:
                        found[name] = _run(name, cluster)
                    except Missing as missing:
                        sys.stdout.write(f"{name}: skipped, {missing}\n")
                        continue
                    num_good = sum(not wrong for wrong in found[name].checks.values())
                    sys.stdout.write(f"{name} {found[name].version}: {num_good} of {len(found[name].checks)}\n")
                    wrong = [f"{line}\n" for line in _compared(name, found[name], expected.get(name, {}))]
                    sys.stdout.writelines(wrong)
                    sys.stdout.flush()
                    num_mistakes += len(wrong)
    if arguments.write:
        text = PAGE.read_text()
        PAGE.write_text(
            re.sub(
                f"{BEGIN}(.*?){END}",
                lambda known: BEGIN + _matrix(found, expected, known[1].splitlines()) + END,
                text,
                flags=re.DOTALL,
            )
        )
    return bool(num_mistakes)


def _models() -> Mapping[str, Path]:
    """Returns the files that name the demo model, and a copy of it for agents, whose prompts are long."""
    long = ENVIRONMENTS / "long"
    shutil.copytree(DEMO_MODEL, long, dirs_exist_ok=True)
    _change(long / "config.json", max_position_embeddings=LONG_CONTEXT_TOKENS)
    vocabulary = Tokenizer.from_file(str(long / "tokenizer.json")).get_vocab()
    # It has learnt from short texts, and would fill such a context: a full stop ends its answers.
    ends = [token_id for text, token_id in sorted(vocabulary.items()) if "." in text]
    _change(long / "generation_config.json", eos_token_id=[1, 2, *ends])
    files = {}
    for name, folder in ((MODEL, DEMO_MODEL), (LONG_MODEL, long)):
        members = {"name": name, "path": str(folder), "aliases": ALIASES}
        files[name] = ENVIRONMENTS / f"{name}.toml"
        lines = ["[[model]]", *(f"{member} = {json.dumps(value)}" for member, value in members.items()), ""]
        files[name].write_text("\n".join(lines))
    return files


def _change(file: Path, **members: object) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **members}))


def _run(name: str, cluster: Cluster) -> Findings:
    program = PROGRAMS[name]
    folder = ENVIRONMENTS / name
    folder.mkdir(parents=True, exist_ok=True)
    told = {
        "COMPAT_URL": cluster.http,
        "COMPAT_GRPC": cluster.grpc,
        "COMPAT_KEY": "not-asked-for",
        "COMPAT_MODEL": program.model,
        "COMPAT_PROTO": str(ROOT / "protos" / "inference.proto"),
    }
    return program.run(folder, told)


def _compared(name: str, found: Findings, expected: Mapping[str, str]) -> Iterator[str]:
    for check, wrong in found.checks.items():
        if wrong and check not in expected:
            yield f"{name}: {check} fails: {wrong}"
        elif not wrong and not expected.get(check, BY_CHANCE).startswith(BY_CHANCE):
            yield f"{name}: {check} passes, though it is expected to fail"
    for check in expected.keys() - found.checks.keys():
        yield f"{name}: {check} is expected to fail, and is not there"


def _matrix(found: Mapping[str, Findings], expected: Mapping[str, Mapping[str, str]], known: Sequence[str]) -> str:
    """Returns the matrix: a row for each program that ran, and those that are known of the others."""
    rows = [
        "| client | version | checks | what to set | what does not work, and why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, program in PROGRAMS.items():
        if name in found:
            good = sum(not wrong for wrong in found[name].checks.values())
            reasons = "; ".join(dict.fromkeys(expected.get(name, {}).values())) or "–"
            cells = (
                program.title,
                found[name].version,
                f"{good} of {len(found[name].checks)}",
                program.settings,
                reasons,
            )
            rows.append("| " + " | ".join(cells) + " |")
        else:
            rows += [row for row in known if row.startswith(f"| {program.title} |")]
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    sys.exit(main())

"""Reading recorded workloads: each format, and each way in which a file can be wrong."""

import contextlib
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.simulator.traces import Trace, compressed, read_trace
from services.runtime.errors import ConfigError

TRACES = Path(__file__).resolve().parents[3] / "benchmarks" / "traces"


def row(**changes: Any) -> str:
    fields = {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]} | changes
    return json.dumps({name: value for name, value in fields.items() if value is not ...})


def read(folder: Path, content: str | bytes, **options: Any) -> Trace:
    file = folder / "trace"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_trace(file, **options)


def test_the_mooncake_trace_is_what_its_readme_says() -> None:
    trace = read_trace(TRACES / "mooncake_fast25_conversation.jsonl.gz")
    assert (trace.format, trace.block_tokens, len(trace.requests)) == ("mooncake", 512, 12_031)
    assert sum(request.num_prompt_tokens for request in trace.requests) // 12_031 == 12_035
    assert sum(request.num_output_tokens for request in trace.requests) // 12_031 == 342
    assert sum(len(request.block_ids) for request in trace.requests) == 288_500
    assert len({block for request in trace.requests for block in request.block_ids}) == 182_790
    assert trace.requests[0].arrival_s == 0.0
    assert trace.requests[-1].arrival_s == pytest.approx(3537, abs=1)


def test_the_azure_trace_is_what_its_readme_says() -> None:
    trace = read_trace(TRACES / "azure2023_conv_first40min.csv.gz")
    assert (trace.format, trace.block_tokens, len(trace.requests)) == ("csv", 0, 14_176)
    assert sum(request.num_prompt_tokens for request in trace.requests) // 14_176 == 1_195


def test_azure_as_it_is_published(tmp_path: Path) -> None:
    trace = read(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50,396,109\n",
    )
    assert trace.format == "azure"
    assert trace.requests[1].arrival_s == pytest.approx(3.31941)
    assert [request.num_prompt_tokens for request in trace.requests] == [374, 396]


def test_lengths_need_a_rate_and_get_poisson_arrivals(tmp_path: Path) -> None:
    lengths = "input_tokens,output_tokens\n" + "10,5\n" * 4000
    with pytest.raises(ConfigError, match="no arrival times"):
        read(tmp_path, lengths)
    trace = read(tmp_path, lengths, rate_per_s=8.0, seed=3)
    assert trace.requests[-1].arrival_s == pytest.approx(500, rel=0.05)
    assert trace == read(tmp_path, lengths, rate_per_s=8.0, seed=3)
    assert trace != read(tmp_path, lengths, rate_per_s=8.0, seed=4)


def test_unit_arrivals_are_divided_by_the_rate(tmp_path: Path) -> None:
    trace = read(tmp_path, "unit_arrival_s,input_tokens,output_tokens\n1,10,5\n3,10,5\n", rate_per_s=4.0)
    assert [request.arrival_s for request in trace.requests] == [0.0, 0.5]


def test_requests_come_in_order_of_arrival_and_from_zero_on(tmp_path: Path) -> None:
    rows = [row(timestamp=9000, output_length=1), row(timestamp=5000, output_length=2)]
    rows.append(row(timestamp=5000, output_length=3, tenant="a", **{"class": "batch"}))
    trace = read(tmp_path, gzip.compress("\n\n".join(rows).encode()))
    assert [(one.arrival_s, one.num_output_tokens) for one in trace.requests] == [(0.0, 2), (0.0, 3), (4.0, 1)]
    assert (trace.requests[1].tenant, trace.requests[1].service_class) == ("a", "batch")


def test_regions_are_read_where_a_trace_has_them(tmp_path: Path) -> None:
    header = "arrival_s,input_tokens,output_tokens,region,residency\n"
    trace = read(tmp_path, header + '0,5,5,eu,"us, eu"\n1,5,5,,\n')
    assert [(one.region, one.residency) for one in trace.requests] == [("eu", ("eu", "us")), ("", ())]
    (request,) = read(tmp_path, row(region="us", residency="us")).requests
    assert (request.region, request.residency) == ("us", ("us",))


def test_speed_and_limit(tmp_path: Path) -> None:
    trace = read(tmp_path, "arrival_s,input_tokens,output_tokens\n0,1,1\n3,1,1\n6,1,1\n")
    assert [request.arrival_s for request in compressed(trace, speed=3.0, limit=2).requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("content", "line", "field"),
    [
        (row(timestamp=-1), 1, "timestamp"),
        (row(timestamp="soon"), 1, "timestamp"),
        (row(timestamp=...), 1, "timestamp"),
        (row(timestamp=True), 1, "timestamp"),
        (row(timestamp=10**400), 1, "timestamp"),
        (row() + "\n" + row(input_length=0), 2, "input_length"),
        (row() + "\n\n" + row(output_length=1.5), 3, "output_length"),
        (row(output_length=...), 1, "output_length"),
        (row(input_length=2**31), 1, "input_length"),
        (row(hash_ids=[1]), 1, "hash_ids"),
        (row(hash_ids=[1, 2, 3]), 1, "hash_ids"),
        (row(hash_ids=[1, 1]), 1, "hash_ids"),
        (row(hash_ids=[1, "2"]), 1, "hash_ids"),
        (row(hash_ids=...), 1, "hash_ids"),
        (row(**{"class": "urgent"}), 1, "class"),
        (row(tenant=4), 1, "tenant"),
        (row(region="a b"), 1, "region"),
        (row(region=7), 1, "region"),
        (row(residency="eu,,us"), 1, "residency"),
        (row(residency=["eu"]), 1, "residency"),
        ("arrival_s,input_tokens,output_tokens\n0,5,5\nnan,5,5\n", 3, "arrival_s"),
        ("arrival_s,input_tokens,output_tokens\n0,5,-5\n", 2, "output_tokens"),
        ("arrival_s,input_tokens,output_tokens\n0,five,5\n", 2, "input_tokens"),
        ("arrival_s,input_tokens,output_tokens\n0," + "9" * 5000 + ",5\n", 2, "input_tokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,5,5\n", 2, "TIMESTAMP"),
        ("class,input_tokens,output_tokens,arrival_s\nurgent,5,5,0\n", 2, "class"),
    ],
)
def test_a_wrong_field_is_named_with_file_line_and_rule(tmp_path: Path, content: str, line: int, field: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, content)
    assert raised.value.message.startswith(f"{tmp_path / 'trace'}, line {line}, field {field!r}: must be ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is empty"),
        ("\n\n", "is empty"),
        ("arrival_s,input_tokens,output_tokens\n", "has no request"),
        (row() + "\n{", "line 2: is not JSON"),
        ("{" + '"a":[' * 100_000, "line 1: is not JSON"),
        (row() + "\n[1]", "line 2: must be a JSON object"),
        ("a,b\n1,2\n", "line 1: is neither JSON lines nor"),
        ("input_tokens,input_tokens,output_tokens\n1,2,3\n", "line 1: a column is named twice"),
        ("arrival_s,input_tokens,output_tokens\n1,2\n", "line 2: has 2 fields, the header 3"),
        ('arrival_s,input_tokens,output_tokens\n1,"2,3\n', "is not CSV"),
        (b"\x1f\x8bnot gzip at all", "cannot be read"),
        (gzip.compress(b'{"timestamp": 1}\n' * 500, mtime=0)[:30], "cannot be read"),
        (b"\xff\xfe\x00", "cannot be read"),
        ("x" * (17 * 2**20), "is too long"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, content: str | bytes, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read(tmp_path, content)
    assert said in raised.value.message
    assert len(raised.value.message) < 500 + len(str(tmp_path))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)


@given(st.binary(max_size=200))
def test_whatever_a_file_holds_it_is_a_trace_or_a_named_error(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.mktemp("any")
    for prefix in (b"", row().encode() + b"\n", b"arrival_s,input_tokens,output_tokens\n"):
        with contextlib.suppress(ConfigError):  # and nothing else
            assert read(folder, prefix + content).requests

"""Links to receivers whose ports are closed or silent: what is reported, and that requests wait for it once."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import socket
from collections.abc import Callable
from typing import Any

import pytest

from kv_transfer import link_dialling, link_retries
from kv_transfer.protocol.timing import Timeouts
from kv_transfer.receiving import LinkReceiver
from kv_transfer.transports.base import LargePacketsLost
from kv_transfer.transports.handshake import PADDING_BYTES
from kv_transfer.transports.tcp import TcpTransport
from services.runtime import dialling
from services.runtime.errors import ChannelUnreachable, PeerUnreachable
from tests.kv_transfer.conftest import Pair, PairMaker, identity
from tests.services.runtime.test_dialling import closed, listening, resolving, silent
from tests.waiting import until

ELSEWHERE = identity("prefill-0", host_id="elsewhere")


def advertise(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Names another port for payload channels than the one that is open."""
    monkeypatch.setattr(LinkReceiver, "_advertised", lambda self, address, transport: f"127.0.0.1:{port}")


def count_openings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    opened: list[str] = []
    really_open = TcpTransport.open

    def open_and_count(self: Any, address: str, *arguments: Any, **options: Any) -> Any:
        opened.append(address)
        return really_open(self, address, *arguments, **options)

    monkeypatch.setattr(TcpTransport, "open", open_and_count)
    return opened


@pytest.mark.parametrize("transport", ["tcp", "auto"])
async def test_a_closed_payload_port_is_named_with_what_to_allow(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = closed()[1]
    advertise(monkeypatch, port)
    pair = await make_pair(transport, sender_identity=ELSEWHERE)
    with caplog.at_level(logging.INFO), pytest.raises(ChannelUnreachable) as caught:
        await pair.reserve(16)
    message = caught.value.message
    assert f"tcp channel from prefill-0 to decode-0 cannot be opened: no connection to 127.0.0.1:{port}" in message
    assert f"allow TCP port {port} from prefill-0 to decode-0 in the firewall" in message
    # Shared memory cannot work between two hosts, so it is not what is wrong.
    assert "shm" not in message
    assert "in common" not in message


@pytest.mark.parametrize("transport", ["tcp", "auto"])
async def test_requests_wait_once_for_a_payload_port_that_drops_packets(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    openings = count_openings(monkeypatch)
    monkeypatch.setattr(link_retries, "FIRST_RETRY_S", 3600.0)
    with silent() as (_, port), monkeypatch.context() as patch:
        advertise(patch, port)
        pair = await make_pair(transport, sender_identity=ELSEWHERE)
        for _ in range(5):
            with pytest.raises(ChannelUnreachable, match="no answer within"):
                await pair.reserve(16)
        assert len(openings) == 1


async def test_a_payload_port_that_opens_again_is_found_in_the_background(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    openings = count_openings(monkeypatch)
    monkeypatch.setattr(link_retries, "FIRST_RETRY_S", 0.01)
    with monkeypatch.context() as patch:
        advertise(patch, closed()[1])
        pair = await make_pair("auto", sender_identity=ELSEWHERE)
        with pytest.raises(ChannelUnreachable):
            await pair.reserve(16)
        await until(lambda: len(openings) >= 2)
    await until(lambda: bool(pair.links._links))
    num_openings = len(openings)
    await pair.assert_works()
    assert len(openings) == num_openings
    assert not pair.links._retries._failures


async def test_a_receiver_that_does_not_answer_is_waited_for_once(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.sending.SLOW_DIAL_S", 0.2)
    monkeypatch.setattr(link_retries, "FIRST_RETRY_S", 3600.0)
    pair = await make_pair("tcp", timeouts=Timeouts(connect_s=0.3))
    num_dials = 0

    async def hang(*_: Any, **__: Any) -> None:
        nonlocal num_dials
        num_dials += 1
        await asyncio.Event().wait()

    monkeypatch.setattr("kv_transfer.link_dialling.prove", hang)
    for _ in range(3):
        with pytest.raises(PeerUnreachable, match=f"prefill-0 could not make a Link to the worker at {pair.address}"):
            await pair.reserve(16)
    assert num_dials == 1


async def test_a_receiver_whose_port_drops_packets_is_dialled_several_times_by_one_request(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.sending.SLOW_DIAL_S", 0.0)
    monkeypatch.setattr(link_retries, "FIRST_RETRY_S", 3600.0)
    pair = await make_pair("tcp")
    dialled: list[str] = []
    really_make = link_dialling.make_channel
    monkeypatch.setattr(
        link_dialling, "make_channel", lambda address: (dialled.append(address), really_make(address))[1]
    )
    with silent() as (host, port):
        pair.address = f"{host}:{port}"
        for _ in range(3):
            with pytest.raises(PeerUnreachable, match=f"nothing answers.*allow TCP port {port} from prefill-0"):
                await pair.reserve(16)
    assert dialled == [pair.address] * link_dialling.MAX_SILENT_DIALS


async def test_a_name_whose_first_address_is_silent_connects_to_the_second(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("tcp", timeouts=Timeouts(connect_s=60.0))
    port = int(pair.receiver.network_address.rpartition(":")[2])
    with silent() as first:
        monkeypatch.setattr(dialling.dial, "__kwdefaults__", {"resolve": resolving(first, ("127.0.0.1", port))})
        await pair.assert_works()


def refuse_large_packets(sock: socket.socket, key: Any, countdown: Any) -> None:
    raise LargePacketsLost("12,000 of 12,288 bytes of padding were not acknowledged within 1.5 s")


async def test_a_path_that_loses_full_size_packets_is_named_with_its_remedy(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kv_transfer.transports.tcp.prove_to_receiver", refuse_large_packets)
    pair = await make_pair("auto", sender_identity=ELSEWHERE)
    with pytest.raises(
        ChannelUnreachable, match=r"padding were not acknowledged .*; lower the MTU .*tcp_mtu_probing=2"
    ):
        await pair.reserve(16)


@pytest.mark.parametrize(("transport", "expected"), [("tcp", PADDING_BYTES), ("shm", 0)])
async def test_channels_that_cross_a_network_are_padded(make_pair: PairMaker, transport: str, expected: int) -> None:
    pair = await make_pair(transport)
    await pair.assert_works()
    link = await next(iter(pair.links._links.values()))
    assert link._opened.ack.padding_bytes == expected


async def test_a_sender_of_an_earlier_version_sends_no_padding(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = await make_pair("tcp")
    hello: Callable[..., Any] = pair.links._dialler.hello
    monkeypatch.setattr(
        pair.links._dialler,
        "hello",
        lambda *arguments: dataclasses.replace(hello(*arguments), sends_padding=False),
    )
    await pair.assert_works()
    link = await next(iter(pair.links._links.values()))
    assert link._opened.ack.padding_bytes == 0


async def test_an_open_link_is_used_whatever_became_of_the_port(
    make_pair: PairMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair: Pair = await make_pair("tcp")
    await pair.assert_works()
    with listening():
        advertise(monkeypatch, closed()[1])
        pair.num_started = 50
        await pair.assert_works()

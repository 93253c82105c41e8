"""Redis behind TLS, with a certificate of our own: `rediss://`."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import support
from semel.colour import ASYNC, SYNC
from semel.errors import StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore
from semel.testing.contracts import ledger_of
from semel.values import Busy, Done, Kept, Outcome, Terms, Won
from support import binaries, servers
from support.process import HOST, free_port

TERMS = Terms(lease_s=30, ttl_s=600)
PAY = make_key("order-1", operation="pay")

colours = pytest.mark.parametrize("colour", [SYNC, ASYNC], ids=["sync", "async"])


@pytest.fixture(scope="module")
def certificate():
    """A self-signed certificate for this machine, and its key; good for a hundred years."""
    folder = Path(support.__file__).parent / "tls"
    return folder / "certificate.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def server(certificate):
    try:
        binary = binaries.find("redis")
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))
    public, private = map(str, certificate)
    port = free_port()
    settings = ("--tls-port", str(port), "--tls-auth-clients", "no")
    files = ("--tls-cert-file", public, "--tls-key-file", private, "--tls-ca-cert-file", public)
    try:
        server = servers.start_redis(binary, *settings, *files)
    except RuntimeError as error:
        if "tls" in str(error).lower():
            pytest.skip(f"{binary} was built without TLS")
        raise
    server.tls_port = port
    yield server
    server.stop()


@pytest.fixture
async def store(server, certificate):
    server.ensure_running()
    server.empty()
    store = RedisStore(f"rediss://{HOST}:{server.tls_port}/0?ssl_ca_certs={certificate[0]}")
    yield store
    await store.aclose()


async def ask(ledger, key=PAY):
    return await ledger.claim(key, attempt=new_attempt(), fingerprint=b"f", terms=TERMS)


@colours
@pytest.mark.parametrize("size", [0, 13, 1_000_000])
async def test_an_outcome_comes_back_to_the_byte(store, colour, size):
    ledger = ledger_of(store, colour)
    claim = (await ask(ledger)).claim
    outcome = Outcome("value", b"\xff" * size)
    assert await ledger.complete(claim, outcome) == Kept()
    assert await ask(ledger) == Done(outcome, claim.fence)


async def test_many_callers_share_one_connection(store, server):
    ledger = store.ledger(ASYNC)
    before = len(servers.command(server.port, "CLIENT", "LIST").splitlines())
    claims = [answer.claim for answer in await asyncio.gather(
        *(ask(ledger, make_key(f"k{number}")) for number in range(200)))]  # fmt: skip
    big = Outcome("value", b"x" * 50_000)
    verdicts = await asyncio.gather(*(ledger.complete(claim, big) for claim in claims))
    assert set(verdicts) == {Kept()}
    assert len(servers.command(server.port, "CLIENT", "LIST").splitlines()) == before + 1


@colours
async def test_a_server_that_is_killed_and_restarted(store, server, colour):
    ledger = ledger_of(store, colour)
    claim = (await ask(ledger)).claim
    server.kill()
    with pytest.raises(StoreUnavailableError):
        await ask(ledger)
    server.restart()
    assert isinstance(await ask(ledger), Busy)
    assert await ledger.complete(claim, Outcome("value", b"1")) == Kept()


@colours
async def test_a_connection_that_was_closed_meanwhile_is_opened_again(store, server, colour):
    ledger = ledger_of(store, colour)
    assert isinstance(await ask(ledger), Won)
    servers.command(server.port, "CLIENT", "KILL", "SKIPME", "yes")
    assert isinstance(await ask(ledger), Busy)


@colours
async def test_a_frozen_server_is_unavailable_within_the_timeout(server, certificate, colour):
    url = f"rediss://{HOST}:{server.tls_port}/0?ssl_ca_certs={certificate[0]}"
    store = RedisStore(url, timeout_s=0.3)
    ledger = ledger_of(store, colour)
    await ask(ledger, make_key("warm"))
    with server.paused(), pytest.raises(StoreUnavailableError, match=r"no reply within 0\.3 s"):
        await ask(ledger)
    assert isinstance(await ask(ledger, make_key(new_attempt())), Won)
    await store.aclose()


@colours
async def test_a_stranger_s_certificate_is_refused(server, colour):
    store = RedisStore(f"rediss://{HOST}:{server.tls_port}/0")
    with pytest.raises(StoreUnavailableError, match="certificate verify failed"):
        await ask(ledger_of(store, colour))
    await store.aclose()

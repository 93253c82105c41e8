"""Connections that stay in hand between the calls of sync code; on a real server."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis.auth.token import SimpleToken

from semel.colour import SYNC, run
from semel.errors import StoreUnavailableError
from semel.keys import make_key, new_attempt
from semel.stores.redis import RedisStore, reserve
from semel.stores.redis.reserve import Held
from semel.values import Busy, Terms, Won

TERMS = Terms(lease_s=30, ttl_s=600)


@pytest.fixture
def admin(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def store(redis_url):
    store = RedisStore(redis_url, timeout_s=2)
    yield store
    store.close()


def ask(store, text):
    ledger = store.ledger(SYNC)
    return run(ledger.claim(make_key(text), attempt=new_attempt(), terms=TERMS))


def others(admin):
    """The addresses of every connection but our own."""
    mine = admin.client_id()
    return {client["addr"] for client in admin.client_list() if int(client["id"]) != mine}


def test_a_call_is_one_write_and_one_read(store, monkeypatch):
    ask(store, "warm")
    done = []
    for name in ("sendall", "recv"):
        original = getattr(socket.socket, name)

        def counted(self, data, *, name=name, original=original):
            done.append(name)
            return original(self, data)

        monkeypatch.setattr(socket.socket, name, counted, raising=False)
    assert isinstance(ask(store, "k"), Won)
    assert isinstance(ask(store, "k"), Busy)
    assert done == ["sendall", "recv"] * 2


def test_one_connection_serves_one_thread_after_another(store, admin):
    before = others(admin)
    for number in range(100):
        thread = threading.Thread(target=ask, args=(store, f"k{number}"))
        thread.start()
        thread.join()
    assert len(others(admin) - before) == 1


def test_there_are_never_more_connections_than_callers_at_once(store, admin):
    before = others(admin)
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: ask(store, f"k{number}"), range(400)))
    assert all(isinstance(answer, Won) for answer in answers)
    assert len(others(admin) - before) <= 8


def test_a_connection_goes_back_to_the_pool_now_and_then(store, admin, monkeypatch):
    """So that redis-py can log in again with a fresh token, as here."""
    admin.acl_setuser("fresh", enabled=True, passwords=["+token"], categories=["+@all"], keys=["*"])
    ask(store, "warm")
    pool = store._way._client().connection_pool
    pool.re_auth_callback(SimpleToken("token", -1, 0, {"oid": "fresh"}))
    users = lambda: {client["user"] for client in admin.client_list()}  # noqa: E731
    try:
        assert isinstance(ask(store, "one"), Won)
        assert users() == {"default"}
        monkeypatch.setattr(reserve, "KEPT_S", 0)
        assert isinstance(ask(store, "two"), Won)
        assert users() == {"default", "fresh"}
    finally:
        admin.acl_deluser("fresh")


def test_a_login_that_fails_on_a_closed_connection_is_nobody_s_trouble(store, admin, monkeypatch):
    ask(store, "warm")
    pool = store._way._client().connection_pool
    pool.re_auth_callback(SimpleToken("wrong", -1, 0, {"oid": "nobody"}))
    for address in others(admin):
        admin.client_kill(address)
    monkeypatch.setattr(reserve, "KEPT_S", 0)
    assert isinstance(ask(store, "k"), Won)


def test_a_connection_that_was_closed_meanwhile_is_opened_again(store, admin):
    ask(store, "warm")
    for address in others(admin):
        admin.client_kill(address)
    assert isinstance(ask(store, "k"), Won)


def test_an_interrupt_between_asking_and_reading_leaves_no_reply_behind(redis_server, store):
    ask(store, "warm")

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with redis_server.paused(), pytest.raises(KeyboardInterrupt):
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            ask(store, "interrupted")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert isinstance(ask(store, "after"), Won)
    assert isinstance(ask(store, "after"), Busy)


def test_a_forked_child_leaves_its_parents_connection_alone(store, admin):
    ask(store, "warm")
    before = others(admin)
    child = os.fork()
    if child == 0:
        store.close()
        os._exit(0 if isinstance(ask(store, "child"), Won) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert isinstance(ask(store, "parent"), Won)
    assert before <= others(admin)


# --- a client that somebody gave ----------------------------------------------------------------


@pytest.mark.parametrize("kind", [redis.ConnectionPool, redis.BlockingConnectionPool])
def test_a_pool_with_one_connection_is_shared(redis_url, kind):
    pool = kind.from_url(redis_url, max_connections=1)
    client = redis.Redis(connection_pool=pool)
    store = RedisStore(client)
    for number in range(3):
        assert isinstance(ask(store, f"k{number}"), Won)
        assert client.ping()
    pool.disconnect()


def test_what_was_borrowed_goes_back_when_the_store_is_closed(redis_url):
    with redis.Redis.from_url(redis_url, max_connections=100) as client:
        store = RedisStore(client)
        ask(store, "k")
        assert len(client.connection_pool._in_use_connections) == 1
        store.close()
        assert not client.connection_pool._in_use_connections
        assert client.ping()


def test_a_client_that_is_closed_by_its_owner_is_opened_again(redis_url):
    client = redis.Redis.from_url(redis_url, max_connections=100)
    store = RedisStore(client)
    ask(store, "k")
    client.close()
    assert isinstance(ask(store, "k"), Busy)
    store.close()
    client.close()


def test_a_pool_that_is_exhausted_is_told(redis_url):
    with redis.Redis.from_url(redis_url, max_connections=1) as client:
        taken = client.connection_pool.get_connection()
        with pytest.raises(StoreUnavailableError, match="Too many connections"):
            ask(RedisStore(client), "k")
        client.connection_pool.release(taken)


def test_the_socket_of_redis_py_is_where_we_expect_it():
    assert redis.Connection()._sock is None


# --- what comes back ----------------------------------------------------------------------------


class Speaker:
    """As much of a connection as is looked at: its socket."""

    def __init__(self, sock):
        self._sock = sock


def reply(*chunks):
    """The reply of a server that says this, whatever it is asked."""
    near, far = socket.socketpair()
    with near, far:
        for chunk in chunks:
            far.sendall(chunk)
        far.shutdown(socket.SHUT_WR)
        return Held(Speaker(near))._swap(b"PING\r\n")


def test_a_push_message_is_not_a_reply():
    push = b">2\r\n$6\r\nMOVING\r\n:1\r\n"
    assert reply(push + b":7\r\n") == 7
    assert reply(push, b":7\r\n" + push) == 7


def test_a_reply_that_nobody_asked_for_is_an_error():
    with pytest.raises(redis.ConnectionError, match="nobody asked for"):
        reply(b":1\r\n:2\r\n")


@pytest.mark.parametrize("said", [b"", b"$5\r\nab"])
def test_a_stream_that_ends_early_is_an_error(said):
    with pytest.raises(redis.ConnectionError, match="closed the connection"):
        reply(said)

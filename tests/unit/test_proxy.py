"""The failing proxy fails in exactly the ways it is told to."""

from __future__ import annotations

import socket
import socketserver
import threading

import pytest

from support.process import wait_until
from support.proxy import Proxy


class Echo(socketserver.StreamRequestHandler):
    """Answers each line with itself in capitals, and remembers it."""

    def handle(self):
        for line in self.rfile:
            self.server.heard.append(line.strip())
            self.wfile.write(line.upper())


class EchoServer(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


@pytest.fixture
def echo():
    with EchoServer(("127.0.0.1", 0), Echo) as server:
        server.heard = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def proxy(echo):
    with Proxy(echo.server_address[1]) as proxy:
        yield proxy


class Client:
    def __init__(self, port):
        self.socket = socket.create_connection(("127.0.0.1", port), 2)

    def ask(self, line, within_s=2.0):
        """The answer, b"" when the connection was cut, or TimeoutError."""
        self.socket.settimeout(within_s)
        self.socket.sendall(line + b"\n")
        return self.hear()

    def hear(self):
        try:
            return self.socket.recv(1000).strip()
        except ConnectionError:
            return b""


@pytest.fixture
def connect(proxy):
    clients = []

    def connect():
        clients.append(Client(proxy.port))
        return clients[-1]

    yield connect
    for client in clients:
        client.socket.close()


def test_it_passes_bytes_both_ways(connect):
    one, two = connect(), connect()
    assert one.ask(b"a") == b"A"
    assert two.ask(b"b") == b"B"
    assert one.ask(b"c") == b"C"


def test_frozen_bytes_arrive_after_the_thaw(proxy, connect, echo):
    client = connect()
    assert client.ask(b"a") == b"A"
    proxy.freeze()
    with pytest.raises(TimeoutError):
        client.ask(b"b", within_s=0.2)
    assert echo.heard == [b"a"]
    proxy.pass_through()
    client.socket.settimeout(2)
    assert client.hear() == b"B"


def test_a_new_connection_to_a_frozen_proxy_hangs(proxy, connect):
    proxy.freeze()
    with pytest.raises(TimeoutError):
        connect().ask(b"a", within_s=0.2)


def test_refusing_cuts_what_is_open_and_takes_nobody_new(proxy, connect):
    client = connect()
    assert client.ask(b"a") == b"A"
    proxy.refuse()
    assert client.hear() == b""
    with pytest.raises(ConnectionRefusedError):
        connect()
    proxy.pass_through()
    assert connect().ask(b"b") == b"B"


def test_dropped_replies_were_answers_to_delivered_requests(proxy, connect, echo):
    client = connect()
    proxy.drop_replies()
    with pytest.raises(TimeoutError):
        client.ask(b"a", within_s=0.2)
    assert echo.heard == [b"a"]


def test_a_cut_before_the_request_keeps_it_from_the_server(proxy, connect, echo):
    proxy.cut_before_request(b"pay")
    client = connect()
    assert client.ask(b"look") == b"LOOK"
    assert client.ask(b"pay") == b""
    assert echo.heard == [b"look"]
    assert proxy.cuts == 1
    assert connect().ask(b"pay") == b"PAY"


def test_a_cut_after_the_request_comes_when_the_server_has_done_it(proxy, connect, echo):
    proxy.cut_after_request(b"pay")
    client = connect()
    assert client.ask(b"pay") == b""
    assert echo.heard == [b"pay"]
    assert proxy.cuts == 1
    assert connect().ask(b"pay") == b"PAY"


def test_a_cut_on_a_reply(proxy, connect):
    proxy.cut_on_reply(b"B")
    client = connect()
    assert client.ask(b"a") == b"A"
    assert client.ask(b"b") == b""


def test_a_cut_after_two_replies(proxy, connect, echo):
    proxy.cut_after_replies(2)
    client = connect()
    assert [client.ask(b"a"), client.ask(b"b"), client.ask(b"c")] == [b"A", b"B", b""]
    assert echo.heard == [b"a", b"b", b"c"]


def test_a_cut_within_a_reply(proxy, connect, echo):
    proxy.cut_after_bytes(len(b"A\nSEC"))
    client = connect()
    assert [client.ask(b"a"), client.ask(b"second")] == [b"A", b"SEC"]
    assert client.hear() == b""
    assert echo.heard == [b"a", b"second"]
    assert proxy.cuts == 1
    assert connect().ask(b"third") == b"THIRD"


def test_one_cut_after_another(proxy, connect):
    proxy.cut_after_bytes(3, 0, 2)
    assert [connect().ask(b"first") for _ in range(4)] == [b"FIR", b"", b"FI", b"FIRST"]
    assert proxy.cuts == 3


def test_closing_ends_connections_threads_and_the_port(echo):
    before = threading.active_count()
    proxy = Proxy(echo.server_address[1])
    client = Client(proxy.port)
    assert client.ask(b"a") == b"A"
    proxy.freeze()
    proxy.close()
    assert client.hear() == b""
    client.socket.close()
    # the echo server's own thread for this client ends a moment later
    wait_until(lambda: threading.active_count() <= before, "every thread to end", within_s=5)
    with pytest.raises(ConnectionRefusedError):
        Client(proxy.port)


def test_a_server_that_is_gone_is_a_closed_connection(proxy, connect, echo):
    echo.shutdown()
    echo.socket.close()
    assert connect().ask(b"a") == b""

"""From URLs to clients: no server is asked."""

from __future__ import annotations

import pytest

from semel.errors import SettingsError
from semel.stores.redis import RedisStore
from semel.stores.redis.address import address_of


def settings_of(client):
    return client.connection_pool.connection_kwargs


@pytest.mark.parametrize("url", ["redis://h:1/2", "rediss://h:1/2", "redis://u:p%40ss@h:1/2"])
def test_a_single_server_has_a_client_of_either_colour(url):
    address = address_of(url, 3)
    for client in (address.open_sync(), address.open_async()):
        found = settings_of(client)
        assert (found["host"], found["port"], found["db"]) == ("h", 1, 2)
        assert found["socket_timeout"] == found["socket_connect_timeout"] == 3
        assert found.get("password") in (None, "p@ss")


def test_a_unix_socket_is_a_path():
    assert settings_of(address_of("unix:///tmp/r.sock", 3).open_sync())["path"] == "/tmp/r.sock"


def test_the_url_overrides_what_the_store_would_set():
    client = address_of("redis://h?socket_timeout=9&health_check_interval=30", 3).open_sync()
    assert settings_of(client)["socket_timeout"] == 9
    assert settings_of(client)["health_check_interval"] == 30


def test_sentinels_master_and_database():
    url = "redis+sentinel://u:p@a:1,b/mymaster/4?sentinel_password=sp&health_check_interval=9"
    address = address_of(url, 3)
    for client in (address.open_sync(), address.open_async()):
        pool = client.connection_pool
        assert pool.service_name == "mymaster"
        sentinels = [settings_of(each) for each in pool.sentinel_manager.sentinels]
        assert [(each["host"], each["port"]) for each in sentinels] == [("a", 1), ("b", 26379)]
        assert {each["password"] for each in sentinels} == {"sp"}
        found = settings_of(client)
        assert (found["db"], found["username"], found["password"]) == (4, "u", "p")
        assert found["health_check_interval"] == 9


def test_a_cluster_starts_from_every_node_named():
    address = address_of("rediss+cluster://:p@a:1,[::1]:2,c", 3)
    assert address.is_cluster
    nodes = address.open_async().nodes_manager.startup_nodes.values()
    names = {(node.host, node.port) for node in nodes}
    assert names == {("a", 1), ("::1", 2), ("c", 6379)}


def test_a_sentinel_may_have_an_ipv6_address():
    client = address_of("redis+sentinel://a:1,[::1]:2/m", 3).open_sync()
    sentinels = [settings_of(each) for each in client.connection_pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in sentinels] == [("a", 1), ("::1", 2)]


@pytest.mark.parametrize(
    ("url", "hint"),
    [
        ("http://localhost", "redis://host:6379/0"),
        ("redis+unknown://localhost", "redis://host:6379/0"),
        ("unix+cluster://localhost", "redis://host:6379/0"),
        ("redis+sentinel://a:1", "master's name"),
        ("redis+sentinel://a:1/m/notanumber", "cannot be read"),
        ("redis+cluster://a:notaport", "cannot be read"),
        ("redis+cluster://", "host is missing"),
        ("redis://h?socket_timeout=soon", "cannot be read"),
        ("redis://h/abc", "is not a number"),
        ("redis://[::1", "cannot be read"),
        ("redis+cluster://a:1,[::1", "cannot be read"),
        ("redis+sentinel://a:1,[::1:2/m", "cannot be read"),
        ("localhost:6379", "redis://host:6379/0"),
        ("redis://h?timeout_s=1", "no setting 'timeout_s'"),
        ("redis+sentinel://a:1/m?shards=2", "no setting 'shards'"),
        ("redis://user:s3?cret@h/0?protocol=3", "no setting like that"),
    ],
)
def test_a_url_that_cannot_work_is_refused_at_once(url, hint):
    with pytest.raises(SettingsError, match=hint):
        RedisStore(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://user:s3cret@h:1/0",
        "redis+sentinel://:s3cret@h:1/m?sentinel_password=s3cret",
        "redis+cluster://:s3cret@h",
        "http://:s3cret@h",
        "redis://user:1/s3cret@h:1/0",
    ],
)
def test_a_password_is_never_shown(url):
    try:
        shown = repr(RedisStore(url))
    except SettingsError as error:
        shown = str(error)
    assert "s3cret" not in shown
    assert "h" in shown

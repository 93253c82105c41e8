"""From a URL to a broker."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from semel import brokers
from semel.brokers import MemoryBroker, SQLiteBroker, connect
from semel.errors import SettingsError


class Recorded:
    """Stands for a broker with a server: what is asked here is what it is made with."""

    def __init__(
        self, url, *, shards=1, maxlen=10_000, timeout_s=5.0, tidy=True, mode="a", on=None
    ):
        self.url = url
        self.settings = {
            "shards": shards,
            "maxlen": maxlen,
            "timeout_s": timeout_s,
            "tidy": tidy,
            "mode": mode,
            "on": on,
        }


@pytest.fixture
def recorded(monkeypatch):
    for name in ("RedisBroker", "NatsBroker", "RabbitBroker"):
        module = types.ModuleType(brokers._HOMES[name])
        setattr(module, name, type(name, (Recorded,), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.mark.parametrize(
    ("url", "broker"),
    [
        ("redis://h:6379/0", "RedisBroker"),
        ("rediss://h", "RedisBroker"),
        ("redis+sentinel://h:1,i:2/main", "RedisBroker"),
        ("redis+cluster://h:1,i:2", "RedisBroker"),
        ("unix:///run/redis.sock", "RedisBroker"),
        ("nats://h:4222", "NatsBroker"),
        ("nats+tls://h:4222", "NatsBroker"),
        ("amqp://u:p@h/vhost", "RabbitBroker"),
        ("amqps://u:p@h/%2f", "RabbitBroker"),
    ],
)
def test_a_scheme_has_its_broker_and_the_url_is_left_as_it_is(recorded, url, broker):
    made = connect(url)
    assert type(made).__name__ == broker
    assert made.url == url


def test_scheme_in_capitals_is_read_in_lower_case(recorded, tmp_path):
    assert connect("AMQPS://U:p@h/V").url == "amqps://U:p@h/V"
    assert isinstance(connect("Memory://?shards=2"), MemoryBroker)
    assert isinstance(connect(f"SQLite:///{tmp_path}/a.db"), SQLiteBroker)


def test_settings_in_the_url_are_the_brokers_and_the_rest_stays(recorded):
    made = connect(
        "redis://:p%40ss@h/0?shards=8&health_check_interval=30&maxlen=none"
        "&timeout_s=1.5&tidy=no&mode=b%20c&on=x&ssl_ca=%2Fa+b"
    )
    assert made.url == "redis://:p%40ss@h/0?health_check_interval=30&on=x&ssl_ca=%2Fa+b"
    assert made.settings == {
        "shards": 8,
        "maxlen": None,
        "timeout_s": 1.5,
        "tidy": False,
        "mode": "b c",
        "on": None,
    }


def test_settings_may_be_given_beside_the_url(recorded):
    thing = object()
    made = connect("nats://h?shards=2", maxlen=5, on=thing)
    assert (made.url, made.settings["shards"]) == ("nats://h", 2)
    assert (made.settings["maxlen"], made.settings["on"]) == (5, thing)
    assert connect("nats://h?shards=2", shards=2).settings["shards"] == 2


def test_two_answers_to_one_question_are_refused(recorded):
    with pytest.raises(SettingsError, match="shards=4 is given, and the URL says 2"):
        connect("nats://h?shards=2", shards=4)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        ("shards=many", "a whole number"),
        ("shards=1.5", "a whole number"),
        ("timeout_s=soon", "a number"),
        ("tidy=perhaps", "true or false"),
    ],
)
def test_a_setting_that_cannot_be_read_says_what_is_wanted(recorded, option, wanted):
    with pytest.raises(SettingsError, match=f"in the URL is not {wanted}"):
        connect(f"redis://:secret@h?{option}")


@pytest.mark.parametrize(
    "place",
    ["redis://h", "redis+sentinel://h:1/m", "redis+cluster://h:1", "nats://h", "amqp://u:p@h/v"],
)
@pytest.mark.parametrize("option", ["shard=4", "max_len=3", "groups=orders", "shards=2&shard=4"])
def test_a_misspelt_setting_in_a_url_is_refused_and_those_there_are_are_named(place, option):
    with pytest.raises(SettingsError, match="no setting") as caught:
        connect(f"{place}?{option}")
    said = str(caught.value)
    assert repr(option.rpartition("&")[2].partition("=")[0]) in said
    assert "shards, maxlen, " in said


@pytest.mark.parametrize(
    "url",
    [
        "rediss://h?health_check_interval=30&ssl_ca_certs=%2Fca.pem&client_name=a&protocol=3",
        "redis+sentinel://h:1/m?sentinel_password=s&sentinel_username=u&socket_keepalive=yes",
        "redis+cluster://h:1?read_from_replicas=yes",
        "amqps://h?cafile=a&capath=a&keyfile=a&certfile=a&no_verify_ssl=1&heartbeat=5&name=x",
    ],
)
def test_settings_of_the_driver_stay_in_the_url(url):
    assert connect(f"{url}&shards=3").shards == 3


def test_a_setting_in_the_url_of_a_broker_that_is_made_by_hand_says_where_to_write_it():
    from semel.brokers import NatsBroker, RabbitBroker, RedisBroker

    for broker, url in (
        (RedisBroker, "redis://:secret@h?shards=8"),
        (NatsBroker, "nats://h?shards=8"),
        (RabbitBroker, "amqp://h?shards=8"),
        (SQLiteBroker, "sqlite:///a.db?shards=8"),
    ):
        with pytest.raises(SettingsError, match=r"shards=.*connect\(") as caught:
            broker(url)
        assert "secret" not in str(caught.value)


def test_what_may_be_a_part_of_a_password_is_not_shown():
    with pytest.raises(SettingsError) as caught:
        connect("redis://:pass?secret@h/0")
    assert "secret" not in str(caught.value)


def test_a_setting_that_a_broker_does_not_have_is_refused(tmp_path):
    for url in (f"sqlite:///{tmp_path / 'a.db'}", "memory://"):
        with pytest.raises(SettingsError, match="no setting 'groups'; it has shards, maxlen"):
            connect(url, groups={"orders": ["billing"]})


def test_memory():
    made = connect("memory://?shards=3&maxlen=7")
    assert isinstance(made, MemoryBroker)
    assert (made.shards, made._maxlen) == (3, 7)
    assert connect("memory://") is not connect("memory://")


@pytest.mark.parametrize("url", ["memory://orders", "memory://?durable=yes"])
def test_memory_takes_nothing_else(url):
    with pytest.raises(SettingsError, match="memory://"):
        connect(url)


async def test_sqlite(tmp_path, monkeypatch):
    made = connect(f"sqlite:///{tmp_path / 'a b.db'}?shards=2&maxlen=none")
    assert isinstance(made, SQLiteBroker)
    assert (made.shards, made._rows._maxlen) == (2, None)
    await made.aclose()
    monkeypatch.chdir(tmp_path)
    here = connect("sqlite:///here.db")
    await here.aclose()
    assert {tmp_path / "a b.db", tmp_path / "here.db"} <= set(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("sqlite://", "needs a file; in this process alone use memory://"),
        ("sqlite:///:memory:", "needs a file"),
        ("sqlite:///a.db?cache=shared", "no setting 'cache'.* shards, maxlen"),
        ("sqlite://events.db", "three slashes"),
        ("sqlite+pysqlite:///a.db", "needs no SQLAlchemy"),
        ("postgresql://h/db", "holds the outbox, and a relay brings it to a broker"),
        ("kafka://h", "no adapter for Kafka"),
        ("tls://h", r"NATS over TLS is nats\+tls://"),
        ("http://u:secret@h", r"^http:// is not a broker's URL; write one of memory://, sqlite:"),
        ("events.db", "'events.db' is not a broker's URL"),
        (7, "a int is not a broker's URL"),
    ],
)
def test_what_is_no_broker_says_what_to_write(url, says):
    with pytest.raises(SettingsError, match=says) as caught:
        connect(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "driver", "extra"),
    [
        ("redis://h", "redis", "redis"),
        ("nats://h", "nats", "nats"),
    ],
)
def test_a_missing_driver_names_the_extra(url, driver, extra):
    code = (
        "import sys\n"
        f"sys.modules[{driver!r}] = None\n"
        "from semel.brokers import connect\n"
        "from semel.errors import SettingsError\n"
        "try:\n"
        f"    connect({url!r})\n"
        "except SettingsError as error:\n"
        "    print(error)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert f"pip install 'semel[{extra}]'" in ran.stdout, ran.stderr


def test_a_broker_that_cannot_be_imported_names_the_extra(tmp_path, monkeypatch):
    (tmp_path / "needs_a_driver.py").write_text("import no_such_driver")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(brokers._HOMES, "RabbitBroker", "needs_a_driver")
    with pytest.raises(SettingsError, match=r"no_such_driver.*pip install 'semel\[rabbitmq\]'"):
        connect("amqp://h")


def test_names_are_imported_when_they_are_asked_for():
    code = (
        "import sys, semel.brokers\n"
        "assert not [m for m in sys.modules if m.startswith('semel.brokers.')]\n"
        "semel.brokers.MemoryBroker\n"
        "assert 'semel.brokers.sqlite' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="KafkaBroker"):
        _ = brokers.KafkaBroker

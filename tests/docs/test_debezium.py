"""The documented Debezium connector, applied to a row of the outbox as Debezium would."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import sqlalchemy as sa

from semel.outbox import Event, Outbox
from semel.stores.sql import init
from support.outbox_party import engine_of

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "outbox.md").read_text()
SECTION = PAGE.partition("\n## For other tools\n")[2]
STRING = "org.apache.kafka.connect.storage.StringConverter"

# Every option in `EventRouterConfigDefinition` of Debezium 3.6.1.
OPTIONS = {
    *(f"table.field.event.{name}" for name in ("id", "key", "type", "payload", "timestamp")),
    *("table.field.event.schema.version", "table.field.additional.missing"),
    *("table.fields.additional.placement", "table.op.invalid.behavior"),
    *("table.expand.json.payload", "table.json.payload.null.behavior"),
    *("route.by.field", "route.topic.regex", "route.topic.replacement"),
    "route.tombstone.on.empty.payload",
    *("tracing.span.context.field", "tracing.operation.name", "tracing.with.context.field.only"),
}
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def block(language):
    [text] = re.findall(rf"```{language}\n(.*?)```", SECTION, re.DOTALL)
    return text


def connector():
    return dict(line.split("=", 1) for line in block("properties").splitlines())


def router(given):
    """The options of the only transform, without its prefix."""
    prefix = f"transforms.{given['transforms']}."
    own = [name for name in given if name.startswith(prefix)]
    return {name.removeprefix(prefix): given[name] for name in own}


def routed(options, row):
    """Apply the rules of `EventRouterDelegate`: topic, key, value and headers of the record."""
    routed_by = row[options["route.by.field"]]
    topic = options["route.topic.replacement"].replace("${routedByValue}", routed_by)
    headers = [("id", row[options["table.field.event.id"]])]
    for placed in options["table.fields.additional.placement"].split(","):
        column, placement, *alias = placed.split(":")
        assert placement == "header", "an envelope would make the value a struct"
        headers.append((alias[0] if alias else column, row[column]))
    key, value = row[options["table.field.event.key"]], row[options["table.field.event.payload"]]
    return topic, string(key), string(value), [(name, string(text)) for name, text in headers]


def string(given):
    """What `StringConverter` writes; the connector reads a TIMESTAMPTZ as a text in UTC."""
    if isinstance(given, datetime):
        given = given.astimezone(UTC).isoformat().replace("+00:00", "Z")
    return None if given is None else str(given).encode()


def trace_of(received):
    """Run the documented consumer."""
    consumer = {}
    exec(block("python"), consumer)
    return consumer["trace_of"](received)


def row_of(url, event):
    init(url)
    engine = engine_of(url)
    with engine.begin() as connection:
        Outbox().add(connection, event)
    with engine.connect() as connection:
        select = sa.text(f"SELECT * FROM {connector()['table.include.list']}")
        [row] = connection.execute(select).mappings()
    engine.dispose()
    return row


def test_documented_connector_has_only_options_that_event_router_knows():
    given = connector()
    options = router(given)
    assert options.pop("type") == "io.debezium.transforms.outbox.EventRouter"
    assert options.keys() <= OPTIONS
    assert {given[f"{part}.converter"] for part in ("key", "value", "header")} == {STRING}


def test_routed_row_has_topic_key_payload_and_headers_of_the_event(postgres_url):
    headers = {"traceparent": TRACEPARENT, "user": "é"}
    payload = '{"b":  1.50, "a": "é"}'
    event = Event("placed", "order", 7, payload, "orders", "acme", headers, id="e-1")
    row = row_of(postgres_url, event)
    topic, key, value, received = routed(router(connector()), row)
    assert (topic, key, value) == ("orders", b"7", payload.encode())
    assert dict(received) == {
        "id": b"e-1",
        "event_type": b"placed",
        "aggregate_type": b"order",
        "tenant_id": b"acme",
        "seq": b"1",
        "created_at": string(row["created_at"]),
        "headers": json.dumps(headers, ensure_ascii=False, separators=(",", ":")).encode(),
    }
    assert trace_of(received) == headers


def test_event_without_headers_continues_no_trace(postgres_url):
    row = row_of(postgres_url, Event("seen", "page", "p", {}, "views", ordered=False))
    *_, received = routed(router(connector()), row)
    assert (dict(received)["headers"], dict(received)["seq"]) == (None, None)
    assert trace_of(received) == {}

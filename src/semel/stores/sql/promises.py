"""What this database's answers survive, read from its live settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from semel.stores.sql.links import Link
from semel.values import Guarantees, Survives


async def promises(link: Link) -> Guarantees:
    match link.dialect.name:
        case "postgresql":
            return await _postgres(link)
        case "mysql":
            return await _mysql(link)
    return await _sqlite(link)


def _survives(**answers: bool) -> frozenset[Survives]:
    names: tuple[Survives, ...] = ("process_crash", "power_loss", "failover")
    return frozenset(name for name in names if answers[name])


# --- PostgreSQL ---------------------------------------------------------------------------------

POSTGRES = """
SELECT current_setting('fsync'), current_setting('synchronous_commit'),
    current_setting('full_page_writes'), current_setting('synchronous_standby_names'),
    pg_is_in_recovery(),
    (SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'),
    (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum')),
    (SELECT relpersistence = 'u' FROM pg_class WHERE oid = to_regclass('idempotency')),
    current_setting('server_version')
"""


async def _postgres(link: Link) -> Guarantees:
    line = (await link.fetch(POSTGRES))[0]
    fsync, commit, pages, names, standby, replicas, synchronous, unlogged, version = line
    crash = commit != "off" and not unlogged
    waits = bool(names) and commit in {"on", "remote_write", "remote_apply"}
    return Guarantees(
        store=f"PostgreSQL {version}",
        survives=_survives(
            process_crash=crash,
            power_loss=crash and fsync == "on" and pages == "on",
            failover=crash and waits and synchronous > 0,
        ),
        shared=True,
        why=tuple(
            _postgres_reasons(fsync, commit, pages, names, standby, replicas, synchronous, unlogged)
        ),
    )


def _postgres_reasons(
    fsync: str,
    commit: str,
    pages: str,
    names: str,
    standby: bool,
    replicas: int,
    synchronous: int,
    unlogged: bool | None,
) -> Iterable[str]:
    if standby:
        yield "this server is a standby and takes no writes; connect to the primary"
    if unlogged:
        yield "table idempotency is UNLOGGED: a crash of the server empties it"
    if commit == "off":
        yield "synchronous_commit=off: a crash of the server loses the last commits"
    else:
        yield f"synchronous_commit={commit}: a commit is in the log when it is answered"
    if fsync != "on" or pages != "on":
        yield f"fsync={fsync}, full_page_writes={pages}: a power loss can lose or damage records"
    else:
        yield "fsync=on, full_page_writes=on: the log is on disk when a commit is answered"
    if not replicas:
        yield "no replica is connected: what is on this machine is lost with it"
    elif names and synchronous and commit not in {"off", "local"}:
        yield f"synchronous_standby_names={names!r}: a commit waits for {synchronous} replica(s)"
    else:
        yield f"{replicas} replica(s) follow asynchronously: a failover can lose the last commits"


# --- MariaDB, MySQL -----------------------------------------------------------------------------

MYSQL_SETTINGS = (
    "innodb_flush_log_at_trx_commit",
    "innodb_doublewrite",
    "sync_binlog",
    "log_bin",
    "read_only",
    "version",
    "rpl_semi_sync_master_enabled",
    "rpl_semi_sync_source_enabled",
    "rpl_semi_sync_master_wait_point",
    "rpl_semi_sync_source_wait_point",
    "wsrep_on",
)
MYSQL_COUNTS = (
    "Rpl_semi_sync_master_clients",
    "Rpl_semi_sync_source_clients",
    "Slaves_connected",
    "wsrep_cluster_size",
)


async def _shown(link: Link, what: str, names: Iterable[str]) -> dict[str, str]:
    listed = ", ".join(f"'{name}'" for name in names)
    lines = await link.fetch(f"SHOW GLOBAL {what} WHERE Variable_name IN ({listed})")
    return {str(name).lower(): str(value) for name, value in lines}


async def _mysql(link: Link) -> Guarantees:
    found = await _shown(link, "VARIABLES", MYSQL_SETTINGS)
    found |= await _shown(link, "STATUS", MYSQL_COUNTS)
    flush = found.get("innodb_flush_log_at_trx_commit", "1")
    double = found.get("innodb_doublewrite", "ON").upper() not in {"OFF", "0"}
    return Guarantees(
        store=f"MariaDB/MySQL {found.get('version', '')}".strip(),
        survives=_survives(
            process_crash=flush in {"1", "2"},
            power_loss=flush == "1" and double,
            failover=flush in {"1", "2"} and _waits_for_replica(found),
        ),
        shared=True,
        why=tuple(_mysql_reasons(found, flush, double)),
    )


def _waits_for_replica(found: Mapping[str, str]) -> bool:
    for role in ("master", "source"):
        enabled = found.get(f"rpl_semi_sync_{role}_enabled", "OFF").upper() in {"ON", "1"}
        point = found.get(f"rpl_semi_sync_{role}_wait_point", "").upper()
        if enabled and point == "AFTER_SYNC" and _count(found, f"rpl_semi_sync_{role}_clients"):
            return True
    return _in_cluster(found)


def _in_cluster(found: Mapping[str, str]) -> bool:
    return found.get("wsrep_on", "OFF").upper() == "ON" and _count(found, "wsrep_cluster_size") > 1


def _count(found: Mapping[str, str], name: str) -> int:
    value = found.get(name, "0")
    return int(value) if value.isdigit() else 0


def _mysql_reasons(found: Mapping[str, str], flush: str, double: bool) -> Iterable[str]:
    if found.get("read_only", "OFF").upper() not in {"OFF", "0"}:
        yield "read_only is set; connect to the primary"
    yield f"innodb_flush_log_at_trx_commit={flush}: " + {
        "1": "the log is on disk when a commit is answered",
        "2": "the log is handed to the system at each commit, and to the disk once a second",
    }.get(flush, "a crash of the server loses up to a second of commits")
    if not double:
        yield "innodb_doublewrite=OFF: a power loss can damage pages"
    if found.get("log_bin", "OFF").upper() == "ON" and found.get("sync_binlog") != "1":
        yield f"sync_binlog={found.get('sync_binlog')}: after a power loss replicas may differ"
    if _in_cluster(found):
        yield f"a Galera cluster of {found['wsrep_cluster_size']} has each commit"
    elif _waits_for_replica(found):
        yield "semi-synchronous replication, AFTER_SYNC: a commit waits for a replica"
    else:
        yield "no replica is waited for: a failover can lose the last commits"


# --- SQLite -------------------------------------------------------------------------------------

SYNCHRONOUS = ("OFF", "NORMAL", "FULL", "EXTRA")
FULL = 2


async def _sqlite(link: Link) -> Guarantees:
    sync = int((await link.fetch("PRAGMA synchronous"))[0][0])
    journal = str((await link.fetch("PRAGMA journal_mode"))[0][0])
    file = str((await link.fetch("PRAGMA database_list"))[0][2] or "")
    version = (await link.fetch("SELECT sqlite_version()"))[0][0]
    on_disk = bool(file) and journal not in {"off", "memory"}
    full = on_disk and sync >= FULL
    return Guarantees(
        store=f"SQLite {version}",
        survives=_survives(process_crash=on_disk, power_loss=full, failover=False),
        shared=bool(file),
        why=(
            f"the file {file}" if file else "a database in this process's memory, gone with it",
            f"PRAGMA synchronous={SYNCHRONOUS[sync]}, journal_mode={journal}: "
            + ("a commit is on disk when it is answered" if full else "a power loss can undo it"),
            "one file on one machine: what is on it is lost with it",
        ),
    )

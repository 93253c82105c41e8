"""SIGKILL and SIGSTOP of a holder at every point between claim and complete, on every engine.

The effect goes to a receiver outside: a file. One that dedupes by the key it is handed shows one
effect whatever happens; so does any receiver when the policy is to hold.
"""

from __future__ import annotations

import signal

import pytest

import semel
from semel.colour import SYNC, run
from semel.keys import make_key
from semel.values import State
from support.holder import POINTS, Receiver
from support.zygote import spawn

ENGINES = ("file", "sqlite", "redis", "redis-cluster", "redis-sentinel", "postgres", "mariadb")


@pytest.fixture(params=ENGINES)
def url(request, tmp_path):
    if request.param == "file":
        return f"file://{tmp_path}/ledger"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/ledger.db"
    url = request.getfixturevalue(request.param.replace("-", "_") + "_url")
    if request.param in ("postgres", "mariadb"):
        from semel.stores.sql import schema

        schema.init(url)
    return url


@pytest.fixture
def receiver(tmp_path):
    return Receiver(tmp_path, dedupes=True)


def start(url, folder, **options):
    flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    return spawn("support.holder", [url, "order-1", *flags], {"HOLDER_FOLDER": str(folder)})


def finish(process):
    out, _ = process.communicate(timeout=60)
    return out.strip().splitlines()[-1]


def killed(process):
    assert process.stdout.readline() == "trap\n"
    process.wait(timeout=30)
    assert process.returncode == -signal.SIGKILL
    process.stdin.close()
    process.stdout.close()


def record(url):
    store = semel.connect(url)
    try:
        return run(store.ledger(SYNC).look(make_key("order-1").id))
    finally:
        store.close()


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_holder_is_taken_over_and_nothing_is_doubled(url, tmp_path, receiver, point):
    colour = "sync" if POINTS.index(point) % 2 else "async"
    killed(start(url, tmp_path, at=point, colour=colour))
    answer = finish(start(url, tmp_path, colour=colour))
    assert answer.startswith("result by-")
    assert len(receiver.effects()) == 1
    found = record(url)
    assert found.state is State.COMPLETED
    assert found.number == (1 if point in ("before-claim", "after-complete") else 2)


@pytest.mark.parametrize("point", ["before-claim", "before-effect", "after-effect", "after-step"])
def test_a_killed_holder_is_held_when_asked_and_nothing_is_doubled(url, tmp_path, point):
    plain = Receiver(tmp_path, dedupes=False)
    options = {"crash": "hold", "receiver": "plain", "lease": 0.5}
    killed(start(url, tmp_path, at=point, **options))
    answers = {finish(start(url, tmp_path, **options)) for _ in range(2)}
    if point == "before-claim":
        assert len(answers) == 1
        assert len(plain.effects()) == 1
        return
    assert answers == {"error OutcomeUnknownError"}
    assert len(plain.effects()) == (0 if point == "before-effect" else 1)
    assert record(url).state is State.UNKNOWN


@pytest.mark.parametrize("point", ["after-effect", "before-complete"])
def test_a_frozen_holder_is_fenced_and_adopts_the_winners_outcome(url, tmp_path, receiver, point):
    frozen = start(url, tmp_path, at=point, do="stop")
    try:
        assert frozen.stdout.readline() == "trap\n"
        winner = finish(start(url, tmp_path))
        frozen.send_signal(signal.SIGCONT)
        late = finish(frozen)
    finally:
        frozen.kill()
        frozen.wait()
    assert winner.startswith("result ")
    assert late == winner
    assert len(receiver.effects()) == 1
    assert record(url).number == 2


def test_eight_processes_one_run(url, tmp_path):
    plain = Receiver(tmp_path, dedupes=False)
    processes = [
        start(url, tmp_path, receiver="plain", lease=30, colour=("sync", "async")[n % 2])
        for n in range(8)
    ]
    answers = {finish(process) for process in processes}
    assert len(answers) == 1
    assert answers.pop().startswith("result by-")
    assert len(plain.effects()) == 1

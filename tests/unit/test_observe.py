"""The rules that are shipped: what they make of numbers, and whether anybody tells them these."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from prometheus_client.parser import text_string_to_metric_families

from semel import observe
from semel.health.metrics import written
from semel.health.watch import Report
from semel.rooms.status import BOUNDS_S, RoomsStatus, Times
from support import binaries

REPEATED = "SemelRoomsRequestsRepeated"
GAPS = "SemelRoomsVersionGaps"
SNAPSHOTS = "SemelRoomsSnapshotsRequested"
SLOW = "SemelRoomsActionsSlow"
VERY_SLOW = "SemelRoomsActionsVerySlow"

RECORDED = (
    "idempotency_cache_hit_rate",
    "version_gap_count",
    "snapshot_request_rate",
    "action_processing_time_p95",
)


@pytest.fixture(scope="session")
def promtool():
    try:
        return binaries.find("promtool")
    except binaries.Unavailable as absent:
        pytest.skip(str(absent))


@pytest.fixture
def check(promtool, tmp_path):
    """Run promtool on the rules as they are shipped."""
    (tmp_path / "rules.yml").write_text(observe.rules())

    def run(*words):
        return subprocess.run(
            [promtool.path, *words],
            cwd=tmp_path,
            env=promtool.environment(),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_prometheus_takes_the_rules(check):
    done = check("check", "rules", "--lint=all", "--lint-fatal", "rules.yml")

    assert done.returncode == 0, done.stderr
    assert "9 rules found" in done.stdout


def test_the_rules_can_be_had_without_the_command_line():
    done = subprocess.run([sys.executable, "-m", "semel.observe"], capture_output=True, check=True)

    assert done.stdout.decode() == observe.rules()


def test_nobody_moves_a_threshold_unawares():
    found = re.findall(rf"({'|'.join(RECORDED)}) > ([\d.]+)", observe.rules())

    assert [(name, float(number)) for name, number in found] == [
        ("idempotency_cache_hit_rate", 0.10),
        ("version_gap_count", 0.05),
        ("snapshot_request_rate", 0.20),
        ("action_processing_time_p95", 0.15),
        ("action_processing_time_p95", 0.5),
    ]


# --- what they make of numbers ------------------------------------------------------------------

MINUTES = 30
COUNTED = ("requests", "repeated", "updates", "gaps")


def process(*, name="table", instance="a", joined=0, snapshots=None, times=None, **counted):
    """What Prometheus reads of a process for half an hour, in which so much happens each minute."""
    labels = f'job="game",instance="{instance}",name="{name}"'
    told = {f"{each}_total{{{labels}}}": counted.get(each, 0) for each in COUNTED}
    for reason, number in {"join": 0, "manual": 0, **(snapshots or {})}.items():
        told[f'snapshots_total{{{labels},reason="{reason}"}}'] = number
    within = times or {"0.15": 0, "0.5": 0, "1": 0}
    for bound, number in {**within, "+Inf": max(within.values())}.items():
        told[f'action_seconds_bucket{{{labels},le="{bound}"}}'] = number
    told[f"action_seconds_count{{{labels}}}"] = max(within.values())
    growing = {f"semel_rooms_{each}": f"0+{number}x{MINUTES}" for each, number in told.items()}
    return growing | {f"semel_rooms_joined{{{labels}}}": f"{joined}+0x{MINUTES}"}


@pytest.fixture
def see(check, tmp_path):
    """Is this what the rules say, after so many minutes? Expressions, and what each is."""

    def run(series, expected, at=MINUTES):
        told = {
            "interval": "1m",
            "input_series": [{"series": key, "values": told} for key, told in series.items()],
            "promql_expr_test": [
                {
                    "expr": expression,
                    "eval_time": f"{at}m",
                    "exp_samples": [{"labels": k, "value": v} for k, v in samples.items()],
                }
                for expression, samples in expected.items()
            ],
        }
        whole = {"rule_files": ["rules.yml"], "evaluation_interval": "1m", "tests": [told]}
        (tmp_path / "seen.yml").write_text(json.dumps(whole))  # what is JSON is YAML
        done = check("test", "rules", "seen.yml")
        assert done.returncode == 0, done.stdout + done.stderr

    return run


def firing(*alerts, name="table"):
    expression = 'count by (alertname, job, name) (ALERTS{alertstate="firing"})'
    labels = '{{alertname="{}", job="game", name="{}"}}'
    return {expression: {labels.format(alert, name): 1 for alert in alerts}}


def test_while_nothing_happens_every_number_is_there_and_is_0(see):
    zeros = {each: {f'{each}{{job="game", name="table"}}': 0} for each in RECORDED}

    see(process(), zeros | firing())
    see(process(joined=500), zeros | firing())


def test_where_there_is_no_process_nothing_is_said(see):
    see({"up": "0+0x30"}, {each: {} for each in RECORDED} | firing())


@pytest.mark.parametrize(
    ("happens", "alerts"),
    [
        pytest.param({"requests": 1000, "repeated": 99}, [], id="9.9 % repeated"),
        pytest.param({"requests": 1000, "repeated": 101}, [REPEATED], id="10.1 % repeated"),
        pytest.param({"requests": 3, "repeated": 3}, [], id="all repeated, but few"),
        pytest.param({"requests": 5, "repeated": 5}, [REPEATED], id="all repeated"),
        pytest.param({"updates": 1000, "gaps": 49}, [], id="gaps at 4.9 %"),
        pytest.param({"updates": 1000, "gaps": 51}, [GAPS], id="gaps at 5.1 %"),
        pytest.param({"updates": 0, "gaps": 3}, [], id="few gaps, and nothing arrives"),
        pytest.param({"updates": 0, "gaps": 5}, [GAPS], id="gaps, and nothing arrives"),
        pytest.param({"joined": 100, "snapshots": {"gap": 19}}, [], id="19 % want snapshots"),
        pytest.param(
            {"joined": 100, "snapshots": {"gap": 11, "manual": 10}}, [SNAPSHOTS],
            id="21 % want snapshots",
        ),
        pytest.param({"joined": 1, "snapshots": {"manual": 3}}, [], id="one client wants a few"),
        pytest.param({"joined": 1, "snapshots": {"manual": 5}}, [SNAPSHOTS], id="one wants more"),
        pytest.param({"joined": 0, "snapshots": {"gap": 5}}, [SNAPSHOTS], id="none stays"),
        pytest.param({"joined": 100, "snapshots": {"join": 500}}, [], id="many come and go"),
        pytest.param({"times": {"0.15": 951, "0.5": 1000}}, [], id="95.1 % within 150 ms"),
        pytest.param({"times": {"0.15": 949, "0.5": 1000}}, [SLOW], id="94.9 % within 150 ms"),
        pytest.param({"times": {"0.15": 0, "0.5": 951, "1": 1000}}, [SLOW], id="95.1 % in 500 ms"),
        pytest.param(
            {"times": {"0.15": 0, "0.5": 949, "1": 1000}}, [SLOW, VERY_SLOW],
            id="94.9 % within 500 ms",
        ),
        pytest.param({"times": {"0.15": 0, "0.5": 0, "1": 3}}, [], id="slow, but few"),
    ],
)  # fmt: skip
def test_an_alert_fires_over_its_threshold_and_not_below_it(see, happens, alerts):
    see(process(**happens), firing(*alerts))


def test_gaps_while_nothing_arrives_are_all_of_it(see):
    expected = {"version_gap_count": {'version_gap_count{job="game", name="table"}': 1}}

    see(process(gaps=5), expected)


def test_an_alert_waits_until_it_has_lasted(see):
    series = process(requests=1000, repeated=101, times={"0.15": 0, "0.5": 0, "1": 1000})

    see(series, firing(), at=5)
    see(series, firing(VERY_SLOW), at=10)
    see(series, firing(REPEATED, SLOW, VERY_SLOW), at=13)


def test_a_bad_minute_wakes_nobody(see):
    series = process(requests=1000)
    [repeated] = [key for key in series if "repeated" in key]
    series[repeated] = "0+0x9 900+0x20"

    see(
        series, {"idempotency_cache_hit_rate > bool 0.10": {'{job="game", name="table"}': 1}}, at=12
    )
    see(series, {'count_over_time(ALERTS{alertstate="firing"}[30m])': {}})


def test_the_processes_of_a_name_are_judged_as_one_and_other_names_apart(see):
    calm = process(requests=1000)
    see(calm | process(instance="b", requests=100, repeated=100), firing())
    other = process(name="lobby", requests=100, repeated=100)
    see(calm | other, firing(REPEATED, name="lobby"))


def test_a_restart_is_no_news(see):
    series = process(requests=1000, repeated=90, joined=9)
    restarted = {
        key: f"{told.split('x')[0]}x14 {told.split('x')[0]}x14" for key, told in series.items()
    }

    see(restarted, {'count_over_time(ALERTS{alertstate="firing"}[30m])': {}})


# --- does anybody tell these numbers ------------------------------------------------------------


@pytest.fixture(scope="module")
def exported():
    """The labels of each sample of rooms in which everything has happened."""
    status = RoomsStatus("table", refused={"INVALID": 1}, closed={"slow": 1})
    labels = {}
    for family in text_string_to_metric_families(written([Report(status)]).decode()):
        for sample in family.samples:
            labels.setdefault(sample.name, []).append(sample.labels)
    return labels


def test_every_metric_of_the_rules_is_told_with_its_labels(exported):
    used = re.findall(r"(semel_\w+)(?:\{([^}]*)\})?", observe.rules())
    assert len({name for name, _ in used}) >= 8
    for name, matchers in used:
        for label, value in [("name", "table"), *re.findall(r'(\w+)!?="([^"]*)"', matchers)]:
            assert value in {each.get(label) for each in exported[name]}, (name, label, value)
    assert all("le" in each for each in exported["semel_rooms_action_seconds_bucket"])


def test_the_rules_group_by_labels_that_are_told():
    """`job` is Prometheus' own."""
    assert {*re.findall(r"by \(([^)]*)\)", observe.rules())} == {"job, name", "job, name, le"}


def test_a_threshold_of_times_is_a_bound():
    """Between two bounds a quantile is guessed: of 110 ms, 250 ms would be made."""
    thresholds = re.findall(r"action_processing_time_p95 > ([\d.]+)", observe.rules())

    assert {float(each) for each in thresholds} <= {*BOUNDS_S}


def test_times_are_told_as_a_histogram():
    times = Times()
    for seconds in (0.0001, 0.01, 0.4, 0.4, 60.0):
        times.add(seconds)
    text = written([Report(RoomsStatus("table", action_s=times.seen()))]).decode()

    assert "# TYPE semel_rooms_action_seconds histogram" in text
    labels = '{{le="{}",name="table"}}'
    for bound, number in [
        ("0.001", 1),
        ("0.01", 2),
        ("0.25", 2),
        ("0.5", 4),
        ("10.0", 4),
        ("+Inf", 5),
    ]:
        assert f"semel_rooms_action_seconds_bucket{labels.format(bound)} {number:.1f}" in text
    assert 'semel_rooms_action_seconds_count{name="table"} 5.0' in text
    [total] = re.findall(r"action_seconds_sum\{.*\} (.*)", text)
    assert float(total) == pytest.approx(60.8101)

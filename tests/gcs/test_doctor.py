"""``doctor`` on a bucket: every setting that does harm, and every permission that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import tako_sync
from gcs import canned, kit
from gcs.faults import Fault
from gcs.server import GCSServer
from tako_sync.backends.gcs import GCSLease
from tako_sync.findings import NOTE, OK, PROBLEM, Report
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime


@pytest.fixture
def runtime(gcs_server: GCSServer) -> Iterator[Runtime]:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        yield Runtime(backend, app="shop", env="prod")
        backend.close()


def told(report: Report, verdict: str) -> str:
    return "\n".join(
        f"{finding.text} {finding.advice}"
        for finding in report.findings
        if finding.verdict == verdict
    )


GOOD: dict[str, Any] = {"softDeletePolicy": {"retentionDurationSeconds": "0"}}


def test_a_bucket_made_for_leases_is_healthy_without_a_note(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.describe(**GOOD)
    report = tako_sync.doctor(runtime)
    assert report.healthy and not told(report, NOTE), str(report)
    assert "AnonymousCredentials" in told(report, OK)
    assert "EUROPE-WEST1" in told(report, OK)
    assert gcs_server.count("bucket") == 1


def test_the_cost_is_worked_out_from_the_policy(gcs_server: GCSServer, runtime: Runtime) -> None:
    cost = told(tako_sync.doctor(runtime), OK)
    assert "$1.31 for each lease that is held all the time (262,800 writes" in cost
    assert "$0.53 for each process that waits all the time (1,314,000 reads" in cost
    slow = Runtime(runtime.backend, policy=LeasePolicy(ttl=60, poll=10))
    assert "$0.66 for each lease" in told(tako_sync.doctor(slow), OK)


@pytest.mark.parametrize(
    ("settings", "verdict", "words"),
    [
        ({"softDeletePolicy": {"retentionDurationSeconds": "604800"}}, NOTE, "60,480 copies"),
        ({"versioning": {"enabled": True}}, NOTE, "8,640 old versions a day"),
        ({"retentionPolicy": {"retentionPeriod": "3600"}}, PROBLEM, "retention policy of 3600 s"),
        ({"defaultEventBasedHold": True}, PROBLEM, "event-based hold"),
        ({"objectRetention": {"mode": "Enabled"}}, NOTE, "retained one by one"),
        (
            {"lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": {"age": 1}}]}},
            PROBLEM,
            "lifecycle rule (Delete",
        ),
        (
            {
                "lifecycle": {
                    "rule": [
                        {
                            "action": {"type": "SetStorageClass"},
                            "condition": {"age": 30, "matchesPrefix": ["leases/"]},
                        }
                    ]
                }
            },
            NOTE,
            "lifecycle rule (SetStorageClass",
        ),
        ({"storageClass": "NEARLINE"}, NOTE, "charges for early deletion"),
        ({"autoclass": {"enabled": True}}, NOTE, "Autoclass"),
        ({"billing": {"requesterPays": True}}, NOTE, "requesters pay"),
        (
            {"iamConfiguration": {"publicAccessPrevention": "inherited"}},
            NOTE,
            "public access to the bucket is not prevented",
        ),
    ],
)
def test_a_setting_that_does_harm_is_told(
    gcs_server: GCSServer,
    runtime: Runtime,
    settings: dict[str, Any],
    verdict: str,
    words: str,
) -> None:
    gcs_server.describe(**{**GOOD, **settings})
    report = tako_sync.doctor(runtime)
    assert words in told(report, verdict)
    assert report.healthy is (verdict == NOTE)


@pytest.mark.parametrize(
    "condition",
    [
        {"isLive": False, "age": 1},
        {"numNewerVersions": 1},
        {"daysSinceNoncurrentTime": 3},
        {"age": 1, "matchesPrefix": ["tmp/"]},
    ],
)
def test_a_lifecycle_rule_that_spares_leases_is_none_of_its_business(
    gcs_server: GCSServer, runtime: Runtime, condition: dict[str, Any]
) -> None:
    rule = {"action": {"type": "Delete"}, "condition": condition}
    gcs_server.describe(**GOOD, lifecycle={"rule": [rule]})
    assert not told(tako_sync.doctor(runtime), NOTE)


@pytest.mark.parametrize(
    ("permission", "verdict"),
    [
        ("storage.objects.get", PROBLEM),
        ("storage.objects.create", PROBLEM),
        ("storage.objects.delete", PROBLEM),
        ("storage.objects.list", PROBLEM),
        ("storage.buckets.get", NOTE),
    ],
)
def test_a_missing_permission_is_named(
    gcs_server: GCSServer, runtime: Runtime, permission: str, verdict: str
) -> None:
    gcs_server.describe(**GOOD)
    gcs_server.set(denied=(permission,))
    assert permission in told(tako_sync.doctor(runtime), verdict)


def test_a_missing_bucket_and_one_out_of_reach_are_problems(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.set(bucket_missing=True)
    assert "the bucket does not exist" in told(tako_sync.doctor(runtime), PROBLEM)
    nowhere = GCSLease("bucket", client=kit.new_client("http://127.0.0.1:1"))
    assert "cannot be reached" in told(tako_sync.doctor(nowhere), PROBLEM)


def test_a_key_that_is_disabled_is_told_as_that(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.faults.add(Fault("write", canned.KMS_DISABLED, times=None))
    assert "encryption key" in told(tako_sync.doctor(runtime), PROBLEM)


def test_clocks_that_differ_are_noted_as_harmless(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.describe(**GOOD)
    gcs_server.set(clock_shift=3600)
    report = tako_sync.doctor(runtime)
    assert report.healthy
    assert "3600 s apart; that does leases no harm" in told(report, NOTE)
    gcs_server.set(send_date=False)
    assert "the storage has no clock" in told(tako_sync.doctor(runtime), NOTE)


def test_the_limit_of_a_write_a_second_only_makes_it_slower(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.set(write_interval=0.2)
    assert tako_sync.doctor(runtime).healthy


def test_without_credentials_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    report = tako_sync.doctor("gs://bucket")
    assert "gcloud auth application-default login" in told(report, PROBLEM)

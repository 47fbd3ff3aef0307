"""``doctor`` on a bucket: every setting that does harm, and every permission that is missing."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from google.auth import compute_engine
from google.oauth2 import credentials as person

import tako_sync
from gcs import canned, kit
from gcs.actions import Drip, Stall, Status, Substitute
from gcs.faults import Fault
from gcs.independent import IndependentServer
from gcs.server import GCSServer
from tako_sync.backends.gcs import GCSLease, examination
from tako_sync.findings import NOTE, PROBLEM, Report
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

SCRATCH = "leases/run-shop-prod-tako-doctor"
GOOD: dict[str, Any] = {"softDeletePolicy": {"retentionDurationSeconds": "0"}}


@pytest.fixture
def runtime(gcs_server: GCSServer) -> Iterator[Runtime]:
    gcs_server.describe(**GOOD)
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        yield Runtime(backend, app="shop", env="prod")
        backend.close()


def hasty(runtime: Runtime, ttl: float) -> Runtime:
    """Return a runtime whose requests may take a sixth of ``ttl``."""
    return Runtime(runtime.backend, app="shop", env="prod", policy=LeasePolicy(ttl=ttl))


def told(report: Report, checked: str) -> str:
    """Return what was found there: the verdict, the text and the advice."""
    found = [finding for finding in report.findings if finding.checked == checked]
    return "\n".join(f"{item.verdict}: {item.text} -> {item.advice}" for item in found)


def verdicts(report: Report, verdict: str) -> list[str]:
    """Return what has that verdict."""
    return [finding.checked for finding in report.findings if finding.verdict == verdict]


# --- A good one ----------------------------------------------------------------------------


def test_a_bucket_made_for_leases_is_healthy_without_a_note(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    report = tako_sync.doctor(runtime)
    assert report.healthy and not verdicts(report, NOTE), str(report)
    assert report.where == "gs://bucket"
    assert "anonymous" in told(report, "credentials")
    assert gcs_server.url.removeprefix("http://") in told(report, "endpoint")
    assert "EUROPE-WEST1 (region)" in told(report, "location")
    assert "this host's agrees with it" in told(report, "clock")
    assert all(len(line) <= 80 for line in str(report).splitlines())


def test_it_sends_a_dozen_requests_to_one_object_and_deletes_nothing(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    assert tako_sync.doctor(runtime) and tako_sync.doctor(runtime)
    assert gcs_server.count() <= 24
    assert gcs_server.count("bucket") == gcs_server.count("permissions") == 2
    assert not gcs_server.count("delete") and not gcs_server.count("patch")
    assert {request.name for request in gcs_server.requests("write")} == {SCRATCH}
    assert "0 leases are recorded" in told(tako_sync.doctor(runtime), "listing")


def test_the_limit_of_a_write_a_second_only_makes_it_slower(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.set(write_interval=0.2)
    assert tako_sync.doctor(runtime).healthy


def test_the_cost_is_worked_out_from_the_policy(gcs_server: GCSServer, runtime: Runtime) -> None:
    report = tako_sync.doctor(runtime)
    assert "$1.31 a month" in told(report, "cost of a held lease")
    assert "262,800 writes (class A) at $0.005 per 1,000" in told(report, "cost of a held lease")
    assert "$0.53 a month" in told(report, "cost of a standby")
    assert "1,314,000 reads (class B) at $0.0004 per 1,000" in told(report, "cost of a standby")
    slow = tako_sync.doctor(Runtime(runtime.backend, policy=LeasePolicy(ttl=60, poll=10)))
    assert "$0.66 a month" in told(slow, "cost of a held lease")
    assert "$0.11 a month" in told(slow, "cost of a standby")


# --- Settings ------------------------------------------------------------------------------


def delete(**condition: Any) -> dict[str, Any]:
    return {"lifecycle": {"rule": [{"action": {"type": "Delete"}, "condition": condition}]}}


@pytest.mark.parametrize(
    ("settings", "verdict", "checked", "words"),
    [
        (
            {"softDeletePolicy": {"retentionDurationSeconds": "604800"}},
            NOTE,
            "soft delete",
            ("7 days", "60,480 dead copies", "gs://bucket --clear-soft-delete"),
        ),
        (
            {"versioning": {"enabled": True}},
            NOTE,
            "versioning",
            ("8,640 old versions a day", "--no-versioning"),
        ),
        (
            {"retentionPolicy": {"retentionPeriod": "3600"}},
            PROBLEM,
            "retention",
            ("3600 s", "--clear-retention-period"),
        ),
        (
            {"retentionPolicy": {"retentionPeriod": "3600", "isLocked": True}},
            PROBLEM,
            "retention",
            ("locked, for good",),
        ),
        (
            {"defaultEventBasedHold": True},
            PROBLEM,
            "holds",
            ("event-based hold", "--no-default-event-based-hold"),
        ),
        ({"objectRetention": {"mode": "Enabled"}}, NOTE, "object retention", ("one by one",)),
        (delete(age=0), PROBLEM, "lifecycle", ("Delete: age 0", "beside its holder")),
        (delete(), PROBLEM, "lifecycle", ("Delete: always",)),
        (delete(age=1), NOTE, "lifecycle", ("nobody has held for 1 days", "forgotten")),
        (delete(createdBefore="2030-01-01"), PROBLEM, "lifecycle", ("createdBefore",)),
        (delete(matchesPrefix=["tmp/", "lea"]), PROBLEM, "lifecycle", ("leases/",)),
        (delete(matchesPrefix=["leases/run-shop-"]), PROBLEM, "lifecycle", ("leases/",)),
        (
            {
                "lifecycle": {
                    "rule": [{"action": {"type": "SetStorageClass"}, "condition": {"age": 30}}]
                }
            },
            NOTE,
            "lifecycle",
            ("SetStorageClass: age 30",),
        ),
        ({"storageClass": "NEARLINE"}, NOTE, "storage class", ("30 days of storage",)),
        ({"storageClass": "ARCHIVE"}, NOTE, "storage class", ("365 days of storage",)),
        ({"autoclass": {"enabled": True}}, NOTE, "Autoclass", ("fee", "--no-enable-autoclass")),
        ({"billing": {"requesterPays": True}}, NOTE, "requester pays", ("user_project",)),
        (
            {"iamConfiguration": {"publicAccessPrevention": "inherited"}},
            NOTE,
            "public access",
            ("not prevented", "--public-access-prevention"),
        ),
        ({"locationType": "multi-region", "location": "EU"}, NOTE, "location", ("cost more",)),
    ],
)
def test_a_setting_that_does_harm_is_told(
    gcs_server: GCSServer,
    runtime: Runtime,
    settings: dict[str, Any],
    verdict: str,
    checked: str,
    words: tuple[str, ...],
) -> None:
    gcs_server.describe(**settings)
    report = tako_sync.doctor(runtime)
    assert verdicts(report, verdict) == [checked]
    assert all(word in told(report, checked) for word in words), told(report, checked)
    assert report.healthy is (verdict == NOTE)


def test_how_many_copies_follows_from_the_heartbeat(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.describe(
        versioning={"enabled": True}, softDeletePolicy={"retentionDurationSeconds": "86400"}
    )
    report = tako_sync.doctor(hasty(runtime, 60))
    assert "for 1 days: about 4,320 dead copies" in told(report, "soft delete")
    assert "4,320 old versions a day" in told(report, "versioning")


@pytest.mark.parametrize(
    "condition",
    [
        {"isLive": False, "age": 1},
        {"numNewerVersions": 1},
        {"daysSinceNoncurrentTime": 3},
        {"daysSinceCustomTime": 3},
        {"matchesPrefix": ["tmp/"]},
    ],
)
def test_a_lifecycle_rule_that_spares_leases_is_none_of_its_business(
    gcs_server: GCSServer, runtime: Runtime, condition: dict[str, Any]
) -> None:
    gcs_server.describe(**delete(**condition))
    report = tako_sync.doctor(runtime)
    assert told(report, "lifecycle") == "ok: no rule meets leases/ -> "


def test_a_rule_that_ends_unfinished_uploads_meets_no_object(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    rule = {"action": {"type": "AbortIncompleteMultipartUpload"}, "condition": {"age": 1}}
    gcs_server.describe(lifecycle={"rule": [rule]})
    assert told(tako_sync.doctor(runtime), "lifecycle").startswith("ok")


def test_a_rule_counts_by_the_folder_that_the_leases_are_in(gcs_server: GCSServer) -> None:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, "team/a", client=client)
        gcs_server.describe(**delete(matchesPrefix=["leases/"]))
        assert told(tako_sync.doctor(backend), "lifecycle").startswith("ok")
        gcs_server.describe(**delete(matchesPrefix=["team/"]))
        assert "team/a/leases/" in told(tako_sync.doctor(backend), "lifecycle")
        assert not tako_sync.doctor(backend)
        backend.close()


def test_settings_of_an_odd_shape_are_no_traceback(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.describe(
        softDeletePolicy={"retentionDurationSeconds": "a week"},
        lifecycle={"rule": [{"action": None, "condition": []}]},
        versioning=None,
        iamConfiguration=None,
        storageClass=7,
    )
    report = tako_sync.doctor(runtime)
    assert report.healthy and told(report, "storage class") == "ok: 7 -> "
    gcs_server.describe(versioning=7, lifecycle=["rule"])
    assert "not what GCS sends" in told(tako_sync.doctor(runtime), "settings")


# --- Permissions -----------------------------------------------------------------------------


@pytest.mark.parametrize("written_before", [False, True])
@pytest.mark.parametrize(
    "permission",
    [
        "storage.objects.get",
        "storage.objects.create",
        "storage.objects.delete",
        "storage.objects.list",
    ],
)
def test_a_missing_permission_is_a_problem_that_names_it_and_the_role(
    gcs_server: GCSServer, runtime: Runtime, permission: str, written_before: bool
) -> None:
    if written_before:
        assert tako_sync.doctor(runtime)
    gcs_server.set(denied=(permission,))
    report = tako_sync.doctor(runtime)
    assert any(permission in problem.text for problem in report.problems), str(report)
    assert told(report, "permissions").startswith(f"note: the bucket does not grant {permission},")
    for needed in examination.NEEDED:
        assert needed in told(report, "permissions").partition("->")[2]
    assert all(problem.advice for problem in report.problems)


def test_all_that_are_missing_are_named(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.set(denied=examination.NEEDED)
    report = tako_sync.doctor(runtime)
    assert " and ".join(examination.NEEDED) in told(report, "permissions")
    assert told(report, "reading").startswith("problem: refused")
    assert told(report, "creating").startswith("problem: refused")


def test_without_sight_of_the_settings_the_rest_is_told(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.set(denied=("storage.buckets.get",))
    report = tako_sync.doctor(runtime)
    assert report.healthy
    assert verdicts(report, NOTE) == ["settings"]
    assert "storage.buckets.get" in told(report, "settings")
    assert "leases do without" in told(report, "settings")
    assert told(report, "cost of a held lease") and told(report, "permissions").startswith("ok")


def test_a_server_that_does_not_tell_permissions_is_noted(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.faults.add(Fault("permissions", Status(501), times=1))
    report = tako_sync.doctor(runtime)
    assert report.healthy
    assert told(report, "permissions").startswith("note: could not be asked for")
    gcs_server.faults.add(Fault("permissions", Status(404), times=1))
    assert "this endpoint does not tell" in told(tako_sync.doctor(runtime), "permissions")


def test_the_server_of_others_is_healthy_too(independent_server: IndependentServer) -> None:
    with kit.client_of(independent_server.url) as client:
        backend = GCSLease(independent_server.bucket, client=client)
        for _ in range(2):
            report = tako_sync.doctor(Runtime(backend, app="examined"))
            assert report.healthy and told(report, "compare-and-swap").startswith("ok: kept")
        backend.close()


@pytest.mark.parametrize(
    ("action", "words"),
    [
        (canned.KMS_DISABLED, "encryption key"),
        (canned.RETENTION, "retention policy"),
        (canned.HOLD, "object hold"),
        (canned.REQUESTER_PAYS, "user_project"),
        (canned.UNAUTHORIZED, "the storage wants credentials, and there are none"),
    ],
)
def test_what_the_service_refuses_with_a_reason_is_told_with_it(
    gcs_server: GCSServer, runtime: Runtime, action: Status, words: str
) -> None:
    gcs_server.faults.add(Fault("write", action, times=None))
    assert words in told(tako_sync.doctor(runtime), "creating")


# --- Out of reach ----------------------------------------------------------------------------


def test_a_missing_bucket_is_one_problem(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.set(bucket_missing=True)
    report = tako_sync.doctor(runtime)
    assert "the bucket does not exist" in told(report, "reading")
    assert len(report.problems) == 1


def test_one_out_of_reach_is_one_problem() -> None:
    with kit.client_of("http://127.0.0.1:1") as client:
        nowhere = GCSLease("bucket", client=client)
        report = tako_sync.doctor(nowhere)
        nowhere.close()
    assert told(report, "reading").startswith("problem: no answer that counts within 5 s")
    assert "can reach it" in told(report, "reading")
    assert len(report.problems) == 1
    assert told(report, "cost of a held lease")


@pytest.mark.parametrize("kind", ["read", "write", "list", "permissions", "bucket"])
def test_an_outage_of_any_request_is_no_traceback(
    gcs_server: GCSServer, runtime: Runtime, kind: str
) -> None:
    gcs_server.faults.add(Fault(kind, canned.UNAVAILABLE, times=None))
    report = tako_sync.doctor(runtime)
    assert report.healthy is (kind not in ("read", "write"))
    assert "503" in str(report)


@pytest.mark.parametrize("kind", ["read", "write", "list", "permissions", "bucket"])
def test_nonsense_for_an_answer_is_no_traceback(
    gcs_server: GCSServer, runtime: Runtime, kind: str
) -> None:
    nonsense = Substitute('["who", "are", "you"]', content_type="application/json")
    gcs_server.faults.add(Fault(kind, nonsense, times=None))
    assert tako_sync.doctor(runtime).healthy is (kind not in ("read", "write"))


@pytest.mark.parametrize("kind", ["read", "permissions", "bucket"])
@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_or_drips_is_left(
    gcs_server: GCSServer, runtime: Runtime, kind: str, drips: bool
) -> None:
    """A drop arrives before each timeout of the socket: only the wait for the whole ends it."""
    action = Drip(1, 0.02) if drips else Stall(20)
    gcs_server.faults.add(Fault(kind, action, times=None))
    report = tako_sync.doctor(hasty(runtime, 2.4))
    gcs_server.faults.release()
    assert "no answer" in str(report) or "timed out" in str(report), str(report)
    assert report.healthy is (kind != "read")


def test_a_slow_server_is_noted_with_a_ttl_that_would_do(
    gcs_server: GCSServer, runtime: Runtime
) -> None:
    gcs_server.set(delay=0.2)
    report = tako_sync.doctor(hasty(runtime, 4.5))
    assert told(report, "round trips").startswith("note")
    assert "LeasePolicy(ttl=" in told(report, "round trips")
    assert report.healthy


# --- Clocks and credentials --------------------------------------------------------------------


def test_clocks_that_differ_are_noted_as_harmless(gcs_server: GCSServer, runtime: Runtime) -> None:
    gcs_server.set(clock_shift=3600)
    report = tako_sync.doctor(runtime)
    assert report.healthy
    assert told(report, "clock").startswith("note")
    assert "s behind it, which does leases no harm" in told(report, "clock")
    gcs_server.set(send_date=False)
    assert told(tako_sync.doctor(runtime), "clock").startswith("note: the storage has none")


def test_without_credentials_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    report = tako_sync.doctor("gs://bucket")
    assert "gcloud auth application-default login" in told(report, "reading")
    assert told(report, "credentials").startswith("problem: no client can be made")


def test_the_kind_of_credentials_is_told_and_no_secret() -> None:
    def found(credentials: object) -> str:
        client = SimpleNamespace(_credentials=credentials)
        return examination._credentials(client).text

    mine = person.Credentials("secret", refresh_token="secret")  # type: ignore[no-untyped-call]
    assert "a person's login" in found(mine) and "secret" not in found(mine)
    machine = compute_engine.Credentials()  # type: ignore[no-untyped-call]
    assert found(machine).endswith("the service account of the machine")
    machine._service_account_email = "worker@shop.iam.gserviceaccount.com"
    assert found(machine).endswith("machine, worker@shop.iam.gserviceaccount.com")
    assert "types.SimpleNamespace" in found(SimpleNamespace())


def test_the_endpoint_is_told_without_what_may_stand_before_it() -> None:
    def found(url: str) -> str:
        return str(
            examination._endpoint(SimpleNamespace(_connection=SimpleNamespace(API_BASE_URL=url)))
        )

    assert found("https://storage.googleapis.com").endswith("Google's")
    assert "secret" not in found("http://me:secret@proxy:8080")
    assert "proxy:8080, which is not Google's" in found("http://me:secret@proxy:8080")
    assert "not a URL" in found("http://[")

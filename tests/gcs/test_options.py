"""Names, lists, the bucket, permissions, generations and rates of our GCS server."""

from __future__ import annotations

from urllib.parse import quote

import pytest
from google.api_core import exceptions

from gcs.kit import Bucket, ask, bucket_of, get, put, response_of
from gcs.objects import crc32c
from gcs.server import GCSServer

# --- Names -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a/b", "%2F", "a#b?c", "å ∂", "a+b", "a&b=c", "..%2e", "a\nb", "~", '"'], ids=repr
)
def test_the_log_has_the_very_name_that_was_asked_for(
    gcs_server: GCSServer, bucket: Bucket, name: str
) -> None:
    put(bucket, name, "body", if_generation_match=0)
    assert get(bucket, name).content == b"body"
    bucket.blob(name).reload(retry=None)
    bucket.blob(name).delete(retry=None)
    assert [request.name for request in gcs_server.requests()] == 4 * [name]
    assert [request.kind for request in gcs_server.requests()] == [
        "write", "read", "metadata", "delete",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["..", "."])
def test_a_name_of_dots_becomes_another_url_on_its_way(
    gcs_server: GCSServer, bucket: Bucket, name: str
) -> None:
    """Why such names must be refused before: the client's own library folds the path."""
    with pytest.raises(exceptions.GoogleAPICallError):
        get(bucket, name)
    assert gcs_server.count("read") == 0
    assert gcs_server.count() == 1


def test_a_bare_slash_in_a_url_is_no_name(gcs_server: GCSServer) -> None:
    gcs_server.put("a/b", b"body")
    assert ask(gcs_server.url, "GET", "/storage/v1/b/bucket/o/a/b")[0] == 501
    assert ask(gcs_server.url, "GET", "/storage/v1/b/bucket/o/a%2Fb")[0] == 200
    assert [request.kind for request in gcs_server.requests()] == ["unknown", "metadata"]


# --- Lists -------------------------------------------------------------------------------


def test_a_list_has_what_begins_with_its_prefix_page_by_page(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    for number in range(7):
        gcs_server.put(f"leases/{number}", b"body")
    gcs_server.put("other", b"body")
    found = bucket.list_blobs(prefix="leases/", page_size=3, retry=None)
    assert [blob.name for blob in found] == [f"leases/{number}" for number in range(7)]
    assert gcs_server.count("list", "leases/") == 3
    assert list(bucket.list_blobs(prefix="none", retry=None)) == []


def test_a_list_that_the_server_does_not_speak_is_refused_clearly(bucket: Bucket) -> None:
    with pytest.raises(exceptions.GoogleAPICallError, match=r"does not speak.*delimiter"):
        list(bucket.list_blobs(delimiter="/", retry=None))


def test_a_resumable_upload_is_refused_clearly(gcs_server: GCSServer) -> None:
    target = "/upload/storage/v1/b/bucket/o?uploadType=resumable&name=x"
    status, _, body = ask(gcs_server.url, "POST", target, b"{}")
    assert status == 501 and b"uploadType=resumable" in body
    assert gcs_server.object("x") is None


# --- The bucket, and who may what --------------------------------------------------------


def test_a_bucket_is_as_its_owner_made_it(gcs_server: GCSServer, bucket: Bucket) -> None:
    gcs_server.describe(
        location="US",
        versioning={"enabled": True},
        retentionPolicy={"retentionPeriod": "3600", "isLocked": False},
        lifecycle={"rule": [{"action": {"type": "Delete"}, "condition": {"age": 1}}]},
    )
    bucket.reload(retry=None)
    assert (bucket.location, bucket.storage_class) == ("US", "STANDARD")
    assert (bucket.versioning_enabled, bucket.retention_period) == (True, 3600)
    assert bucket.soft_delete_policy.retention_duration_seconds == 604800
    assert [rule["action"]["type"] for rule in bucket.lifecycle_rules] == ["Delete"]
    assert bucket.iam_configuration.uniform_bucket_level_access_enabled is True


def test_a_permission_that_is_denied_is_missing_and_missed(
    gcs_server: GCSServer, bucket: Bucket
) -> None:
    gcs_server.put("x", b"body")
    gcs_server.set(denied=["storage.objects.delete", "storage.objects.list"])
    asked = [f"storage.objects.{verb}" for verb in ("get", "create", "delete", "list")]
    assert bucket.test_iam_permissions(asked, retry=None) == asked[:2]
    put(bucket, "y", "body", if_generation_match=0)
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.delete access"):
        put(bucket, "y", "again")  # to overwrite is to delete
    assert get(bucket, "x").content == b"body"
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.list access"):
        get(bucket, "none")  # who may not list is not told what is absent
    gcs_server.set(denied=["storage.objects.get", "storage.buckets.get"])
    with pytest.raises(exceptions.Forbidden, match=r"storage\.objects\.get"):
        get(bucket, "x")
    with pytest.raises(exceptions.Forbidden, match=r"storage\.buckets\.get"):
        bucket.reload(retry=None)


def test_an_unknown_option_is_refused(gcs_server: GCSServer) -> None:
    with pytest.raises(TypeError, match=r"date_shfit.*date_shift"):
        gcs_server.set(date_shfit=1, delay=5)
    assert gcs_server.options.delay == 0


# --- Generations and rates ---------------------------------------------------------------


def test_generations_increase_unless_told_otherwise(gcs_server: GCSServer, bucket: Bucket) -> None:
    seen = [put(bucket, "x", "body").generation for _ in range(20)]
    assert seen == sorted(set(seen))


def test_generations_can_be_unique_and_in_no_order(gcs_server: GCSServer, bucket: Bucket) -> None:
    """As the real service reserves. The guard holds all the same."""
    gcs_server.set(random_generations=True)
    seen, last = [], 0
    for _ in range(20):
        last = put(bucket, "x", "body", if_generation_match=last).generation
        seen.append(last)
    assert len(set(seen)) == 20 and seen != sorted(seen)
    for stale in seen[:-1]:
        with pytest.raises(exceptions.PreconditionFailed):
            put(bucket, "x", "late", if_generation_match=stale)


def test_a_generation_is_never_used_twice_even_where_the_clock_stands() -> None:
    with GCSServer(wall=lambda: 1.0) as server:
        seen = {server.put("x", b"body").generation}
        for number in range(100):
            server.set(random_generations=number % 3 == 0)
            server.delete("x")
            seen.add(server.put("x", b"body").generation)
    assert len(seen) == 101


def test_a_second_change_within_the_interval_is_not_applied() -> None:
    """On the server's clock, so that the test waits for none."""
    now = [100.0]
    with (
        GCSServer(monotonic=lambda: now[0], write_interval=1.0) as server,
        bucket_of(server.url) as bucket,
    ):
        first = put(bucket, "x", "first", if_generation_match=0).generation
        now[0] += 0.9
        with pytest.raises(exceptions.TooManyRequests) as caught:
            put(bucket, "x", "second", if_generation_match=first)
        error = response_of(caught.value).json()["error"]["errors"][0]
        assert error["reason"] == "rateLimitExceeded"
        with pytest.raises(exceptions.TooManyRequests):
            bucket.blob("x").delete(retry=None)
        put(bucket, "y", "another object")
        stored = server.object("x")
        assert stored is not None and stored.generation == first
        now[0] += 0.1  # what was refused has not begun another interval
        put(bucket, "x", "second", if_generation_match=first)


def test_the_checksum_is_castagnolis() -> None:
    """The check value of the catalogues, E3069283."""
    assert crc32c(b"123456789") == "4waSgw=="
    assert quote(crc32c(b"")) == "AAAAAA%3D%3D"

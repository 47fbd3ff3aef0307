"""The log: one line a change of state, none a poll, no bodies, no secrets; and the listeners."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime, timezone

import pytest

from kit import Host, Running, World
from tako_sync import events
from tako_sync.abc import ABSENT
from tako_sync.backends.memory import MemoryLease
from tako_sync.ctx import Ctx
from tako_sync.errors import (
    BackendDeniedError,
    BackendUnavailableError,
    ConfigurationError,
    LeaseLostError,
    LossReason,
)
from tako_sync.events import (
    Acquired,
    Busy,
    CronAhead,
    CronCutShort,
    CronMissed,
    CronRan,
    CronRefused,
    Event,
    HandoverRequested,
    Lost,
    Recovered,
    Released,
    ReleaseUnconfirmed,
    Renewed,
    SingletonDown,
    SingletonRefused,
    SingletonReturned,
    SingletonUp,
    Unreachable,
    UnreadableTakenOver,
    Waiting,
)
from tako_sync.flag import Flag
from tako_sync.lock import Lock
from tako_sync.record import Holder
from tako_sync.runtime import Runtime
from tako_sync.testing import FakeClock
from tako_sync.testing.faults import fail

KEY = "run-shop-test-reindex"
MINUTES = 60.0
POLL = 2.5


@pytest.fixture
def world(caplog: pytest.LogCaptureFixture) -> Iterator[World]:
    caplog.set_level(logging.INFO, "tako_sync")
    world = World()
    yield world
    for host in world.hosts:
        host.storage.release_all()
    world.advance(60)
    assert not world.clock.waiters, "something goes on after the end"


def unavailable() -> BackendUnavailableError:
    return BackendUnavailableError("503 service unavailable")


def lines(caplog: pytest.LogCaptureFixture, since: int = 0) -> list[str]:
    return [record.getMessage() for record in caplog.records[since:]]


def beginnings(caplog: pytest.LogCaptureFixture, words: int) -> list[str]:
    return [" ".join(line.split()[:words]) for line in lines(caplog)]


def campaigns(world: World, hosts: list[Host]) -> list[Running[None]]:
    return [world.start(lambda host=host: host.lock().do(lambda ctx: None)) for host in hosts]


# --- Waiting -----------------------------------------------------------------------------------


def test_ten_campaigners_that_wait_ten_minutes_write_a_line_each_and_one_more_when_they_have_it(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """Expected contention, logged at each poll, has filled disks with gigabytes."""
    finish, holder = Flag(), world.host("holder")
    holding = world.start(lambda: holder.lock().do(lambda ctx: world.clock.wait(finish)))
    hosts = [world.host(f"h{number}") for number in range(10)]
    running = campaigns(world, hosts)
    assert beginnings(caplog, 4) == ['waiting for lease "reindex":'] * 10
    world.advance(10 * MINUTES)
    assert len(caplog.records) == 10, "no line a poll"
    finish.set()
    world.advance(10)
    holding.result()
    for one in running:
        one.result()
    assert beginnings(caplog, 3)[10:] == ['acquired lease "reindex"'] * 10
    assert {record.levelno for record in caplog.records} == {logging.INFO}
    assert not any(record.exc_info for record in caplog.records)


def test_ten_threads_of_one_process_write_no_more(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    finish, holder, home = Flag(), world.host("holder"), world.host("home")
    holding = world.start(lambda: holder.lock().do(lambda ctx: world.clock.wait(finish)))
    running = campaigns(world, [home] * 10)
    world.advance(10 * MINUTES)
    assert 1 <= len(caplog.records) <= 10
    finish.set()
    world.advance(10)
    holding.result()
    for one in running:
        one.result()
    assert len(caplog.records) <= 20


def test_an_unreadable_record_for_ten_minutes_is_a_line_a_campaigner(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.store.write(KEY, b"{", expect=ABSENT, timeout=1)
    running = campaigns(world, hosts := [world.host(f"h{number}") for number in range(10)])
    for number in range(30):  # somebody goes on writing there
        world.advance(20)
        version = world.store.read(KEY, timeout=1).version
        world.store.write(KEY, b"{" * number, expect=version, timeout=1)
    assert len(caplog.records) == 10
    assert all("a record that cannot be read" in line for line in lines(caplog))
    world.advance(30 + 10 * POLL)
    for one in running:
        one.result()
    takeovers = [line for line in lines(caplog) if "took over an unreadable record" in line]
    assert len(takeovers) == 1
    assert len(caplog.records) == 10 + 1 + len(hosts)


def test_a_store_that_is_down_for_ten_minutes_is_two_lines_a_campaigner(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    hosts = [world.host(f"h{number}") for number in range(10)]
    for host in hosts:
        host.storage.always("*", fail(unavailable))
    running = campaigns(world, hosts)
    world.advance(10 * MINUTES)
    assert (
        lines(caplog)
        == [
            (
                'lease "reindex": the storage fails while campaigning '
                "(BackendUnavailableError: 503 service unavailable); retrying"
            )
        ]
        * 10
    )
    assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert not any(record.exc_info for record in caplog.records), "no stack for a plain outage"
    for host in hosts:
        host.storage.heal()
    world.advance(20)
    for one in running:
        one.result()
    recovered = 'lease "reindex": the storage answers again while campaigning'
    assert lines(caplog).count(recovered) == 10


def test_ten_thousand_busy_answers_write_nothing(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = world.host("a"), world.host("b")
    with a.lock().hold():
        for _ in range(1000):
            assert not b.lock().try_do(lambda ctx: None)
    assert not caplog.records


def test_undisturbed_holds_write_nothing(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host = world.host()
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(10 * MINUTES)))
    world.advance(10 * MINUTES)
    running.result()
    for number in range(100):
        host.lock(f"other-{number}").do(lambda ctx: None)
    assert not caplog.records


# --- Holding -----------------------------------------------------------------------------------


def test_an_outage_during_a_hold_is_two_lines(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    host, finish = world.host(), Flag()
    running = world.start(lambda: host.lock().do(lambda ctx: world.clock.wait(finish)))
    for _ in range(2):
        host.storage.always("write", fail(unavailable))
        world.advance(20)
        host.storage.heal()
        world.advance(20)
    finish.set()
    world.advance(0)
    running.result()
    assert (
        lines(caplog)
        == [
            (
                'lease "reindex": the storage fails while renewing '
                "(BackendUnavailableError: 503 service unavailable); retrying"
            ),
            'lease "reindex": the storage answers again while renewing',
        ]
        * 2
    )


def test_a_backend_with_a_bug_is_one_traceback_an_outage(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    """The traceback helps its author; ten of the same do not."""
    host = world.host()
    host.storage.always("write", fail(lambda: RuntimeError("a bug")), when=lambda c: c.number > 2)
    running = world.start(lambda: host.lock().do(lambda ctx: ctx.wait(600)))
    world.advance(60)
    with pytest.raises(LeaseLostError):
        running.result()
    traced = [record for record in caplog.records if record.exc_info]
    assert len(traced) == 1
    assert "a fault of the backend" in traced[0].getMessage()
    assert str(traced[0].exc_info[1]) == "a bug"  # type: ignore[index]
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR", "WARNING"]


def test_a_loss_is_told_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    host = world.host()
    host.storage.always("write", fail(unavailable), when=lambda call: call.number > 2)

    def body(ctx: Ctx) -> None:
        ctx.wait(600)
        for _ in range(100):
            assert ctx.cancelled
            assert ctx.lease.loss is not None
        ctx.wait(100)

    running = world.start(lambda: host.lock().do(body))
    world.advance(300)
    with pytest.raises(LeaseLostError):
        running.result()
    assert len(host.told(Lost)) == 1
    assert sum("was lost while held" in line for line in lines(caplog)) == 1


def test_a_release_that_cannot_be_confirmed_is_one_warning(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    host = world.host()
    host.storage.script("write", None, *[fail(unavailable)] * 200)
    running = world.start(lambda: host.lock().do(lambda ctx: "value"))
    world.advance(60)
    assert running.result() == "value"
    (line,) = lines(caplog)
    assert line.startswith('the release of lease "reindex" (fence ')
    assert line.endswith(
        "could not be confirmed (BackendUnavailableError: 503 service unavailable); "
        "it becomes free by its age"
    )


# --- What does not stand in it -------------------------------------------------------------------


def test_no_value_body_or_argument_stands_in_the_log(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "tako_sync")
    a, b, secret = world.host("a"), world.host("b"), "s3cr3t-value"

    def body(ctx: Ctx) -> str:
        ctx.wait(40)
        assert not b.lock().try_do(lambda ctx: secret)
        return secret

    running = world.start(lambda: a.lock().do(body))
    world.store.write("run-shop-test-other", secret.encode() * 9, expect=ABSENT, timeout=1)
    other = world.start(lambda: a.lock("other").do(lambda ctx: secret))
    guarded = a.lock("third").guard(lambda password: password)
    assert guarded(password=secret) == secret
    world.advance(60)
    running.result()
    other.result()
    assert len(caplog.records) > 8
    assert secret not in caplog.text
    assert '"expires"' not in caplog.text, "no record, either"


@pytest.mark.parametrize(
    "url", ["redis://user:s3cr3t@host/0", "redis://:s3cr3t@host", "pg://s3cr3t@host/db?x=1"]
)
def test_a_password_in_a_url_is_not_repeated_by_its_refusal(url: str) -> None:
    """The URL comes from the environment, and errors go to trackers of others."""
    with pytest.raises(ConfigurationError) as caught:
        Runtime(url)
    assert "s3cr3t" not in str(caught.value)
    assert "host" in str(caught.value), "what helps to find it is still there"


# --- Events and listeners ------------------------------------------------------------------------


def test_a_listener_is_told_each_event_in_order_in_the_thread_where_it_happens() -> None:
    clock, told = FakeClock(), list[Event]()
    home = Runtime(MemoryLease(clock), clock=clock, listeners=[told.append])
    lock = Lock("reindex").bound_to(home)
    lock.do(lambda ctx: lock.try_do(lambda ctx: None))
    assert [type(event) for event in told] == [Acquired, Busy, Released]
    acquired, busy, released = told
    assert {event.lease for event in told} == {"reindex"}
    assert isinstance(acquired, Acquired)
    assert isinstance(busy, Busy)
    assert isinstance(released, Released)
    assert acquired.fence == busy.holder.fence == released.fence
    assert (acquired.how, acquired.waited, acquired.contended) == ("new", 0.0, False)


def test_the_log_is_nothing_but_the_events(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """A handler that wants structure finds the event on the record."""
    caplog.set_level(logging.DEBUG, "tako_sync")
    a, b, finish = world.host("a"), world.host("b"), Flag()
    running = world.start(lambda: a.lock().do(lambda ctx: world.clock.wait(finish)))
    waiting = world.start(lambda: b.lock().do(lambda ctx: None))
    world.advance(20)
    finish.set()
    world.advance(POLL)
    running.result()
    waiting.result()
    logged = [record.tako_event for record in caplog.records]  # type: ignore[attr-defined]
    told = a.events + b.events
    assert sorted(map(repr, logged)) == sorted(map(repr, told))
    for record in caplog.records:
        event: Event = record.tako_event  # type: ignore[attr-defined]
        assert (record.levelno, record.getMessage()) == (event.level, event.message)
        assert record.name == "tako_sync"


def test_a_listener_that_raises_harms_neither_the_hold_nor_the_other_listeners(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Event] = []

    def broken(event: Event) -> None:
        raise ZeroDivisionError

    home = Runtime(
        world.store, app="shop", env="test", clock=world.clock, listeners=[broken, told.append]
    )
    lock = Lock("reindex").bound_to(home)
    running = world.start(lambda: lock.do(lambda ctx: (ctx.wait(100), "value")[1]))
    world.advance(101)
    assert running.result() == "value"
    assert type(told[0]) is Acquired
    assert type(told[-1]) is Released
    assert len([event for event in told if isinstance(event, Renewed)]) >= 9
    failures = [record for record in caplog.records if record.exc_info]
    assert len(failures) == len(told)
    assert "broken" in failures[0].getMessage()
    assert not [event for event in told if isinstance(event, Unreachable)], "it is no outage"


def test_a_listener_may_ask_the_lock(world: World) -> None:
    """A metric's listener reads the holder; no lock of ours is held meanwhile."""
    host = world.host()
    seen: list[Holder | None] = []

    def ask(event: Event) -> None:
        if not isinstance(event, Busy):
            seen.append(host.lock().holder())

    home = Runtime(world.store, app="shop", env="test", clock=world.clock, listeners=[ask])
    Lock("reindex").bound_to(home).do(lambda ctx: None)
    assert [holder is not None for holder in seen] == [True, False]


SOMEONE = Holder("web-1:7:abc", "12", "held", None, 5, 21.0)
SAMPLES: dict[type[Event], tuple[Event, int, str]] = {
    Busy: (
        Busy("x", SOMEONE),
        logging.DEBUG,
        'lease "x" is busy: held by web-1:7:abc (fence 5, at most 21 s left)',
    ),
    Waiting: (
        Waiting("x", SOMEONE),
        logging.INFO,
        'waiting for lease "x": held by web-1:7:abc (fence 5, at most 21 s left)',
    ),
    Acquired: (
        Acquired("x", 6, "released", 3.25, True),
        logging.INFO,
        'acquired lease "x" (after 3.2 s, released, fence 6)',
    ),
    UnreadableTakenOver: (
        UnreadableTakenOver("x", "run-a-b-x", "empty"),
        logging.WARNING,
        'lease "x": took over an unreadable record (run-a-b-x: empty)',
    ),
    Unreachable: (
        Unreachable("x", "renewing", BackendUnavailableError("503")),
        logging.WARNING,
        'lease "x": the storage fails while renewing (BackendUnavailableError: 503); retrying',
    ),
    Recovered: (
        Recovered("x", "renewing"),
        logging.INFO,
        'lease "x": the storage answers again while renewing',
    ),
    Renewed: (
        Renewed("x", 6, 0.0125),
        logging.DEBUG,
        'renewed lease "x" (fence 6, 0.013 s late)',
    ),
    HandoverRequested: (
        HandoverRequested("x", 6, "deploy 7"),
        logging.INFO,
        'lease "x": deploy 7 asks for a hand-over (fence 6)',
    ),
    Lost: (
        Lost("x", 6, LossReason.TAKEN),
        logging.ERROR,
        'lease "x" was lost while held (taken, fence 6)',
    ),
    Released: (
        Released("x", 6, 1.5),
        logging.DEBUG,
        'released lease "x" after 1.500 s (fence 6)',
    ),
    ReleaseUnconfirmed: (
        ReleaseUnconfirmed("x", 6, None),
        logging.WARNING,
        (
            'the release of lease "x" (fence 6) could not be confirmed (no answer); '
            "it becomes free by its age"
        ),
    ),
    SingletonReturned: (
        SingletonReturned("singleton-x", "x", 5.0, None),
        logging.INFO,
        "♾ singleton x returned — restarting in 5s.",
    ),
    SingletonRefused: (
        SingletonRefused("singleton-x", "x", BackendDeniedError("403")),
        logging.ERROR,
        "singleton x cannot campaign (BackendDeniedError: 403); trying again for ever",
    ),
    SingletonDown: (
        SingletonDown("singleton-x", "x", "nobody runs it"),
        logging.CRITICAL,
        "singleton x is down: nobody runs it",
    ),
    SingletonUp: (
        SingletonUp("singleton-x", "x"),
        logging.WARNING,
        "singleton x is up again",
    ),
    CronRan: (
        CronRan("cron-x", "x", datetime(2026, 3, 1, tzinfo=timezone.utc), 1.5, ValueError("no")),
        logging.ERROR,
        "cron x, due 2026-03-01T00:00:00Z: failed with ValueError: no",
    ),
    CronMissed: (
        CronMissed("cron-x", "x", (datetime(2026, 3, 1, tzinfo=timezone.utc),), "it slept"),
        logging.WARNING,
        "cron x missed 2026-03-01T00:00:00Z: it slept",
    ),
    CronAhead: (
        CronAhead("cron-x", "x", datetime(2027, 3, 1, tzinfo=timezone.utc), 86400.4, "web:1:a"),
        logging.ERROR,
        (
            "cron x: the slot of 2027-03-01T00:00:00Z was begun by web:1:a, 86400 s ahead of this "
            "clock; nothing is run before that. If a clock was wrong: set it right, and see "
            "Cron.forget"
        ),
    ),
    CronCutShort: (
        CronCutShort("cron-x", "x", datetime(2026, 3, 1, tzinfo=timezone.utc), 2),
        logging.ERROR,
        ("cron x, due 2026-03-01T00:00:00Z: was cut short (begun 2 times), and is not run again"),
    ),
    CronRefused: (
        CronRefused("cron-x", "x", BackendDeniedError("403")),
        logging.ERROR,
        "cron x cannot tell whether it is to run (BackendDeniedError: 403)",
    ),
}
KINDS = [
    kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_event_has_a_level_and_a_line(kind: type[Event]) -> None:
    event, level, message = SAMPLES[kind]  # a new event needs a sample here
    assert (event.level, event.message) == (level, message)
    assert kind.__doc__


@pytest.mark.parametrize(
    ("how", "contended", "level"),
    [
        ("new", False, logging.DEBUG),
        ("released", False, logging.DEBUG),
        ("released", True, logging.INFO),
        ("expired", False, logging.INFO),
    ],
)
def test_only_an_acquisition_that_is_news_is_logged_at_info(
    how: str, contended: bool, level: int
) -> None:
    assert Acquired("x", 6, how, 0.0, contended).level == level

"""A storage that fails on demand: a wrapper around any backend, with a log of its calls.

There is one mechanism. A fault is a callable ``fault(call, proceed)``: it answers for the
backend, and may call ``proceed()`` to have the call carried out, before, after or never. All
the rest is built from it; :func:`intercept` is for those that are not here.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, cast

from attrs import define, field, frozen

from tako_sync import fork
from tako_sync.abc import Absent, Clock, Interval, LeaseBackend, Snapshot, Version
from tako_sync.clock import SystemClock
from tako_sync.errors import BackendDeniedError, BackendUnavailableError, TakoError
from tako_sync.findings import Finding
from tako_sync.flag import Flag
from tako_sync.policy import LeasePolicy


@define(eq=False)
class Call:
    """One call of a backend, as the log keeps it.

    Attributes:
        number: its place in the log's life, from 1; :meth:`FaultyBackend.clear` does not reset it.
        op: ``read``, ``write`` or ``list``.
        key: the key; for ``list`` the prefix.
        at: when it came, on the monotonic clock.
        pid: the process that called.
        thread: the name of the thread that called.
        timeout: seconds it was given.
        expect: the version a write expects.
        body: what a write stores.
        faults: the faults that met it, outermost first.
        applied: whether the wrapped backend has carried it out.
        outcome: ``pending``, ``ok``, or the name of the error's class.
        result: what it returned.
        error: what it raised.
        faulty: the backend that it came to.
    """

    faulty: FaultyBackend = field(repr=False)
    number: int
    op: str
    key: str
    at: float
    pid: int
    thread: str
    timeout: float
    expect: Version | Absent | None = None
    body: bytes | None = field(default=None, repr=False)
    faults: list[str] = field(factory=list)
    applied: bool = False
    outcome: str = "pending"
    result: Any = field(default=None, repr=False)
    error: BaseException | None = None

    @property
    def document(self) -> Mapping[str, Any]:
        """The body's JSON object; empty if there is none: ``call.document.get("state")``."""
        try:
            document = json.loads(self.body or b"")
        except ValueError:
            return {}
        return document if isinstance(document, dict) else {}

    def hold(self, until: Flag, timeout: float | None = None) -> None:
        """Wait on the clock for ``until``, within reach of :meth:`FaultyBackend.release_all`."""
        self.faulty._hold(self, until, timeout)


Proceed = Callable[[], Any]
Fault = Callable[[Call, Proceed], Any]
Predicate = Callable[[Call], bool]
Raisable = BaseException | Callable[[], BaseException]
"""An error to raise as it is, or a class or function that makes one for each call."""


@frozen
class _Named:
    """A fault with a name that tells a reader of the log which one it was."""

    name: str
    act: Fault

    def __call__(self, call: Call, proceed: Proceed) -> Any:
        return self.act(call, proceed)

    def __repr__(self) -> str:
        return self.name


# --- The faults ------------------------------------------------------------------------


def intercept(act: Fault) -> Fault:
    """Have ``act(call, proceed)`` answer; any such function may also be given as it is."""
    return _Named(f"intercept({getattr(act, '__name__', act)})", act)


def fail(error: Raisable) -> Fault:
    """Raise ``error``; nothing is applied."""

    def act(call: Call, proceed: Proceed) -> Any:
        raise _fresh(error)

    return _Named(f"fail({error!r})", act)


def applied_then(error: Raisable) -> Fault:
    """Apply the call, then raise ``error``: a lost acknowledgement."""

    def act(call: Call, proceed: Proceed) -> Any:
        proceed()
        raise _fresh(error)

    return _Named(f"applied_then({error!r})", act)


def delay(before: float = 0.0, after: float = 0.0, *, deaf: bool = False) -> Fault:
    """Wait on the clock before the call is applied, and after it.

    Args:
        before: seconds before.
        after: seconds after.
        deaf: whether to ignore the call's timeout, as a server that drips its answer does.
            Otherwise ``BackendUnavailableError`` is raised when the timeout is over.
    """

    def act(call: Call, proceed: Proceed) -> Any:
        left = float("inf") if deaf else call.timeout
        _pause(call, before, left)
        result = proceed()
        _pause(call, after, left - before)
        return result

    return _Named(f"delay({before:g}, {after:g}{', deaf' if deaf else ''})", act)


def lands_later(seconds: float, error: Raisable | None = None) -> Fault:
    """Say at once that there is no answer, and apply the call later, in a thread of its own.

    Args:
        seconds: how much later.
        error: what to raise instead of ``BackendUnavailableError``.
    """

    def act(call: Call, proceed: Proceed) -> Any:
        def land() -> None:
            _pause(call, seconds, float("inf"))
            with contextlib.suppress(TakoError):  # nobody is there any more to be told
                proceed()

        call.faulty.clock.spawn(land, f"late {call.op} {call.number}")
        raise _fresh(error or _no_answer)

    return _Named(f"lands_later({seconds:g})", act)


def hang(until: Flag | None = None, *, after: bool = False) -> Fault:
    """Hang whatever the timeout, until ``until`` is set or everything is released.

    Args:
        until: what ends it; None leaves it to :meth:`FaultyBackend.release_all`, which sets
            this flag as well.
        after: whether the call is applied first, so that only its answer hangs.
    """
    until = until or Flag()

    def act(call: Call, proceed: Proceed) -> Any:
        if after:
            result = proceed()
            call.hold(until)
            return result
        call.hold(until)
        return proceed()

    return _Named(f"hang({'after' if after else 'before'})", act)


def substitute(body: bytes | Callable[[Snapshot], bytes]) -> Fault:
    """Have someone else write before the call proceeds.

    Args:
        body: what they write; or a function that makes it of what is stored.
    """

    def act(call: Call, proceed: Proceed) -> Any:
        backend = call.faulty.backend
        stored = backend.read(call.key, timeout=call.timeout)
        theirs = body if isinstance(body, bytes) else body(stored)
        backend.write(call.key, theirs, expect=stored.version, timeout=call.timeout)
        return proceed()

    return _Named("substitute", act)


class Gate:
    """A fault that stops calls until it is opened, to put threads into an exact order.

    Attributes:
        arrived: set once a call stands here.
        calls: those that have come, in order.
    """

    def __init__(self, *, after: bool = False) -> None:
        self._after = after
        self._opened = Flag()
        self.arrived = Flag()
        self.calls: list[Call] = []

    def __call__(self, call: Call, proceed: Proceed) -> Any:
        if not self._after:
            self._stop(call)
            return proceed()
        try:
            return proceed()
        finally:  # an error is a reply too
            self._stop(call)

    def open(self) -> None:
        """Let pass those who stand here, and all who come."""
        self._opened.set()

    def _stop(self, call: Call) -> None:
        self.calls.append(call)
        self.arrived.set()
        call.hold(self._opened)

    def __repr__(self) -> str:
        return f"gate({'after' if self._after else 'before'})"


def _fresh(error: Raisable) -> BaseException:
    return error.with_traceback(None) if isinstance(error, BaseException) else error()


def _no_answer() -> BackendUnavailableError:
    return BackendUnavailableError("no answer")


def _pause(call: Call, seconds: float, left: float) -> None:
    """Wait ``seconds``, or what is ``left`` of the timeout and then raise."""
    if seconds > 0:
        call.hold(Flag(), min(seconds, max(left, 0.0)))
    if seconds > left:
        raise BackendUnavailableError(f"no answer within {call.timeout:g} s")


# --- Chance ------------------------------------------------------------------------------

_CHAOS: Final[Mapping[str, Callable[[float, Call], Fault]]] = {
    "fail": lambda chance, call: fail(_no_answer),
    "denied": lambda chance, call: fail(BackendDeniedError("chaos")),
    "lost": lambda chance, call: applied_then(_no_answer),
    "slow": lambda chance, call: delay(chance * call.timeout / 2, chance * call.timeout / 2),
    "timeout": lambda chance, call: delay(2 * call.timeout),
    "deaf": lambda chance, call: delay((1 + 9 * chance) * call.timeout, deaf=True),
    "late": lambda chance, call: lands_later(10 * chance * call.timeout),
}


# --- The backend -------------------------------------------------------------------------

Choose = Callable[[Call], Fault | None]


@frozen(eq=False)
class _Rule:
    """Which calls something happens to, and what: ``choose`` is asked once for each of them."""

    op: str
    when: Predicate
    choose: Choose


def _any(call: Call) -> bool:
    return True


class FaultyBackend(LeaseBackend):
    """A backend that passes calls on to another, injects faults, and keeps a log.

    Every rule that matches a call takes part in it, the first one added outermost. An ``op`` is
    ``read``, ``write``, ``list``, or ``*`` for all; ``when`` narrows it further, to renewals for
    example: ``when=lambda call: call.document.get("state") == "held"``. The faults' own requests
    go to the wrapped backend and are in no log.

    Args:
        backend: where calls go.
        clock: what delays and hangs wait on, and ``Call.at`` is read from. Give the test's
            :class:`~tako_sync.testing.clock.FakeClock`; without it they pass in real time.
        prompt: as for any backend; leave it False if anything is to hang or be late.
    """

    def __init__(
        self, backend: LeaseBackend, clock: Clock | None = None, *, prompt: bool = False
    ) -> None:
        self.backend = backend
        self.clock = clock or SystemClock()
        self.prompt = prompt
        self.clock_skew = backend.clock_skew
        self._rules: list[_Rule] = []
        self._calls: list[Call] = []
        self._number = 0
        self._released = 0  # the last call that nothing holds up any more
        self.after_fork_in_child()
        fork.reset_in_child(self)

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[Flag, int] = {}

    # --- What a backend does -----------------------------------------------------------

    def read(self, key: str, *, timeout: float) -> Snapshot:
        forward = partial(self.backend.read, key, timeout=timeout)
        return cast(Snapshot, self._meet(forward, "read", key, timeout))

    def write(self, key: str, body: bytes, *, expect: Version | Absent, timeout: float) -> Version:
        forward = partial(self.backend.write, key, body, expect=expect, timeout=timeout)
        return cast(Version, self._meet(forward, "write", key, timeout, expect, body))

    def written(self, key: str, version: Version, *, timeout: float) -> Interval | None:
        return self.backend.written(key, version, timeout=timeout)

    def list(self, prefix: str, *, timeout: float) -> Iterable[str]:
        def forward() -> Sequence[str]:
            return tuple(self.backend.list(prefix, timeout=timeout))

        return cast("Sequence[str]", self._meet(forward, "list", prefix, timeout))

    def describe(self) -> str:
        return self.backend.describe()

    def examine(self, policy: LeasePolicy, *, timeout: float) -> Iterable[Finding]:
        return self.backend.examine(policy, timeout=timeout)

    def close(self) -> None:
        self.backend.close()

    # --- Faults --------------------------------------------------------------------------

    def script(self, op: str, *faults: Fault | None, when: Predicate = _any) -> None:
        """Give each matching call the next of ``faults``; None, and all after the last, pass."""
        rest = deque(faults)
        self._add(op, when, lambda call: rest.popleft() if rest else None)

    def always(self, op: str, fault: Fault, *, when: Predicate = _any) -> None:
        """Give every matching call ``fault``, until :meth:`heal`."""
        self._add(op, when, lambda call: fault)

    def gate(self, op: str, *, after: bool = False, when: Predicate = _any) -> Gate:
        """Stop every matching call until the returned gate is opened.

        Args:
            op: which calls: at a ``read`` or a ``write`` that has been sent.
            after: stop them once they are applied, before the caller has the reply.
            when: which of them. To stop only the n-th, put a :class:`Gate` into a script.
        """
        gate = Gate(after=after)
        self.always(op, gate, when=when)
        return gate

    def chaos(
        self, seed: int, rates: Mapping[str, float], *, op: str = "*", when: Predicate = _any
    ) -> None:
        """Give matching calls faults by chance: the same for the same seed and order of calls.

        Args:
            seed: of the chance.
            rates: the share of calls for each kind: ``fail``, ``denied``, ``lost`` (applied,
                then unavailable), ``slow`` (within the timeout), ``timeout`` (not applied),
                ``deaf`` (1 to 10 timeouts), ``late`` (unavailable; applied within 10 timeouts).
            op: which calls.
            when: which of them.

        Raises:
            ValueError: an unknown kind, or shares that are negative or above 1 together.
        """
        unknown = rates.keys() - _CHAOS.keys()
        if unknown:
            raise ValueError(f"unknown {sorted(unknown)}: the kinds are {', '.join(_CHAOS)}")
        if any(rate < 0 for rate in rates.values()) or sum(rates.values()) > 1 + 1e-9:
            raise ValueError(f"rates are shares of all calls, together 1 at most, not {rates}")
        chance = random.Random(seed)

        def choose(call: Call) -> Fault | None:
            # Two draws a call, whatever comes of them: a fault shifts no later one.
            pick, how = chance.random(), chance.random()
            for kind, rate in rates.items():
                pick -= rate
                if pick < 0:
                    return _CHAOS[kind](how, call)
            return None

        self._add(op, when, choose)

    def heal(self) -> None:
        """Forget all faults; calls that stand in one stay there."""
        with self._lock:
            self._rules.clear()

    def release_all(self) -> None:
        """Heal, and let every call go on that waits in a delay, a hang or a gate.

        So no thread is left at the end of a test. What was to be applied is applied.
        """
        self.heal()
        with self._lock:
            # Also those that have their fault already and are only on their way to the wait.
            self._released = self._number
            held = tuple(self._held)
        for flag in held:
            flag.set()

    def _hold(self, call: Call, until: Flag, timeout: float | None) -> None:
        with self._lock:
            if call.number <= self._released:
                return
            self._held[until] = self._held.get(until, 0) + 1
        try:
            self.clock.wait(until, timeout)
        finally:
            with self._lock:
                self._held[until] -= 1
                if not self._held[until]:
                    del self._held[until]

    # --- The log -------------------------------------------------------------------------

    @property
    def calls(self) -> Sequence[Call]:
        """The calls so far, in the order in which they came."""
        with self._lock:
            return tuple(self._calls)

    def count(self, op: str = "*", *, key: str | None = None, when: Predicate = _any) -> int:
        """Return how many calls there were, of ``op``, for ``key``, for which ``when`` holds."""
        return sum(
            op in ("*", call.op) and key in (None, call.key) and when(call) for call in self.calls
        )

    def clear(self) -> None:
        """Empty the log."""
        with self._lock:
            self._calls.clear()

    # --- The mechanism -------------------------------------------------------------------

    def _add(self, op: str, when: Predicate, choose: Choose) -> None:
        if op not in ("read", "write", "list", "*"):
            raise ValueError(f"an op is read, write, list or *, not {op!r}")
        with self._lock:
            self._rules.append(_Rule(op, when, choose))

    def _meet(
        self,
        forward: Proceed,
        op: str,
        key: str,
        timeout: float,
        expect: Version | Absent | None = None,
        body: bytes | None = None,
    ) -> Any:
        call = Call(
            faulty=self,
            number=0,
            op=op,
            key=key,
            at=self.clock.monotonic(),
            pid=os.getpid(),
            thread=threading.current_thread().name,
            timeout=timeout,
            expect=expect,
            body=body,
        )
        with self._lock:
            self._number += 1
            call.number = self._number
            self._calls.append(call)
            rules = [rule for rule in self._rules if rule.op in ("*", op)]

        def apply() -> Any:
            result = forward()
            call.applied = True
            return result

        proceed = apply
        for fault in reversed(self._choose(rules, call)):
            call.faults.insert(0, getattr(fault, "__name__", None) or repr(fault))
            proceed = partial(fault, call, proceed)
        try:
            call.result = proceed()
        except BaseException as error:
            call.error, call.outcome = error, type(error).__name__
            raise
        call.outcome = "ok"
        return call.result

    def _choose(self, rules: Iterable[_Rule], call: Call) -> Sequence[Fault]:
        matching = [rule for rule in rules if rule.when(call)]  # anyone's code: not in the lock
        with self._lock:
            chosen = [rule.choose(call) for rule in matching]
        return [fault for fault in chosen if fault is not None]

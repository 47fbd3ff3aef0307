"""``Singleton``: exactly one loop, across all instances and revisions of an application."""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections.abc import Callable
from typing import Final, NoReturn

from attrs import frozen

from tako_sync import breaking, checks, fork
from tako_sync.ctx import Ctx
from tako_sync.declared import Declaration
from tako_sync.errors import (
    ConfigurationError,
    CtxCancelledError,
    HandoverRequestedError,
    LeaseLostError,
    UsageError,
)
from tako_sync.events import SingletonRefused, SingletonReturned
from tako_sync.footprint import Footprint, refuse
from tako_sync.policy import seconds
from tako_sync.record import Holder, Identity
from tako_sync.runner import Background, Runner, loops
from tako_sync.runtime import Runtime, current
from tako_sync.tenure import Tenure
from tako_sync.vigil import DOWN, Health, Vigil

PREFIX: Final = "singleton-"
"""Of the leases of Singletons."""

Body = Callable[[Ctx], object]

log: Final = logging.getLogger("tako_sync")


@frozen(init=False)
class SingletonConfig:
    """What may be chosen about a Singleton.

    Args:
        footprint: CPU and memory of its instance.
        max_silence: seconds without ``ctx.beat()`` after which the loop loses its lease on
            purpose: a heartbeat shows that the process lives, not that the loop does. None: never.
        down_after: seconds without a running loop anywhere after which it counts as down, and
            ``SingletonDown`` is told.

    Raises:
        ConfigurationError: a time that cannot be; or an option that scales: there is one instance.
    """

    footprint: Footprint
    max_silence: float | None
    down_after: float

    def __init__(
        self,
        footprint: Footprint | None = None,
        *,
        max_silence: float | None = None,
        down_after: float = 60.0,
        **options: object,
    ) -> None:
        if options:
            refuse("SingletonConfig", options)
        if footprint is not None and not isinstance(footprint, Footprint):
            raise ConfigurationError(f"footprint is a tako_sync.Footprint, not {footprint!r}")
        if max_silence is not None:
            max_silence = seconds("max_silence", max_silence)
        down_after = seconds("down_after", down_after)
        self.__attrs_init__(  # pyright: ignore[reportAttributeAccessIssue]
            footprint or Footprint(), max_silence, down_after
        )


class Singleton:
    """A loop of which at most one runs, anywhere, and one does as long as any process campaigns.

    The variable that declares it is its identity, in lower case: ``invoicer =
    Singleton(assign_invoices)`` at the top level of a module has the lease
    ``singleton-invoicer``. As a decorator, the function's own name is that variable.

    The body takes a ctx, loops, and returns when ``ctx.cancelled``; whatever way it ends, it is
    restarted after five seconds, by this process or another. A body that does not ask its ctx
    goes on after a loss, and may overlap the next one: send ``ctx.fence`` with each write.

    Args:
        fn: the loop.
        config: what may be chosen.

    Raises:
        UsageError: ``fn`` is no function of a ctx.
    """

    def __init__(self, fn: Body, config: SingletonConfig | None = None, **options: object) -> None:
        if options:
            refuse("Singleton", options)
        checks.body(fn)
        if config is not None and not isinstance(config, SingletonConfig):
            raise UsageError(f"config is a tako_sync.SingletonConfig, not {config!r}")
        self.fn = fn
        self.config = config or SingletonConfig()
        self._declared = Declaration("Singleton", self, depth=2)
        self._home: Runtime | None = None
        self._background = Background()
        self._vigil: Vigil | None = None
        functools.update_wrapper(self, fn, updated=())

    @classmethod
    def configured(cls, config: SingletonConfig) -> Callable[[Body], Singleton]:
        """Return a decorator: ``@Singleton.configured(SingletonConfig(max_silence=60))``."""

        def declare(fn: Body) -> Singleton:
            singleton = cls(fn, config)
            singleton._declared = Declaration("Singleton", singleton, depth=2)
            return singleton

        return declare

    @property
    def name(self) -> str:
        """The declaring variable's, in lower case.

        Raises:
            ConfigurationError: there is no such variable, or several, or another module of the
                application has declared the name.
        """
        return self._declared.name

    @property
    def lease(self) -> str:
        """The name of its lease."""
        return PREFIX + self.name

    # --- Running

    def run(self, ctx: Ctx | None = None) -> None:
        """Campaign for ever, run the loop while holding the lease; return once ``ctx`` is over.

        What the loop raises is told and survived, as are losses and the storage's faults; what
        ends the process (``KeyboardInterrupt``, and ``SystemExit`` in the main thread) is not.

        Args:
            ctx: whose end ends it. By default it goes on until the process is told to stop, by
                :func:`tako_sync.install_signal_handlers`.
        """
        self._run(self._runtime, checks.parent(ctx))

    def _run(self, runtime: Runtime, parent: Ctx | None) -> None:
        root = (parent or Ctx.background(runtime.clock)).child()
        identity = runtime.identity(self.lease)
        vigil = Vigil(self.name, runtime, identity, self.config.down_after)
        leave = loops.enter(root)
        self._vigil = vigil
        try:
            vigil.start()
            _Turns(self, runtime, identity, root, vigil).go_on()
        finally:
            vigil.stop()
            leave()

    def start(self) -> Runner:
        """Run it in a thread of its own, once per process; return what stops it.

        Where :meth:`stop` has been called and the body goes on, the new thread waits for its end.
        """
        runtime = self._runtime  # that of who starts it, wherever the thread is
        loop = functools.partial(self._run, runtime)
        return self._background.start(f"singleton {self.name}", runtime.clock, loop)

    def stop(self, timeout: float | None = None) -> bool:
        """Stop what :meth:`start` has started, as :meth:`tako_sync.Runner.stop`; True if it has."""
        return self._background.stop(timeout)

    def health(self) -> Health:
        """Say how it does, as this process sees it. Sends no request."""
        if self._vigil is None:
            return Health(DOWN, "it was not started in this process")
        return self._vigil.health()

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise UsageError(
            f"a Singleton is not called: {self._declared_as()}.run(ctx) campaigns and runs it, "
            ".start() does so in a thread, .fn(ctx) is the bare loop, for a test"
        )

    # --- Looking

    def holder(self) -> Holder | None:
        """Return who runs it, as :meth:`tako_sync.Lock.holder`."""
        runtime = self._runtime
        return breaking.who(runtime, runtime.identity(self.lease))

    def request_handover(self, holder: Holder, *, by: str = "") -> None:
        """Ask ``holder`` to hand over, as :meth:`tako_sync.Lock.request_handover`."""
        shown, owner = checks.shown(holder, "")
        runtime = self._runtime
        breaking.request_handover(
            runtime, runtime.identity(self.lease), version=shown, owner=owner, by=checks.by(by)
        )

    def bound_to(self, runtime: Runtime) -> Singleton:
        """Return the same Singleton under ``runtime``, whatever ``configure`` says."""
        bound = object.__new__(type(self))
        bound.__dict__.update(self.__dict__)
        bound._home, bound._vigil = runtime, None
        bound._background = Background()
        return bound

    @property
    def _runtime(self) -> Runtime:
        return self._home if self._home is not None else current()

    def _declared_as(self) -> str:
        try:
            return self.name
        except ConfigurationError:
            return "singleton"

    def __repr__(self) -> str:
        return f"<Singleton {self._declared_as()}>"


class _Turns:
    """One process's part: campaign, run, pause, and again, until its ctx is over."""

    def __init__(
        self, singleton: Singleton, runtime: Runtime, identity: Identity, root: Ctx, vigil: Vigil
    ) -> None:
        self._singleton = singleton
        self._runtime = runtime
        self._identity = identity
        self._root = root
        self._vigil = vigil
        self._refused = ""
        self._generation = fork.generation()

    def go_on(self) -> None:
        while not self._root.cancelled:
            self._turn()
            if self._generation != fork.generation():
                log.warning(
                    "singleton %s: a child that was forked in its body has returned from there: "
                    "the loop is its parent's, and ends here",
                    self._singleton.name,
                )
                return
            # The lease is free meanwhile: so that a process in which the loop works gets it from
            # one in which it always fails.
            self._root.wait(self._pause())

    def _pause(self) -> float:
        policy, chance = self._runtime.policy, self._runtime.clock.random()
        return policy.restart * (1 + policy.jitter * chance)

    def _turn(self) -> None:
        silence = self._singleton.config.max_silence
        tenure = Tenure(self._runtime, self._identity, self._root, silence or math.inf)
        began = False
        try:
            with tenure:
                tenure.campaign(None)
                began, self._refused = True, ""
                self._vigil.begins(tenure.ctx)
                tenure.run(self._singleton.fn)
        except Exception as error:
            if not began and isinstance(error, UsageError):
                raise
            self._over(error, began)
        except BaseException as error:
            self._vigil.ends("it was told to end")
            if threading.current_thread() is threading.main_thread():
                raise
            self._over(error, began)
        else:
            self._over(None, began)

    def _over(self, error: BaseException | None, began: bool) -> None:
        if self._generation != fork.generation():
            return
        name, lease = self._singleton.name, self._identity.name
        if error is None:
            self._vigil.ends("it has returned, and is to be restarted")
        else:
            self._vigil.ends(f"{type(error).__name__}: {error}")
        if self._root.cancelled and (error is None or isinstance(error, CtxCancelledError)):
            return  # it was asked to stop, and has
        if isinstance(error, HandoverRequestedError):
            error = None  # the body has heard, and has ended as it was asked to
        if began:
            self._runtime.tell(SingletonReturned(lease, name, self._runtime.policy.restart, error))
            if error is not None and not isinstance(error, LeaseLostError):
                log.error("singleton %s failed:", name, exc_info=error)
        elif isinstance(error, Exception) and repr(error) != self._refused:
            self._refused = repr(error)
            self._runtime.tell(SingletonRefused(lease, name, error))

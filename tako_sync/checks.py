"""What a lock's methods refuse, at the call: wrong bodies, ctxs, timeouts and holders."""

from __future__ import annotations

import functools
import inspect
import types
from typing import Any, Final, TypeVar

from tako_sync.ctx import Ctx
from tako_sync.errors import UsageError
from tako_sync.policy import seconds
from tako_sync.record import Holder

_DEFERRED: Final = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


_MAX_BY: Final = 200

_UNFINISHED: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)

T = TypeVar("T")


def parent(ctx: object) -> Ctx | None:
    if ctx is not None and not isinstance(ctx, Ctx):
        raise UsageError(f"ctx is a tako_sync.Ctx, not {ctx!r}")
    return ctx


def timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    return seconds("timeout", timeout, or_zero=True)


def body(fn: object) -> None:
    """Refuse now what could only fail after the campaign, holding the lease."""
    if not _fits_at_a_glance(fn):
        plain(fn)
        if not _accepts_one(fn):
            raise UsageError(
                f"{_named(fn)} cannot be called with the ctx as its one argument: write "
                "`def body(ctx): ...`, or lambda ctx: ... around it; guard() keeps a function's "
                "own arguments"
            )


def _fits_at_a_glance(fn: object) -> bool:
    """Know the ordinary case, a function of one argument, without asking ``inspect``."""
    if not isinstance(fn, types.FunctionType):
        return False
    code = fn.__code__
    return (
        code.co_argcount == 1
        and code.co_kwonlyargcount == 0
        and not code.co_flags & _DEFERRED
        and not hasattr(fn, "__wrapped__")
    )


def _accepts_one(fn: Any) -> bool:
    try:
        inspect.signature(fn, follow_wrapped=False).bind(None)
    except TypeError:
        return False
    except ValueError:  # a builtin that tells no signature
        return True
    return True


def guarded(fn: object) -> None:
    """Refuse what guard() would turn into something else than it was."""
    if isinstance(fn, (staticmethod, classmethod)):
        kind = type(fn).__name__
        raise UsageError(f"write @{kind} above @lock.guard, so that guard() sees the function")
    if isinstance(fn, type):
        raise UsageError(f"guard() is for functions and methods, not for the class {_named(fn)}")
    plain(fn)


def plain(fn: object) -> None:
    """Refuse what is not a function, or does its work after it has returned."""
    if not callable(fn):
        raise UsageError(f"the body is a function, not {fn!r}")
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    for candidate in (inner, type(inner).__call__):
        if inspect.iscoroutinefunction(candidate) or inspect.isasyncgenfunction(candidate):
            raise UsageError(
                f"{_named(fn)} is asynchronous: the lease would be given back before it runs. "
                "Write a plain function; a coroutine writes await asyncio.to_thread(lock.do, body)"
            )
        if inspect.isgeneratorfunction(candidate):
            raise UsageError(
                f"{_named(fn)} is a generator: the lease would be given back before it runs. "
                "Write a plain function, or `with lock.hold() as ctx:` inside it"
            )


def finished(value: T) -> T:
    """Return what a body has returned, unless its work is only to be done, by what that is."""
    if isinstance(value, _UNFINISHED):
        if isinstance(value, types.CoroutineType):
            value.close()  # or it would be reported as never awaited, too
        raise UsageError(
            f"the body has returned a {type(value).__name__}, whose work would be done after the "
            "lease is given back: do it inside, and return its result"
        )
    return value


def _named(fn: object) -> str:
    return getattr(fn, "__qualname__", None) or repr(fn)


def by(who: object) -> str:
    """Return who does something, for the record; a record has no room for more than a line."""
    if not isinstance(who, str) or len(who) > _MAX_BY:
        raise UsageError(f"by is a text of at most {_MAX_BY} characters")
    return who


def shown(holder: Holder | None, version: str) -> tuple[str, str | None]:
    if holder is not None and not isinstance(holder, Holder):
        raise UsageError(f"holder is what Lock.holder() returned, not {holder!r}")
    if (holder is None) == (not version):
        raise UsageError("give what Lock.holder() returned, or its version")
    return (holder.version, holder.owner) if holder is not None else (version, None)

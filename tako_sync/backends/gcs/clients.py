"""Google's client, one per process, made to send what it is asked to send and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from google.api_core.client_info import ClientInfo
from google.api_core.client_options import ClientOptions
from google.cloud import storage  # type: ignore[import-untyped]
from requests import Response, Session
from requests.adapters import HTTPAdapter

from tako_sync import fork
from tako_sync.errors import BackendDeniedError, ConfigurationError

_CONNECTIONS: Final = 256
"""Kept open. Each held lease has one in use for moments; beyond that, some are opened anew."""


class Heard(threading.local):
    """The last answer that this thread got, and its headers."""

    headers: Mapping[str, str] = {}
    answer: Response | None = None

    def forget(self) -> None:
        self.headers, self.answer = {}, None

    def close(self) -> None:
        """Close the answer: what is left unread of it would keep its connection open."""
        if self.answer is not None:
            self.answer.close()


class Clients:
    """Hands out this process's client; a forked child, and a use after ``close``, get another.

    A connection that crosses a fork gives the answers to one process's questions to the other.

    Args:
        model: whose credentials, project and endpoint are used; None for Google's defaults.
    """

    def __init__(self, model: storage.Client | None = None) -> None:
        self.heard = Heard()
        self._arguments: dict[str, Any] = _arguments_of(model) if model is not None else {}
        self._lock = threading.Lock()
        self._client: Any = None
        fork.reset_in_child(self)

    def get(self) -> Any:
        """Return the client. The first time this looks for credentials, which may take long."""
        fork.settle()
        client = self._client
        if client is None:
            with self._lock:
                client = self._client
                if client is None:
                    client = self._client = self._make()
        return client

    def close(self) -> None:
        fork.settle()
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def after_fork_in_child(self) -> None:
        self._lock = threading.Lock()
        self._client = None

    def _make(self) -> Any:
        # project=None: leases need none, and it is not looked for.
        arguments = {"project": None, "client_info": _info(), **self._arguments}
        try:
            client: Any = storage.Client(**arguments)
        except ValueError as error:  # as where endpoint and credentials are of two universes
            raise BackendDeniedError(f"Google's client cannot be made: {error}") from error
        if getattr(client, "_bucket_metadata_cache", None) is not None:
            # It would ask for the bucket's metadata beside our requests, in a thread, for two
            # minutes if need be, and with a permission that leases do without.
            client._bucket_metadata_cache = None
        session = client._http
        if isinstance(session, Session):
            session.hooks["response"].append(self._hear)
            if not getattr(session, "is_mtls", False):  # that has an adapter of its own
                for scheme in ("https://", "http://"):
                    session.mount(scheme, HTTPAdapter(pool_maxsize=_CONNECTIONS))
        return client

    def _hear(self, response: Response, **_kwargs: object) -> None:
        self.heard.headers, self.heard.answer = response.headers, response
        if response.status_code == 401:
            # Google's session drops it, unread, to refresh its credentials: read, its connection
            # can be used again; else it would stay open until the garbage collector comes.
            _ = response.content


def _info() -> ClientInfo:
    from tako_sync import __version__

    return ClientInfo(user_agent=f"tako-sync/{__version__}")  # type: ignore[no-untyped-call]


def _arguments_of(model: Any) -> dict[str, Any]:
    if not isinstance(model, storage.Client):
        raise ConfigurationError(f"client is a google.cloud.storage.Client, not {model!r}")
    options = ClientOptions(
        api_endpoint=_endpoint_of(model), universe_domain=getattr(model, "_universe_domain", None)
    )
    arguments = {
        "project": model.project,
        "credentials": model._credentials,
        "client_options": options,
        "client_info": getattr(model, "_initial_client_info", None) or _info(),
    }
    if extra := getattr(model, "_extra_headers", None):
        arguments["extra_headers"] = extra
    return arguments


def _endpoint_of(model: Any) -> str | None:
    """Return where it sends its requests, if that was chosen by somebody."""
    connection = getattr(model, "_connection", None)
    if getattr(connection, "ALLOW_AUTO_SWITCH_TO_MTLS_URL", True):
        return None
    endpoint: str | None = getattr(connection, "API_BASE_URL", None)
    return endpoint

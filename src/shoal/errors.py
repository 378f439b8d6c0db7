"""The one tree of errors, split by whose fault it is.

    ShoalError
    ├── CallerError            the request is wrong; sending it again changes nothing
    │   ├── InvalidRequest         400  a field is missing, of the wrong type or out of range
    │   │   └── InputTooLong       400  more tokens or characters than the model or the limits take
    │   ├── Unauthorized           401  no key, or a wrong one
    │   ├── NotFound               404  no such path
    │   │   └── UnknownModel       404  no such model, alias, revision or adapter
    │   ├── MethodNotAllowed       405
    │   ├── RequestTimeout         408  the body did not arrive in time
    │   ├── PayloadTooLarge        413  the body is over the limit
    │   ├── PathTooLong            414
    │   ├── UnsupportedMedia       415  neither JSON nor MessagePack
    │   ├── HeadTooLarge           431  too many headers, or too large ones
    │   ├── IdempotencyConflict    422  the Idempotency-Key was sent with another request before
    │   └── ClientGone             499  the caller closed the connection
    ├── CapacityError          the fleet cannot take it now; again later may work
    │   ├── Overloaded             429  the answer could not be in time
    │   ├── QueueFull              429
    │   ├── QueueUnavailable       503  the broker is away
    │   ├── ModelLoading           503
    │   ├── NoWorker               503  no worker can run this model
    │   ├── DeadlineExceeded       504
    │   ├── ShuttingDown           503  the gateway had to leave before the answer was there
    │   └── Unreachable            503  (in clients) no server answers at the address
    ├── RuntimeFault           a model or its runtime failed on work that was well formed
    │   ├── RuntimeUnavailable     503  the runtime's library is not installed, or it does not start
    │   ├── ModelUnavailable       503  the weights do not load: another try would find the same
    │   │   └── WeightsMissing     503  they are not there, or could not be fetched: later perhaps
    │   ├── RuntimeCrashed         503  the runtime's process went away
    │   ├── OutOfMemory            503
    │   └── RunFailed              500  the batch raised; non-finite numbers are here too
    ├── OperatorError          configuration: found at start-up, never caused by a request
    │   ├── CatalogError
    │   └── SettingsError
    └── Bug                    500  our own fault

`code` is the stable, machine-readable name that travels on the wire and in HTTP bodies.
`from_code` turns it back into the class, so that an error keeps its kind across processes.
Owns the classification. Does not own the JSON shapes, which belong to the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar


class ShoalError(Exception):
    """Base of every error that Shoal raises on purpose.

    `param` names the field at fault; `retry_after_s` says when another try may succeed;
    `input_index` says which input of a list is meant, counted from 0.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        input_index: int | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        self.input_index = input_index


class CallerError(ShoalError):
    """The caller's fault."""

    code = "invalid_request"
    http_status = 400


class InvalidRequest(CallerError):
    """A field is missing, has the wrong type, or is out of range."""


class InputTooLong(InvalidRequest):
    """An input is longer than the model, or the limits, allow."""

    code = "input_too_long"


class Unauthorized(CallerError):
    """No API key, or a wrong one."""

    code = "unauthorized"
    http_status = 401


class NotFound(CallerError):
    """No such path."""

    code = "not_found"
    http_status = 404


class UnknownModel(NotFound):
    """No such model, alias, revision or adapter in the catalog."""

    code = "model_not_found"


class MethodNotAllowed(CallerError):
    """The path exists, the method does not."""

    code = "method_not_allowed"
    http_status = 405


class RequestTimeout(CallerError):
    """The body did not arrive in time."""

    code = "request_timeout"
    http_status = 408


class PayloadTooLarge(CallerError):
    """The body is over the limit."""

    code = "payload_too_large"
    http_status = 413


class PathTooLong(CallerError):
    """The path, with its query, is over the limit."""

    code = "path_too_long"
    http_status = 414


class UnsupportedMedia(CallerError):
    """The body is neither JSON nor MessagePack."""

    code = "unsupported_media_type"
    http_status = 415


class HeadTooLarge(CallerError):
    """The request has too many headers, or too large ones."""

    code = "head_too_large"
    http_status = 431


class IdempotencyConflict(CallerError):
    """The same `Idempotency-Key` was sent with another request before."""

    code = "idempotency_conflict"
    http_status = 422


class ClientGone(CallerError):
    """The caller closed the connection before the answer."""

    code = "client_gone"
    http_status = 499


class CapacityError(ShoalError):
    """The fleet cannot take the work now."""

    code = "capacity"
    http_status = 503
    retryable = True


class Overloaded(CapacityError):
    """So much work is before this that it could not be answered by its deadline."""

    code = "overloaded"
    http_status = 429


class QueueFull(CapacityError):
    """The model's queue has reached its bound."""

    code = "queue_full"
    http_status = 429


class QueueUnavailable(CapacityError):
    """The broker cannot be reached."""

    code = "queue_unavailable"


class ModelLoading(CapacityError):
    """The model is being loaded and was not ready in time."""

    code = "model_loading"


class NoWorker(CapacityError):
    """Workers are alive, and none of them can run this model."""

    code = "no_worker"


class DeadlineExceeded(CapacityError):
    """The answer was not there at the request's deadline."""

    code = "deadline_exceeded"
    http_status = 504


class ShuttingDown(CapacityError):
    """The gateway had to leave before the answer was there."""

    code = "shutting_down"


class Unreachable(CapacityError):
    """No server answers at the address; raised by clients."""

    code = "unreachable"


class RuntimeFault(ShoalError):
    """A model or its runtime failed on well-formed work."""

    code = "runtime_fault"
    http_status = 500
    retryable = True


class RuntimeUnavailable(RuntimeFault):
    """The runtime's library is not installed, or the runtime does not start."""

    code = "runtime_unavailable"
    http_status = 503
    retryable = False


class ModelUnavailable(RuntimeFault):
    """The weights cannot be loaded."""

    code = "model_unavailable"
    http_status = 503
    retryable = False


class WeightsMissing(ModelUnavailable):
    """The weights are not on this machine, or could not be fetched."""

    code = "weights_missing"


class RuntimeCrashed(RuntimeFault):
    """The runtime's process went away while it held the work."""

    code = "runtime_crashed"
    http_status = 503


class OutOfMemory(RuntimeFault):
    """The device has no memory left for the work."""

    code = "out_of_memory"
    http_status = 503


class RunFailed(RuntimeFault):
    """The batch raised, or gave numbers that are not finite."""

    code = "run_failed"
    retryable = False  # the batch was split already, so it is this item's own


class OperatorError(ShoalError):
    """Configuration is wrong. Found at start-up, before a request is served."""

    code = "operator_error"


class CatalogError(OperatorError):
    """A catalog entry is wrong."""

    code = "catalog_error"


class SettingsError(OperatorError):
    """A flag, an environment variable or a settings file is wrong."""

    code = "settings_error"


class Bug(ShoalError):
    """Our own fault."""


def _leaves(cls: type[ShoalError]) -> list[type[ShoalError]]:
    return [cls, *(leaf for sub in cls.__subclasses__() for leaf in _leaves(sub))]


# Where two classes share a code (a base and its plainest child), the child wins.
_BY_CODE: dict[str, type[ShoalError]] = {cls.code: cls for cls in _leaves(ShoalError)}
_BY_CODE[Bug.code] = Bug


def from_code(
    code: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: float | None = None,
    input_index: int | None = None,
) -> ShoalError:
    """The error that `code` names; an unknown code (a newer peer's) becomes a `Bug`."""
    kind = _BY_CODE.get(code, Bug)
    return kind(message, param=param, retry_after_s=retry_after_s, input_index=input_index)


class Panic(Exception):
    """A native library gave up in the middle of a call. No kind of its own: the edge maps it."""


# With asyncio's CancelledError, which is not imported where nothing else needs asyncio.
_ENDS = (Exception, KeyboardInterrupt, SystemExit, GeneratorExit)


@contextmanager
def panics_as_errors() -> Iterator[None]:
    """Calls of native libraries: what these raise in a panic is no `Exception`, and becomes one.

    So an item that makes a library panic fails as one that makes it raise, and no task ends with
    it. Raises `Panic`; an order to end, such as `KeyboardInterrupt`, passes unchanged.
    """
    try:
        yield
    except BaseException as raised:  # task root: what a native library raises
        if isinstance(raised, _ENDS) or type(raised).__name__ == "CancelledError":
            raise
        raise Panic(f"{type(raised).__name__}: {raised}") from raised

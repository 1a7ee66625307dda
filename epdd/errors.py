"""Every exception epdd raises on purpose, with what a client is told.

A class carries `status` (HTTP), `code` (the string in the error envelope) and `retryable` (the
server may try the same work again).  Only `frontend/app.py` turns them into answers; across a
process edge they travel as `wire.Failed(code, message)` and are rebuilt by `from_wire`.
"""


class EpddError(Exception):
    """Base of all: never raised itself."""

    status = 500
    code: str = "internal_error"
    type = "server_error"
    retryable = False
    retry_after_s: int | None = None

    def __init__(self, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param


# --- the daemon cannot start: exit 78 (EX_CONFIG), systemd does not restart it


class StartupError(EpddError):
    """Starting again without a change would fail the same way."""

    code = "startup_failed"
    exit_code = 78


class ConfigError(StartupError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "bad_config"


class HardwareError(StartupError):
    """The machine cannot be read or lacks what is needed."""

    code = "bad_hardware"


class PlacementError(StartupError):
    """The asked-for workers do not fit this machine."""

    code = "bad_placement"


class ModelError(StartupError):
    """The checkpoint is missing, damaged or of a family epdd does not serve."""

    code = "bad_model"


class AddressTaken(StartupError):
    """Another process listens where this one should; it may be about to end."""

    code = "address_taken"
    exit_code = 75      # EX_TEMPFAIL: systemd tries again


class HubUnreachable(StartupError):
    """The Hub could not be asked or broke off; the same may succeed later."""

    code = "hub_unreachable"
    exit_code = 75      # EX_TEMPFAIL: systemd may try again


# --- the client's fault: 4xx, not logged as an error


class RequestError(EpddError):
    """The request can never succeed as sent."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class BadRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class Unauthorized(RequestError):
    """The server has API keys, and the request has none of them."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotFound(RequestError):
    """No such route, model or object."""

    status = 404
    code = "not_found"


class MediaError(RequestError):
    """An image cannot be fetched, read or used; `code` names the fault."""

    code = "invalid_image"


class RequestTimeout(RequestError):
    """The client sent its request too slowly, or not at all."""

    status = 408
    code = "request_timeout"


class TooLarge(RequestError):
    """The body is over the limit."""

    status = 413
    code = "request_too_large"


class UnsupportedEncoding(RequestError):
    """The body is compressed."""

    status = 415
    code = "unsupported_encoding"


class ContextLength(RequestError):
    """Prompt and answer do not fit the model's context."""

    code = "context_length_exceeded"


class Rejected(RequestError):
    """Two workers crashed on this content, one after the other: it is rejected for `fleet.poison_s` seconds."""

    code = "prompt_rejected"


# --- no room now: the client may come back


class CapacityError(EpddError):
    """The machine is busy or not ready; the same request may succeed later."""

    status = 503
    code = "unavailable"
    retry_after_s = 1


class Overloaded(CapacityError):
    """More requests are waiting than allowed."""

    status = 429
    code = "overloaded"
    type = "rate_limit_error"


class ArenaFull(CapacityError):
    """Shared memory has no room for this request's embeddings."""

    code = "arena_full"


class NoWorker(CapacityError):
    """No worker of the needed role is ready."""

    code = "no_worker"
    retry_after_s = 5


class OutOfMemory(CapacityError):
    """A device has too little free memory for this work, also on a second try by itself."""

    code = "out_of_memory"


# --- a worker's fault: 5xx, counted and logged with the request id


class WorkerError(EpddError):
    """Work was handed to a worker and not finished."""

    code = "worker_error"


class WorkerLost(WorkerError):
    """The worker's process ended while it had the work, or as it was to get it."""

    status = 503
    code = "worker_lost"
    retryable = True
    retry_after_s = 1

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        """`crashed`: it had the work, and nobody asked it to end: the work may be what ended it."""
        super().__init__(message)
        self.crashed = crashed


class WorkerTimeout(WorkerError):
    """The work was not finished before the request's deadline."""

    status = 504
    code = "timeout"


class WorkerFailed(WorkerError):
    """The worker reported a fault of its own."""

    code = "worker_failed"


class DeviceError(WorkerError):
    """A GPU failed: its worker ends, and the driver is asked about the GPU before the next worker starts."""

    code = "device_error"
    exit_code = 79      # not StartupError's: on a GPU that is still there a new process may well do


class ProtocolError(EpddError):
    """A worker sent a message that breaks the wire format, which is a bug: the worker is replaced."""

    code = "protocol_error"


def from_wire(code: str, message: str) -> EpddError:
    """The exception for a `wire.Failed`: image faults are the client's, all else the worker's.

    WorkerLost comes from a prefill-decode worker whose source of rows was lost: an encoder's GPU memory.
    """
    if code in IMAGE_CODES:
        return MediaError(message, code=code)
    if code == ContextLength.code:
        return ContextLength(message)
    if code == BadRequest.code:
        return BadRequest(message)
    if code == OutOfMemory.code:
        return OutOfMemory(message)
    if code == WorkerLost.code:
        return WorkerLost(message)
    return WorkerFailed(message, code=code)


# The names the OpenAI SDK lists for image faults; a worker may answer with these.
IMAGE_CODES = frozenset({
    "invalid_image", "invalid_image_format", "invalid_base64_image", "invalid_image_url",
    "image_too_large", "image_too_small", "image_parse_error", "invalid_image_mode",
    "image_file_too_large", "unsupported_image_media_type", "empty_image_file",
    "failed_to_download_image", "image_file_not_found",
})

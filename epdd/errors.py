"""Every exception that epdd raises on purpose, with what a client is told.

A class has `status` (HTTP), `code` (of the error in the answer) and `retryable` (the server may try the same work
again).  Only `frontend/app.py` turns exceptions into answers.  Between processes they travel as
`wire.Failed(code, message)`, and `from_wire` makes exceptions of them again.
"""


class EpddError(Exception):
    """Base class, never raised itself."""

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
    """The daemon cannot start, and a retry without a change fails again."""

    code = "startup_failed"
    exit_code = 78


class ConfigError(StartupError):
    """A setting is unknown, of the wrong type or out of range."""

    code = "bad_config"


class HardwareError(StartupError):
    """The machine cannot be inspected, or lacks what epdd needs."""

    code = "bad_hardware"


class PlacementError(StartupError):
    """The workers that the settings ask for do not fit this machine."""

    code = "bad_placement"


class ModelError(StartupError):
    """The checkpoint is missing, damaged or of a family epdd does not serve."""

    code = "bad_model"


class AddressTaken(StartupError):
    """Another process listens on this port or socket; it may end soon, so systemd tries again."""

    code = "address_taken"
    exit_code = 75      # EX_TEMPFAIL


class HubUnreachable(StartupError):
    """The Hub could not be reached or broke off; a retry may succeed, so systemd tries again."""

    code = "hub_unreachable"
    exit_code = 75      # EX_TEMPFAIL


# --- the client's fault: 4xx, not logged as an error


class RequestError(EpddError):
    """The request can never succeed as sent."""

    status = 400
    code = "invalid_request"
    type = "invalid_request_error"


class BadRequest(RequestError):
    """A field is missing, of the wrong type or out of range."""


class Unauthorized(RequestError):
    """The server has API keys, and the request does not send a valid one."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class NotFound(RequestError):
    """No such route, model or object."""

    status = 404
    code = "not_found"


class MediaError(RequestError):
    """An image cannot be fetched, read or used; `code` says why."""

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
    """Prompt and answer together exceed the model's context."""

    code = "context_length_exceeded"


class Rejected(RequestError):
    """Two workers crashed on this content, one after the other: it is rejected for `fleet.poison_s` seconds."""

    code = "prompt_rejected"


# --- no room now: the client may retry later


class CapacityError(EpddError):
    """The server is busy or not ready; the same request may succeed later."""

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
    """A device has too little free memory for this work, even for this work alone."""

    code = "out_of_memory"


# --- a worker's fault: 5xx, counted and logged with the request id


class WorkerError(EpddError):
    """A worker got work and did not finish it."""

    code = "worker_error"


class WorkerLost(WorkerError):
    """The process of the worker ended while it had the work, or before it got it."""

    status = 503
    code = "worker_lost"
    retryable = True
    retry_after_s = 1

    def __init__(self, message: str, *, crashed: bool = False) -> None:
        """`crashed`: the worker had the work and was not asked to end, so the work may have crashed it."""
        super().__init__(message)
        self.crashed = crashed


class WorkerTimeout(WorkerError):
    """The work was not finished before the request's deadline."""

    status = 504
    code = "timeout"


class WorkerFailed(WorkerError):
    """The worker reported an internal error."""

    code = "worker_failed"


class DeviceError(WorkerError):
    """A GPU failed: its worker ends, and the daemon asks the driver about the GPU before it starts the next worker."""

    code = "device_error"
    exit_code = 79      # unlike StartupError, a new process may succeed if the GPU is still there


class ProtocolError(EpddError):
    """A worker sent a message that breaks the wire format.  That is a bug, and the worker is replaced."""

    code = "protocol_error"


def from_wire(code: str, message: str) -> EpddError:
    """The exception for a `wire.Failed`: image errors are the client's, all others the worker's.

    A prefill-decode worker sends WorkerLost if it was to read from the GPU memory of an encoder that has died.
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


# Codes of image errors in the OpenAI SDK; workers may answer with these.
IMAGE_CODES = frozenset({
    "invalid_image", "invalid_image_format", "invalid_base64_image", "invalid_image_url",
    "image_too_large", "image_too_small", "image_parse_error", "invalid_image_mode",
    "image_file_too_large", "unsupported_image_media_type", "empty_image_file",
    "failed_to_download_image", "image_file_not_found",
})

"""Errors of the Hub as one sentence that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (FileMetadataError, GatedRepoError, HfHubHTTPError, HFValidationError,
                                    LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError,
                                    RevisionNotFoundError)

from epdd.errors import HubUnreachable, ModelError, StartupError
from epdd.hub import cache

AGAIN = (408, 425, 429, 500, 502, 503, 504)     # HTTP statuses after which a retry may succeed


@contextmanager
def told(model: str, revision: str) -> Iterator[None]:
    """Turns every exception of huggingface_hub and its HTTP client into ModelError or HubUnreachable."""
    try:
        yield
    except StartupError:
        raise
    except Exception as error:
        raise _told(model, revision, error) from error


def _told(model: str, revision: str, error: Exception) -> StartupError:
    # huggingface_hub wraps the first error if it then looked for a copy in the cache.
    while isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    endpoint = constants.ENDPOINT
    match error:
        case OfflineModeIsEnabled():
            return ModelError(f"{cache.absent(model, revision)}, and HF_HUB_OFFLINE forbids to download it; unset "
                              "that, or copy the model here and name its folder")
        case GatedRepoError():
            if get_token():
                return ModelError(f"{model} is gated, and the account of this token was not let in: accept the terms "
                                  f"at {endpoint}/{model}")
            return ModelError(f"{model} is gated: accept the terms at {endpoint}/{model}, then set HF_TOKEN to a token "
                              "of your account")
        case RevisionNotFoundError():
            return ModelError(f"{model} has no revision {revision or 'main'!r}; name a branch, a tag or a whole commit")
        case RepositoryNotFoundError():
            return ModelError(f"{model} is no folder here, and no model at {endpoint} that "
                              f"{'this token may read' if get_token() else 'is open to all'}: check the spelling, or "
                              "set HF_TOKEN to a token that may read it")
        case HFValidationError():
            return ModelError(f"{model} is no folder here, and cannot be a model's id on the Hub: that is ORG/NAME")
        case HfHubHTTPError():
            status = error.response.status_code
            if status in (401, 403):
                return ModelError(f"{model}: {endpoint} refuses the token ({status}); set HF_TOKEN to one that is "
                                  "valid and may read the model, or unset it for a public model")
            kind = HubUnreachable if status in AGAIN else ModelError
            return kind(f"{model}: {endpoint} answers {status}; try again later, or copy the model here and name its "
                        "folder")
        case FileMetadataError():
            return ModelError(f"{model}: {endpoint} does not answer as a Hub does; check HF_ENDPOINT and the proxy")
        case OSError() if error.errno is not None and not isinstance(error, ConnectionError):
            place = error.filename or constants.HF_HUB_CACHE
            return ModelError(f"{model} cannot be stored: {place}: {error.strerror}; make room or set HF_HOME to "
                              "another folder")
        case _ if _of_network(error):
            return HubUnreachable(f"{cache.absent(model, revision)}, and {endpoint} cannot be reached "
                                  f"({_line(error)}); try again with a network, or copy the model here and name its "
                                  "folder")
    return ModelError(f"{model} cannot be downloaded: {_line(error)}")


def _of_network(error: Exception) -> bool:
    """huggingface_hub's HTTP is httpx or, from its second version on, httpx2."""
    return isinstance(error, ConnectionError) or any(
        kind.__name__ in ("TransportError", "StreamError") and kind.__module__.startswith("httpx")
        for kind in type(error).__mro__)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__

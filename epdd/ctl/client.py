"""Talks to the daemon: one line of JSON in each direction over its admin socket, and HTTP for `chat`."""

from __future__ import annotations

import base64
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from epdd import private
from epdd.ctl import peer
from epdd.errors import ConfigError, StartupError
from epdd.log import CONTROL
from epdd.settings.paths import SYSTEM_FILE, runtime_dir

SYSTEM_DIR = Path("/run/epdd")      # sockets of the systemd service; the caller's runtime folder may be another
ANSWER_S = 5.0                      # the daemon answers from memory, so if this is not enough it hangs
KEY_VARIABLE = "EPDD_API_KEY"       # API key that `chat` sends
CHAT_S = 600.0                      # between two parts of an answer; the first one waits for a whole prefill

_CONTROL = {code: shown for code, shown in CONTROL.items() if code not in b"\n\t"}


class CtlError(Exception):
    """Ends epdctl with this message and exit code."""

    exit_code = 1                   # refused or failed


class UsageError(CtlError):
    """The command line lacks something or is wrong."""

    exit_code = 2


class ActionRefused(CtlError):
    """The daemon would not start: with this message and exit code."""

    def __init__(self, error: StartupError) -> None:
        super().__init__(error.message)
        self.exit_code = error.exit_code


class NotRunning(CtlError):
    """No daemon answers."""

    exit_code = 3


def socket_of(given: str | None) -> Path:
    """The admin socket given by --socket, or that of the only running daemon.  Raises NotRunning, UsageError."""
    return Path(given) if given else find_socket()


def find_socket(environ: Mapping[str, str] | None = None) -> Path:
    """The admin socket of the only running daemon.  Raises NotRunning, or UsageError if several run."""
    environ = os.environ if environ is None else environ
    if environ.get("EPDD_ADMIN_SOCKET"):
        return Path(environ["EPDD_ADMIN_SOCKET"])
    folders = {runtime_dir(environ), SYSTEM_DIR}
    refused = {folder: reason for folder in folders if folder.is_dir() and (reason := private.danger(folder))}
    live = sorted(path for folder in folders - refused.keys() for path in folder.glob("admin-*.sock") if _listens(path))
    if not live and (path := _of_settings()) and _listens(path):
        live = [path]
    if len(live) > 1:
        raise UsageError("several daemons are running; choose one with --socket:\n"
                         + "\n".join(f"  {path}" for path in live))
    if live:
        return live[0]
    if refused:
        raise CtlError("; ".join(refused.values()) + ": a socket there is not used.  Remove that folder")
    closed = [str(folder) for folder in folders if folder.is_dir() and not os.access(folder, os.R_OK | os.X_OK)]
    hint = f" (or its socket is not yours to see in {', '.join(closed)})" if closed else ""
    raise NotRunning(f"daemon not running{hint}")


def _of_settings() -> Path | None:
    """admin.socket of the system's settings file, if it sets one and we may read it."""
    from epdd.settings.config import Config, from_file
    try:
        socket = from_file(Config(), SYSTEM_FILE).admin.socket
    except ConfigError:
        return None
    return Path(socket) if socket else None


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except PermissionError:
            return True             # a daemon listens; `ask` reports that we may not use it
        except OSError:
            return False
    return True


def ask(path: Path, verb: str, **fields: Any) -> Any:
    """The daemon's answer to one verb.  Raises NotRunning, or CtlError if it refuses or does not answer."""
    return _ask(path, {"verb": verb, **fields})[0]


def listener(path: Path) -> tuple[str, int, int]:
    """Host and port of the daemon's API, and the user it runs as.  Raises the errors of `ask`."""
    status, uid = _ask(path, {"verb": "status"})
    try:
        return status["listen"]["host"], status["listen"]["port"], uid
    except (KeyError, TypeError):
        raise CtlError("the daemon's answer does not say where it listens; is it of another version?") from None


def _ask(path: Path, request: dict[str, Any]) -> tuple[Any, int]:
    """The daemon's answer without control characters, and the user it runs as."""
    try:
        sock, uid = peer.connect(path, ANSWER_S)
        with sock:
            sock.sendall(json.dumps(request).encode() + b"\n")
            with sock.makefile("rb") as stream:
                line = stream.readline()
        reply = _harmless(json.loads(line))
    except peer.Stranger as error:
        raise CtlError(str(error)) from None
    except (FileNotFoundError, ConnectionRefusedError):
        raise NotRunning(f"daemon not running: nothing listens on {path}") from None
    except PermissionError:
        raise CtlError(f"{path}: permission denied; run as the daemon's user or join admin.group") from None
    except TimeoutError:
        raise CtlError(f"the daemon did not answer within {ANSWER_S:g} s") from None
    except OSError as error:
        raise CtlError(f"{path}: {error.strerror or error}") from None
    except ValueError:
        raise NotRunning("the daemon closed the connection") from None
    if not reply.get("ok"):
        raise CtlError(reply.get("error") or "the daemon refused")
    return reply["result"], uid


def _harmless(value: Any) -> Any:
    """JSON with control characters escaped, so that no text can control the terminal."""
    if isinstance(value, str):
        return value.translate(_CONTROL)
    if isinstance(value, dict):
        return {_harmless(key): _harmless(item) for key, item in value.items()}
    return [_harmless(item) for item in value] if isinstance(value, list) else value


def chat(host: str, port: int, uid: int, question: str, images: Sequence[str]) -> Iterator[str]:
    """Parts of the model's answer as they arrive.  The API key is sent only if user `uid` listens there.

    Raises CtlError.
    """
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": _image_url(image)}} for image in images]
    content.append({"type": "text", "text": question})
    body = json.dumps({"messages": [{"role": "user", "content": content}], "stream": True})
    # The daemon may listen on a wildcard address, to which no client can connect.
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    connection = http.client.HTTPConnection(host, port, timeout=CHAT_S)
    try:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
            connection.connect()
            peer.check_listener(connection.sock, uid)
            headers["Authorization"] = f"Bearer {key}"
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise CtlError(_error_of(response.read()) or f"HTTP {response.status} {_harmless(response.reason)}")
        yield from _deltas(response)
    except peer.Stranger as error:
        raise CtlError(str(error)) from None
    except (OSError, http.client.HTTPException) as error:
        raise CtlError(f"http://{host}:{port}: {error}") from None
    finally:
        connection.close()


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    for line in response:
        data = line.decode(errors="replace").strip().removeprefix("data:").strip()
        if data == "[DONE]":
            return
        if not line.startswith(b"data:"):
            continue
        event = json.loads(data)
        if "error" in event:
            raise CtlError(_error_of(data.encode()) or _harmless(data))
        for choice in event.get("choices", ()):
            text = choice.get("delta", {}).get("content")
            if text:
                yield _harmless(text)
    raise CtlError("the daemon ended the answer early")


def _error_of(body: bytes) -> str:
    try:
        return str(_harmless(json.loads(body)["error"]["message"]))
    except (ValueError, KeyError, TypeError):
        return ""


def _image_url(image: str) -> str:
    """A URL unchanged, a file as a data: URL.  The daemon detects the format by the bytes, not by this type."""
    if image.startswith(("http://", "https://", "data:")):
        return image
    try:
        content = Path(image).read_bytes()
    except OSError as error:
        raise UsageError(f"{image}: {error.strerror}") from None
    kind = {".png": "png", ".webp": "webp", ".gif": "gif"}.get(Path(image).suffix.lower(), "jpeg")
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"

"""A Hub on the loopback device, as far as downloads need one: model info, tree, resolve by HEAD and GET with Range.

    with hub_server.Hub({"org/name": Repo(folder)}) as hub:
        run(env={"HF_ENDPOINT": hub.endpoint})

Large files are marked as stored in large-file storage and answered by a redirect, as in the real Hub.
"""

import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = {"main": "a" * 40, "v1": "b" * 40}
PIECE = 64 << 10


@dataclass
class Repo:
    """A model: revisions as folders of files."""

    revisions: dict[str, Path]
    gated: bool = False
    token: str = ""             # that opens it; empty: open to all
    damaged: set[str] = field(default_factory=set)      # files whose bytes are not what their hash says
    lies: dict[str, dict] = field(default_factory=dict)     # file -> wrong information about it
    commit: str = ""            # in place of the true one

    def folder(self, revision):
        names = {commit: name for name, commit in COMMIT.items()} | {name: name for name in COMMIT}
        return self.revisions.get(names.get(revision, ""))


class Hub:
    def __init__(self, repos):
        self.repos = repos
        self.sent = Counter()       # bytes of bodies, by file name
        self.requests = []          # (method, path, Range, Authorization)
        self.cut_after = {}         # file name: bytes after which the connection is cut, once
        self.hold_after = {}        # file name: bytes after which it stalls until `release` is set
        self.held, self.release = threading.Event(), threading.Event()
        self.bytes_per_s = 0
        self.fault = 0              # answered to every request
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_HEAD(self):
                hub.answer(self, False)

            def do_GET(self):
                hub.answer(self, True)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._storage = f"http://localhost:{self._server.server_port}"     # another host, as the real one's is

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *how):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()

    def asked(self, method, name):
        return [request for request in self.requests if request[0] == method and request[1].endswith(name)]

    def answer(self, handler, body):
        path = unquote(urlsplit(handler.path).path)
        authorization = handler.headers.get("Authorization", "")
        self.requests.append((handler.command, path, handler.headers.get("Range"), authorization))
        if self.fault:
            return _send(handler, self.fault, {})
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)", path):
            return self._listing(handler, *found.groups(), authorization)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
            return self._listing(handler, found[1], "revision", "main", authorization)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._resolve(handler, *found.groups(), authorization, body)
        if found := re.fullmatch(r"/storage/([^/]+/[^/]+)/([^/]+)/(.+)", path):
            repo = self.repos[found[1]]
            return self._file(handler, repo.folder(found[2]) / found[3], body, found[3] in repo.damaged)
        _send(handler, 404, {})

    def _refused(self, handler, name, revision, authorization):
        repo = self.repos.get(name)
        if repo is None:
            _send(handler, 401 if not authorization else 404, {"X-Error-Code": "RepoNotFound"})
        elif repo.token and authorization != f"Bearer {repo.token}":
            code = {"X-Error-Code": "GatedRepo"} if repo.gated else {"X-Error-Message": "Invalid credentials in "
                                                                     "Authorization header"}
            _send(handler, 403 if repo.gated and authorization else 401, code)
        elif repo.folder(revision) is None:
            _send(handler, 404, {"X-Error-Code": "RevisionNotFound"})
        else:
            return False
        return True

    def _listing(self, handler, name, what, revision, authorization):
        if self._refused(handler, name, revision, authorization):
            return
        folder = self.repos[name].folder(revision)
        files = [_entry(folder, path, self.repos[name]) for path in sorted(folder.rglob("*")) if path.is_file()]
        if what == "tree":
            return _send(handler, 200, {}, files)
        siblings = [{"rfilename": entry["path"], "size": entry["size"], "blobId": entry["oid"],
                     **({"lfs": {**entry["lfs"], "sha256": entry["lfs"]["oid"]}} if "lfs" in entry else {})}
                    for entry in files]
        commit = self.repos[name].commit or COMMIT.get(revision, revision)
        _send(handler, 200, {}, {"_id": "1", "id": name, "modelId": name, "sha": commit, "siblings": siblings,
                                 "private": False, "tags": [], "downloads": 0, "likes": 0})

    def _resolve(self, handler, name, revision, file, authorization, body):
        if self._refused(handler, name, revision, authorization):
            return
        folder = self.repos[name].folder(revision)
        commit = COMMIT.get(revision, revision)
        if not (folder / file).is_file():
            return _send(handler, 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        entry = _entry(folder, folder / file, self.repos[name])
        told = {"X-Repo-Commit": commit, "ETag": f'"{entry["oid"]}"'}
        if "lfs" not in entry:
            return self._file(handler, folder / file, body, False, told)
        _send(handler, 302, told | {"X-Linked-Etag": f'"{entry["lfs"]["oid"]}"', "X-Linked-Size": str(entry["size"]),
                                    "Location": f"{self._storage}/storage/{name}/{commit}/{file}"})

    def _file(self, handler, path, body, damaged, told=None):
        data = path.read_bytes()
        if damaged:
            data = data[:-1] + bytes([data[-1] ^ 1])
        start, status, headers = 0, 200, dict(told or {})
        if wanted := handler.headers.get("Range"):
            start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1])
            status, headers["Content-Range"] = 206, f"bytes {start}-{len(data) - 1}/{len(data)}"
        rest = data[start:]
        handler.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(rest))}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if body:
            self._send_pieces(handler, path.name, rest)

    def _send_pieces(self, handler, name, rest):
        cut = self.cut_after.pop(name, None)
        hold = self.hold_after.get(name)
        for at in range(0, len(rest), PIECE):
            piece = rest[at:at + PIECE]
            if cut is not None and at >= cut:
                handler.close_connection = True
                handler.connection.close()
                return
            if hold is not None and at >= hold:
                self.held.set()
                self.release.wait(300)
                handler.close_connection = True
                return
            try:
                handler.wfile.write(piece)
            except OSError:
                return
            self.sent[name] += len(piece)
            if self.bytes_per_s:
                time.sleep(len(piece) / self.bytes_per_s)


def _entry(folder, path, repo):
    data = path.read_bytes()
    entry = {"type": "file", "path": str(path.relative_to(folder)), "size": len(data),
             "oid": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()}
    if path.suffix in (".safetensors", ".bin", ".gguf"):
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry | repo.lies.get(path.name, {})


def _send(handler, status, headers, answer=None):
    data = b"" if answer is None else json.dumps(answer).encode()
    handler.send_response(status)
    for key, value in {**headers, "Content-Type": "application/json", "Content-Length": str(len(data))}.items():
        handler.send_header(key, value)
    handler.end_headers()
    if handler.command != "HEAD":
        handler.wfile.write(data)

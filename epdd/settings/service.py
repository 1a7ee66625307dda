"""Settings of the service: listeners and limits, epdctl, images, logs.  `etc/epdd.toml` and docs are made from this."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from epdd.settings.values import Count, Mode, Positive, Seconds

_ORIGIN = r"^(\*|null|[a-z][a-z0-9+.-]*://[^/\s]+)$"        # as browsers send it: no path, no slash at the end


class ServerSettings(Struct, frozen=True):
    host: Annotated[str, Meta(description="""
        Address to listen on. "127.0.0.1": programs on this machine only. "::": every address, IPv6 and IPv4. Everyone
        who reaches it may use the API unless API keys are set. The connection is not encrypted.""")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="""
        TCP port to listen on. 0: any free port, which `epdctl status` shows.""")] = 8765
    unix_socket: Annotated[str, Meta(description="""
        Path of a Unix socket on which the API listens too. Empty: TCP only.""")] = ""
    unix_socket_mode: Annotated[Mode, Meta(description="""
        File permissions of server.unix_socket, which decide who may use it. 0o600: its own user and root.
        """)] = 0o600
    unix_socket_group: Annotated[str, Meta(description="""
        Group that owns server.unix_socket and may use it. Empty: the daemon's own, with no permission added.""")] = ""
    api_keys: Annotated[tuple[str, ...], Meta(description="""
        API keys. If any is set, a request must send one as "Authorization: Bearer KEY"; only /health, /ready and /ping
        stay open. Set keys in the environment (EPDD_SERVER_API_KEYS=KEY,KEY) or in server.api_keys_file, because other
        users may be able to read this file. A reload takes over new keys.""")] = ()
    api_keys_file: Annotated[str, Meta(description="""
        File with further API keys, one on each line. Lines that begin with # are comments. A reload reads it again.
        Under systemd, provide it with LoadCredential=. Empty: no file.""")] = ""
    share_caches: Annotated[bool, Meta(description="""
        Share the encoder cache and the prefix cache between API keys. true saves work if keys send the same images or
        prompts. A client can then learn what others have sent, from cached_tokens or from how fast an answer comes.
        """)] = False
    cors_origins: Annotated[tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...], Meta(
        extra={"expected": '"*" or like "https://example.com"'}, description="""
        Origins whose web pages may call the API from a browser, for example ["https://chat.example.com"]. "*": every
        origin. Empty: none.""")] = ()
    max_requests: Annotated[Positive, Meta(description="""
        Requests that may run or wait at the same time. Further ones get a 429. A higher value queues more requests,
        which then wait longer; a lower one refuses them sooner.""")] = 256
    max_body_bytes: Annotated[Count, Meta(description="""
        Bytes of one request's body; a larger body gets a 413. Eight phone photos in base64 are about 60 MB. The body
        without its images is limited apart from that: to 8 MiB, or for long contexts to 32 bytes for each token of the
        model's context, at most 16 MiB.""")] = 128 << 20
    max_connections: Annotated[Count, Meta(description="""
        Client connections at the same time. At the limit, a new connection closes the one that has waited longest
        without sending a request. 0: as many as the limit of file descriptors (ulimit -n) allows, which always holds.
        """)] = 4096
    head_timeout_s: Annotated[Seconds, Meta(description="""
        Seconds for a request's line and headers to arrive, counted from the connection or from their first byte. Then
        the client gets a 408. 0: no limit. A low value frees connections of slow or silent clients sooner.""")] = 10.0
    body_timeout_s: Annotated[Seconds, Meta(description="""
        Seconds over which a request's body must bring at least 512 bytes a second, again and again until it is whole.
        A slower body gets a 408. 0: no limit. A higher value lets bad networks recover, and keeps memory for longer.
        """)] = 10.0
    keep_alive_s: Annotated[Seconds, Meta(description="""
        Seconds that a connection stays open after an answer without a further request. Set it higher than the idle
        time of a proxy in front, or the proxy sends requests into closing connections. 0: no limit.""")] = 75.0
    timeout_s: Annotated[Seconds, Meta(description="""
        Seconds from a request's arrival to its last token. Then it ends with a 504, or with an error event if its
        stream has begun. 0: no limit. A lower value frees workers from long answers sooner.""")] = 600.0
    strict: Annotated[bool, Meta(description="""
        Refuse requests that have unknown fields, with a 400. false: ignore such fields and count them in the metrics.
        """)] = False
    shutdown_timeout_s: Annotated[Seconds, Meta(description="""
        Seconds that running requests get to end when the daemon stops. Requests that still run then are cut off. Keep
        it below TimeoutStopSec= of the systemd unit.""")] = 30.0

    def __repr__(self) -> str:
        return f"ServerSettings(host={self.host!r}, port={self.port}, ...)"     # a key must not get into a log


class AdminSettings(Struct, frozen=True):
    socket: Annotated[str, Meta(description="""
        Path of the Unix socket for epdctl. Empty: admin-PORT.sock in the runtime folder, /run/epdd for the service, so
        several daemons can run side by side.""")] = ""
    mode: Annotated[Mode, Meta(description="""
        File permissions of the socket for epdctl, which decide who may control the daemon. 0o600: its own user and
        root.""")] = 0o600
    group: Annotated[str, Meta(description="""
        Group that owns the socket for epdctl and may control the daemon. Empty: the daemon's own, with no permission
        added.""")] = ""


class MediaSettings(Struct, frozen=True):
    fetch: Annotated[Literal["off", "allowlist", "public"], Meta(description="""
        Which http and https URLs of images are fetched. public: from any host with a public address. allowlist: only
        from the hosts in media.allow. off: none, so images must come inside the request.""")] = "public"
    allow: Annotated[tuple[str, ...], Meta(description="""
        Hosts that media.fetch = "allowlist" permits: host, host:port or CIDR, for example ["images.example.com",
        "10.2.0.0/16"].""")] = ()
    folders: Annotated[tuple[str, ...], Meta(description="""
        Folders from which requests may name images as file:///path. Every client can then use every image below them.
        Empty: no file: URLs.""")] = ()
    timeout_s: Annotated[Seconds, Meta(description="""
        Seconds that the whole fetch of one image may take, redirects included. Then the request fails.""")] = 10.0
    max_redirects: Annotated[Count, Meta(description="""
        Redirects that the fetch of one image follows. 0: none.""")] = 3
    max_file_bytes: Annotated[Count, Meta(description="""
        Bytes of one image file. A request with a larger one is refused.""")] = 32 << 20
    max_pixels: Annotated[Positive, Meta(description="""
        Width times height of one image, as its header says, before it is decoded. A request with a larger image gets a
        400. Decoding 64 million pixels takes an encoder up to 1.1 GB; a lower value saves memory.""")] = 64_000_000
    max_images: Annotated[Count, Meta(description="""
        Images in one request, earlier turns of the conversation included. More get a 400. 0: text only.""")] = 16
    max_inflight_bytes: Annotated[Count, Meta(description="""
        Bytes of image files, and likewise of request bodies, in memory at the same time over all requests. Images over
        it wait, request bodies get a 429. A higher value takes more memory under load.""")] = 512 << 20
    max_fetches: Annotated[Positive, Meta(description="""
        Images that are fetched by URL at the same time. Further fetches wait.""")] = 32


class LogSettings(Struct, frozen=True):
    level: Annotated[Literal["debug", "info", "warning", "error"], Meta(description="""
        Least severe messages that are logged. Prompts and images are never logged, at any level.""")] = "info"
    requests: Annotated[str, Meta(description="""
        Request log: a file that gets one line of JSON for each request, with sizes, times and outcome but no content.
        Under systemd use "/var/log/epdd/requests.jsonl". If the disk is too slow, lines are dropped and counted.
        Empty: no request log.""")] = ""
    max_requests_bytes: Annotated[Count, Meta(description="""
        Bytes of the request log at which it becomes FILE.1, FILE.1 becomes FILE.2, and so on. If logrotate moves the
        file, let it send SIGUSR1 or reload the daemon, which then opens the path again.""")] = 64 << 20
    requests_kept: Annotated[Count, Meta(description="""
        Full files of the request log that are kept. 0: a full file is deleted.""")] = 4

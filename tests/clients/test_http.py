"""curl's bodies, and nginx between a client and the daemon."""

import http.client
import io
import json
import os
import shutil
import subprocess
import sys
from contextlib import closing, contextmanager

import pytest
from PIL import Image, ImageDraw

from tests.clients import servers
from tests.e2e.daemon import data_url

ASKED = {"temperature": 0, "max_tokens": 16}


@pytest.fixture(scope="package")
def large():
    """A body of 3 MB: a red circle as a BMP, which is not compressed."""
    image = Image.new("RGB", (1000, 750), "white")
    ImageDraw.Draw(image).ellipse((200, 75, 800, 675), fill=(230, 20, 20))
    buffer = io.BytesIO()
    image.save(buffer, "BMP")
    body = json.dumps(asked(data_url(buffer.getvalue(), "BMP"))).encode()
    assert 3.0e6 < len(body) < 3.1e6
    return body


def asked(url, **fields):
    return ASKED | fields | {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What colour is the circle?"}]}]}


def answer_of(body):
    return json.loads(body)["choices"][0]["message"]["content"]


def curl(url, *options, body=b""):
    """(body, output of -v) of a POST."""
    if not shutil.which("curl"):
        pytest.skip("curl is missing")
    ended = subprocess.run(["curl", "-sSv", "--max-time", "60", "-H", "Content-Type: application/json", *options, url],
                           input=body, capture_output=True)
    said = ended.stderr.decode()
    assert ended.returncode == 0, said
    return ended.stdout.decode(), said


@pytest.mark.parametrize("expect", ["Expect:", "Expect: 100-continue"])
def test_curl_sends_3_mb_in_chunks(daemon, large, expect):
    body, said = curl(daemon.url("/v1/chat/completions"), "-X", "POST", "-T", "-", "-H", "Transfer-Encoding: chunked",
                      "-H", expect, body=large)
    assert answer_of(body) == "red" and "> Transfer-Encoding: chunked" in said
    assert ("HTTP/1.1 100 Continue" in said) == ("100-continue" in expect)


def test_curl_waits_for_the_word_to_go_on(daemon, large):
    body, said = curl(daemon.url("/v1/chat/completions"), "--data-binary", "@-", "-H", "Expect: 100-continue",
                      body=large)
    assert answer_of(body) == "red" and said.index("HTTP/1.1 100 Continue") < said.index("HTTP/1.1 200 OK")


def test_curl_is_refused_before_it_sends_too_much(daemon, tmp_path):
    with open(tmp_path / "body", "wb") as file:
        file.truncate(130 << 20)
    body, said = curl(daemon.url("/v1/chat/completions"), "-X", "POST", "-T", str(tmp_path / "body"),
                      "-H", "Expect: 100-continue", "-w", "\n%{http_code} %{size_upload}")
    body, _, counts = body.rpartition("\n")
    assert counts == "413 0" and json.loads(body)["error"]["code"] == "request_too_large"


def test_curl_reads_a_stream(daemon, facts):
    sent = json.dumps(asked(facts["image"], stream=True)).encode()
    body, said = curl(daemon.url("/v1/chat/completions"), "-N", "--data-binary", "@-", body=sent)
    assert "X-Accel-Buffering: no" in said
    lines = body.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == facts["answer"]


# As packaged, with a limit on bodies; /direct/ passes bodies on without collecting them.
NGINX = """
daemon off;
worker_processes 1;
pid nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path body;
    proxy_temp_path proxy;
    fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi;
    scgi_temp_path scgi;
    client_max_body_size 4m;
    proxy_http_version 1.1;
    server {{
        listen 127.0.0.1:{port};
        location / {{ proxy_pass http://127.0.0.1:{upstream}; }}
        location /direct/ {{
            proxy_request_buffering off;
            proxy_pass http://127.0.0.1:{upstream}/;
        }}
    }}
}}
"""


@pytest.fixture(scope="package")
def nginx(daemon, tmp_path_factory):
    """The port of an nginx in front of the daemon."""
    program = shutil.which("nginx", path=os.environ["PATH"] + ":/usr/sbin")
    if not program:
        pytest.skip("nginx is missing")
    folder, port = tmp_path_factory.mktemp("nginx"), servers.free_port()
    own = "user root;\n" if os.geteuid() == 0 else ""      # its workers could not enter the folder otherwise
    (folder / "nginx.conf").write_text(own + NGINX.format(port=port, upstream=daemon.port))
    with servers.started([program, "-p", folder, "-e", "stderr", "-c", "nginx.conf"], port, folder):
        yield port


def test_openai_python_behind_nginx(run, nginx):
    run(sys.executable, "with_openai.py", url=f"http://127.0.0.1:{nginx}/v1")


def test_a_stream_passes_nginx_as_it_is_made(daemon, nginx):
    """Events arrive while the request runs, and leaving ends the request."""
    with first_events(nginx, "/v1/chat/completions", 4000) as events:
        assert events[0]["choices"][0]["delta"]["role"] == "assistant"
        assert daemon.status()["requests"]["running"] == 1
    # `undisturbed` waits until it is no longer running, less long than 4000 tokens take.


@contextmanager
def first_events(port, path, tokens):
    """The first ten, for nginx passes on at once what came with the header.  Leaves the stream in the end."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", path, json.dumps({
            "messages": [{"role": "user", "content": "Hello"}], "stream": True, "ignore_eos": True,
            "max_tokens": tokens}))
        answer = connection.getresponse()
        assert answer.status == 200 and answer.getheader("Content-Type").startswith("text/event-stream")
        lines = [answer.readline() for _ in range(20)]
        yield [json.loads(line.removeprefix(b"data: ")) for line in lines if line != b"\n"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/direct/v1/chat/completions"])
@pytest.mark.parametrize("coding", ["Transfer-Encoding:", "Transfer-Encoding: chunked"])
def test_large_bodies_pass_nginx(nginx, large, path, coding):
    body, _ = curl(f"http://127.0.0.1:{nginx}{path}", "--data-binary", "@-", "-H", coding, body=large)
    assert answer_of(body) == "red"


def test_nginx_refuses_what_is_over_its_own_limit(nginx, large):
    # Nothing of it reaches the daemon.
    body, _ = curl(f"http://127.0.0.1:{nginx}/v1/chat/completions", "--data-binary", "@-", "-w", "\n%{http_code}",
                   body=large + b" " * (2 << 20))
    assert body.endswith("413") and "nginx" in body

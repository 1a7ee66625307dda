"""Unmodified clients, each in its own environment, against the real daemon."""

import os
import secrets
import sys
from contextlib import contextmanager


from tests.clients import servers


def test_openai_python(run):
    run(sys.executable, "with_openai.py")


def test_the_openai_python_before_it(run, installed):
    """LiteLLM brings an older major version of it."""
    assert run(installed("litellm") / "bin" / "python", "with_openai.py").startswith("2.")


def test_openai_node(run, installed):
    run("node", "with_openai.mjs", installed("node"))


def test_langchain(run, installed):
    run(installed("langchain") / "bin" / "python", "with_langchain.py")


def test_litellm(run, installed):
    run(installed("litellm") / "bin" / "python", "with_litellm.py")


def test_litellm_proxy(run, installed, facts, tmp_path):
    folder = installed("litellm") / "bin"
    with litellm_proxy(folder, facts["url"], tmp_path) as (url, key):
        run(folder / "python", "with_litellm_proxy.py", url=url, key=key)


@contextmanager
def litellm_proxy(folder, upstream, tmp_path):
    """(URL, key) of LiteLLM's proxy in front of `upstream`."""
    (tmp_path / "proxy.yaml").write_text(f"""
model_list:
  - model_name: epdd-demo
    litellm_params: {{model: hosted_vllm/epdd-demo, api_base: "{upstream}", api_key: none}}
litellm_settings: {{telemetry: false, num_retries: 0}}
""")
    key, port = f"sk-{secrets.token_hex(24)}", servers.free_port()
    command = [folder / "litellm", "--config", tmp_path / "proxy.yaml", "--host", "127.0.0.1", "--port", port]
    with servers.started(command, port, tmp_path, os.environ | {"LITELLM_MASTER_KEY": key}):
        yield f"http://127.0.0.1:{port}/v1", key

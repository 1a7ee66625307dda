"""schemathesis against /openapi.json: thousands of requests, right and wrong ones, and no answer that is not described.

It is installed apart (.ci/run), since its requirements are many; EPDD_SCHEMATHESIS names the program.
"""

import os
import re
import shutil
import subprocess

import pytest

from tests.e2e.daemon import running

PROGRAM = os.environ.get("EPDD_SCHEMATHESIS") or shutil.which("schemathesis")
# Not positive_data_acceptance: what only the checkpoint can tell (a token id, an image, a length) is a 400.
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_headers_conformance",
          "response_schema_conformance", "negative_data_rejection", "unsupported_method", "allow_header_conformance")


@pytest.mark.slow
@pytest.mark.skipif(not PROGRAM, reason="schemathesis is not installed (EPDD_SCHEMATHESIS names the program)")
def test_no_fault_and_no_answer_that_is_not_described(tmp_path):
    # A short context: requests that say nothing of max_tokens generate all that is left of it.
    with running(model__max_model_len=160, media__fetch="off") as daemon:
        daemon.ready()
        before = daemon.at_rest()
        command = [PROGRAM, "run", daemon.url("/openapi.json"), "--checks", ",".join(CHECKS), "--phases",
                   "examples,coverage,fuzzing", "--max-examples", "40", "--seed", "1", "--continue-on-failure",
                   # The bare aliases are the same handlers.
                   "--exclude-path-regex", "^/(chat/)?completions$"]
        ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
        print(ended.stdout[-8000:], ended.stderr[-2000:])
        assert ended.returncode == 0
        assert int(re.search(r"(\d+) generated", ended.stdout)[1]) >= 2000
        after = daemon.at_rest()
        assert after["pids"] == before["pids"] and after["pinned"] == 0
        assert daemon.say("Hello", max_tokens=4)

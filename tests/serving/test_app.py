"""The description in /openapi.json, and answers that follow it whatever is sent."""

import subprocess
import sys

import pytest

from tests.http_servers import LIMIT_S, HttpProcess

CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
EXAMPLES = 12  # an operation


def test_every_operation_tells_its_errors(server: HttpProcess) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    assert {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/v1/models",
    } <= set(paths)
    for path, operations in paths.items():
        for operation in operations.values():
            assert {"400", "401", "413", "500", "503"} <= set(operation["responses"]), path
            assert "422" not in operation["responses"], path


@pytest.mark.slow
def test_generated_requests(server: HttpProcess) -> None:
    """schemathesis: valid and invalid requests by the schema; no 5xx, no answer that the schema
    does not describe.
    """
    command = [
        sys.executable,
        "-m",
        "schemathesis.cli",
        "run",
        f"{server.url}/openapi.json",
        "--no-color",
    ]
    options = [
        "--checks",
        ",".join(CHECKS),
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        "1",
        "--mode",
        "all",
    ]
    # the machine may be slow
    options += ["--request-timeout", str(LIMIT_S), "--suppress-health-check", "too_slow"]
    done = subprocess.run(
        [*command, *options], capture_output=True, text=True, timeout=2 * LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert server.get("/ready").status_code == 200
    live = server.until("/live", lambda r: r.json()["requests_running"] == 0).json()
    assert live["generation_tokens_total"] > 0
    assert "Traceback" not in server.log.read_text()

"""Pods find each other as JAX does on Kubernetes, by a stand-in for its API server that knows the
job of launch/.

Needs root and the package `kubernetes`: each pod gets a mount namespace of its own with the files
of a service account and the name of rank 0.
"""

import json
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_kubernetes import documents
from tests.train_runs import Start, TrainRuns, committed, losses

pytest.importorskip("kubernetes")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="a mount namespace needs root"),
]
NAMESPACE = "team"
# what a pod finds below /run, and who rank 0 is; "$@": its command
POD = """
mount -t tmpfs none /run && mkdir -p /run/secrets/kubernetes.io/serviceaccount
cp "$FILES"/ca.crt "$FILES"/token "$FILES"/namespace /run/secrets/kubernetes.io/serviceaccount
mount --bind "$FILES"/hosts /etc/hosts && exec "$@"
"""


class ApiServer:
    """Answers the three questions that JAX asks about a pod, its job and the services; `asked`
    has their paths.
    """

    def __init__(self, folder: Path, name: str) -> None:
        found = documents(name)
        self.job = found["Job"]
        meta, pods = self.job["metadata"], self.job["spec"]["template"]
        for container in pods["spec"]["containers"]:  # a server gives quantities back as text
            limits = container["resources"]["limits"]
            limits.update({name: str(quantity) for name, quantity in limits.items()})
        owner = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": meta["name"],
            "uid": "1",
            "controller": True,
        }
        labels = pods["metadata"]["labels"] | {"job-name": meta["name"]}
        pod = {
            "metadata": {"name": "pod", "labels": labels, "ownerReferences": [owner]},
            "spec": pods["spec"],
        }
        answers = {
            f"/api/v1/namespaces/{NAMESPACE}/pods": {"kind": "PodList", "items": [pod]},
            f"/api/v1/namespaces/{NAMESPACE}/services": {
                "kind": "ServiceList",
                "items": [found["Service"]],
            },
            f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{meta['name']}": (
                self.job | {"metadata": meta | {"labels": {"app": meta["name"]}}}
            ),
        }
        self.allowed = True
        self.asked: list[str] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                server.asked.append(path)
                known = self.headers["Authorization"].lower() == "bearer a token" and server.allowed
                body = json.dumps(answers[path] if known else {"kind": "Status"}).encode()
                self.send_response(200 if known else 403)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: Any) -> None: ...

        key, certificate = folder / "key.pem", folder / "ca.crt"
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1"]
        made = [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            key,
            "-out",
            certificate,
        ]
        subprocess.run([*made, *subject], check=True, capture_output=True)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        rank_0 = f"{meta['name']}-0.{pods['spec']['subdomain']}"
        (folder / "token").write_text("a token")
        (folder / "namespace").write_text(NAMESPACE)
        (folder / "hosts").write_text(f"127.0.0.1 localhost {rank_0} {socket.gethostname()}\n")
        self.folder = folder


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    (tmp_path / "account").mkdir()
    server = ApiServer(tmp_path / "account", "train-job.yaml")
    yield server
    server.http.shutdown()
    server.http.server_close()


def start_pod(server: ApiServer, rank: int, runs: TrainRuns, run: Path, start_python: Start) -> Any:
    """Start `train.py` without a word about the other processes."""
    environment = runs.environment() | {
        "KUBERNETES_SERVICE_HOST": "127.0.0.1",
        "KUBERNETES_SERVICE_PORT": str(server.http.server_port),
        "JOB_COMPLETION_INDEX": str(rank),
        "HOSTNAME": "localhost",
        "FILES": str(server.folder),
    }
    code = (
        "import os, sys; os.execvp('unshare', ['unshare', '-m', 'sh', '-c', sys.argv[1], 'sh',"
        " *sys.argv[2:]])"
    )
    pod = ["-c", code, POD, sys.executable, *runs.command(run, "--num-steps", 4)]
    return start_python(pod, run.parent / f"pod-{rank}", environment)


def test_pods_find_each_other(
    server: ApiServer, runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    run = tmp_path / "run"
    pods = [
        start_pod(server, rank, runs, run, start_python)
        for rank in range(server.job["spec"]["parallelism"])
    ]
    for pod in pods:
        pod.end(300)
    assert "Rank 0 is connected to 1 peer ranks" in pods[0].screen
    assert len(losses(run)) == 4 and committed(run) == [4]
    assert {path.rpartition("/")[2] for path in server.asked} == {
        "pods",
        server.job["metadata"]["name"],
    }


def test_a_pod_without_the_right_to_look_around(
    server: ApiServer, runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    server.allowed = False
    screen = start_pod(server, 0, runs, tmp_path / "run", start_python).end(300, returncode=1)
    assert "JAX cannot find the other processes of this job" in screen and "403" in screen
    assert "--distributed.coordinator-address HOST:PORT" in screen
    assert not (tmp_path / "run").exists()

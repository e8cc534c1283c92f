"""The manifests of launch/kubernetes: what must fit together does, and two pods' commands really
train together.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jmoe.command_line import parse_serve, parse_train
from jmoe.configs import PRESETS
from jmoe.runtime import EXIT_STOPPED
from tests.train_runs import MODEL, SHORT, Start, TrainRuns, committed, free_port, losses

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "launch" / "kubernetes"
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def documents(name: str) -> dict[str, Any]:
    """The objects of a file by kind."""
    return {
        document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())
    }


def job_of(name: str) -> tuple[dict[str, Any], str]:
    """(specification of the Job, rank 0's host name in it)."""
    found = documents(name)
    if "JobSet" in found:
        job_set = found["JobSet"]
        (replicated,) = job_set["spec"]["replicatedJobs"]
        network = job_set["spec"]["network"]
        assert (
            replicated["replicas"] == 1
            and network["enableDNSHostnames"]
            and network["publishNotReadyAddresses"]
        )
        pod = f"{job_set['metadata']['name']}-{replicated['name']}-0-0"
        return replicated["template"]["spec"], f"{pod}.{network['subdomain']}"
    job, service = found["Job"], found["Service"]
    pods = job["spec"]["template"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert service["spec"]["selector"].items() <= pods["metadata"]["labels"].items()
    assert pods["spec"]["subdomain"] == service["metadata"]["name"]
    return job["spec"], f"{job['metadata']['name']}-0.{service['metadata']['name']}"


def arguments_of(job: dict[str, Any], rank: int) -> list[str]:
    """The pod's arguments as the kubelet gives them to the container: its own variables put in."""
    (container,) = job["template"]["spec"]["containers"]
    values = {}
    for variable in container["env"]:
        index = variable.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        assert "value" in variable or index == INDEX
        values[variable["name"]] = variable.get("value", str(rank))
    assert container["command"] == ["jmoe-train"]
    return [
        re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], argument)
        for argument in container["args"]
    ]


@pytest.mark.parametrize("name", ["train-job.yaml", "serve.yaml", "serve-replicas.yaml"])
def test_kubernetes_would_take_it(name: str) -> None:
    """Every field by the newest schema; that of a JobSet is not among them."""
    validator = pytest.importorskip("kubernetes_validate")
    for document in documents(name).values():
        validator.validate(document, validator.latest_version(), strict=True)
    unknown = documents(name)["Service"] | {"metadata": {"name": "x", "lables": {}}}
    with pytest.raises(validator.ValidationError):
        validator.validate(unknown, validator.latest_version(), strict=True)


@pytest.mark.parametrize("name", ["train-job.yaml", "train-jobset.yaml"])
def test_the_parts_of_a_training_job_fit_together(name: str) -> None:
    job, rank_0 = job_of(name)
    spec = job["template"]["spec"]
    (container,) = spec["containers"]
    for rank in range(job["completions"]):
        config = parse_train(arguments_of(job, rank), PRESETS)
        own = config.distributed
        assert (own.num_processes, own.process_id) == (job["completions"], rank)
        assert own.stopped_exit_code == EXIT_STOPPED
        host, _, port = str(own.coordinator_address).partition(":")
        assert host == rank_0
        assert [p["containerPort"] for p in container["ports"]] == [int(port)]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(mounts.values()) == set(volumes)
        assert "persistentVolumeClaim" in volumes[mounts["/" + config.output_dir.split("/")[1]]]
        assert "hostPath" in volumes[mounts["/" + str(config.tiers.path).split("/")[1]]]
    assert job["completionMode"] == "Indexed" and job["parallelism"] == job["completions"]
    assert spec["terminationGracePeriodSeconds"] >= config.distributed.step_timeout_s
    assert spec["shareProcessNamespace"]
    # SIGTERM itself begins the save: nothing has to come before it
    assert "lifecycle" not in container
    assert spec["restartPolicy"] == "Never"  # what a policy of failed pods demands
    (mistakes,) = [rule for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
    assert mistakes["onExitCodes"]["containerName"] == container["name"]
    assert mistakes["onExitCodes"]["values"] == [1, 2]


@pytest.mark.parametrize("name", ["serve.yaml", "serve-replicas.yaml"])
def test_the_parts_of_a_server_fit_together(name: str) -> None:
    found = documents(name)
    service, deployment = found["Service"]["spec"], found["Deployment"]["spec"]
    pods = deployment["template"]
    (container,) = pods["spec"]["containers"]
    config = parse_serve(container["args"])
    assert (
        service["selector"] == deployment["selector"]["matchLabels"] == pods["metadata"]["labels"]
    )
    named = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert named[service["ports"][0]["targetPort"]] == config.port
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert waits_s + config.drain_timeout_s < pods["spec"]["terminationGracePeriodSeconds"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    assert mounts.keys() == {"/models", "/keys"}
    assert config.model.startswith("/models/") and str(config.api_key_file).startswith("/keys/")
    assert set(mounts.values()) == {volume["name"] for volume in pods["spec"]["volumes"]}
    paths = {
        probe: container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths == {
        "startupProbe": "/health",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }


def test_the_autoscaler_counts_requests_of_the_deployment() -> None:
    found = documents("serve-replicas.yaml")
    deployment, scaler = found["Deployment"], found["HorizontalPodAutoscaler"]["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", deployment["metadata"]["name"])
    assert "replicas" not in deployment["spec"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    max_batch = parse_serve(container["args"]).engine.max_batch
    (metric,) = scaler["metrics"]
    assert int(metric["pods"]["target"]["averageValue"]) < max_batch
    exposed = metric["pods"]["metric"]["name"].replace("vllm_", "vllm:", 1)
    assert f'"{exposed}"' in (ROOT / "jmoe" / "serving" / "metrics.py").read_text()


def test_the_pods_of_a_leader_worker_set_fit_together() -> None:
    """Its own schema is not among those of kubernetes-validate, its pods' and Service's are."""
    validator = pytest.importorskip("kubernetes_validate")
    found = documents("serve-leaderworkerset.yaml")
    service, group = found["Service"], found["LeaderWorkerSet"]
    template = group["spec"]["leaderWorkerTemplate"]
    validator.validate(service, validator.latest_version(), strict=True)
    pods = [template["leaderTemplate"], template["workerTemplate"]]
    for pod in pods:
        whole = {"apiVersion": "v1", "kind": "Pod", **pod}
        validator.validate(whole, validator.latest_version(), strict=True)
    prefix = "leaderworkerset.sigs.k8s.io"
    selector = {f"{prefix}/name": group["metadata"]["name"], f"{prefix}/worker-index": "0"}
    assert service["spec"]["selector"] == selector
    leader, worker = (pod["spec"]["containers"][0] for pod in pods)
    assert leader["args"] == worker["args"]
    size = template["size"]
    for rank in range(size):
        own = {"LEADER_ADDRESS": "leader", "GROUP_SIZE": str(size), "WORKER_INDEX": str(rank)}
        config = parse_serve(
            [re.sub(r"\$\(LWS_(\w+)\)", lambda m, own=own: own[m[1]], a) for a in leader["args"]]
        )
        assert (config.distributed.num_processes, config.distributed.process_id) == (size, rank)
        ports = {port["name"]: port["containerPort"] for port in leader["ports"]}
        assert config.distributed.coordinator_address == f"leader:{ports['coordinator']}"
        assert ports["http"] == config.port
    assert config.engine.mesh.devices == size * leader["resources"]["limits"]["nvidia.com/gpu"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"


@pytest.mark.slow
def test_the_pods_of_a_job_train_together(
    runs: TrainRuns, tmp_path: Path, start_python: Start
) -> None:
    """With what this machine cannot have replaced: the preset, the folders and rank 0's name."""
    job, rank_0 = job_of("train-job.yaml")
    here, port = str(tmp_path), free_port()
    pods = []
    for rank in range(job["completions"]):
        arguments = [
            argument.replace(f"{rank_0}:8476", f"127.0.0.1:{port}").replace(
                "/runs/", f"{here}/runs/"
            )
            for argument in arguments_of(job, rank)[1:]
            if not argument.startswith("--tiers.path")
        ]
        tiny = ("tiny", *MODEL, *SHORT, "--data.path", str(runs.shards), "--num-steps", "4")
        pods.append(
            start_python(
                ["train.py", *tiny, *arguments], tmp_path / f"pod-{rank}", runs.environment()
            )
        )
    for pod in pods:
        pod.end(300)
    folder = tmp_path / "runs" / "qwen3-30b-a3b"
    assert len(losses(folder)) == 4
    assert committed(folder) == [4]

"""The example files for clusters: they can be read, and what they say exists."""

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from jaxgpt import configured, flags
from jaxgpt.processes.launch import JOIN

FOLDER = Path(__file__).parent.parent / "experiments" / "cluster"
SLURM, KUBERNETES = FOLDER / "slurm.sh", FOLDER / "kubernetes.yaml"


@pytest.fixture
def parts():
    """Kubernetes' objects by kind."""
    return {part["kind"]: part for part in yaml.safe_load_all(KUBERNETES.read_text())}


def told(args):
    return configured.configured("train", flags.LaunchFlags, args)


def test_the_slurm_script_is_bash_and_starts_the_command():
    subprocess.run(["bash", "-n", str(SLURM)], check=True)
    text = SLURM.read_text()
    assert re.search(r"^srun .*\bjaxgpt train \"\$@\"", text, re.M)
    assert "#SBATCH --signal=USR1@120" in text
    assert f"export {JOIN}=" in text
    asked = dict(re.findall(r"^#SBATCH --([a-z-]+)=(.+)$", text, re.M))
    (example,) = re.findall(r"slurm\.sh (--.+)$", text, re.M)
    assert told(example.split()).config.mesh == f"fsdp={int(asked['nodes']) * int(asked['ntasks-per-node'])}"


def test_the_slurm_script_queues_a_run_again_that_can_go_on(tmp_path):
    """With a srun that ends as it is told, and a scontrol that says what it was asked."""
    for name, does in (("srun", "exit $WITH"), ("scontrol", "echo $@")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{does}\n")
        (tmp_path / name).chmod(0o755)
    for status, said in ((0, ""), (2, ""), (75, "requeue 7\n"), (143, "")):
        variables = {"PATH": f"{tmp_path}:/usr/bin:/bin", "WITH": str(status), "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash", str(SLURM)], env=variables, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (status, said, "")


def test_kubernetes_objects_fit_together(parts):
    assert list(parts) == ["ServiceAccount", "Role", "RoleBinding", "Service", "Job"]
    job = parts["Job"]["spec"]
    pod = job["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    service = parts["Service"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": parts["Job"]["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert pod["serviceAccountName"] == parts["ServiceAccount"]["metadata"]["name"]
    assert parts["RoleBinding"]["roleRef"]["name"] == parts["Role"]["metadata"]["name"]
    may = {resource for rule in parts["Role"]["rules"] for resource in rule["resources"]}
    assert may == {"pods", "services", "jobs"}


def test_the_kubernetes_command_is_one(parts):
    job = parts["Job"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    assert container["command"] == ["jaxgpt", "train"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert told(container["args"]).config.mesh == f"fsdp={gpus * job['parallelism']}"
    assert JOIN in {variable["name"] for variable in container["env"]}
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in job["template"]["spec"]["volumes"]}

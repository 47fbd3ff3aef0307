"""What is written for Cloud Run: it validates, and it is what makes exactly one loop there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import attrs
import jsonschema
import pytest
import yaml

from deploy import published
from deploy.conftest import Declare
from tako_sync import Footprint, application
from tako_sync.deploy import Target, limits, manifests, write
from tako_sync.deploy.__main__ import main
from tako_sync.errors import ConfigurationError

SHOP = """
invoicer = tako.Singleton(body)
ledger_sync = tako.Singleton(
    body, tako.SingletonConfig(footprint=tako.Footprint(cpu=2, memory="4Gi"))
)
sweep = tako.Cron("*/5 * * * *", body, tako.CronConfig(singleflight=True, tz="Europe/Berlin"))
report = tako.Cron("0 6 * * MON-FRI", body)
"""


def test_each_manifest_validates_against_what_google_publishes(
    declare: Declare, target: Target
) -> None:
    found = manifests(declare(SHOP), target)
    assert sorted(found) == [
        "shop-invoicer.service.yaml",
        "shop-ledger-sync.service.yaml",
        "shop-report.job.yaml",
        "shop-report.scheduler.json",
        "shop-sweep.job.yaml",
        "shop-sweep.scheduler.json",
    ]
    for name, manifest in found.items():
        if name.endswith(".scheduler.json"):
            published.check(manifest, "cloudscheduler.v1", "Job")
        else:
            published.check(manifest, "run.v1", manifest["kind"])


def test_the_published_schemas_refuse_a_field_that_is_none(
    declare: Declare, target: Target
) -> None:
    """Else the test above could not fail."""
    manifest = manifests(declare(SHOP), target)["shop-invoicer.service.yaml"]
    manifest["spec"]["template"]["spec"]["containers"][0]["livenessProbes"] = {}
    with pytest.raises(jsonschema.ValidationError):
        published.check(manifest, "run.v1", "Service")
    manifest = manifests(declare("sweep = tako.Cron('* * * * *', body)"), target)
    manifest["shop-sweep.scheduler.json"]["state"] = "ENABLED"  # output only
    with pytest.raises(jsonschema.ValidationError):
        published.check(manifest["shop-sweep.scheduler.json"], "cloudscheduler.v1", "Job")


def test_every_annotation_is_one_that_cloud_run_accepts_where_it_stands(
    declare: Declare, target: Target
) -> None:
    manifest = manifests(declare(SHOP), target)["shop-invoicer.service.yaml"]
    told = published.described("run.v1", "ObjectMeta", "annotations")
    accepted = dict(re.findall(r"`([a-z./A-Z-]+)`: ([A-Z][^.*]*)", told))
    revision = manifest["spec"]["template"]["metadata"]["annotations"]
    for place, found in (
        ("Service", manifest["metadata"]["annotations"]),
        ("Revision", revision),
    ):
        for annotation in found:
            assert place in accepted[annotation], annotation


def container(manifest: dict[str, Any]) -> dict[str, Any]:
    (only,) = manifest["spec"]["template"]["spec"]["containers"]
    return dict(only)


def test_a_singleton_is_one_instance_that_is_always_on_and_serves_nobody(
    declare: Declare, target: Target
) -> None:
    manifest = manifests(declare(SHOP), target)["shop-invoicer.service.yaml"]
    assert manifest["metadata"]["name"] == "shop-invoicer"
    assert manifest["metadata"]["annotations"]["run.googleapis.com/ingress"] == "internal"
    assert manifest["metadata"]["annotations"]["run.googleapis.com/default-url-disabled"] == "true"
    template = manifest["spec"]["template"]
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/minScale"] == "1"
    assert template["metadata"]["annotations"]["autoscaling.knative.dev/maxScale"] == "1"
    assert template["metadata"]["annotations"]["run.googleapis.com/cpu-throttling"] == "false"
    assert template["spec"]["containerConcurrency"] == 1
    assert container(manifest)["resources"]["limits"] == {"cpu": "1", "memory": "512Mi"}


def test_its_footprint_is_honoured(declare: Declare, target: Target) -> None:
    manifest = manifests(declare(SHOP), target)["shop-ledger-sync.service.yaml"]
    assert container(manifest)["resources"]["limits"] == {"cpu": "2", "memory": "4Gi"}


def test_a_container_finds_its_loop_its_leases_and_its_environment(
    declare: Declare, target: Target
) -> None:
    module = declare(SHOP)
    made = container(manifests(module, target)["shop-invoicer.service.yaml"])
    assert made["command"] == ["python", "-m", "tako_sync.serve"]
    assert application.find(*made["args"]) is vars(module)["invoicer"]
    assert {variable["name"]: variable["value"] for variable in made["env"]} == {
        "TAKO_APP": "shop",
        "TAKO_ENV": "prod",
        "TAKO_BACKEND": "gs://shop-tako",
        "LOG_LEVEL": "info",
    }


def test_a_cron_is_a_job_and_a_scheduler_job_that_starts_it(
    declare: Declare, target: Target
) -> None:
    found = manifests(declare(SHOP), target)
    started = found["shop-sweep.scheduler.json"]
    assert (started["schedule"], started["timeZone"]) == ("*/5 * * * *", "Europe/Berlin")
    assert started["httpTarget"]["uri"] == (
        "https://run.googleapis.com/v2/projects/shop-prod-1234/locations/europe-west1"
        "/jobs/shop-sweep:run"
    )
    assert found["shop-sweep.job.yaml"]["metadata"]["name"] == "shop-sweep"


def test_the_platform_begins_a_run_anew_only_where_the_record_keeps_count(
    declare: Declare, target: Target
) -> None:
    found = manifests(declare(SHOP), target)

    def retries(name: str) -> int:
        return int(found[name]["spec"]["template"]["spec"]["template"]["spec"]["maxRetries"])

    assert retries("shop-sweep.job.yaml") == 1
    assert retries("shop-report.job.yaml") == 0


# --- What the platform does not take


@pytest.mark.parametrize(
    ("app", "thing", "why"),
    [
        ("shop", "x" * 45, "50 characters, and Cloud Run takes names of 49"),
        ("7shop", "x", "beginning with a letter"),
        ("shop.eu", "x", "a-z, 0-9 and '-'"),
        ("shop", "x_", "not ending with '-'"),
    ],
)
def test_a_name_that_cloud_run_does_not_take_is_refused(app: str, thing: str, why: str) -> None:
    with pytest.raises(ConfigurationError, match=why):
        limits.name(app, thing)


def test_the_longest_name_is_taken() -> None:
    assert len(limits.name("shop", "x" * 44)) == 49


def test_two_variables_that_would_be_deployed_as_one_are_refused(
    declare: Declare, target: Target
) -> None:
    target = attrs.evolve(target, app="a-b")
    module = declare("x__y = tako.Singleton(body)\nx_y = tako.Singleton(body)\n")
    assert len(manifests(module, target)) == 2
    module = declare("Sweep = tako.Singleton(body)\n")
    assert list(manifests(module, target)) == ["a-b-sweep.service.yaml"]


@pytest.mark.parametrize(
    ("footprint", "why"),
    [
        (Footprint(cpu=0.5), "the loop would stand still"),
        (Footprint(cpu="500m"), "the loop would stand still"),
        (Footprint(cpu=3), "1, 2, 4, 6 and 8"),
        (Footprint(cpu=1.5, memory="1Gi"), "1, 2, 4, 6 and 8"),
        (Footprint(memory="5Gi"), "128Mi to 4Gi"),
        (Footprint(cpu=4), "2Gi to 16Gi"),
        (Footprint(memory="64Mi"), "128Mi to 4Gi"),
    ],
)
def test_a_footprint_that_cloud_run_does_not_have_is_refused(
    footprint: Footprint, why: str
) -> None:
    with pytest.raises(ConfigurationError, match=why):
        limits.resources(footprint, "Singleton invoicer")


def test_less_than_half_a_gibibyte_is_had_in_the_first_generation_alone() -> None:
    assert limits.resources(Footprint(memory="256Mi"), "it")[1] == "gen1"
    assert limits.resources(Footprint(), "it")[1] == "gen2"
    assert limits.resources(Footprint(cpu="2000m"), "it")[0]["cpu"] == "2"


@pytest.mark.parametrize(
    ("expression", "why"),
    [("0 6 L * *", "'L'"), ("0 6 * * 5#2", "'5#2'"), ("0 6 LW * *", "'LW'"), ("0 0 * * 7", "SUN")],
)
def test_a_schedule_that_cloud_scheduler_reads_otherwise_is_refused(
    expression: str, why: str, declare: Declare, target: Target
) -> None:
    module = declare(f"sweep = tako.Cron({expression!r}, body)")
    with pytest.raises(ConfigurationError, match=re.escape(why)):
        manifests(module, target)


@pytest.mark.parametrize("expression", ["*/7 * * * *", "0,17 6-8 1 JAN SUN", "5 4 27 7 1-5"])
def test_a_schedule_that_it_reads_as_we_do_is_taken(
    expression: str, declare: Declare, target: Target
) -> None:
    found = manifests(declare(f"sweep = tako.Cron({expression!r}, body)"), target)
    assert found["shop-sweep.scheduler.json"]["schedule"] == expression


def test_a_cron_that_no_container_could_be_in_time_for_is_refused(
    declare: Declare, target: Target
) -> None:
    module = declare("sweep = tako.Cron('* * * * *', body, tako.CronConfig(catch_up=5))")
    with pytest.raises(ConfigurationError, match="catch_up=5"):
        manifests(module, target)


def test_crons_need_an_account_to_be_started_as(declare: Declare, target: Target) -> None:
    nobody = attrs.evolve(target, service_account=None)
    assert manifests(declare("invoicer = tako.Singleton(body)"), nobody)
    with pytest.raises(ConfigurationError, match="service_account"):
        manifests(declare(SHOP), nobody)


@pytest.mark.parametrize(
    "wrong",
    [
        {"project": "Shop"},
        {"region": "europe"},
        {"image": "a b"},
        {"app": "Shop"},
        {"backend": "sqlite:///leases"},
        {"backend": "memory:"},
        {"backend": "/leases"},
        {"service_account": "me"},
        {"python": ""},
        {"environ": {"PORT": "1"}},
        {"environ": {"TAKO_APP": "x"}},
        {"environ": {"A B": "x"}},
        {"environ": {"A": 1}},
    ],
)
def test_a_target_that_cannot_be_is_refused_where_it_is_written(
    wrong: dict[str, Any], target: Target
) -> None:
    with pytest.raises(ConfigurationError):
        attrs.evolve(target, **wrong)


# --- Files


def test_files_are_written_whole_and_read_back_the_same(
    declare: Declare, target: Target, tmp_path: Path
) -> None:
    module = declare(SHOP)
    for _ in range(2):
        paths = write(module, target, tmp_path / "a" / "b")
    read = {}
    for path in paths:
        text = path.read_text()
        read[path.name] = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        assert "&id" not in text, "what is the same twice is written twice"
    assert read == manifests(module, target)
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == set(read)


def test_nothing_is_written_unless_all_of_it_can_be(
    declare: Declare, target: Target, tmp_path: Path
) -> None:
    module = declare(SHOP + "\nmonthly = tako.Cron('0 0 L * *', body)\n")
    with pytest.raises(ConfigurationError):
        write(module, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_program_writes_what_the_function_does(
    declare: Declare,
    target: Target,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = declare(SHOP)
    monkeypatch.setenv("TAKO_ENV", "prod")
    asked = [
        module.__name__,
        f"--project={target.project}",
        f"--region={target.region}",
        f"--image={target.image}",
        "--app=shop",
        "--backend=gs://shop-tako",
        f"--service-account={target.service_account}",
        "--set=LOG_LEVEL=info",
        f"--out={tmp_path / 'out'}",
    ]
    assert main(asked) == 0
    written = {Path(line).name: Path(line).read_text() for line in capsys.readouterr().out.split()}
    by_hand = write(module, target, tmp_path / "by hand")
    assert written == {path.name: path.read_text() for path in by_hand}
    with pytest.raises(SystemExit):
        main([*asked, "--app=Shop"])
    assert "app 'Shop'" in capsys.readouterr().err

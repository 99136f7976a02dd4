"""`ray job submit` to, and plain python beside, a cluster of two nodes: two raylets on this machine."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from skyrl_train.ranks import free_port
from tests.support.jobs import MARK, ROOT, WITHOUT_VLLM, Job, assert_whole_steps, running, start_command, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
# One rank on each node, two pipeline stages, so weights have two senders on two nodes.
ON_TWO_NODES = [
    "trainer.placement.strategy=SPREAD",
    "trainer.placement.policy_num_nodes=2",
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.policy.megatron_config.pipeline_model_parallel_size=2",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_world(tmp_path_factory.mktemp("cluster") / "world")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Its processes start in another folder than the runs', as on a real cluster."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("RAY_")]:
            patch.delenv(name)
        patch.setenv("PYTHONPATH", str(ROOT))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "60")
        dashboard = {"include_dashboard": True, "dashboard_port": free_port()}
        nodes = Cluster(initialize_head=True, head_node_args=node_arguments() | dashboard)
        nodes.add_node(**node_arguments())
        nodes.wait_for_nodes()
        try:
            yield nodes
        finally:
            nodes.shutdown()


def node_arguments() -> dict[str, Any]:
    """The agent that jobs are submitted through listens on one port of the machine, unless told otherwise."""
    return {"num_cpus": 2, "dashboard_agent_listen_port": free_port()}


def nodes_of(job: Job, kind: str) -> set[str]:
    """Ids of the nodes on which processes of this kind run, as their logs say."""
    logs = [path.read_text() for path in job.run_dir.glob(f"logs/{kind}-*.log")]
    return {found[1] for text in logs if (found := re.search(r"on node (\w+)", text))}


def assert_nothing_is_held(cluster: Any) -> None:
    """All CPUs are free again, and no placement group is left."""
    program = (
        "import json, ray; ray.init(address='auto', log_to_driver=False, logging_level='ERROR');"
        "from ray.util import placement_group_table as t;"
        "groups = [g['state'] for g in t().values() if g['state'] != 'REMOVED'];"
        "print(json.dumps([ray.available_resources().get('CPU'), groups]))"
    )
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    deadline = time.monotonic() + 60
    held = None
    while held != [4.0, []] and time.monotonic() < deadline:
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        held = json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else done.stderr
    assert held == [4.0, []]


def submitted(command: list[str], world: Path, mark: str) -> Job:
    """A fresh cluster refuses jobs until its agents are up."""
    deadline = time.monotonic() + 90
    while True:
        job = start_command(command, world, "submitted", mark, {})
        while job.process.poll() is None and "submitted successfully" not in job.output:
            time.sleep(0.2)
        if "No available agent" not in job.output or time.monotonic() > deadline:
            return job


def test_a_submitted_job_trains_on_both_nodes(world: Path, cluster: Any):
    mark = uuid.uuid4().hex
    environment = {"working_dir": str(world), "env_vars": {"OMP_NUM_THREADS": "1", MARK: mark}}
    submit = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", "job", "submit"]
    address = f"http://{cluster.head_node.webui_url}"
    train = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", "+experiment=tiny", *ON_TWO_NODES]
    train += ["trainer.run_name=submitted", f"trainer.run_dir={world}/runs/submitted"]
    command = [*submit, "--address", address, "--runtime-env-json", json.dumps(environment), "--", *train]
    job = submitted(command, world, mark)
    try:
        assert job.wait() == 0, job.story()
        assert [row["trainer/global_step"] for row in job.metrics] == [1, 2]
        assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for row in job.metrics)
        assert len(nodes_of(job, "policy")) == 2, job.story()
        assert "joined the Ray cluster" in job.output and "succeeded" in job.output
        assert not (left := job.left_behind()), left
        assert_nothing_is_held(cluster)
    finally:
        job.kill()


def test_plain_python_beside_a_cluster_joins_it_and_leaves_it_clean(world: Path, cluster: Any):
    overrides = ["trainer.run_name=joined", *ON_TWO_NODES, "trainer.max_training_steps=1000", "trainer.epochs=1000"]
    overrides.append(WITHOUT_VLLM)
    with running(world, *overrides, environment={"RAY_ADDRESS": cluster.address}) as job:
        job.wait_for_step(1)
        job.process.send_signal(signal.SIGTERM)
        assert job.wait() == 143
        assert "stopping after this step" in job.output
        assert_whole_steps(job)
        assert len(nodes_of(job, "policy")) == 2
        assert "Traceback" not in job.output, job.output
        assert_nothing_is_held(cluster)

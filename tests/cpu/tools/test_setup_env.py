"""The set-up scripts take packages from where pip would, and leave out what breaks a CPU torch."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
uv_settings = runpy.run_path(str(ROOT / "scripts" / "pip_to_uv.py"))["uv_settings"]


def test_pips_indexes_links_and_certificates_reach_uv_and_the_environment_wins_over_files():
    listing = """
        global.index-url='https://one.example/simple'
        global.extra-index-url='https://two.example/simple\\nhttps://three.example/simple'
        global.find-links='/old'
        install.find-links='/wheels /more'
        install.trusted-host='one.example'
        :env:.cert='/ca.pem'
        :env:.default-timeout='180'
        download.find-links='/never'
        global.progress-bar='off'
    """.splitlines()
    assert uv_settings(listing, {}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://one.example/simple",
        "UV_INDEX": "https://two.example/simple https://three.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_INSECURE_HOST": "one.example",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "180",
    }
    replaced = uv_settings([*listing, ":env:.find-links='/new'"], {})
    assert replaced["UV_FIND_LINKS"] == "/new"


def test_a_setting_of_uvs_own_stays():
    assert uv_settings(["global.index-url='https://one.example'"], {"UV_DEFAULT_INDEX": "https://mine.example"}) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match"
    }


@pytest.mark.parametrize("script", ["scripts/setup_env.sh", "scripts/quickstart.sh", "scripts/test.sh", ".ci/run"])
def test_scripts_parse_and_can_be_run(script: str):
    assert (ROOT / script).stat().st_mode & 0o111
    subprocess.run(["bash", "-n", ROOT / script], check=True)


def test_nothing_that_is_left_out_is_installed_here():
    lines = re.findall(r"^\w+ ;.*$", (ROOT / "scripts" / "left_out.txt").read_text(), re.MULTILINE)
    requirements = [Requirement(line) for line in lines]
    left_out = [one.name for one in requirements if one.marker is not None and not one.marker.evaluate()]
    assert {"torchvision", "torchaudio", "torchcodec"} <= set(left_out)
    if "+cpu" not in importlib.metadata.version("torch"):
        pytest.skip("a CUDA torch goes with CUDA builds of them")
    installed = {distribution.name for distribution in importlib.metadata.distributions()}
    assert not installed & set(left_out)

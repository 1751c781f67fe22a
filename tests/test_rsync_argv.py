"""rsync's argv: real rsync starts the transport it is told, and paths arrive unchanged."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__)

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.commands import rsync
from launcher.nodes.endpoint import Endpoint

CONFIG = Path('/logs/it\'s "here"/config')
# Stands in for ssh: writes down its arguments, then is the remote shell.
SHIM = """#!{python}
import json, os, sys
json.dump(sys.argv[1:], open(os.environ["SEEN"], "w"))
os.chdir(os.environ["THERE"])
os.execv("/bin/sh", ["sh", "-c", " ".join(sys.argv[4:])])
"""
names = st.text(
    st.characters(exclude_categories=("Cs",), exclude_characters="\0/"), min_size=1, max_size=40
).filter(lambda name: name not in (".", "..") and len(name.encode()) < 200)


def test_push_and_pull_name_the_destination_once() -> None:
    here = Endpoint("spark2", "bob", 22022, "/key")
    pushed = rsync.push(here, CONFIG, ["/a", "b:c"], "/there/x y", "-a")
    transport = "ssh -F '/logs/it''s \"here\"/config'"
    assert pushed == (
        "rsync", "-s", "-e", transport, "-a", "--", "/a", "./b:c", "spark2:/there/x y",
    )  # fmt: skip
    pulled = rsync.pull(here, CONFIG, ["-r", "/b"], "to", "-a")
    assert pulled[-4:] == ("--", "spark2:./-r", "spark2:/b", "./to")


def test_an_address_with_colons_has_brackets() -> None:
    assert rsync.push(Endpoint("fe80::1"), CONFIG, ["/a"], "/b")[-1] == "[fe80::1]:/b"


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("rsync"):
        pytest.skip("rsync is not installed: sudo apt install rsync")
    root = tmp_path_factory.mktemp("rsync")
    (root / "bin").mkdir()
    shim = root / "bin" / "ssh"
    shim.write_text(SHIM.format(python=sys.executable))
    shim.chmod(0o755)
    return root


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=names, source=names, target=names)
def test_real_rsync_changes_no_path(rig: Path, config: str, source: str, target: str) -> None:
    here, there = rig / "here", rig / "there"
    for each in (here, there):
        shutil.rmtree(each, ignore_errors=True)
        each.mkdir()
    (here / source).write_bytes(b"content")
    env = dict(os.environ, SEEN=str(rig / "seen"), THERE=str(there))
    env["PATH"] = f"{rig / 'bin'}:{env['PATH']}"
    place = Path(f"/{config}")
    for to in (target, f"{there}/{target}"):
        (there / target).unlink(missing_ok=True)
        argv = rsync.push(Endpoint("spark2"), place, [str(here / source)], to, "-t")
        done = subprocess.run(argv, env=env, capture_output=True, timeout=20)
        assert done.returncode == 0, done.stderr
        assert [each.name for each in there.iterdir()] == [target]
        seen = json.loads((rig / "seen").read_text())
        assert seen[:3] == ["-F", str(place), "spark2"]

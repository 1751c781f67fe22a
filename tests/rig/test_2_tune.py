"""``./start.sh tune`` on two nodes, with a stand-in for the tuner in the stub image."""

from __future__ import annotations

import pytest
from head_clone import HeadClone
from pair import Pair
from rig import USER

pytestmark = pytest.mark.rig

START = 90.0
WHERE = f"{USER.home}/.cache/vllm-dsv41-flash-exl3/tuned"


def test_a_pair_serves_from_the_table_that_both_nodes_have(clean: HeadClone) -> None:
    nodes = (clean.rig.head, clean.rig.worker)
    ran = clean.start("tune", timeout=START)
    assert ran.status == 0, ran.said
    assert "both nodes have the table" in ran.out
    texts = [node.read(f"{WHERE}/exl3.json") for node in nodes]
    assert texts[0] == texts[1] and '"origin": "measured"' in texts[0]
    assert clean.containers() == {}
    ran = clean.start("start", timeout=START)
    assert ran.status == 0, ran.said
    pair = Pair.of(clean)
    named = set()
    for role in ("head", "worker"):
        attrs = pair.inspect(role)
        env = dict(word.split("=", 1) for word in attrs["Config"]["Env"])
        mounts = {m["Destination"]: (m["Source"], m["RW"]) for m in attrs["Mounts"]}
        assert mounts[env["SPARK_EXL3_TABLE"]] == (f"{WHERE}/exl3.json", False)
        named.add(env["SPARK_EXL3_TABLE"])
    assert len(named) == 1
    # Nothing is measured beside a server, and a table of one node alone starts no pair.
    busy = clean.start("tune")
    assert busy.status == 1 and "./start.sh stop, then ./start.sh tune" in busy.err, busy.said
    assert Pair.of(clean) == pair
    assert clean.start("stop").status == 0
    clean.rig.worker.run("rm", f"{WHERE}/exl3.json")
    alone = clean.start("start", timeout=START)
    assert alone.status == 1 and "the launch tables differ" in alone.err, alone.said
    clean.rig.head.run("rm", f"{WHERE}/exl3.json")

"""The launcher's memory: replaced whole, read strictly, free of secrets."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which this Python may lack
    from _standalone import main

    main(__file__)

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import files, rehearsal
from launcher.app import App
from launcher.console import Console
from launcher.errors import LauncherError
from launcher.record import KEPT, Record, Secrets, open_run
from launcher.state import DeploymentRecord, Finished, RankRecord, State, Store
from launcher.together import together

DEPLOYMENT = DeploymentRecord(
    name="rehearsal",
    launch_id="abc",
    fingerprint="f",
    served_model_name="m",
    api_host="127.0.0.1",
    api_port=8888,
    master_port=1234,
    boot_id="b",
    started=1.5,
    run="logs/runs/x",
    ranks=(
        RankRecord(0, "head", "local", "logs/head.log", {"api": 8888}),
        RankRecord(1, "worker", "local", "logs/worker.log"),
    ),
)


def test_what_is_recorded_is_what_is_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "logs" / "state.json")
    assert store.load() == State()
    store.finish("rehearsal/engine", Finished("f1", 10.0, 2.5))
    store.record(DEPLOYMENT)
    store.record(replace(DEPLOYMENT, ready=3.0).with_pid("worker", 77))
    again = Store(store.path).load()
    assert again.steps == {"rehearsal/engine": Finished("f1", 10.0, 2.5)}
    assert again.deployment is not None
    assert again.deployment.ready == 3.0
    assert [rank.pid for rank in again.deployment.ranks] == [None, 77]
    assert again.deployment.ranks[0].ports == {"api": 8888}
    store.forget(["rehearsal/engine", "never there"])
    assert store.load().steps == {}
    store.record(None)
    assert store.load() == State()


def test_a_broken_off_write_leaves_the_old_file_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "state.json")
    store.record(DEPLOYMENT)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            store.record(None)
    assert store.load().deployment == DEPLOYMENT
    assert os.listdir(tmp_path) == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"version": 2, "steps": {}, "deployment": null}',
        '{"version": 1, "steps": {"a": {"what": 1}}, "deployment": null}',
        '{"version": 1, "steps": {}, "deployment": {"name": "rehearsal"}}',
    ],
)
def test_a_foreign_state_is_refused_with_the_way_out(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(LauncherError) as refusal:
        Store(path).load()
    assert str(path) in refusal.value.found
    assert "mv " in refusal.value.do_next


def test_an_address_s_password_enters_no_record_and_no_error(tmp_path: Path) -> None:
    environ = {
        "HF_ENDPOINT": "https://me:hub%40pass@hub.example:444/at/x",
        "https_proxy": "http://proxy-user:proxy/pass@10.0.0.1:3128",
        "ALL_PROXY": "other-user:otherpass@10.0.0.2:3128",
        "HTTP_PROXY": "http://10.0.0.3:3128",
        "HOME": "/home/me:password@x",
    }
    app = App(tmp_path, environ, Console(), Secrets(), rehearsal.build)
    said = [
        f"no way to {environ['HF_ENDPOINT']}",
        "a proxy refused me with hub@pass",
        f"Cannot connect to proxy {environ['https_proxy']}",
        f"nor to http://{environ['ALL_PROXY']}",
    ]
    hidden = app.secrets.hide("\n".join(said))
    assert not [word for word in ("hub%40", "hub@", "proxy/", "otherp") if word in hidden]
    assert "hub.example:444/at/x" in hidden and "10.0.0.1:3128" in hidden
    assert (
        app.secrets.hide("10.0.0.3:3128 /home/me:password@x") == "10.0.0.3:3128 /home/me:password@x"
    )


def test_events_are_json_lines_and_secrets_never_enter(tmp_path: Path) -> None:
    secrets = Secrets()
    record = Record(tmp_path, secrets=secrets, now=lambda: 0.0)
    secrets.add('s3"cret')
    record.event("launch", "rank started", role="head", note='key s3"cret inside', count=3)
    record.text("engine", 'a line with s3"cret\udcff')
    (entry,) = [json.loads(x) for x in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert entry == {
        "time": "1970-01-01T00:00:00Z",
        "step": "launch",
        "event": "rank started",
        "role": "head",
        "note": "key *** inside",
        "count": 3,
    }
    log = (tmp_path / "log.txt").read_text()
    assert "s3" not in log
    assert len(log.splitlines()) == 2


def test_each_run_has_its_folder_and_old_ones_go(tmp_path: Path) -> None:
    first, second = (open_run(tmp_path, now=lambda: 86400.0) for _ in range(2))
    assert first.folder.name == "19700102T000000Z"
    assert second.folder.name == "19700102T000000Z-2"
    for count in range(KEPT + 3):
        open_run(tmp_path, now=lambda count=count: 1e6 + count)  # type: ignore[misc]
    left = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert len(left) == KEPT
    assert first.folder.name not in left


def test_tail_reads_the_end_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    assert files.tail(path, 5) == ()
    path.write_text("".join(f"line {n}\n" for n in range(1000)))
    assert files.tail(path, 2) == ("line 998", "line 999")
    assert files.tail(path, 0) == ()
    # A line that the window cuts is left out rather than shown in part.
    assert files.tail(path, 5, window=12) == ("line 999",)


def test_threads_may_replace_one_file_at_the_same_time(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"

    def often(number: int) -> None:
        for _ in range(20):
            files.replace_json(path, {"number": number})

    together(often, range(8))
    assert files.read_json(path) is not None and os.listdir(tmp_path) == [path.name]

"""The worker's ssh destination, and what ssh makes of the configuration written for it."""

from __future__ import annotations

if __name__ == "__main__":
    from _standalone import main

    main(__file__, "paramiko")

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.errors import LauncherError, UsageError
from launcher.nodes import host_keys, refusals
from launcher.nodes.endpoint import Destination, Endpoint, expand, resolved
from launcher.nodes.host_keys import Known

CONFIG = Path("/there/logs/ssh/config")
OUTPUT = """\
host spark2
user alice
hostname 10.9.8.7
port 2201
identitiesonly yes
identityfile ~/.ssh/id_%u
identityfile /keys/a b
userknownhostsfile /home/me/known hosts
globalknownhostsfile /etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2
"""


class Given(dict[str, str]):
    """Settings, as far as Endpoint asks them."""

    def text(self, key: str) -> str:
        return self.get(key, "")

    def maybe_int(self, key: str) -> int | None:
        return int(self[key]) if self.get(key) else None

    def path(self, key: str) -> Path:
        return Path("/root of it") / self[key]


def of(**settings: str) -> Endpoint:
    return Endpoint.of(Given(settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "host", "user"),
    [
        ({"WORKER_IP": "10.0.0.2"}, "10.0.0.2", ""),
        ({"WORKER_IP": "10.0.0.2", "WORKER_USER": "bob"}, "10.0.0.2", "bob"),
        ({"WORKER_IP": "10.0.0.2", "WORKER_SSH": "spark2"}, "spark2", ""),
        ({"WORKER_SSH": "amy@spark2", "WORKER_USER": "bob"}, "spark2", "amy"),
        ({"WORKER_SSH": "spark2", "WORKER_USER": "bob"}, "spark2", "bob"),
        ({"WORKER_SSH": "amy@corp@fe80::1"}, "fe80::1", "amy@corp"),
    ],
)
def test_the_settings_name_it(settings: dict[str, str], host: str, user: str) -> None:
    assert (of(**settings).host, of(**settings).user) == (host, user)


def test_port_key_and_known_hosts_come_from_their_settings() -> None:
    made = of(
        WORKER_IP="10.0.0.2", WORKER_SSH_PORT="22022", WORKER_SSH_KEY="k", WORKER_KNOWN_HOSTS="/x y"
    )
    assert made == Endpoint("10.0.0.2", "", 22022, "/root of it/k", "/x y")


@pytest.mark.parametrize(
    "bad",
    [
        {"host": ""},
        {"host": "-oProxyCommand=id"},
        {"host": "a b"},
        {"host": "a\nProxyCommand id"},
        {"host": "*"},
        {"host": "a/b"},
        {"host": "a,b"},
        {"host": "h", "user": "-l"},
        {"host": "h", "user": 'a"b'},
        {"host": "h", "user": "a$(id)"},
        {"host": "h", "user": "a%h"},
        {"host": "h", "port": 0},
        {"host": "h", "port": 65536},
        {"host": "h", "key": "relative"},
        {"host": "h", "key": "/a\nProxyCommand id"},
        {"host": "h", "known_hosts": "/a${HOME}"},
    ],
)
def test_what_ssh_would_read_otherwise_is_refused_with_its_setting(bad: dict[str, object]) -> None:
    with pytest.raises(UsageError) as told:
        Endpoint(**bad)  # type: ignore[arg-type]
    assert "WORKER_" in told.value.do_next


def test_nobody_is_asked_and_no_key_is_accepted() -> None:
    text = Endpoint("10.0.0.2", "bob", 22022, "/k", "/known").config("/home/me/.ssh/config")
    for line in (
        "BatchMode yes", "StrictHostKeyChecking yes", "UpdateHostKeys no", "ConnectTimeout 10",
        "ServerAliveInterval 5", "ServerAliveCountMax 3", "IdentitiesOnly yes", "Port 22022",
    ):  # fmt: skip
        assert f"\n    {line}\n" in text
    # The user's own settings hold too, and what stands first wins in OpenSSH.
    mine, theirs = text.index("Host 10.0.0.2"), text.index('Include "/home/me/.ssh/config"')
    assert mine < theirs < text.index("Include /etc/ssh/ssh_config")
    assert "Include" not in Endpoint("h").config("")


def test_the_command_names_the_configuration() -> None:
    assert Endpoint("spark2").ssh(CONFIG) == ("ssh", "-F", str(CONFIG), "spark2")


names = st.text(
    st.characters(exclude_categories=("Cs", "Cc"), exclude_characters="\x7f"),
    min_size=1,
    max_size=30,
).filter(lambda name: "${" not in name)


@settings(max_examples=40)
@given(key=names, known=names)
def test_ssh_reads_every_path_as_it_is(
    tmp_path_factory: pytest.TempPathFactory, key: str, known: str
) -> None:
    config = tmp_path_factory.getbasetemp() / "config"
    config.write_text(Endpoint("10.0.0.2", "bob", 7, f"/{key}", f"/{known}").config(""))
    asked = ["ssh", "-F", str(config), "-G", "10.0.0.2"]
    done = subprocess.run(asked, capture_output=True)
    assert done.returncode == 0, done.stderr
    rows = done.stdout.decode().split("\n")
    assert [expand(row[13:], {"%": "%"}) for row in rows if row.startswith("identityfile ")] == [
        f"/{key}"
    ]
    assert [expand(row[19:], {"%": "%"}) for row in rows if row.startswith("userknownhostsfi")] == [
        f"/{known}"
    ]


def resolve(
    text: str = OUTPUT, there: tuple[str, ...] = (), endpoint: str = "spark2"
) -> Destination:
    return resolved(text, Endpoint(endpoint), CONFIG, "/home/me", "me", frozenset(there))


def test_ssh_resolves_host_user_port_and_files() -> None:
    found = resolve(there=("/home/me/known hosts",))
    assert (found.host, found.user, found.port) == ("10.9.8.7", "alice", 2201)
    assert found.identities == ("/home/me/.ssh/id_me", "/keys/a b")
    assert found.known_hosts == (
        "/home/me/known hosts",
        "/etc/ssh/ssh_known_hosts",
        "/etc/ssh/ssh_known_hosts2",
    )
    assert found.identities_only and found.proxy == "" and found.known_as == "[10.9.8.7]:2201"


def test_a_list_of_known_hosts_is_told_from_a_path_with_spaces() -> None:
    assert resolve().known_hosts[:2] == ("/home/me/known", "hosts")


def test_an_alias_of_the_host_key_has_no_port() -> None:
    assert resolve(OUTPUT + "hostkeyalias twin\n").known_as == "twin"


def test_a_jump_host_becomes_a_command() -> None:
    aim = "ssh -F /there/logs/ssh/config -W '[10.9.8.7]:2201' ssh://amy@door:2"
    assert resolve(OUTPUT + "proxyjump amy@door:2\n").proxy == aim
    twice = resolve(OUTPUT + "proxyjump one,amy@two\n").proxy
    assert "-J one -W '[10.9.8.7]:2201' ssh://amy@two" in twice
    assert resolve(OUTPUT + "proxycommand nc %h %p %% %n\n").proxy == "nc 10.9.8.7 2201 % spark2"
    assert resolve(OUTPUT + "proxycommand none\n").proxy == ""


def test_output_without_a_host_is_an_error() -> None:
    with pytest.raises(ValueError, match="hostname"):
        resolve("port 22\n")


BLOB = b"key of the worker"
TEXT = "a2V5IG9mIHRoZSB3b3JrZXI="
OTHER = Known("/known hosts", 7, "", "ssh-ed25519", "b3RoZXI=")
SAME = Known("/known hosts", 9, "", "ssh-ed25519", TEXT)


def judge(*entries: Known) -> refusals.SshError | None:
    return host_keys.judge(resolve(), "ssh-ed25519", BLOB, entries)


def test_a_key_counts_only_when_it_is_known() -> None:
    assert judge(SAME) is None
    assert judge(OTHER, SAME) is None
    revoked = Known("/known", 3, "REVOKED", "ssh-ed25519", TEXT)
    authority = Known("/known", 3, "CA", "ssh-ed25519", TEXT)
    rsa = Known("/known", 3, "", "ssh-rsa", TEXT)
    whys = [judge(), judge(OTHER), judge(rsa), judge(SAME, revoked), judge(authority)]
    assert [each and each.why for each in whys] == [
        "unknown key", "changed key", "other key type", "revoked key", "unknown key",
    ]  # fmt: skip


def test_a_changed_key_names_file_line_and_command() -> None:
    told = judge(OTHER)
    assert told and "/known hosts line 7" in told.found and "CHANGED" in told.found
    assert "ssh-keygen -f '/known hosts' -R '[10.9.8.7]:2201'" in told.do_next


def test_entries_of_known_hosts_with_their_lines() -> None:
    text = (
        "# Host [h]:1 found: line 4 \n[h]:1 ssh-ed25519 QQ== comment\n"
        "# Host [h]:1 found: line 6 REVOKED\n@revoked * ssh-rsa Qg==\n"
        "# Host [h]:1 found: line 8 CA\n@cert-authority *.x ssh-rsa Qw==\n"
    )
    assert host_keys.parse(text, "f") == [
        Known("f", 4, "", "ssh-ed25519", "QQ=="),
        Known("f", 6, "REVOKED", "ssh-rsa", "Qg=="),
        Known("f", 8, "CA", "ssh-rsa", "Qw=="),
    ]


def test_every_refusal_says_what_to_do_with_a_command() -> None:
    to, shown = resolve(), refusals.HostKey("ecdsa-sha2-nistp256", "SHA256:x")
    told: list[LauncherError] = [
        refusals.no_ssh("ssh"),
        refusals.configuration("h", "bad", "ssh -G h"),
        refusals.name(to, "x"),
        refusals.route(to, "x"),
        refusals.refused(to),
        refusals.timeout(to),
        refusals.silent(to, "x"),
        refusals.not_ssh(to, "HTTP"),
        refusals.closed(to, ""),
        refusals.algorithms(to, "x"),
        refusals.unknown_key(to, shown, ["/known"]),
        refusals.other_key_type(to, shown, ["ssh-rsa"], "/known line 1"),
        refusals.changed_key(to, shown, "SHA256:y", "/known", 1),
        refusals.revoked_key(to, shown, "/known", 1),
        refusals.no_key(to, [], [], ""),
        refusals.keys_refused(to, ["password"]),
        refusals.wrong_user(to, "bob"),
        refusals.no_login(to, 1, "x"),
        refusals.lost(to, "x"),
        refusals.no_channel(to, "x"),
        refusals.no_sftp(to, "x"),
        refusals.no_tools(to, "x"),
    ]
    words = ("ssh", "sudo ", "getent", "ip -br", "ping", "WORKER_")
    assert all(any(word in each.do_next for word in words) for each in told)
    assert len({each.found for each in told}) == len(told)
    assert "/etc/ssh/ssh_host_ecdsa_key.pub" in told[10].do_next

from __future__ import annotations

import socket
from ipaddress import ip_network
from pathlib import Path

import pytest

from netlimit import settings
from netlimit.errors import SettingsError
from netlimit.settings import Backend, Listen, load_settings


@pytest.fixture(autouse=True)
def _no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for field in settings.Settings.model_fields:
        monkeypatch.delenv("NETLIMIT_" + field.upper(), raising=False)
    monkeypatch.setattr(settings, "DEFAULT_FILE", tmp_path / "absent.toml")


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults() -> None:
    found = load_settings()
    assert found.database_url == "sqlite:////var/lib/netlimit/netlimit.db"
    assert found.listen == Listen("127.0.0.1", 8750)
    assert found.bootstrap_token is None
    assert found.backend is Backend.AUTO
    assert found.mark_mask is None, "auto"
    assert found.safe == ()
    assert found.host == socket.gethostname()
    assert found.set_size == 1048576
    assert found.url == "http://127.0.0.1:8750"
    assert found.token is None
    assert (found.log_format, found.log_level) == ("console", "info")


def test_everything_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "DATABASE_URL": "sqlite:////tmp/x.db",
        "LISTEN": "[::1]:9000",
        "BOOTSTRAP_TOKEN": "secret-1",
        "BACKEND": "fake",
        "MARK_MASK": "0x00ff0000",
        "SAFE": "192.0.2.1, 2001:db8::/32",
        "HOST": "gw1",
        "SET_SIZE": "65536",
        "URL": "https://gw1.example/",
        "TOKEN": "secret-2",
    }.items():
        monkeypatch.setenv("NETLIMIT_" + name, value)
    found = load_settings()
    assert found.database_url == "sqlite:////tmp/x.db"
    assert found.listen == Listen("::1", 9000)
    assert found.bootstrap_token is not None
    assert found.bootstrap_token.get_secret_value() == "secret-1"
    assert found.backend is Backend.FAKE
    assert found.mark_mask == 0x00FF0000
    assert found.safe == (ip_network("192.0.2.1"), ip_network("2001:db8::/32"))
    assert found.host == "gw1"
    assert found.set_size == 65536
    assert found.url == "https://gw1.example"
    assert found.token is not None
    assert found.token.get_secret_value() == "secret-2"


def test_everything_from_a_file(tmp_path: Path) -> None:
    text = """
        listen = "0.0.0.0:80"
        backend = "iptables"
        mark_mask = 0xf000
        safe = ["10.0.0.1", "10.1.0.0/16"]
        host = "gw2"
        set_size = 4096
    """
    found = load_settings(write(tmp_path / "n.toml", text))
    assert found.listen == Listen("0.0.0.0", 80)  # noqa: S104
    assert found.backend is Backend.IPTABLES
    assert found.mark_mask == 0xF000
    assert found.safe == (ip_network("10.0.0.1"), ip_network("10.1.0.0/16"))
    assert found.host == "gw2"
    assert found.set_size == 4096


def test_the_environment_wins_over_the_file_and_an_empty_variable_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write(tmp_path / "n.toml", 'host = "file"\nbackend = "fake"\n')
    monkeypatch.setenv("NETLIMIT_HOST", "environment")
    monkeypatch.setenv("NETLIMIT_BACKEND", "")
    found = load_settings(config)
    assert (found.host, found.backend) == ("environment", Backend.FAKE)


def test_the_default_file_is_read_when_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DEFAULT_FILE", write(tmp_path / "default.toml", 'host = "here"'))
    assert load_settings().host == "here"


def test_secrets_do_not_print(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NETLIMIT_BOOTSTRAP_TOKEN", "hidden-1")
    monkeypatch.setenv("NETLIMIT_TOKEN", "hidden-2")
    monkeypatch.setenv("NETLIMIT_DATABASE_URL", "postgresql://u:hidden-3@h/d")
    assert "hidden" not in repr(load_settings())


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("MARK_MASK", "0xff0000ff", "not one run of at least two neighbouring bits"),
        ("MARK_MASK", "0x80000000", "not one run of at least two neighbouring bits"),
        ("MARK_MASK", "0", "does not fit into the 32 bits"),
        ("MARK_MASK", "-4", "does not fit into the 32 bits"),
        ("MARK_MASK", "0x1ff000000", "does not fit into the 32 bits"),
        ("MARK_MASK", "top", "or a mask such as"),
        ("LISTEN", "8750", "write host:port"),
        ("LISTEN", "127.0.0.1:99999", "write host:port"),
        ("LISTEN", "::1:8750", "write host:port"),
        ("LISTEN", "[1.2]:8750", "write host:port"),
        ("BACKEND", "ebpf", 'it can be "auto", "iptables", "l7", "fake"'),
        ("LOG_FORMAT", "xml", '\'xml\' is none of "console", "json"'),
        ("SAFE", "10.0.0.1,router", "'router' is no address or CIDR"),
        ("SAFE", "10.0.0.1/8", "'10.0.0.1/8' is no address or CIDR"),
        ("HOST", "gw 1", "no name for a gateway"),
        ("SET_SIZE", "many", "no size of a set"),
        ("SET_SIZE", "0", "no size of a set"),
        ("STATE_DIRECTORY", "state", "write its path from the root, such as /var/lib/netlimit-controller"),
        ("URL", "gw1:8750", "no address of an API"),
        ("URL", "http://[::1", "no address of an API"),
        ("URL", "http://[::1]:99999", "no address of an API"),
        ("URL", "http://x:y:z", "no address of an API"),
        ("URL", "http://admin:s3cret@127.0.0.1:8750", "user, a query or a fragment, and is not shown"),
        ("URL", "ftp://admin:s3cret@[::1", "user, a query or a fragment, and is not shown"),
        ("URL", "http://127.0.0.1:8750/?token=s3cret", "user, a query or a fragment, and is not shown"),
        ("URL", "http://[zz]", "no address of an API"),
        ("URL", "http://gw1 :8750", "no address of an API"),
        ("URL", "https://", "no address of an API"),
        ("URL", "http://ü%00x:1", "no address of an API"),
    ],
)
def test_a_wrong_setting_is_named_with_what_would_work(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, part: str
) -> None:
    monkeypatch.setenv("NETLIMIT_" + name, value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert caught.value.setting == "NETLIMIT_" + name
    assert f"The setting NETLIMIT_{name} cannot be used: " in str(caught.value)
    assert part in str(caught.value)
    assert str(caught.value).endswith(".")


@pytest.mark.parametrize(
    ("mask", "value"),
    [("0xff000000", 0xFF000000), ("0x3", 3), ("0xffffffff", 0xFFFFFFFF), ("12", 12), ("0xff00", 0xFF00)],
)
def test_masks_that_are_one_run_of_bits(monkeypatch: pytest.MonkeyPatch, mask: str, value: int) -> None:
    monkeypatch.setenv("NETLIMIT_MARK_MASK", mask)
    assert load_settings().mark_mask == value


@pytest.mark.parametrize("text", ["127.0.0.1:8750", "[::1]:8750", "gw1.example:80", "[2001:db8::1]:0"])
def test_a_place_to_listen_prints_as_it_was_written(text: str) -> None:
    assert str(settings.parse_listen(text)) == text
    assert settings.parse_any_listen(text) == settings.parse_listen(text)


@pytest.mark.parametrize("path", ["/run/netlimit-limiter/http.sock", "/a b%20:1", f"/{'ä' * 53}"])
def test_a_unix_socket_prints_as_it_was_written(path: str) -> None:
    found = settings.parse_any_listen(f"unix:{path}")
    assert (found, str(found), found.is_open) == (settings.LocalListen(path), f"unix:{path}", False)
    assert settings.Settings(limiter_listen=found, limiter_grpc_listen=f"unix:{path}").limiter_grpc_listen == found


def test_a_host_may_be_called_unix() -> None:
    assert settings.parse_any_listen("unix:8751") == Listen("unix", 8751)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("unix:", "with its whole path"),
        ("unix:http.sock", "with its whole path"),
        ("unix:/", "with its whole path"),
        ("unix:/run/", "with its whole path"),
        ("unix:/run/..", "with its whole path"),
        ("unix:/run/\0a", "with its whole path"),
        (f"unix:/{'ä' * 54}", "107 bytes at most"),
        ("/run/http.sock", "write host:port, "),
    ],
)
def test_what_is_no_place_of_the_limiter_s_is_told(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        settings.parse_any_listen(text)


def test_the_api_listens_at_no_unix_socket() -> None:
    with pytest.raises(ValueError, match="write host:port"):
        settings.parse_listen("unix:/run/api.sock")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("speed = 3", "There is no setting 'speed'"),
        ("listen = ", "is not valid TOML"),
        ("safe = " + "[" * 5000, "is not valid TOML"),
        ('safe = "10.0.0.1,x"', "The setting safe in "),
        ("safe = 7", "a list of addresses and CIDRs"),
        ("token = 5", "it must be text."),
        ("set_size = true", "no size of a set"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str, part: str) -> None:
    config = write(tmp_path / "wrong.toml", text)
    with pytest.raises(SettingsError, match=r"wrong\.toml") as caught:
        load_settings(config)
    assert part in str(caught.value)


def test_a_file_that_was_asked_for_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="There is no settings file"):
        load_settings(tmp_path / "none.toml")


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="cannot be read: it is a directory"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("listen", "url"),
    [
        ("192.0.2.1:8760", "http://192.0.2.1:8760"),
        ("[fd00::1]:8750", "http://[fd00::1]:8750"),
        ("0.0.0.0:80", "http://127.0.0.1:80"),
        ("[::]:80", "http://[::1]:80"),
        ("localhost:8751", "http://localhost:8751"),
        ("127.0.0.1:0", "http://127.0.0.1:8750"),
    ],
)
def test_the_command_line_looks_for_the_api_where_it_listens(tmp_path: Path, listen: str, url: str) -> None:
    config = tmp_path / "netlimit.toml"
    config.write_text(f'listen = "{listen}"')
    assert load_settings(config).url == url
    config.write_text(f'listen = "{listen}"\ntls_cert = "/a"\ntls_key = "/b"')
    assert load_settings(config).url == url.replace("http:", "https:")
    config.write_text(f'listen = "{listen}"\nurl = "https://gw1.example"')
    assert load_settings(config).url == "https://gw1.example"

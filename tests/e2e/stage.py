"""A gateway of its own in mount and network namespaces: with users, settings and directories of netlimit, of which the
machine that runs the tests sees nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.e2e.gateway import COMMAND
from tests.warm import ROOT

USERS = {"netlimit": 64001, "netlimit-controller": 64002}
GROUP = 64001
LIB = "/var/lib"
DIRECTORIES = (
    *(LIB, f"{LIB}/netlimit", f"{LIB}/netlimit/controller", f"{LIB}/netlimit-controller"),
    *("/run", "/run/netlimit", "/run/netlimit/bpf", "/etc/netlimit"),
)
"""Where somebody with the rights of our users may look for what he may change."""
_SETUP = f"""
set -e
mount -t sysfs none /sys
ip link set lo up
mount -t tmpfs -o mode=755 none "$1"
for each in /etc /usr/local/bin; do
    mkdir -p "$1/$each"
    cp -a "$each/." "$1/$each"
    mount --bind "$1/$each" "$each"
done
mkdir "$1/lib"
mount --bind {LIB} "$1/lib"
mount -o remount,bind,ro "$1/lib"
mount -t tmpfs -o mode=755 none {LIB}
ln -s "$1/lib/dpkg" {LIB}/dpkg
mount -t tmpfs -o mode=755 none /run
rm -rf /etc/netlimit
sed -i '/^netlimit/d' /etc/passwd /etc/group
echo netlimit:x:{GROUP}: >>/etc/group
echo netlimit:x:{USERS["netlimit"]}:{GROUP}::/nonexistent:/usr/sbin/nologin >>/etc/passwd
echo netlimit-controller:x:{USERS["netlimit-controller"]}:{GROUP}::/nonexistent:/usr/sbin/nologin >>/etc/passwd
echo made
exec sleep 1000
"""
_OUTSIDE = f"""
stat -c '%n %u %g %a' /etc /etc/passwd /etc/shadow /etc/group /var/lib /run
sha256sum /etc/passwd /etc/shadow /etc/group
find /etc /run /usr/local/bin -uid {USERS["netlimit"]} -o -uid {USERS["netlimit-controller"]} -o -perm -2 ! -type l
ls -A -I netlimit /etc
"""


class Stage:
    """Commands in there, as root."""

    def __init__(self) -> None:
        self._place = Path(tempfile.mkdtemp(prefix="netlimit-"))
        self._place.chmod(0o755)
        inside = self._place / "inside"
        inside.mkdir()
        self.others = self._place / "others"
        self._make_others()
        self.prefix = inside / "opt/netlimit"
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--net", "--propagation", "private", "sh", "-c", _SETUP, "setup", inside],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "made\n"

    def _make_others(self) -> None:
        """What is not netlimit's: files that root alone, everybody, and somebody else may read, and a directory."""
        self.others.mkdir()
        for name, mode, owner in (("secret", 0o640, 0), ("public", 0o644, 0), ("another's", 0o600, 65533)):
            file = self.others / name
            file.write_text(f"{name}\n")
            file.chmod(mode)
            os.chown(file, owner, owner)
        (self.others / "empty").mkdir(0o755)

    def run(self, *words: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command to its end. One that hangs raises TimeoutExpired."""
        settings = {"NETLIMIT_HOST": "gw", "NETLIMIT_CONFIG": "", "NETLIMIT_BACKEND": "iptables"}
        return subprocess.run(
            self._enter(*words), env={**os.environ, **settings}, stdin=subprocess.DEVNULL, capture_output=True,
            text=True, errors="replace", timeout=timeout, check=False,
        )  # fmt: skip

    def netlimit(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.run(sys.executable, *COMMAND, *words)

    def shell(self, script: str) -> str:
        done = self.run("sh", "-ec", script)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def describe_outside(self) -> tuple[object, ...]:
        """Owner, mode, names and content of what is not netlimit's."""
        return (*self.describe_others(), *self.shell(_OUTSIDE).splitlines())

    def describe_others(self) -> tuple[object, ...]:
        """The same of those files alone that nobody may change."""
        found = [self.others, *sorted(self.others.iterdir())]
        stats = [(path.name, path.lstat()) for path in found]
        told = [(name, s.st_uid, s.st_gid, s.st_mode, s.st_nlink, s.st_mtime_ns) for name, s in stats]
        texts = [path.read_bytes() for path in found if path.is_file()]
        return (*told, *texts)

    @contextmanager
    def attacked(self, user: str) -> Iterator[None]:
        """Meanwhile somebody with this user's rights exchanges every name that he may."""
        words = (
            str(USERS[user]),
            str(GROUP),
            str(self.others),
            *DIRECTORIES,
            str(self.prefix),
            str(self.prefix / "share"),
        )
        code = (
            f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.e2e.intruder import main; main(*sys.argv[1:])"
        )
        with self.running(sys.executable, "-c", code, *words) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            yield
            assert process.poll() is None, "who exchanges names has ended"

    @contextmanager
    def running(self, *words: str | Path) -> Iterator[subprocess.Popen[str]]:
        """A command that runs meanwhile, as root; it is killed in the end."""
        process = subprocess.Popen(self._enter(*words), stdout=subprocess.PIPE, text=True)
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)
            assert process.stdout is not None
            process.stdout.close()

    def _enter(self, *words: str | Path) -> list[str]:
        inside = ("nsenter", f"--target={self._process.pid}", "--mount", "--net", f"--wd={ROOT}")
        return [*inside, *map(str, words)]

    def close(self) -> None:
        self._process.kill()
        self._process.wait(10)
        assert self._process.stdout is not None
        self._process.stdout.close()
        shutil.rmtree(self._place)

"""The programs by which the kernel is spoken to: run, and heard without trust in what they print."""

from __future__ import annotations

import array
import errno
import fcntl
import logging
import os
import re
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from typing import IO, NamedTuple

from netlimit.errors import KernelError
from netlimit.plain import decode
from netlimit.spool import open_spool

_MOMENT = 0.0005
_PACKAGES = {
    "iptables-legacy-save": "iptables",
    "ip6tables-legacy-save": "iptables",
    "iptables-legacy-restore": "iptables",
    "ip6tables-legacy-restore": "iptables",
    "iptables-nft-save": "iptables",
    "ip6tables-nft-save": "iptables",
    "ebtables-legacy": "ebtables",
    "tc": "iproute2",
    "nft": "nftables",
}
"""The packages (of Debian) that have tools which are not called like them."""


_SYSTEM = "/usr/local/sbin", "/usr/sbin", "/sbin"

LONGEST = 60.0
"""Seconds that a tool may take: one that hangs would keep all that is to be repaired waiting for as long as it does."""


def find_in_system_directories() -> None:
    """Let this process and what it starts find tools of the system where a user's PATH does not lead, as that of cron
    and that of `su` without a dash."""
    path = os.environ.get("PATH", os.defpath).split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join([*path, *(each for each in _SYSTEM if each not in path)])


def own_module(name: str) -> tuple[str, ...]:
    """The command that runs a module of ours in a process of its own, with what this one has found to import and never
    with what lies in the working directory: that may be anybody's, and `python -m` looks there first."""
    return sys.executable, "-P", "-m", name


_WORD, _SHOWN = re.compile("[!-~]+"), 200
log = logging.getLogger(__name__)


class Done(NamedTuple):
    """How a tool ended, and what it said."""

    status: int
    output: str
    errors: str


class ToolMissing(KernelError):
    """A tool that cannot be run here."""


class NoAnswer(KernelError):
    """Nothing was heard of a tool, for it hangs or was killed: that says nothing of what this host can do."""


class NotStarted(NoAnswer, ToolMissing):
    """A tool that could not be started at this moment: of descriptors, processes or memory there were too few."""


_SHORTAGES = (
    errno.EAGAIN,
    errno.EINTR,
    errno.EIO,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOBUFS,
    errno.ENOMEM,
    errno.ENOSPC,
    errno.ETXTBSY,
)
"""What the kernel says where it could do a thing at another moment."""
_SHORTAGE_WORDS = re.compile(
    "|".join([*(re.escape(os.strerror(number)) for number in _SHORTAGES), "Memory allocation problem", "Out of memory"])
    + rf"|: Error (?:{'|'.join(map(str, _SHORTAGES))})$",  # as the loader of shared libraries says it
    re.MULTILINE,
)


def is_shortage(error: BaseException | str | int) -> bool:
    """Whether an error (what was raised, said, or its number) is no answer to what this host can do, for at another
    moment there would be none."""
    if isinstance(error, int):
        return error in _SHORTAGES
    if isinstance(error, NoAnswer | MemoryError):
        return True
    number = getattr(error, "errno", None) or getattr(error, "code", None)
    return number in _SHORTAGES or _SHORTAGE_WORDS.search(str(error)) is not None


def run(
    *command: str,
    script: str | None = None,
    patience: float | None = None,
    kept: int | None = None,
    **environment: str,
) -> Done:
    """Run a tool to its end, `script` on its standard input. It has the descriptor `kept`, and what is added to its
    environment. Raises ToolMissing, which names the tool and its package, where it cannot be run, and NoAnswer when it
    takes longer than `patience` seconds (`LONGEST`, where nothing is said), or a signal ends it."""
    patience = LONGEST if patience is None else patience
    given = None if script is None else script.encode("utf-8", "backslashreplace")
    try:
        # Without `input` the tool has ours, which may be a terminal.
        done = subprocess.run(
            command,
            input=given or b"",
            capture_output=True,
            timeout=patience,
            check=False,
            pass_fds=() if kept is None else (kept,),
            env={**os.environ, **environment} if environment else None,
        )
    except OSError as error:
        raise _refuse(command, error) from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(" ".join(command), f"it did not end within {patience:g} seconds") from None
    return _hear(command, Done(done.returncode, decode(done.stdout), decode(done.stderr)))


def ask(*command: str, patience: float | None = None) -> str:
    """What a tool prints. Raises as `run`, and KernelError with the tool's own words when it refuses."""
    done = run(*command, patience=patience)
    if done.status:
        raise KernelError(" ".join(command), done.errors.strip() or f"it ended with status {done.status}")
    return done.output


class Listing:
    """What a tool prints that may take long for it, as it may be large: nobody waits for more than `patience` seconds,
    and meanwhile what it printed the last time is as good. Given up after `longest` seconds. For one thread."""

    def __init__(self, *command: str, longest: float) -> None:
        self._command, self._longest = command, longest
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: list[IO[bytes]] = []
        self._began = 0.0
        self._known: str | None = None

    def read(self, patience: float) -> str:
        """The listing. Raises as `ask`, and KernelError as long as there is none yet."""
        process = self._process or self._start()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            if time.monotonic() - self._began > self._longest:
                process.kill()
                process.wait()
                self._end()
                raise KernelError(" ".join(self._command), f"it did not end within {self._longest:g} seconds") from None
            if self._known is None:
                raise KernelError(" ".join(self._command), "it has much to list, and has not ended yet") from None
            return self._known
        output, errors = self._end()
        if process.returncode:
            raise KernelError(" ".join(self._command), errors.strip() or f"it ended with status {process.returncode}")
        self._known = output
        return output

    def __del__(self) -> None:
        """What nobody will hear does not go on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        # A pipe that nobody reads would hold it up. On a disk that is full, nft lists nothing and ends with status 0.
        self._answers = [open_spool(), open_spool()]
        output, errors = self._answers
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=errors)
        except OSError as error:
            self._end()
            raise _refuse(self._command, error) from None
        self._began = time.monotonic()
        return self._process

    def _end(self) -> tuple[str, str]:
        """What it has said."""
        said = []
        for each in self._answers:
            with each:
                each.seek(0)
                said.append(decode(each.read()))
        self._process, self._answers = None, []
        return said[0], said[1]


class Dialogue:
    """A running tool that is told one thing after the other. It has the descriptor `kept`, and what is added to its
    environment; it may take `patience` seconds for each answer. Raises as `run`. Who leaves before the end ends it."""

    def __init__(self, *command: str, patience: float, kept: int, **environment: str) -> None:
        self._command, self._patience = command, patience
        pipe, settings = subprocess.PIPE, {**os.environ, **environment}
        try:
            self._process = subprocess.Popen(
                command, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, pass_fds=(kept,), env=settings
            )
        except OSError as error:
            raise _refuse(command, error) from None

    def __enter__(self) -> Dialogue:
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()

    def tell(self, text: str) -> None:
        """Tell it something, and wait until it reads that: it has done by then all that it was told before."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode("utf-8", "backslashreplace"))
            self._process.stdin.flush()
        except BrokenPipeError:  # it has ended, and `finish` tells why
            return
        unread = array.array("i", [1])
        deadline = time.monotonic() + self._patience
        while unread[0] and self._process.poll() is None:
            if time.monotonic() > deadline:
                raise self._late()
            time.sleep(_MOMENT)
            fcntl.ioctl(self._process.stdin.fileno(), termios.FIONREAD, unread)

    def finish(self, text: str) -> Done:
        """Tell it the rest, and hear how it ended."""
        try:
            _, said = self._process.communicate(text.encode("utf-8", "backslashreplace"), self._patience)
        except subprocess.TimeoutExpired:
            raise self._late() from None
        return _hear(self._command, Done(self._process.returncode, "", decode(said)))

    def _late(self) -> NoAnswer:
        return NoAnswer(" ".join(self._command), f"it did not answer within {self._patience:g} seconds")


def is_word(text: str, where: str) -> bool:
    """Whether a text is one word of a script, and ends no line of it. Nothing else gets there: this is the last to
    look, and leaves out one element rather than having the tool obey it, or refuse all others with it."""
    if _WORD.fullmatch(text):
        return True
    log.error("Not written, for it is no word that a tool can be told: %s, to %s.", ascii(text)[:_SHOWN], where)
    return False


def name_package(tool: str) -> str:
    """The package that has a tool."""
    return _PACKAGES.get(tool, tool)


def _hear(command: Sequence[str], done: Done) -> Done:
    """What a tool has said that has come to its end."""
    if done.status < 0:
        raise NoAnswer(" ".join(command), f"it was ended by a signal ({signal.strsignal(-done.status)})")
    return done


def _refuse(command: Sequence[str], error: OSError) -> ToolMissing:
    if is_shortage(error):
        reason = f"`{command[0]}` cannot be started at this moment ({error.strerror})"
        return NotStarted(" ".join(command), reason)
    return ToolMissing(" ".join(command), _explain(command[0], error))


def _explain(tool: str, error: OSError) -> str:
    package = name_package(tool)
    if isinstance(error, FileNotFoundError):
        return f"there is no `{tool}` on this host; install the package {package}"
    return (
        f"`{tool}` cannot be run here ({error.strerror}): install the package {package}, or look at the rights of the "
        "program and of the directories in PATH"
    )

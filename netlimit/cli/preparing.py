"""`netlimit prepare`: what root does for a controller that is not root, before it starts."""

from __future__ import annotations

import ctypes
import errno
import os
import pwd
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import typer

from netlimit.cli.errors import CommandError, complain
from netlimit.cli.last_settings import FILE as LAST_SETTINGS
from netlimit.cli.last_settings import read_settings_or_last, word_recalled
from netlimit.cli.parts import GUARD_LOCK, check_backend, make_kernel, open_copy
from netlimit.cli.privileges import CONTROLLER, NETWORK, Capability, become, find_user, is_root
from netlimit.cli.readers import find_unit_users, find_unread
from netlimit.custody import Rights, admit, give, give_unopened, made_directory, made_file, move_directory, opened
from netlimit.errors import KernelError
from netlimit.plain import read_text
from netlimit.settings import FORMER_STATE, STATE, Backend, Settings, find_file

ASK_SECONDS = 15.0
"""How long it is asked again what this host can do, if it does not tell: a unit has to start before long."""
WAIT_SECONDS = 45.0
"""How long another unit that prepares the host is waited for, which asks for as long: systemd starts two at once."""
_PAUSE_SECONDS = 1.0
_BPF_MAGIC = 0xCAFE4A11
_STATFS_BYTES = 256
_NOTHING_RUNS = 2 | 4 | 8
"""Flags of mount(2): MS_NOSUID, MS_NODEV, MS_NOEXEC."""


def prepare(
    context: typer.Context,
    user: str = typer.Option(CONTROLLER, "--user", help="Whom the controller runs as."),
    more: bool = typer.Option(False, "--bpf", help="It has CAP_BPF and CAP_SYS_ADMIN as well."),
) -> None:
    """Prepare this host, as root, for a controller that is not root.

    It finds what the host can do, and makes the locks and the program that such a controller needs."""
    settings, fault = read_settings_or_last(context)
    if fault is not None:
        complain(CommandError(word_recalled(fault, settings)))
    check_backend(settings)
    if not is_root():
        raise CommandError("Only root can prepare a host for a controller that is not root: run this as root.")
    owner = find_user(user)
    _tell_unread(context, owner)
    give_state(settings, owner)
    if settings.backend not in (Backend.FAKE, Backend.L7):
        prepare_host(owner, (*NETWORK, Capability.BPF, Capability.SYS_ADMIN) if more else NETWORK)


def _tell_unread(context: typer.Context, user: pwd.struct_passwd) -> None:
    """Tell who may not read the settings file, that user above all, who is about to start. It is left as it is."""
    file = find_file(context.find_root().params.get("config"))
    for finding in find_unread(file, {user.pw_name: user, **find_unit_users()}):
        complain(CommandError(f"{finding.severity.upper()}: {finding}"))


def give_state(settings: Settings, user: pwd.struct_passwd) -> None:
    """Make the controller's directory and copy of the rules, and let them be this user's. Where that fails (a disk may
    be read-only since an error), it is told: the controller goes on as far as it can."""
    if settings.state == FORMER_STATE and not _is_controlled(settings):  # a controller that runs writes there
        _leave_former(user)
    state = settings.state
    try:
        with made_directory(state) as directory:
            for name in _list_own():
                with suppress(FileNotFoundError):  # a journal comes and goes
                    _give_file(directory, name, state / name, user)
            _give_state(directory, state, user)  # last, for from then on files are opened with the user's rights
    except OSError as error:
        _tell_kept(state, user, error)
    with open_copy(settings):  # which by now is opened with the rights of that user
        pass


def _list_own() -> list[str]:
    """The files that netlimit keeps in that directory, with those that SQLite has beside the copy. It is not looked
    through: its user may have filled it, and root would not be done in time."""
    from netlimit.store.replica import FILE

    return [GUARD_LOCK, LAST_SETTINGS, *(f"{FILE}{end}" for end in ("", "-journal", "-wal", "-shm"))]


def _is_controlled(settings: Settings) -> bool:
    """Whether a controller runs here; true also where the kernel does not tell."""
    with suppress(KernelError):
        return make_kernel(settings).controlled()
    return True


def _leave_former(user: pwd.struct_passwd) -> None:
    """Move the directory to where nobody but root can put another in its place. What cannot be moved stays in use."""
    try:
        move_directory(FORMER_STATE, STATE, user.pw_uid)
    except FileNotFoundError:
        with made_directory(STATE):
            pass
    except FileExistsError:
        return  # another part has moved it at this moment
    except OSError as error:
        hint = " `scripts/install` moves it within a file system." if error.errno == errno.EXDEV else ""
        typer.echo(f"netlimit: {FORMER_STATE} cannot be moved to {STATE}: {error.strerror}.{hint}", err=True)


def _give_state(directory: int, path: Path, user: pwd.struct_passwd) -> None:
    try:
        give(directory, user.pw_uid, user.pw_gid)
    except OSError as error:
        _tell_kept(path, user, error)


def _give_file(directory: int, name: str, path: Path, user: pwd.struct_passwd) -> None:
    try:
        with opened(name, directory) as file:
            give(file, user.pw_uid, user.pw_gid)
    except FileNotFoundError:
        raise
    except OSError as error:
        _tell_kept(path, user, error)


def _tell_kept(path: Path, user: pwd.struct_passwd, error: OSError) -> None:
    typer.echo(f"netlimit: {path} cannot be given to {user.pw_name}: {path}: {error.strerror}.", err=True)


def prepare_host(user: pwd.struct_passwd, capabilities: tuple[Capability, ...] = NETWORK) -> None:
    """Do so for a controller that runs as this user, with these capabilities. Raises OSError, KernelError."""
    from netlimit.kernel import iptables, proc_files
    from netlimit.kernel.capabilities import FINDINGS
    from netlimit.kernel.lock import locked

    place = FINDINGS.parent
    with made_directory(place, 0o750) as directory:
        _take_place(directory, user)
    with locked(str(place / "prepare.lock"), "prepare this host", keep=False, patience=WAIT_SECONDS):
        _remove_old_locks(place)
        _let_lock(Path(iptables.LOCK), user)
        proc_files.load_modules()
        _let_read(user)
        _pin_programs(user)
        _leave_ports(user)
        _find_out(user, capabilities)


def _take_place(directory: int, user: pwd.struct_passwd) -> None:
    """What root leaves stands where nobody else may write. Former versions let the controller have the directory: what
    it may have put there that is no plain file goes."""
    give(directory, 0, user.pw_gid, 0o750, of=(os.fstat(directory).st_uid,))  # in /run only root makes any
    for name in os.listdir(directory):
        mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            os.unlink(name, dir_fd=directory)


def _remove_old_locks(place: Path) -> None:
    """Former versions left a lock file for each network namespace, and for those that are gone, too. Those that an old
    controller holds stay."""
    from netlimit.kernel.lock import is_locked

    for path in place.iterdir():
        if re.fullmatch(r"\d+\.(controller|lock)", path.name) and not is_locked(str(path), "tidy up"):
            path.unlink(missing_ok=True)


def _find_out(user: pwd.struct_passwd, capabilities: tuple[Capability, ...]) -> None:
    """Leave what this host can do where the controller reads it. What was found before stays where there is no answer
    at this moment: a controller that believed it missing would take working limits out of the kernel."""
    from netlimit.kernel import linux
    from netlimit.kernel.capabilities import FINDINGS, keep_answers, print_findings
    from netlimit.plan import WriteIngress

    if Capability.BPF not in capabilities:
        linux.LinuxKernel().apply(WriteIngress(drop=True))  # this controller could neither read nor change it
    found = _ask(user, capabilities)
    unanswered = _list_unanswered(found)
    if unanswered:
        reason = found[unanswered[0]]
        found = keep_answers(found, _read_former(FINDINGS))
        left = _list_unanswered(found)
        follows = f"not known: {', '.join(left)}" if left else "what was found before stays"
        typer.echo(f"netlimit: What this host can do could not be found out now ({reason}); {follows}.", err=True)
    try:
        _leave(FINDINGS, print_findings(found), user)
    except OSError as error:  # of memory that is full, say: what the controller needs may be there
        said = f"{FINDINGS} cannot be written: {error.strerror}."
        if not _read_former(FINDINGS):
            raise CommandError(f"{said} A controller that is not root goes by it.") from error
        typer.echo(f"netlimit: {said} What was found before stays.", err=True)


def _leave_ports(user: pwd.struct_passwd) -> None:
    """Leave the ports of sshd, whose sockets and configuration such a controller may not be able to read. Where they
    cannot be found, it goes by what it sees itself."""
    from netlimit.kernel.sessions import LEFT, list_ports

    try:
        _leave(LEFT, " ".join(map(str, list_ports())), user)
    except OSError as error:
        typer.echo(f"netlimit: The ports of sshd cannot be left in {LEFT}: {error}", err=True)


def _leave(path: Path, text: str, user: pwd.struct_passwd) -> None:
    """Put a file of root's, whole, where the user's group may read it."""
    fresh = path.with_suffix(".new").name
    with opened(path.parent, directory=True) as place:
        with suppress(FileNotFoundError):
            os.unlink(fresh, dir_fd=place)
        with (
            made_file(fresh, place, 0o640, Rights(0, user.pw_gid)) as descriptor,
            open(descriptor, "w", encoding="utf-8", closefd=False) as file,
        ):
            file.write(text)
        os.rename(fresh, path.name, src_dir_fd=place, dst_dir_fd=place)


def _ask(user: pwd.struct_passwd, capabilities: tuple[Capability, ...]) -> dict[str, str | None]:
    """What such a controller can do; asked again for a while where there is no answer."""
    from netlimit.kernel.capabilities import find_out_as

    end = time.monotonic() + ASK_SECONDS
    while True:
        found = find_out_as(lambda: _give_up(user, capabilities))
        if not _list_unanswered(found) or time.monotonic() >= end:
            return found
        time.sleep(_PAUSE_SECONDS)


def _give_up(user: pwd.struct_passwd, capabilities: tuple[Capability, ...]) -> None:
    from netlimit.kernel import proc_files

    for path in proc_files.FILES:  # of the namespace in which things are tried
        with suppress(OSError):  # which was told of those of this host; what cannot be tried for it says so
            proc_files.let_read(path, user.pw_uid)
    become(user, capabilities)


def _list_unanswered(found: Mapping[str, str | None]) -> list[str]:
    from netlimit.kernel.base import Unanswered

    return [name for name, reason in found.items() if isinstance(reason, Unanswered)]


def _read_former(path: Path) -> dict[str, str | None]:
    """What was found before; nothing where that cannot be read."""
    from netlimit.kernel.capabilities import read_findings

    try:
        return read_findings(read_text(path))
    except (OSError, ValueError):
        return {}


def _let_lock(path: Path, user: pwd.struct_passwd) -> None:
    """Let the controller take the lock of iptables, and not its group, for the API is in that. Where it fails, this is
    told, and by the controller whenever it cannot write."""
    try:
        with opened(path.parent.resolve(), directory=True) as place:
            with suppress(FileExistsError), made_file(path.name, place, 0o640):
                pass
            with opened(path.name, place) as lock:
                _admit(lock, user.pw_uid)
    except OSError as error:
        _tell_kept(path, user, error)


def _admit(lock: int, user: int) -> None:
    """Where the file system keeps no lists of who may open what, it becomes the user's own."""
    try:
        admit(lock, user)
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
        give(lock, user, 0, 0o640)


def _let_read(user: pwd.struct_passwd) -> None:
    """Let the controller read what the kernel shows to root alone. Where it fails, this is told, and by the controller
    whenever it cannot read."""
    from netlimit.kernel import proc_files

    for path in proc_files.FILES:
        try:
            proc_files.let_read(path, user.pw_uid)
        except OSError as error:
            _tell_kept(Path(path), user, error)


def _pin_programs(user: pwd.struct_passwd) -> None:
    """Leave the programs of root filters, and of what leaves a device, where the controller may open them. Where that
    cannot be, the probe says why nobody shapes, and the controller what is shaped without the second."""
    from netlimit.kernel import egress, tc

    place = Path(tc.PINNED).parent
    try:
        with made_directory(place, 0o750):
            _mount_bpf_files(place)
        with made_directory(place) as directory:  # what is mounted there
            give(directory, 0, user.pw_gid, 0o750)
            for path, pin in ((Path(tc.PINNED), tc.pin_lead), (Path(egress.PINNED), egress.pin)):
                path.unlink(missing_ok=True)
                pin()
                give_unopened(path.name, directory, user.pw_gid, 0o640)
    except (OSError, KernelError) as error:
        typer.echo(f"netlimit: The programs for queues cannot be pinned in {place}: {error}", err=True)


def _mount_bpf_files(place: Path) -> None:
    """A file system of our own, where none is mounted (by systemd, for the units): into the one that systemd mounts at
    boot, /sys/fs/bpf, only root may look."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if libc.statfs(bytes(place), buffer) == 0 and int.from_bytes(buffer.raw[:8], "little") == _BPF_MAGIC:
        return
    if libc.mount(b"bpf", bytes(place), b"bpf", _NOTHING_RUNS, b"mode=0750"):
        number = ctypes.get_errno()
        raise OSError(number, f"{place} cannot be mounted ({os.strerror(number)})")
    if _is_apart():
        typer.echo(
            f"netlimit: {place} is mounted in a mount namespace of its own, outside of which nobody sees the program: "
            "start run-netlimit-bpf.mount first, or run `netlimit prepare` in a shell.",
            err=True,
        )


def _is_apart() -> bool:
    """Whether what is mounted here is not for all others, as far as the kernel tells."""
    with suppress(OSError):
        return not os.path.samestat(os.stat("/proc/self/ns/mnt"), os.stat("/proc/1/ns/mnt"))
    return False

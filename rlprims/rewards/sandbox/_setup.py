"""Runs as a separate process by ``python -I -S``: isolates itself, starts the program, and reports how it ended.

It reads a job (JSON) from stdin and writes lines to the descriptor ``job["status"]``: ``ready``, then ``exit N`` or
``signal N``; or ``error ...``. The program inherits neither descriptor. Only the standard library is imported.

The isolation consists of Linux namespaces: a separate user (nobody, without rights outside), a separate root (an empty
tmpfs with the system's libraries and Python bound read-only), no network, and a separate process tree, which the kernel
kills when its first process ends. It does not need root. A seccomp filter forbids system calls that evade the limits.
"""

import ctypes
import fcntl
import json
import os
import resource
import shutil
import signal
import struct
import sys
from contextlib import suppress
from typing import Any

PDEATHSIG, SECCOMP, SUBREAPER, NO_NEW_PRIVS = 1, 22, 36, 38
NEW_NAMESPACES = 0x00020000 | 0x10000000 | 0x20000000 | 0x40000000 | 0x08000000 | 0x04000000 | 0x02000000
"""Mounts, users, processes, network, IPC, host name, cgroups."""
NOSUID, NODEV, BIND, RECURSIVE, PRIVATE, DETACH = 2, 4, 4096, 16384, 1 << 18, 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, ATTR_READ_ONLY, ATTR_NOSUID = 442, -100, 0x8000, 1, 2
NOBODY = 65534
FORBIDDEN = {
    # The number of the architecture for seccomp, and the numbers of: shmget, shmat, semget, msgget, mq_open,
    # memfd_create, memfd_secret, io_uring_setup, add_key, keyctl, userfaultfd, bpf, perf_event_open.
    "x86_64": (0xC000003E, (29, 30, 64, 68, 240, 319, 447, 425, 248, 250, 323, 321, 298)),
    "aarch64": (0xC00000B7, (194, 196, 190, 186, 180, 279, 447, 425, 217, 219, 282, 280, 241)),
}
"""System calls that allocate memory outside of the limits, or memory that outlives the process."""
PRCTL = {"x86_64": 157, "aarch64": 167}
SEALING, ADD_SEALS, ALL_SEALS = 2, 1033, 0xF

libc = ctypes.CDLL(None, use_errno=True)


def check(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    check(libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), f"mount {target}")


def separate() -> None:
    """Enter the namespaces. A child that stays outside writes the user maps: only a process outside may do so."""
    uid, gid, me = os.geteuid(), os.getegid(), os.getpid()
    entered, enter = os.pipe()
    mapper = os.fork()
    if mapper == 0:
        os.close(enter)
        os.read(entered, 1)
        try:
            write_maps(me, uid, gid)
        except OSError as error:
            os.write(2, f"user map: {error}".encode())
            os._exit(1)
        os._exit(0)
    os.close(entered)
    check(libc.unshare(NEW_NAMESPACES), "unshare")
    os.write(enter, b".")
    os.close(enter)
    if os.waitpid(mapper, 0)[1] != 0:
        raise OSError("the user map cannot be written")


def write_maps(process: int, uid: int, gid: int) -> None:
    """Map the users. For root: root inside for the mounts, and nobody for the program. Other users become nobody.

    The kernel does not limit the number of processes of the real root, so the program must run as another user.
    """

    def write(name: str, text: str) -> None:
        with open(f"/proc/{process}/{name}", "w") as file:
            file.write(text)

    if uid == 0:
        try:
            write("uid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            write("gid_map", f"0 0 1\n{NOBODY} {NOBODY} 1\n")
            return
        except OSError:
            pass  # a container without the user nobody
    write("setgroups", "deny")
    write("uid_map", f"{NOBODY} {uid} 1\n")
    write("gid_map", f"{NOBODY} {gid} 1\n")


def build_root(job: dict[str, Any]) -> None:
    mount("none", "/", "", RECURSIVE | PRIVATE)
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, "size=16m,mode=755")
    os.mkdir("/tmp/.old")
    number = PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root: unknown machine {os.uname().machine}")
    check(libc.syscall(number, b"/tmp", b"/tmp/.old"), "pivot_root")
    os.chdir("/")
    for path in job["readable"]:
        old = "/.old" + path
        if os.path.islink(old):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(os.readlink(old), path)
        elif os.path.exists(old):
            bind_read_only(old, path)
    for device in ("null", "zero", "random", "urandom"):
        bind(f"/.old/dev/{device}", f"/dev/{device}")
    write_files(job, "/box")
    for name, folder in job["packages"].items():
        bind_read_only("/.old" + folder, f"/box/packages/{name}")
    os.mkdir("/tmp")
    options = f"size={job['disk_mb']}m,nr_inodes={job['files_at_most'] + 1},mode=1777"
    mount("tmpfs", "/tmp", "tmpfs", NOSUID | NODEV, options)
    # Forbid namespaces inside: they would give the program capabilities and access to more parts of the kernel.
    with suppress(OSError), open("/.old/proc/sys/user/max_user_namespaces", "w") as file:
        file.write("0")
    check(libc.umount2(b"/.old", DETACH), "umount")
    os.rmdir("/.old")
    attributes = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", 0, attributes, 32), "read-only /")


def bind(source: str, target: str) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(source, target, "", BIND | RECURSIVE)


def bind_read_only(source: str, target: str) -> None:
    bind(source, target)
    attributes = (ctypes.c_uint64 * 4)(ATTR_READ_ONLY | ATTR_NOSUID, 0, 0, 0)
    check(libc.syscall(MOUNT_SETATTR, AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, 32), f"read-only {target}")


def write_files(job: dict[str, Any], folder: str) -> None:
    os.makedirs(folder, exist_ok=True)
    os.chmod(folder, 0o755)
    for name, text in job["files"].items():
        with open(os.path.join(folder, name), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)


def execute(job: dict[str, Any], folder: str, writable: str) -> None:
    """Set the limits and replace this process by the program. It never returns."""
    os.setsid()
    limits = {
        resource.RLIMIT_AS: job["memory_mb"] * 2**20,
        resource.RLIMIT_CPU: job["cpu_seconds"],
        resource.RLIMIT_FSIZE: job["disk_mb"] * 2**20,
        resource.RLIMIT_NPROC: job["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    if os.geteuid() == 0 and job["isolate"]:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)  # this drops all capabilities
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    libc.prctl(NO_NEW_PRIVS, 1, 0, 0, 0)
    stdin = os.memfd_create("stdin", SEALING)
    with open(stdin, "wb", closefd=False) as file:
        file.write(job["stdin"].encode("utf-8", "replace"))
    os.lseek(stdin, 0, os.SEEK_SET)
    fcntl.fcntl(stdin, ADD_SEALS, ALL_SEALS)  # no limit counts this memory; sealed, it cannot grow
    os.dup2(stdin, 0)
    forbid_system_calls()
    first = 3
    if job["channel"] is not None:
        if job["channel"] != first:
            os.dup2(job["channel"], first)
        os.set_inheritable(first, True)
        first += 1
    os.closerange(first, 4096)
    for number in (signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # the defaults that a new interpreter expects
    os.chdir(writable)
    environment = {"PATH": "/usr/bin:/bin", "HOME": writable, "TMPDIR": writable, "LANG": "C.UTF-8"}
    if job["packages"]:
        environment |= {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # threads count as processes
    label = f"trainer={job['parent']}"  # shown in the list of processes
    arguments = ["python", "-I", "-S", "-B", "-X", label, os.path.join(folder, job["main"])]
    os.execve(job["python"], arguments, environment)


def forbid_system_calls() -> None:
    """Install a seccomp filter: EPERM for :data:`FORBIDDEN` and for a change of PDEATHSIG, by which the program could
    outlive its parent. System calls of another architecture kill the process.

    It is a classic BPF program: each line is (code, jump if true, jump if false, value).
    """
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    number, machine, first_argument = 0, 4, 16
    kill, refuse, allow = 0x80000000, 0x00050001, 0x7FFF0000
    name = os.uname().machine
    if name not in FORBIDDEN:
        raise OSError(f"seccomp: unknown machine {name}")
    audit, calls = FORBIDDEN[name]
    program = [(load, 0, 0, machine), (equal, 1, 0, audit), (answer, 0, 0, kill), (load, 0, 0, number)]
    if name == "x86_64":  # the calls of the x32 machine have this bit
        program += [(at_least, 0, 1, 0x40000000), (answer, 0, 0, kill)]
    for call in calls:
        program += [(equal, 0, 1, call), (answer, 0, 0, refuse)]
    program += [(equal, 0, 3, PRCTL[name]), (load, 0, 0, first_argument), (equal, 0, 1, PDEATHSIG)]
    program += [(answer, 0, 0, refuse), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    check(libc.prctl(SECCOMP, 2, ctypes.c_void_p(ctypes.addressof(header)), 0, 0), "seccomp")


def in_own_tree(job: dict[str, Any], folder: str, writable: str, watcher: int) -> None:
    """The first process of the new tree: starts the program and waits for it. Other processes end with this one."""
    if job["isolate"]:
        libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # the kernel then kills the whole tree
    else:  # this process kills the tree if the watcher is killed; in a new session, apart from the watcher's signals
        os.setsid()
        libc.prctl(SUBREAPER, 1, 0, 0, 0)
        signal.signal(signal.SIGTERM, kill_children_and_exit)
        libc.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != watcher:
            return
    me = os.getpid()
    program = os.fork()
    if program == 0:
        try:
            if not job["isolate"]:
                libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
                if os.getppid() != me:
                    os._exit(127)
            execute(job, folder, writable)
        except OSError as error:
            say(job, f"error {error}")
        finally:
            os._exit(127)
    say(job, "ready")
    while True:
        process, status = os.wait()
        if process == program:
            code = os.waitstatus_to_exitcode(status)
            say(job, f"exit {code}" if code >= 0 else f"signal {-code}")
            return


def say(job: dict[str, Any], line: str) -> None:
    os.write(job["status"], line.encode("utf-8", "replace") + b"\n")


def main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    libc.prctl(PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != job["parent"]:
        return
    try:
        if job["isolate"]:
            separate()
            build_root(job)
        else:
            libc.prctl(SUBREAPER, 1, 0, 0, 0)
            write_files(job, job["folder"])
            os.mkdir(os.path.join(job["folder"], "packages"))
            for name, folder in job["packages"].items():
                os.symlink(folder, os.path.join(job["folder"], "packages", name))
    except OSError as error:
        say(job, f"error {error}")
        return
    folder, writable = ("/box", "/tmp") if job["isolate"] else (job["folder"], job["folder"])
    me = os.getpid()
    first = os.fork()
    if first == 0:
        try:
            in_own_tree(job, folder, writable, me)
        finally:
            os._exit(0)

    def end(*_: object) -> None:
        with suppress(ProcessLookupError):
            os.kill(first, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    if not job["isolate"]:
        libc.prctl(PDEATHSIG, signal.SIGTERM, 0, 0, 0)  # so that this process kills what the program has started
        if os.getppid() != job["parent"]:
            end()
    os.waitpid(first, 0)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if not job["isolate"]:
        kill_children()
        # The parent does so too if it lives. It cannot be tested whether it lives: the threads of a killed process end
        # one by one, and until the last one ends it is still the parent of this process.
        shutil.rmtree(job["folder"], ignore_errors=True)


def kill_children_and_exit(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_children()
    os._exit(0)


def kill_children() -> None:
    """Kill all child processes. Without namespaces, orphaned processes become children of this process."""
    me = os.getpid()
    while True:
        with open(f"/proc/self/task/{me}/children") as file:
            children = file.read().split()
        if not children:
            return
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):  # the interrupted loop may have waited for it already
                os.waitpid(int(child), 0)


if __name__ == "__main__":
    main()

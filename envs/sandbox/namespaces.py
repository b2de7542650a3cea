"""Level 2 without bubblewrap, as the text of `python -c`: makes the namespaces, then runs the supervisor in them.

    outer       waits for init, and dies with the process that started it
    init        process 1 of its namespace: builds the root, gives up every capability, waits for the supervisor
    supervisor  the text of supervisor.py, in a fork of init

Standard library only, and nothing of ours: inside there is no streamrl. Needs Linux 5.12, for mount_setattr.
"""

import ctypes
import json
import os
import platform
import signal
import sys

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV, AT_FDCWD, AT_RECURSIVE, MNT_DETACH = 1, 2, 4, -100, 0x8000, 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP = 1, 4, 24
CAP_SETGID, CAP_SETUID, NUM_CAPS = 6, 7, 41
CAPABILITY_VERSION_3 = 0x20080522
PIVOT_ROOT, MOUNT_SETATTR = {"x86_64": 155, "aarch64": 41}, 442
UNPRIVILEGED = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")
SHM_BYTES = 1 << 20
libc = ctypes.CDLL(None, use_errno=True)


def main():
    settings = json.loads(sys.argv[1])
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    user = os.getuid(), os.getgid()
    spaces = NEWNS | NEWCGROUP | NEWUTS | NEWIPC | NEWPID | NEWNET
    if settings["uid"] is None:
        spaces |= NEWUSER
    check(libc.unshare(spaces), "unshare")
    if settings["uid"] is None:
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"{UNPRIVILEGED} {user[0]} 1")
        write("/proc/self/gid_map", f"{UNPRIVILEGED} {user[1]} 1")
    init = os.fork()
    if init:
        os._exit(os.waitstatus_to_exitcode(os.waitpid(init, 0)[1]) & 0xFF)
    check(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
    enter_root(settings)
    give_up(() if settings["uid"] is None else (CAP_SETGID, CAP_SETUID))
    supervisor = os.fork()
    if supervisor:
        reap(supervisor)
    sys.argv = ["supervisor", json.dumps({"uid": settings["uid"], "work": "/tmp"})]
    exec(compile(settings["supervisor"], "supervisor", "exec"), {"__name__": "__main__"})


def enter_root(settings):
    """A root of its own, read-only but for /tmp and /dev/shm, in place of this machine's."""
    check(mount(None, "/", None, MS_REC | MS_PRIVATE), "mount")
    root = settings["work"]
    tmpfs(root, 1 << 20, "0755")
    for folder in settings["folders"]:
        os.makedirs(root + folder, exist_ok=True)
        bind(folder, root + folder)
    for name, target in settings["links"].items():
        os.symlink(target, root + name)
    for name in settings["files"]:
        os.makedirs(os.path.dirname(root + name), exist_ok=True)
        write(root + name, "")
        bind(name, root + name)
    for name in ("/proc", "/tmp", "/dev", "/old"):
        os.makedirs(root + name)
    check(mount("proc", root + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC), "mount /proc")
    tmpfs(root + "/tmp", settings["tmp_bytes"], "1777")
    make_devices(root + "/dev")
    check(libc.syscall(PIVOT_ROOT[platform.machine()], os.fsencode(root), os.fsencode(root + "/old")), "pivot_root")
    os.chdir("/")
    check(libc.umount2(b"/old", MNT_DETACH), "umount")
    os.rmdir("/old")
    set_attributes("/dev", ATTR_RDONLY, 0)
    set_attributes("/", ATTR_RDONLY, 0)
    os.chdir("/tmp")


def make_devices(folder):
    tmpfs(folder, 1 << 20, "0755")
    for name in DEVICES:
        write(folder + "/" + name, "")
        check(mount("/dev/" + name, folder + "/" + name, None, MS_BIND), "mount /dev/" + name)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1")):
        os.symlink(target, folder + "/" + name)
    os.mkdir(folder + "/shm")
    tmpfs(folder + "/shm", SHM_BYTES, "1777")


def give_up(kept):
    """Every capability but these, for this process and all that it starts; neither can be traced."""
    for number in range(NUM_CAPS):
        if number not in kept:
            libc.prctl(PR_CAPBSET_DROP, number, 0, 0, 0)  # one that this kernel does not know is refused
    bits = sum(1 << number for number in kept)
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(bits, bits, 0, 0, 0, 0)  # effective, permitted, inheritable; low, then high
    check(libc.capset(header, data), "capset")
    check(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "prctl")


def reap(supervisor):
    """Process 1 adopts what loses its parent, and ends with the supervisor: the kernel then ends everything."""
    os.closerange(0, 64)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def bind(source, target):
    """Read-only with all that is mounted below it, without devices and setuid programs."""
    check(mount(source, target, None, MS_BIND | MS_REC), "mount " + source)
    set_attributes(target, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV, AT_RECURSIVE)


def tmpfs(folder, size, mode):
    check(mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={size},mode={mode}"), "mount " + folder)


def set_attributes(folder, bits, flags):
    attributes = (ctypes.c_uint64 * 4)(bits, 0, 0, 0)
    done = libc.syscall(
        MOUNT_SETATTR, AT_FDCWD, os.fsencode(folder), flags, attributes, ctypes.c_size_t(ctypes.sizeof(attributes))
    )
    check(done, "mount_setattr " + folder)


def mount(source, target, kind, flags, data=None):
    names = [None if name is None else os.fsencode(name) for name in (source, target, kind)]
    return libc.mount(*names, ctypes.c_ulong(flags), None if data is None else data.encode())


def write(path, text):
    with open(path, "w") as file:
        file.write(text)


def check(result, what):
    if result != 0:
        raise OSError(ctypes.get_errno(), what + ": " + os.strerror(ctypes.get_errno()))


if __name__ == "__main__":
    main()

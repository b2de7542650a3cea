"""Programs that try to get out of their sandbox, each with what it prints if it succeeded.

An attempt prints ESCAPED when it got what it should not; any other end is a defense: an exception, a kill, a time-out.
`{port}`, `{abstract}`, `{secret_file}`, `{secret_dir}` and `{pid}` belong to the test: listening sockets, a file
with a secret that anyone may read, a writable directory, the test's own process.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Attempt:
    """`levels` are those that promise to stop it."""

    name: str
    program: str
    levels: tuple[int, ...] = (1, 2)


ATTEMPTS = [
    # network
    Attempt(
        "tcp_loopback", "import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)\nprint('ESCAPED')", (2,)
    ),
    Attempt("tcp_loopback_v6", "import socket\nsocket.create_connection(('::1', {port}), 1)\nprint('ESCAPED')", (2,)),
    Attempt(
        "udp_out",
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\ns.connect(('192.0.2.1', 9))\nprint('ESCAPED')",
        (2,),
    ),
    Attempt(
        "raw_socket",
        "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW)\nprint('ESCAPED')",
    ),
    Attempt(
        "abstract_socket",
        "import socket\ns=socket.socket(socket.AF_UNIX)\ns.connect('\\0{abstract}')\nprint('ESCAPED')",
        (2,),
    ),
    Attempt(
        "interfaces",
        "import socket\nprint('ESCAPED' if [n for _, n in socket.if_nameindex() if n != 'lo'] else 'none')",
        (2,),
    ),
    # files
    Attempt("read_host_file", "print('ESCAPED' if 'secret' in open('{secret_file}').read() else '')", (2,)),
    Attempt("read_passwd", "print('ESCAPED', open('/etc/passwd').read())", (2,)),
    Attempt("read_shadow", "print('ESCAPED', open('/etc/shadow').read())"),
    Attempt("write_host", "open('{secret_dir}/escaped_file', 'w').write('x')\nprint('ESCAPED')", (2,)),
    Attempt("write_usr", "open('/usr/escaped_file', 'w').write('x')\nprint('ESCAPED')"),
    Attempt("write_root", "open('/escaped_file', 'w').write('x')\nprint('ESCAPED')"),
    Attempt(
        "symlink_out",
        "import os\nos.symlink('{secret_file}', 'link')\nprint('ESCAPED', open('link').read())",
        (2,),
    ),
    Attempt("hard_link", "import os\nos.link('{secret_file}', 'link')\nprint('ESCAPED', open('link').read())", (2,)),
    Attempt("chroot", "import os\nos.mkdir('d')\nos.chroot('d')\nprint('ESCAPED')"),
    Attempt(
        "mount",
        "import ctypes, os\nos.mkdir('m')\nr=ctypes.CDLL(None).mount(b'none', b'm', b'tmpfs', 0, None)\n"
        "print('ESCAPED' if r == 0 else 'no')",
    ),
    Attempt("mknod", "import os, stat\nos.mknod('disk', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\nprint('ESCAPED')"),
    Attempt(
        "remount_usr",
        "import ctypes\nr=ctypes.CDLL(None).mount(b'none', b'/usr', b'', 32|4096, None)\n"
        "print('ESCAPED' if r == 0 else 'no')",
    ),
    Attempt("dev_mem", "open('/dev/mem', 'rb').read(16)\nprint('ESCAPED')"),
    # processes
    Attempt("kill_parent_of_test", "import os\nos.kill({pid}, 0)\nprint('ESCAPED')"),
    Attempt("see_processes", "import os\nprint('ESCAPED' if os.path.exists('/proc/{pid}/cmdline') else 'no')", (2,)),
    Attempt("read_test_environment", "print('ESCAPED', open('/proc/{pid}/environ').read())"),
    Attempt(
        "read_supervisor_memory",
        "import os\nopen('/proc/%d/mem' % os.getppid(), 'rb').seek(0)\nprint('ESCAPED')",
    ),
    Attempt(
        "supervisor_descriptors",
        "import os\nfor n in range(64):\n    try:\n        open('/proc/%d/fd/%d' % (os.getppid(), n), 'wb')\n"
        "        print('ESCAPED')\n    except OSError:\n        pass",
    ),
    Attempt(
        "trace_supervisor",
        "import ctypes, os\nr=ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0)\nprint('ESCAPED' if r == 0 else 'no')",
    ),
    Attempt("become_root", "import os\nos.setuid(0)\nprint('ESCAPED')"),
    Attempt(
        "setuid_binary",
        "import subprocess\nout=subprocess.run(['/usr/bin/su', '-c', 'id'], capture_output=True, text=True).stdout\n"
        "print('ESCAPED' if 'uid=0' in out else 'no')",
    ),
    Attempt(
        "raise_limit", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))\nprint('ESCAPED')"
    ),
    Attempt("lower_nice", "import os\nos.nice(-5)\nprint('ESCAPED')"),
    Attempt("host_name", "import socket\nsocket.sethostname('escaped_file')\nprint('ESCAPED')"),
    Attempt("reboot", "import ctypes\nr=ctypes.CDLL(None).reboot(0x89ABCDEF)\nprint('ESCAPED' if r == 0 else 'no')"),
    Attempt("environment_secret", "import os\nprint('ESCAPED' if 'SANDBOX_TEST_SECRET' in os.environ else 'no')"),
    Attempt(
        "inherited_descriptors",
        "import os\nprint('ESCAPED' if [f for f in os.listdir('/proc/self/fd') if int(f) > 5] else 'no')",
    ),
    # resources
    Attempt("memory", "x = bytearray(4 << 30)\nprint('ESCAPED')"),
    Attempt("memory_in_steps", "x = []\nwhile len(x) < 4096:\n    x.append(bytearray(1 << 20))\nprint('ESCAPED')"),
    Attempt(
        "large_file",
        "f = open('f', 'wb')\nfor _ in range(64):\n    f.write(bytes(1 << 20))\nf.close()\nprint('ESCAPED')",
    ),
    Attempt(
        "fill_disk",
        "for n in range(40):\n    open('f%d' % n, 'wb').write(bytes(4 << 20))\nprint('ESCAPED')",
        (2,),
    ),
    Attempt(
        "fill_shared_memory",
        "for n in range(40):\n    open('/dev/shm/f%d' % n, 'wb').write(bytes(4 << 20))\nprint('ESCAPED')",
        (2,),
    ),
    Attempt("many_files", "f = [open('/dev/null') for _ in range(500)]\nprint('ESCAPED')"),
    Attempt("endless", "while True:\n    pass"),
    Attempt("sleep", "import time\ntime.sleep(60)\nprint('ESCAPED')"),
    Attempt("ignore_signals", "import signal\nfor n in (1, 2, 15): signal.signal(n, signal.SIG_IGN)\nwhile True: pass"),
    Attempt("endless_output", "while True:\n    print('x' * 10000)"),
]

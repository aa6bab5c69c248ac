"""Hosts on one machine: network namespaces on a bridge, each with a name, an address and a torchrun node of its own.

A file of its own because it is the only one that makes network devices. What is done to a link happens on the bridge's
side, so a host sees nothing but what comes of it. Needs root, `ip`, `tc` (iproute2) and `iptables`.

    node0 eth0 10.77.0.1 --+
    node1 eth0 10.77.0.2 --+-- bridge, in a namespace of its own
    node2 eth0 10.77.0.3 --+

The kernels that this has to run on have no netem: `delay` puts `tests/relay.py` between a host and the bridge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.ranks import REPOSITORY, Finished, rank_environment

NETWORK = "10.77.0"
PORT = 29500
CAN_RUN = os.name == "posix" and os.geteuid() == 0 and all(map(shutil.which, ("ip", "tc", "iptables")))


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(argv)}: {done.stderr or done.stdout}")
    return done.stdout


class Hosts:
    """`num_hosts` hosts, `node0` first. `close` kills what runs on them and removes everything."""

    def __init__(self, num_hosts: int):
        self._tag = f"dbo{os.getpid()}"
        self._hub = f"{self._tag}-hub"
        self._relays: list[subprocess.Popen[bytes]] = []
        self.names = [f"node{i}" for i in range(num_hosts)]
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _run("ip", "netns", "add", self._hub)
        _run("ip", "-n", self._hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._hub, "link", "set", "bridge", "up")
        known = "".join(f"{self.address(i)} {name}\n" for i, name in enumerate(self.names))
        for i, name in enumerate(self.names):
            files = Path("/etc/netns") / self.namespace(i)  # `ip netns exec` shows these files in /etc
            files.mkdir(parents=True)
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{known}")
            _run("ip", "netns", "add", self.namespace(i))
            _run("ip", "link", "add", "eth0", "netns", self.namespace(i), "type", "veth",
                 "peer", "name", name, "netns", self._hub)  # fmt: skip
            _run("ip", "-n", self._hub, "link", "set", name, "master", "bridge", "up")
            _run("ip", "-n", self.namespace(i), "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", self.namespace(i), "link", "set", device, "up")

    def namespace(self, host: int) -> str:
        """The name of the host's network namespace."""
        return f"{self._tag}-{host}"

    def address(self, host: int) -> str:
        """The host's address."""
        return f"{NETWORK}.{host + 1}"

    def command(self, host: int, argv: Sequence[str]) -> list[str]:
        """`argv`, to be run on a host: under its name, seeing no process of the others."""
        named = 'hostname "$1" && shift && "$@"'  # no exec: process 1 of a namespace cannot be killed from inside
        apart = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        # Should this process be killed, `setpriv` makes the next one go with it, which takes its children along.
        within = ["ip", "netns", "exec", self.namespace(host), "setpriv", "--pdeathsig", "KILL", *apart]
        return [*within, "sh", "-c", named, "sh", self.names[host], *argv]

    def pids(self, host: int) -> list[int]:
        """Every process that runs on a host."""
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace(host)).split()]

    # ------------------------------------------------------------------ what happens to hosts and links

    def kill(self, host: int) -> None:
        """Kill every process of a host. Its kernel lives on and closes their connections."""
        while pids := self.pids(host):
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def cut(self, host: int) -> None:
        """Pull the cable of a host: nobody is told."""
        _run("ip", "-n", self._hub, "link", "set", self.names[host], "down")

    def part(self, host: int, other: int) -> None:
        """Lose everything between two hosts; both reach the others."""
        for at, source in ((host, other), (other, host)):
            self._iptables(at, "INPUT", "-s", self.address(source), "-j", "DROP")

    def lose(self, host: int, share: float) -> None:
        """Lose a share of the packets that a host sends and of those that it gets; 0 loses none."""
        self._iptables(host, "-F")
        for chain in ("INPUT", "OUTPUT") if share else ():
            random = ("-m", "statistic", "--mode", "random", "--probability", str(share))
            self._iptables(host, chain, "!", "-i" if chain == "INPUT" else "-o", "lo", *random, "-j", "DROP")

    def limit(self, host: int, rate: str | None) -> None:
        """Shape what a host sends and what it gets to `rate` (as `tc` takes it: `10mbit`); None is no limit."""
        change = ("add", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "200ms") if rate else ("del", "root")
        for namespace, device in ((self.namespace(host), "eth0"), (self._hub, self.names[host])):
            _run("tc", "-n", namespace, "qdisc", change[0], "dev", device, *change[1:])

    def delay(self, host: int, seconds: float) -> None:
        """Hold every packet that a host sends or gets for `seconds`, from now on."""
        device, inner, outer = self.names[host], f"in{host}", f"out{host}"
        _run("ip", "-n", self._hub, "link", "add", inner, "type", "veth", "peer", "name", outer)
        plug = f"ip link set {device} nomaster; ip link set {outer} master bridge up; ip link set {inner} up"
        relay = [sys.executable, str(REPOSITORY / "tests/relay.py")]
        for i in range(len(self.names)):
            _run("ip", "netns", "exec", self.namespace(i), *relay, "eth0")
        _run("ip", "netns", "exec", self._hub, "sh", "-c", plug)
        here = ["ip", "netns", "exec", self._hub]
        self._relays.append(subprocess.Popen([*here, *relay, device, inner, str(seconds)]))

    def _iptables(self, host: int, chain: str, *rule: str) -> None:
        add = () if chain.startswith("-") else ("-A",)
        _run("ip", "netns", "exec", self.namespace(host), "iptables", "-w", *add, chain, *rule)

    def close(self) -> None:
        """Kill what runs and remove what was made."""
        for relay in self._relays:
            relay.kill()
            relay.wait()
        for i in range(len(self.names)):
            with contextlib.suppress(RuntimeError):
                self.kill(i)
            shutil.rmtree(Path("/etc/netns") / self.namespace(i), ignore_errors=True)
        for namespace in (*map(self.namespace, range(len(self.names))), self._hub):
            with contextlib.suppress(RuntimeError):
                _run("ip", "netns", "del", namespace)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # only if nobody else uses it

    def __enter__(self) -> Hosts:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HostsCommand:
    """`argv` (as torchrun takes it) running on one rank of every host."""

    def __init__(self, hosts: Hosts, argv: Sequence[str], *, env: Mapping[str, str] | None = None):
        self.hosts = hosts
        self._files = tempfile.TemporaryDirectory(prefix="hosts-")
        self._started = time.monotonic()
        self.nodes = [self._start(host, argv, env or {}) for host in range(len(hosts.names))]

    def _start(self, host: int, argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[Any]:
        count = f"--nnodes={len(self.hosts.names)}"
        launcher = [sys.executable, "-m", "torch.distributed.run", count, "--nproc-per-node=1", "--rdzv-id=job",
                    "--rdzv-backend=c10d", f"--rdzv-endpoint={self.hosts.address(0)}:{PORT}"]  # fmt: skip
        with self._file(host, "out").open("wb") as out, self._file(host, "err").open("wb") as err:
            return subprocess.Popen(
                self.hosts.command(host, [*launcher, *argv]),
                env=rank_environment({"GLOO_SOCKET_IFNAME": "eth0", **env}),
                cwd=REPOSITORY,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def _file(self, host: int, stream: str) -> Path:
        return Path(self._files.name) / f"{host}.{stream}"

    def errors(self, host: int) -> str:
        """What a host's node and rank have written to standard error so far."""
        return self._file(host, "err").read_text(errors="replace")

    def rank_pid(self, host: int) -> tuple[int, int]:
        """The rank that runs on a host and its process."""
        for pid in self.hosts.pids(host):
            with contextlib.suppress(OSError):
                for item in Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0"):
                    if item.startswith("RANK="):
                        return int(item.removeprefix("RANK=")), pid
        raise RuntimeError(f"no rank runs on host {host}: {self.errors(host)}")

    def host_of_rank(self, rank: int) -> int:
        """The host on which a rank runs: torchrun numbers its nodes as it likes."""
        return next(host for host in range(len(self.hosts.names)) if self.rank_pid(host)[0] == rank)

    def wait(self, timeout: float, hosts: Sequence[int] | None = None) -> list[Finished]:
        """Wait for the ends of these hosts' nodes (of all); raise TimeoutError after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        finished = []
        for host in range(len(self.nodes)) if hosts is None else hosts:
            try:
                self.nodes[host].wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                said = "\n".join(f"--- host {h}\n{self.errors(h)[-4000:]}" for h in range(len(self.nodes)))
                raise TimeoutError(f"host {host} has not ended after {timeout} s\n{said}") from None
            finished.append(
                Finished(
                    returncode=self.nodes[host].returncode,
                    stdout=self._file(host, "out").read_text(errors="replace"),
                    stderr=self.errors(host),
                    elapsed_s=time.monotonic() - self._started,
                )
            )
        return finished

    def close(self) -> None:
        """Kill what is left."""
        for host, node in enumerate(self.nodes):
            self.hosts.kill(host)
            node.wait()
        self._files.cleanup()

    def __enter__(self) -> HostsCommand:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

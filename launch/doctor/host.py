"""What a rank finds out alone: versions, variables, limits, memory, disk, addresses, GPUs, its pace.

Its own file because none of it needs another rank; each check is a `gather_*`, which reads the machine, and a
`judge_*`, which is pure. The table of combinations known to fail is here too.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from launch.doctor.base import Check, Cohort, Facts, Finding, Site, differing, groups_of

_GIB = 2**30
_PACKAGES = (
    "numpy",
    "safetensors",
    "tokenizers",
    "triton",
    "greenlet",
    "tokenspeed-deepep",
    "deep-ep",
    "nvidia-nvshmem-cu12",
    "nvidia-nvshmem-cu13",
)

# ---------------------------------------------------------------------------------------------------------- versions


def gather_versions(site: Site) -> Facts:
    """Versions of Python, of the packages that results depend on, of this code, of the driver."""
    versions: dict[str, str] = {"python": platform.python_version(), "torch": torch.__version__, "code": _own_code()}
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    if site.device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        versions["driver"] = _read("/sys/module/nvidia/version")
    if importlib.util.find_spec("deep_ep"):
        versions["deep_ep imports"] = _import_error("deep_ep") or "yes"
    return versions


def judge_versions(facts: Mapping[int, Facts], _: Cohort) -> Iterator[Finding]:
    """All ranks run the same, and nothing that is known to fail together."""
    for name in sorted({name for found in facts.values() for name in found}):
        if odd := differing(name, {rank: found.get(name, "") for rank, found in facts.items()}):
            remedy = f"install the same {name} on all ranks"
            if name == "code":
                remedy = "run the same version of this program on all hosts: update the copies that differ"
            yield Finding(level="fail", ranks=odd[0], what=odd[1], remedy=remedy)
    for bad in KNOWN_BAD:
        if ranks := tuple(rank for rank, found in facts.items() if bad.applies(found)):
            found = facts[ranks[0]]
            versions = ", ".join(f"{name} {found[name]}" for name in bad.names if name in found)
            yield Finding(level="fail", ranks=ranks, what=f"{bad.what} ({versions})", remedy=bad.remedy)


@dataclass(frozen=True, kw_only=True)
class BadCombination:
    """Versions that do not work together. `names`: those that a message shows."""

    names: tuple[str, ...]
    applies: Callable[[Facts], bool]
    what: str
    remedy: str


def version_tuple(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13, 0); () for nothing."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


def _below(found: Facts, name: str, *bound: int) -> bool:
    return name in found and version_tuple(found[name]) < bound


def _deepep(found: Facts) -> tuple[int, ...]:
    return version_tuple(found.get("tokenspeed-deepep", found.get("deep-ep", "")))


KNOWN_BAD: Sequence[BadCombination] = (
    BadCombination(
        names=("torch",),
        applies=lambda v: _below(v, "torch", 2, 11),
        what="torch is older than 2.11, which this program needs",
        remedy="pip install 'torch>=2.11'",
    ),
    BadCombination(
        names=("cuda", "driver"),
        applies=lambda v: version_tuple(v.get("cuda", ""))[:1] == (13,) and _below(v, "driver", 580),
        what="CUDA 13 needs driver 580 or newer",
        remedy="update the driver, or install torch built for CUDA 12",
    ),
    BadCombination(
        names=("cuda", "driver"),
        applies=lambda v: version_tuple(v.get("cuda", ""))[:1] == (12,) and _below(v, "driver", 525),
        what="CUDA 12 needs driver 525 or newer",
        remedy="update the driver",
    ),
    BadCombination(
        names=("tokenspeed-deepep", "deep-ep", "nccl"),
        applies=lambda v: _deepep(v) >= (2,) and _below(v, "nccl", 2, 30, 4),
        what="DeepEP 2 needs NCCL 2.30.4 or newer",
        remedy="install DeepEP 1.2.1 (the extra `deepep`), or a newer NCCL",
    ),
    BadCombination(
        names=("tokenspeed-deepep", "deep-ep", "torch", "deep_ep imports"),
        applies=lambda v: v.get("deep_ep imports", "yes") != "yes",
        what="DeepEP is installed but does not import",
        remedy="install the DeepEP built for this torch and this Python, or remove it and use --all2all torch",
    ),
)


def _own_code() -> str:
    """A short hash of this program's own sources: two checkouts that differ are the commonest mismatch."""
    root = Path(__file__).parents[2]
    files = sorted(file for package in ("dbo", "moe", "launch") for file in (root / package).rglob("*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files))
    return digest.hexdigest()[:10]


def _import_error(module: str) -> str:
    """Why `module` does not import, tried in a process of its own."""
    environment = os.environ | {"EP_SUPPRESS_NCCL_CHECK": "1"}
    command = [sys.executable, "-c", f"import torch, {module}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    return (done.stderr.strip().splitlines() or ["failed"])[-1] if done.returncode else ""


# --------------------------------------------------------------------------------------------------------- variables

_PREFIXES = ("NCCL_", "GLOO_", "NVSHMEM_", "TORCH_NCCL_", "EP_", "CUDA_DEVICE_MAX_CONNECTIONS", "OMP_NUM_THREADS")
_OF_A_HOST = ("IFNAME", "_HCA", "NCCL_TOPO_FILE", "_DEBUG")


def gather_variables(_: Site) -> Facts:
    """The variables that change how ranks communicate."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}


def judge_variables(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """The same on all ranks; CUDA with more than one hardware queue."""
    for name in sorted({name for found in facts.values() for name in found}):
        odd = differing(name, {rank: found.get(name, "") for rank, found in facts.items()})
        if odd and not any(word in name for word in _OF_A_HOST):
            yield Finding(level="warn", ranks=odd[0], what=odd[1], remedy=f"set {name} alike on all ranks")
    single = [rank for rank, found in facts.items() if found.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"]
    if single and cohort.device == "cuda":
        yield Finding(
            level="warn",
            ranks=tuple(single),
            what="CUDA_DEVICE_MAX_CONNECTIONS=1: all streams share one hardware queue, messages wait behind compute",
            remedy="unset CUDA_DEVICE_MAX_CONNECTIONS (the default is 8), or set it to 8 or more",
        )


# ------------------------------------------------------------------------------------------------- limits and space


def gather_limits(site: Site) -> Facts:
    """Soft limits of this process; -1 is unlimited."""
    return {
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "open files needed": 256 + 8 * len(site.present),
        "locked memory": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
    }


def judge_limits(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """Enough descriptors for the connections of all ranks; memory that a network adapter may pin."""
    for rank, found in facts.items():
        limit, needed = found["open files"], found["open files needed"]
        if 0 <= limit < needed:
            yield Finding(
                level="fail",
                ranks=(rank,),
                what=f"at most {limit} open files are allowed; {len(facts)} ranks need {needed}",
                remedy=f"ulimit -n {max(needed, 65536)} before starting (in Slurm: LimitNOFILE of slurmd; in "
                "containers: --ulimit nofile=65536)",
            )
        if cohort.device == "cuda" and cohort.spans_hosts and 0 <= found["locked memory"] < _GIB:
            yield Finding(
                level="warn",
                ranks=(rank,),
                what=f"only {_size(found['locked memory'])} may be locked: InfiniBand cannot pin its buffers",
                remedy="ulimit -l unlimited (in Slurm: LimitMEMLOCK of slurmd; in containers: --ulimit memlock=-1)",
            )


def gather_space(_: Site) -> Facts:
    """Bytes of shared memory, and free bytes where temporary files and output go."""
    facts = {f"free in {path}": shutil.disk_usage(path).free for path in {os.getcwd(), tempfile.gettempdir()}}
    with suppress(OSError):
        usage = shutil.disk_usage("/dev/shm")
        facts |= {"shared memory": usage.total, "free shared memory": usage.free}
    return facts


def judge_space(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """Room for NCCL's buffers, and for output."""
    for rank, found in facts.items():
        total, free = found.get("shared memory", 0), found.get("free shared memory", 0)
        if cohort.device == "cuda" and free < _GIB:
            yield Finding(
                level="fail" if total <= 64 * 2**20 else "warn",
                ranks=(rank,),
                what=f"{_size(free)} of {_size(total)} in /dev/shm are free; NCCL exchanges messages there",
                remedy="mount a larger one (containers: --shm-size=8g or --ipc=host); remove what earlier runs left",
            )
        for name, room in found.items():
            if name.startswith("free in") and room < _GIB:
                yield Finding(
                    level="fail" if room < 100 * 2**20 else "warn",
                    ranks=(rank,),
                    what=f"{_size(room)} {name}",
                    remedy="make room, start in another directory, or point TMPDIR elsewhere",
                )


# --------------------------------------------------------------------------------------------------------- addresses


def interfaces() -> dict[str, str]:
    """The address of every network interface of this host, IPv4 before IPv6; "" for one without."""
    found = {name: _ipv4(name) for _, name in socket.if_nameindex()}
    for line in _read("/proc/net/if_inet6").splitlines():
        digits, _, _, scope, _, name = line.split()
        if scope != "20" and not found.get(name):  # 20 = link-local, which needs a scope to be used
            found[name] = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return found


def _ipv4(name: str) -> str:
    siocgifaddr = 0x8915
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        answer = fcntl.ioctl(probe, siocgifaddr, struct.pack("256s", name.encode()[:15]))
        return socket.inet_ntoa(answer[20:24])
    return ""


def gloo_address(variables: Mapping[str, str], found: Mapping[str, str], host: str) -> tuple[str, str]:
    """The address that gloo will listen on, and why none or which way. "" where it will fail.

    As torch's `ProcessGroupGloo` chooses: the interface of GLOO_SOCKET_IFNAME, else what the host's name resolves to if
    that is an address of this host, else the loopback.
    """
    if names := variables.get("GLOO_SOCKET_IFNAME"):
        for name in names.split(","):
            if not found.get(name):
                problem = "has no address" if name in found else "does not exist"
                return "", f"interface {name} of GLOO_SOCKET_IFNAME {problem}"
        return found[names.split(",")[0]], f"GLOO_SOCKET_IFNAME={names}"
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as probe, suppress(OSError):
                probe.bind(address)
                return str(address[0]), f"what {host} resolves to"
        return "127.0.0.1", f"{host} resolves to no address of this host"
    return "127.0.0.1", f"{host} does not resolve"


def nccl_interfaces(variables: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The interfaces that NCCL's sockets may use: NCCL_SOCKET_IFNAME is a list of prefixes, `=` exact, `^` excluded."""
    setting = variables.get("NCCL_SOCKET_IFNAME", "")
    usable = [name for name, address in found.items() if address]
    if not setting:
        return [n for n in usable if not n.startswith(("lo", "docker"))] or usable
    excluded, exact = setting.startswith("^"), setting.lstrip("^").startswith("=")
    words = setting.lstrip("^=").split(",")
    return [n for n in usable if any(n == w if exact else n.startswith(w) for w in words) != excluded]


def gather_address(_: Site) -> Facts:
    """The addresses of this host, and which of them gloo and NCCL would use."""
    found = interfaces()
    address, why = gloo_address(os.environ, found, socket.gethostname())
    return {
        "gloo": address,
        "why": why,
        "interface": _interface_of(address, found),
        "nccl": nccl_interfaces(os.environ, found),
        "interfaces": found,
    }


def judge_address(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """Every rank listens where the others can reach it."""
    loopback = [rank for rank, found in facts.items() if is_loopback(found["gloo"])]
    for rank, found in facts.items():
        choices = ", ".join(f"{name} ({address})" for name, address in found["interfaces"].items() if address)
        choose = f"set GLOO_SOCKET_IFNAME to the interface that reaches the other hosts; this host has {choices}"
        if not found["gloo"]:
            yield Finding(level="fail", ranks=(rank,), what=found["why"], remedy=choose)
        elif rank in loopback and cohort.spans_hosts:
            what = f"gloo uses {found['gloo']} ({found['why']}), which other hosts cannot reach"
            yield Finding(level="fail", ranks=(rank,), what=what, remedy=choose)
        elif cohort.expect_interface and found["interface"] != cohort.expect_interface:
            what = f"gloo uses {found['interface'] or found['gloo']} ({found['why']}), not {cohort.expect_interface}"
            remedy = f"export GLOO_SOCKET_IFNAME={cohort.expect_interface}; this host has {choices}"
            yield Finding(level="fail", ranks=(rank,), what=what, remedy=remedy)
        if cohort.device == "cuda" and not found["nccl"]:
            what = "NCCL_SOCKET_IFNAME leaves no interface"
            yield Finding(level="fail", ranks=(rank,), what=what, remedy=f"unset it; this host has {choices}")
    if not cohort.spans_hosts and 0 < len(loopback) < len(facts):
        minority = loopback if 2 * len(loopback) <= len(facts) else [rank for rank in facts if rank not in loopback]
        what = "some ranks of this host use the loopback and some a network interface"
        remedy = "set GLOO_SOCKET_IFNAME alike on all ranks"
        yield Finding(level="warn", ranks=tuple(minority), what=what, remedy=remedy)


def is_loopback(address: str) -> bool:
    """Whether an address means this host on every host."""
    return address.startswith("127.") or address == "::1"


def _interface_of(address: str, found: Mapping[str, str]) -> str:
    return next((name for name, own in found.items() if own and own == address), "lo" if is_loopback(address) else "")


# -------------------------------------------------------------------------------------------------------------- GPUs


def gather_gpu(site: Site) -> Facts:
    """This rank's GPU, which others it can read directly, and what lets GPUs talk to network adapters."""
    own, count = site.device.index or 0, torch.cuda.device_count()
    properties = torch.cuda.get_device_properties(site.device)
    peers = {str(other): torch.cuda.can_device_access_peer(own, other) for other in range(count) if other != own}
    return {
        "name": properties.name,
        "uuid": str(properties.uuid),
        "index": own,
        "peers": peers,
        "nvlinks": _num_nvlinks(str(properties.uuid)),
    }


def judge_gpu(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """A GPU for each rank, all of one kind, that reach each other directly within a host."""
    for ranks in groups_of({rank: (cohort.networks[rank], found["uuid"]) for rank, found in facts.items()}).values():
        if len(ranks) > 1:
            remedy = "start one process for each GPU, and let each see its own or all (CUDA_VISIBLE_DEVICES)"
            yield Finding(level="fail", ranks=tuple(ranks), what="these ranks share one GPU", remedy=remedy)
    if odd := differing("GPU", {rank: found["name"] for rank, found in facts.items()}):
        yield Finding(level="warn", ranks=odd[0], what=odd[1], remedy="the slowest one sets the pace of all")
    for rank, found in facts.items():
        if cut := [other for other, reached in found["peers"].items() if not reached]:
            what = f"GPU {found['index']} cannot read GPU {', '.join(cut)} directly: messages pass through the host"
            remedy = "check `nvidia-smi topo -p2p r`; IOMMU or PCIe access control services often forbid it"
            yield Finding(level="warn", ranks=(rank,), what=what, remedy=remedy)


def _num_nvlinks(uuid: str) -> int | None:
    """Active NVLinks of a GPU; None where `nvidia-smi` does not say."""
    with suppress(OSError, subprocess.SubprocessError):
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        command = ["nvidia-smi", "nvlink", "--status", "--id", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
        return len(re.findall(r"Link \d+: [\d.]+ GB/s", done.stdout))
    return None


def gather_rdma(_: Site) -> Facts:
    """InfiniBand and RoCE ports, and what IBGDA (GPUs that drive the adapter themselves) needs of the driver."""
    ports = {}
    for state in sorted(Path("/sys/class/infiniband").glob("*/ports/*/state")):
        ports[f"{state.parts[4]}:{state.parts[6]}"] = _read(str(state)).split(":")[-1].strip()
    parameters = _read("/proc/driver/nvidia/params")
    return {
        "ports": ports,
        "peer memory": any(word in _read("/proc/modules") for word in ("nvidia_peermem", "nv_peer_mem")),
        "ibgda": "PeerMappingOverride=1" in parameters and "EnableStreamMemOPs: 1" in parameters,
    }


def judge_rdma(facts: Mapping[int, Facts], cohort: Cohort) -> Iterator[Finding]:
    """Matters between hosts only."""
    if not cohort.spans_hosts:
        return
    for rank, found in facts.items():
        active = [port for port, state in found["ports"].items() if state == "ACTIVE"]
        if not active:
            what = "no active InfiniBand or RoCE port: between hosts NCCL uses TCP, and DeepEP does not run"
            remedy = "check `ibstat`; in containers pass /dev/infiniband; without an adapter use --all2all torch"
            yield Finding(level="warn", ranks=(rank,), what=what, remedy=remedy)
        elif not found["ibgda"]:
            what = "IBGDA is not enabled: DeepEP's low-latency kernels need it between hosts"
            remedy = (
                'load the driver with NVreg_EnableStreamMemOPs=1 and NVreg_RegistryDwords="PeerMappingOverride=1;", or '
                "use --all2all torch for decode"
            )
            yield Finding(level="warn", ranks=(rank,), what=what, remedy=remedy)


_PACE_S = 0.5
_UNEVEN = 1.5  # times the least; a stranger on the other half of a core makes it nearly 2


def yardstick_us() -> float:
    """Microseconds that a fixed piece of Python takes now."""
    start = time.perf_counter()
    total = 0
    for i in range(2000):
        total += i
    return (time.perf_counter() - start) * 1e6


def gather_pace(_: Site) -> Facts:
    """The yardstick, again and again for half a second."""
    took = [yardstick_us()]
    end = time.perf_counter() + _PACE_S
    while time.perf_counter() < end:
        took.append(yardstick_us())
    took.sort()
    return {"least": took[0], "median": took[len(took) // 2], "p90": took[len(took) * 9 // 10]}


def judge_pace(facts: Mapping[int, Facts], _: Cohort) -> Iterator[Finding]:
    """Eager steps wait for the host below some ten thousand tokens, and all ranks for the slowest one."""
    if not facts:
        return
    remedy = (
        "look for other programs there; on rented machines they may be strangers', on the other half of a core. Graphs "
        "need little of the host: --cudagraph-mode full-and-piecewise"
    )
    best = min(facts, key=lambda rank: facts[rank]["median"])
    for rank, found in facts.items():
        uneven, slower = found["p90"] / found["least"], found["median"] / facts[best]["median"]
        if slower > _UNEVEN:
            what = f"Python takes {slower:.1f} times as long as on rank {best}"
        elif uneven > _UNEVEN:
            what = f"Python runs unevenly: up to {uneven:.1f} times as long as at best"
        else:
            continue
        yield Finding(level="warn", ranks=(rank,), what=what, remedy=remedy)


# -------------------------------------------------------------------------------------------------------- the checks


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _size(num_bytes: int) -> str:
    if num_bytes < 0:
        return "unlimited"
    if num_bytes >= 10 * _GIB:
        return f"{num_bytes / _GIB:.0f} GiB"
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / 2**20:.1f} MiB"


def _pairs(facts: Facts) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def _show_limits(facts: Facts) -> str:
    files = facts["open files"]
    return f"open files {files if files >= 0 else 'unlimited'}, locked memory {_size(facts['locked memory'])}"


def _show_space(facts: Facts) -> str:
    return ", ".join(f"{name} {_size(value)}" for name, value in facts.items())


def _show_address(facts: Facts) -> str:
    return f"gloo {facts['gloo'] or 'none'} on {facts['interface'] or '?'} ({facts['why']})"


def _show_gpu(facts: Facts) -> str:
    reached = [other for other, can in facts["peers"].items() if can]
    links = "" if facts["nvlinks"] is None else f", {facts['nvlinks']} NVLinks"
    return f"{facts['name']}{links}, direct access to GPU {', '.join(reached) or 'none'}"


def _show_pace(facts: Facts) -> str:
    return f"a piece of Python takes {facts['median']:.0f} us, at best {facts['least']:.0f}, p90 {facts['p90']:.0f}"


def _show_rdma(facts: Facts) -> str:
    ports: dict[str, Any] = facts["ports"]
    return f"{_pairs(ports) or 'no ports'}; IBGDA {'on' if facts['ibgda'] else 'off'}"


CHECKS: Sequence[Check] = (
    Check(
        name="versions", needs="rank", limit_s=70, gather=gather_versions, judge=judge_versions, show=_pairs
    ),
    Check(
        name="variables", needs="rank", limit_s=5, gather=gather_variables, judge=judge_variables,
        show=lambda facts: _pairs(facts) or "none set",
    ),
    Check(name="limits", needs="rank", limit_s=5, gather=gather_limits, judge=judge_limits, show=_show_limits),
    Check(name="space", needs="rank", limit_s=10, gather=gather_space, judge=judge_space, show=_show_space),
    Check(name="address", needs="rank", limit_s=10, gather=gather_address, judge=judge_address, show=_show_address),
    Check(
        name="gpu", needs="rank", limit_s=30, gather=gather_gpu, judge=judge_gpu, show=_show_gpu, devices=("cuda",)
    ),
    Check(
        name="pace", needs="rank", limit_s=5, gather=gather_pace, judge=judge_pace, show=_show_pace, devices=("cuda",)
    ),
    Check(
        name="rdma", needs="rank", limit_s=5, gather=gather_rdma, judge=judge_rdma, show=_show_rdma, devices=("cuda",)
    ),
)  # fmt: skip

"""A relay between two network devices that holds every packet for a while: what netem does, for kernels without it.

A program of its own because it runs in the namespace of the devices, and a file of its own because it starts in a
moment: it imports the standard library only.

    relay.py DEVICE DEVICE SECONDS    carries packets both ways until it is killed
    relay.py DEVICE                   prepares the device of a host whose packets a relay will carry
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import select
import socket
import struct
import sys
import time

SIOCETHTOOL = 0x8946
ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO = 0x17, 0x1F, 0x24
ETH_P_ALL, SO_RCVBUFFORCE, PACKET_OUTGOING = 3, 33, 4


def prepare(device: str) -> None:
    """Have packets leave with their checksum, and no larger than the wire takes: nobody completes them later."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for setting in (ETHTOOL_STXCSUM, ETHTOOL_STSO, ETHTOOL_SGSO):
            off = (ctypes.c_uint32 * 2)(setting, 0)
            fcntl.ioctl(control, SIOCETHTOOL, struct.pack("16sP16x", device.encode(), ctypes.addressof(off)))


def relay(devices: list[str], seconds: float) -> None:
    """Carry every packet from one device to the other, both ways, `seconds` late."""
    ends = [socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL)) for _ in devices]
    for end, device in zip(ends, devices, strict=True):
        end.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 24)
        end.bind((device, 0))
    held: list[tuple[float, int, int, bytes]] = []  # when to send, in which order, on which end, what
    for number in range(sys.maxsize):
        pause = max(0.0, held[0][0] - time.monotonic()) if held else None
        for end in select.select(ends, [], [], pause)[0]:
            packet, address = end.recvfrom(65536)
            if address[2] != PACKET_OUTGOING:
                other = 1 - ends.index(end)
                heapq.heappush(held, (time.monotonic() + seconds, number, other, packet))
        while held and held[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(held)
            with contextlib.suppress(OSError):
                ends[to].send(packet)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        prepare(sys.argv[1])
    else:
        relay(sys.argv[1:3], float(sys.argv[3]))

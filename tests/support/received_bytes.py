"""What a process has received by TCP, as the system counts it."""

import os
import socket
import struct

BYTES_RECEIVED = 128  # where struct tcp_info has it, after 8 small fields, 24 of four bytes and three of eight


def received() -> int:
    """The payload that has come in through all of the process's open connections so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:  # it was closed, or is of another kind
            continue
        total += struct.unpack_from("<Q", info, BYTES_RECEIVED)[0]
    return total

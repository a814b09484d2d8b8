"""A test that reaches beyond this machine fails."""

import socket

import pytest

# An address that is reserved for documentation.
HOST = "192.0.2.1"
REACHED = {
    "connect": lambda sender: sender.connect((HOST, 9)),
    "connect_ex": lambda sender: sender.connect_ex((HOST, 9)),
    "sendto": lambda sender: sender.sendto(b"", (HOST, 9)),
    "sendto with flags": lambda sender: sender.sendto(b"", 0, (HOST, 9)),
    "sendmsg": lambda sender: sender.sendmsg([b""], [], 0, (HOST, 9)),
    "getaddrinfo": lambda sender: socket.getaddrinfo(host=HOST, port=9),
    "gethostbyname": lambda sender: socket.gethostbyname(HOST),
    "create_connection": lambda sender: socket.create_connection((HOST, 9), 1),
}


@pytest.fixture
def sender():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        yield sender


@pytest.mark.parametrize("name", REACHED)
def test_other_machines_are_out_of_reach(name, sender):
    with pytest.raises(RuntimeError, match=f"reach '{HOST}'; tests run without a network"):
        REACHED[name](sender)


def test_this_machine_is_within_reach(sender):
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as receiver:
        receiver.bind(("localhost", 0))
        assert sender.sendto(b"x", receiver.getsockname()) == 1
        sender.connect(receiver.getsockname())
        assert sender.sendmsg([b"x"]) == 1

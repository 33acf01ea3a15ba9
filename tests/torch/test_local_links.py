"""Streams between pipeline peers on one host: order, sockets that take only a part, peers that go."""

import socket
import threading
from pathlib import Path

import pytest
import torch

from shardwright.backends.torch.machine.local_links import BUFFER_BYTES, LocalLink, LocalLinks, _connect, _listen


class Alone:
    """Waits for a link with peer 0 without a process group."""

    def __init__(self, link: LocalLink, timeout_s: float) -> None:
        self.links = LocalLinks.__new__(LocalLinks)
        self.links.timeout_s, self.links._look_s, self.links._links = timeout_s, 0.0, {0: link}


@pytest.fixture
def pair():
    left, right = (LocalLink(end) for end in socket.socketpair(socket.AF_UNIX))
    yield left, right
    left.connection.close()
    right.connection.close()


def test_tensors_come_in_order_whatever_their_shape_and_dtype(pair: tuple[LocalLink, LocalLink]) -> None:
    left, right = pair
    turned = torch.randn(3, dtype=torch.complex64).conj()  # torch computes that only when it must
    sent = [torch.arange(6.0).view(2, 3), torch.tensor(7), torch.empty(0), torch.randn(5).bfloat16(), turned]
    left.send(sent[:2])
    left.send(sent[2:])
    got = [torch.empty_like(tensor) for tensor in sent]
    first = right.await_into(got[:1])
    assert right.await_into(got[1:]) == first + 3, "a tensor without elements needs no bytes"
    Alone(right, 10).links.wait(right, first)
    assert torch.equal(got[0], sent[0])
    while right.read():
        pass
    assert all(torch.equal(a, b) for a, b in zip(got, sent, strict=True))


def test_what_the_socket_does_not_take_is_copied_and_follows(pair: tuple[LocalLink, LocalLink]) -> None:
    left, right = pair
    big, small = torch.randn(8 * BUFFER_BYTES // 4), torch.tensor([3.0])
    wanted = big.clone()
    left.send([big])
    left.send([small])
    big.zero_()  # a sender may use its memory again
    got = [torch.empty_like(big), torch.empty_like(small)]
    # Nothing is asked of the sender meanwhile: it may sit in a collective, or in a wait for somebody else.
    Alone(right, 30).links.wait(right, right.await_into(got))
    Alone(left, 30).links.drain()
    assert torch.equal(got[0], wanted)
    assert got[1] == 3.0


def test_a_peer_that_takes_nothing_ends_the_drain_and_close_ends_the_writer(pair: tuple[LocalLink, LocalLink]) -> None:
    left, _ = pair
    left.send([torch.zeros(8 * BUFFER_BYTES // 4)])
    with pytest.raises(RuntimeError, match="a peer did not take all that it was sent in time"):
        Alone(left, 0.1).links.drain()
    Alone(left, 30).links.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "shardwright-link"]


def test_a_peer_that_goes_before_it_took_everything_is_told_by_the_next_send(
    pair: tuple[LocalLink, LocalLink],
) -> None:
    left, right = pair
    left.send([torch.zeros(8 * BUFFER_BYTES // 4)])
    right.connection.close()
    with pytest.raises(RuntimeError, match="the connection broke"):
        left.drain(30)
    with pytest.raises(RuntimeError, match="the connection broke"):
        left.send([torch.zeros(4)])


def test_a_peer_that_is_gone_ends_the_wait(pair: tuple[LocalLink, LocalLink]) -> None:
    left, right = pair
    left.connection.close()
    with pytest.raises(RuntimeError, match="the peer closed the connection"):
        Alone(right, 30).links.wait(right, right.await_into([torch.empty(4)]))
    with pytest.raises(RuntimeError, match="the connection broke"):
        right.send([torch.zeros(4)])


def test_a_peer_that_sends_nothing_ends_the_wait_after_its_time(pair: tuple[LocalLink, LocalLink]) -> None:
    _, right = pair
    with pytest.raises(RuntimeError, match=r"nothing came for 0\.1 s"):
        Alone(right, 0.1).links.wait(right, right.await_into([torch.empty(4)]))


def test_a_folder_with_too_long_a_name_makes_no_link(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as door:
        assert _listen(door, str(folder / "0"), 1) == ""
    assert _connect("", 0) is None

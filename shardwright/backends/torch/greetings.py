"""What pipeline peers on one host tell each other when a step begins, ahead of its messages: what they were given.

A rank whose batch has another shape would wait for messages that never come, or take what belongs to others. Nobody
waits for a greeting: it is read where the first message of that peer is, and a difference is an error there, on both
ends, instead of a wait that runs into its timeout.
"""

from collections.abc import Sequence

import torch

from shardwright.backends.torch.local_links import LocalLink, LocalLinks
from shardwright.core.errors import ShardwrightError


class Greetings:
    """One rank's greetings over its local links.

    Args:
        ranks: the global rank at each pp coordinate.
    """

    def __init__(self, links: LocalLinks, ranks: Sequence[int]) -> None:
        self.links, self.ranks = links, tuple(ranks)
        self._awaited: dict[int, tuple[LocalLink, int, torch.Tensor, int, Sequence[object]]] = {}

    def say(self, token: int, shapes: Sequence[object]) -> None:
        """Begin a step.

        Args:
            token: a number that stands for what this rank was given.
            shapes: those of each microbatch, for the error.

        Raises:
            ShardwrightError: a peer began the step before with something else.
        """
        self.hear_all()
        own = torch.tensor([token], dtype=torch.int64)
        for peer, link in self.links.all():
            link.send([own])
            heard = torch.empty_like(own)
            self._awaited[peer] = (link, link.await_into([heard]), heard, token, shapes)

    def hear(self, peer: int) -> None:
        """Wait for the greeting of a peer, unless it was heard. Raises ShardwrightError when it is another one."""
        if peer not in self._awaited:
            return
        link, filled, heard, token, shapes = self._awaited.pop(peer)
        self.links.wait(link, filled)
        if int(heard) != token:
            raise ShardwrightError(
                f"this rank and rank {self.ranks[peer]} are pipeline peers and were given batches of different shapes "
                f"or dtypes in one step, or another schedule (here {len(shapes)} microbatches, the last of "
                f"{shapes[-1]}): each rank passes the batch of its dp coordinate, the same on all its pp peers; "
                f"sw.sampler(dataset) does that"
            )

    def hear_all(self) -> None:
        """Wait for the greetings of all peers."""
        for peer in tuple(self._awaited):
            self.hear(peer)

"""What the dims of a program's values are of a sequence: its tokens, the keys that tokens attend to, or neither."""

from typing import Literal

Role = Literal["tokens", "keys", "open", "plain"]


class MixingError(Exception):
    """Tokens meet others in a way that no slice can run by itself; says how."""


class Axis:
    """A dim of one or more values, which are found to be the same as the program is read.

    ``open``: not known yet. Products of queries and keys have two such dims, each the other's ``partner``: what is
    summed over later is the keys. Others come of broadcasts, and are what they meet.
    """

    __slots__ = ("_joined", "_partner", "_role")

    def __init__(self, role: Role = "open") -> None:
        self._role: Role = role
        self._joined: Axis | None = None
        self._partner: Axis | None = None

    @classmethod
    def pair(cls) -> tuple["Axis", "Axis"]:
        """The two dims of a product of tokens with tokens."""
        one, other = cls(), cls()
        one._partner, other._partner = other, one
        return one, other

    @property
    def root(self) -> "Axis":
        found = self
        while found._joined is not None:
            found = found._joined
        return found

    @property
    def role(self) -> Role:
        return self.root._role

    @property
    def is_of_pair(self) -> bool:
        root = self.root
        return root._role == "open" and root._partner is not None

    @property
    def is_stretched(self) -> bool:
        root = self.root
        return root._role == "open" and root._partner is None

    def become(self, role: Role) -> None:
        """Settle an open axis, and its partner with it. Raises MixingError for one that is settled otherwise."""
        root = self.root
        if root._role == role:
            return
        if root._role != "open":
            raise MixingError("brings tokens together with tokens")
        root._role, partner = role, root._partner
        if partner is not None:
            if role == "plain":
                raise MixingError("brings tokens together with tokens")
            partner.become("keys" if role == "tokens" else "tokens")

    def join(self, other: "Axis") -> None:
        """Note that two axes are one. Raises MixingError where they cannot be."""
        one, two = self.root, other.root
        if one is two:
            return
        if one.is_stretched:
            one._joined = two
        elif two.is_stretched:
            two._joined = one
        elif one._role == "open" == two._role:
            first, second = one._partner, two._partner
            assert first is not None
            assert second is not None
            if first.root is two:
                raise MixingError("brings tokens together with tokens")
            one._joined = two
            if first.root is not second.root:
                first.root._joined = second.root
        elif one._role == "open":
            one.become(two._role)
        else:
            two.become(one._role)

"""How many nodes of a dynamic tree a round verifies, and how deep it drafts: as many as pay at the present speed.

Verifying N nodes is expected to yield 1 + the sum of their chances; it costs time in which, at the present tokens per
second, so many others would have been written. The round takes the N with the largest difference: the plain ratio of
the two would starve easy rounds and overspend on hard ones.
"""

from __future__ import annotations

from fastea.costs import Costs
from fastea.drafters import Draft

KEPT = 0.95  # of the running sums, each round
STEPS = (4, 8, 12, 16, 24, 32, 48, 64)  # numbers of nodes that are tried


class Pace:
    """costs: of this machine; limit: most nodes; rate: tokens per second at first; few: every other step only, where
    each number is compiled for itself. buckets: the numbers of nodes that a round may have."""

    def __init__(self, costs: Costs, limit: int, rate: float, few: bool):
        self.costs = costs
        self.buckets = [n for n in (STEPS[1::2] if few else STEPS) if n < limit] + [limit]
        self.seconds = 20.0 / rate
        self.tokens, self.accepted, self.promised = 20.0, 10.0, 10.0

    @property
    def rate(self) -> float:
        """Tokens per second of late."""
        return self.tokens / self.seconds

    @property
    def trust(self) -> float:
        """Accepted nodes for one that was expected."""
        return self.accepted / self.promised

    def cut(self, draft: Draft) -> Draft:
        """The best first nodes of a draft."""
        assert draft.chances is not None
        sums = draft.chances.mean(0).cumsum(0).tolist()
        available = len(sums) + 1
        self.expected = [0.0, *sums]

        def worth(count: int) -> float:
            return (
                1 + self.trust * self.expected[count - 1] - self.rate * self.costs.verified(len(draft.tokens) * count)
            )

        self.count = max({min(n, available) for n in self.buckets}, key=worth)
        return draft.first(self.count)

    def deeper(self, mass: float, above: float) -> bool:
        """Whether another level of drafting pays. mass: the chances of the nodes that it would expand, in sum; above:
        the same of the level before: the next is expected to fall in the same proportion."""
        gain = self.trust * mass * min(1.0, mass / max(above, 1e-9))
        return gain > self.rate * self.costs.grown_level

    def learn(self, tokens: float, seconds: float) -> None:
        """A round with the last cut yielded so many tokens a sequence and took so long."""
        self.tokens, self.seconds = KEPT * self.tokens + tokens, KEPT * self.seconds + seconds
        self.accepted = KEPT * self.accepted + tokens - 1
        self.promised = KEPT * self.promised + self.expected[self.count - 1]

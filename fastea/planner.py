"""`--tree auto`: the tree that writes most tokens a second with this head on this machine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from fastea import costs as timing
from fastea.acceptance import AcceptanceTable, corrected, expected
from fastea.costs import COUNTS, Costs, machine, timed
from fastea.drafters import Draft, Drafter
from fastea.engine import Engine
from fastea.pace import Pace
from fastea.replay import graph
from fastea.runtime import compiling, note
from fastea.sampling import Sampling
from fastea.state import DecodeState
from fastea.tree import MAX_DEPTH, DynamicTree, Tree, chain
from fastea.tree_search import best_static, chance_of, chances

if TYPE_CHECKING:
    from fastea.generator import Generator

GROWN_WIDTH = 8  # children a node of dynamic trees that are considered
FOUR_CHAINS = Tree([(rank, *[0] * depth) for depth in range(3) for rank in range(4)], "probe")  # levels of one shape
ROUNDS = 16  # of a call, at least, that say how long rounds take
DOUBT = 1.5  # so many times as fast as expected, and the timings are not believed any more
GAIN = 1.03  # a tree must promise this much more than plain decoding, or than the tree that runs


@dataclass
class Plan:
    """What was chosen, and why. tree None = plain decoding. tokens: expected a round; rate, plain_rate: expected tokens
    per second with it and without a draft."""

    tree: Tree | DynamicTree | None
    tokens: float
    rate: float
    plain_rate: float
    costs: Costs
    rates: list[list[float | None]]

    @property
    def name(self) -> str:
        return self.tree.name if self.tree else "none"

    def __str__(self) -> str:
        ratio = f"{self.rate / self.plain_rate:.2f} times plain decoding's"
        if self.tree is None:
            return "tree auto: plain decoding, since no draft is expected to pay here"
        return f"tree auto: {self.name}, {self.tokens:.2f} tokens per round and {ratio} speed are expected"


class Planner:
    """make: a drafter over the head for a tree. card: the head's, with its acceptance; None: nothing is known of it.
    key: what runs, for finding its timings again."""

    def __init__(self, make: Callable[[Tree | DynamicTree], Drafter], card: dict[str, Any] | None, key: str):
        self.make, self.key = make, key
        self.acceptance = (card or {}).get("acceptance", {})
        self.known: dict[str, Costs] = {}
        self.plans: dict[tuple[int, bool], Plan] = {}  # by batch size, and greedy or not
        self.engines: dict[tuple[int, bool], Engine] = {}
        self.counted: dict[bool, list[AcceptanceTable]] = {True: [], False: []}

    def engine(self, generator: Generator, batch: int, sampling: Sampling, again: bool) -> Engine:
        """What decodes so many sequences with these settings. again: a static tree that was chosen before may be given
        up for one that what was accepted since then speaks for; not where it was compiled."""
        key = batch, sampling.greedy
        known = self.engines.get(key)
        if known and (generator.compile or not again or not isinstance(self.plans[key].tree, Tree)):
            return known
        plan = self.plan(generator, batch, sampling)
        if known and plan.rate < GAIN * self.expected_rate(*key):
            return known
        self.plans[key] = plan
        self.engines[key] = engine = self.equipped(generator, plan)
        self.counted[sampling.greedy].append(engine.table)
        return engine

    def equipped(self, generator: Generator, plan: Plan) -> Engine:
        if plan.tree is None:
            return Engine(generator, None)
        drafter, pace = self.make(plan.tree), None
        if isinstance(plan.tree, DynamicTree) and not generator.round.captures:
            pace = Pace(plan.costs, plan.tree.count, plan.rate, few=generator.compile)
            if not generator.compile:
                drafter.deeper = pace.deeper  # type: ignore[attr-defined]
        return Engine(generator, drafter, pace)

    def table(self, greedy: bool) -> list[list[float | None]]:
        """Acceptance by depth and rank: the head's own, moved by what was accepted here."""
        stored = self.stored(greedy).get("by_depth_and_rank")
        return corrected(stored or [list(row) for row in expected()], self.counted[greedy])

    def stored(self, greedy: bool) -> dict[str, Any]:
        """What the head's card says of acceptance."""
        found: dict[str, Any] = self.acceptance.get("greedy" if greedy else "temperature 0.8", {})
        return found

    def expected_rate(self, batch: int, greedy: bool) -> float:
        """Of the static tree that runs, with what is known now."""
        old = self.plans[batch, greedy]
        assert isinstance(old.tree, Tree)
        rates = self.table(greedy)
        tokens = sum(chance_of(rates, path) for path in old.tree.paths)  # the root's is 1
        return tokens / old.costs.static(batch * len(old.tree), old.tree.depth_max)

    def plan(self, generator: Generator, batch: int, sampling: Sampling) -> Plan:
        """The best tree by acceptance and costs; rates are a sequence's."""
        rates = self.table(sampling.greedy)
        costs = self.costs(generator, sampling)
        plain = 1 / (costs.plain if batch == 1 else max(costs.plain, costs.verified(batch)))

        def seconds(nodes: int, depth: int) -> float:
            return costs.static(batch * nodes, depth)

        most = costs.verify[-1][0]  # nodes that were timed: what more would cost is not known
        static = best_static(rates, seconds, most, min(MAX_DEPTH, len(rates) + 2))
        name = f"auto:{len(static.paths) + 1}"
        best = Plan(Tree(static.paths, name), static.tokens, static.rate, plain, costs, rates)
        dynamic = self.stored(sampling.greedy).get("dynamic", {})
        for spec, by_slot in dynamic.items():
            width, levels = (int(part) for part in spec.split(","))
            tokens = 1.0
            for count, chance in enumerate(by_slot[: most - 1], 2):
                tokens += chance
                rate = tokens / costs.grown(batch * count, levels)
                if rate > best.rate:
                    best = replace(best, tree=DynamicTree(count, width, levels), tokens=tokens, rate=rate)
        if best.rate < GAIN * plain:
            return replace(best, tree=None, tokens=1.0, rate=plain)
        if isinstance(best.tree, DynamicTree) and not generator.round.captures:  # a round may take fewer
            measured = dynamic[f"{best.tree.width},{best.tree.levels}"]
            largest = min(len(measured) + 1, 2 * best.tree.count, most)
            best.tree = replace(best.tree, count=largest)
        return best

    def observe(self, generator: Generator, batch: int, sampling: Sampling, rounds: int, seconds: float) -> None:
        """What the rounds of a call took. Other programs can only have made the timings too long: where rounds are much
        faster, they are taken again at the next start."""
        plan = self.plans[batch, sampling.greedy]
        if rounds >= ROUNDS and seconds / rounds * DOUBT < plan.tokens / plan.rate:
            timing.remember(self._key(generator, sampling), None)

    def _key(self, generator: Generator, sampling: Sampling) -> str:
        kind = "greedy" if sampling.greedy else f"sampled, top-k {sampling.top_k > 0}, top-p {sampling.top_p < 1}"
        return f"{machine(generator.device)}; {self.key}; compile {generator.compile}; {kind}"

    def costs(self, generator: Generator, sampling: Sampling) -> Costs:
        """As measured before on this machine, or now."""
        key = self._key(generator, sampling)
        if key not in self.known:
            found = timing.remembered(key)
            if found is None:
                note("timing rounds for --tree auto, once on this machine with these settings")
                found = self.measure(generator, sampling)
                timing.remember(key, found)
            self.known[key] = found
        return self.known[key]

    def measure(self, generator: Generator, sampling: Sampling) -> Costs:
        """Times verifying and drafting with a few trees: seconds, or the better part of a minute where each must
        be compiled first."""
        rates, held = expected(), generator.engine

        def likeliest(count: int) -> Tree:
            return Tree([path for _, path in itertools.islice(chances(rates, 5), count - 1)], "probe")

        try:
            with compiling(), torch.inference_mode():
                few = generator.compile and not generator.round.captures
                counts = COUNTS[1:4:2] if few else COUNTS
                verify = [(n, self.verifying(generator, sampling, likeliest(n))) for n in counts]
                plain = self.verifying(generator, sampling, None)
                grown = (DynamicTree(GROWN_WIDTH, GROWN_WIDTH, 1), DynamicTree(GROWN_WIDTH, GROWN_WIDTH, 4))
                first, last, grown_first, grown_last = (
                    self.drafting(generator, sampling, tree) for tree in (chain(1), FOUR_CHAINS, *grown)
                )
        finally:
            generator.engine = held
        level, grown_level = (last - first) / (FOUR_CHAINS.depth_max - 1), (grown_last - grown_first) / 3
        return Costs(plain, verify, first, max(0.0, level), grown_first, max(0.0, grown_level))

    def verifying(self, generator: Generator, sampling: Sampling, tree: Tree | None) -> float:
        """Seconds of verifying and accepting this tree's nodes; None: of a round of plain decoding."""
        engine = Engine(generator, self.make(tree) if tree else None)
        state = _ready(generator, engine, sampling)
        tokens, probs = state.root[:, None].repeat(1, len(engine.round.tree)), None
        if generator.rejection and tree and not sampling.greedy:  # the rule reads what the children were drawn from
            vocab = generator.model.config.vocab_size
            probs = torch.full((1, len(tree), vocab), 1 / vocab, device=generator.device)
        draft = Draft(tokens, probs)
        return _seconds(generator, lambda: engine.accept(state, draft, *engine.round.verify(state, draft)))

    def drafting(self, generator: Generator, sampling: Sampling, tree: Tree | DynamicTree) -> float:
        """Seconds of drafting this tree."""
        engine = Engine(generator, self.make(tree))
        state = _ready(generator, engine, sampling)
        return _seconds(generator, lambda: engine.draft(state))


def _ready(generator: Generator, engine: Engine, sampling: Sampling) -> DecodeState:
    """A state after a short prompt."""
    generator.engine = engine
    state = generator.state(1)
    state.reset(sampling, [0])
    generator.prefill(state, 0, [0, 0])
    state.done.fill_(True)  # rounds do all their work, and the text does not grow past its cache
    return state


def _seconds(generator: Generator, action: Callable[[], object]) -> float:
    for _ in range(2):  # compiles, and settles
        action()
    as_graph = generator.compile and generator.round.captures and generator.device.type == "cuda"
    if not as_graph:
        return timed(action, generator.device)
    with torch.cuda.device(generator.device):
        return timed(graph(action), generator.device)


def drawn(plan: Plan) -> str:
    """The tree and the table that speak for a plan, as text."""
    lines = [str(plan)]
    if isinstance(plan.tree, Tree):
        width = max(len(row) for row in plan.rates)
        lines.append("acceptance of a child under an accepted node, by depth and rank:")
        for depth, row in enumerate(plan.rates, 1):
            cells = " ".join("    -" if rate is None else f"{rate:5.2f}" for rate in row)
            lines.append(f"  depth {depth:2d}  {cells}{'      ' * (width - len(row))}")
        lines.append(f"the tree, {len(plan.tree)} nodes with the root; each with its chance of being accepted:")
        lines.append("root")
        for path in sorted(plan.tree.paths[1:]):
            lines.append(f"{'   ' * (len(path) - 1)}└─ {path[-1]}  {chance_of(plan.rates, path):.2f}")
    costs = plan.costs
    rows = ", ".join(f"{count}: {1e3 * seconds:.2f}" for count, seconds in costs.verify)
    lines.append(f"ms of a round: plain {1e3 * costs.plain:.2f}; verifying nodes {rows}")
    lines.append(
        f"ms of drafting: static, first level {1e3 * costs.first:.2f}, each further one {1e3 * costs.level:.2f}; "
        f"dynamic {1e3 * costs.grown_first:.2f} and {1e3 * costs.grown_level:.2f}"
    )
    return "\n".join(lines)

"""The protocol under search: random walks, a state machine, and proof that the search can fail."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from model.simulator import (
    Fate,
    Message,
    Move,
    Process,
    Register,
    Violation,
    Weather,
    World,
    duel,
    walk,
)
from tako_sync import rules
from tako_sync.claim import Claim, Draft, Finding, Grant
from tako_sync.lease import Lease
from tako_sync.record import Record, State, moment
from tako_sync.rules import Free, Held, Sighting
from tako_sync.runtime import Known
from tako_sync.snapshot import Version
from tako_sync.tenancy import Landed, Standing, Tenancy

# --- Random walks --------------------------------------------------------------------------


@pytest.mark.timeout(120)
def test_random_walks_of_200_000_steps_break_no_promise() -> None:
    """Steps are moves of time, of the network and of operators, and turns of processes."""
    steps = grants = takeovers = lost = seed = 0
    while steps < 200_000:
        world = walk(seed) if seed % 3 else duel(seed)
        steps += world.steps
        grants += world.grants
        takeovers += world.takeovers
        lost += world.lost_holds
        seed += 1
    # The walks went to where it is dangerous.
    assert grants > 2_000
    assert takeovers > 400
    assert lost > 400


def test_a_grant_that_came_too_late_and_cannot_be_given_back_is_not_busy() -> None:
    """Stopped during its write, which lands after 20 s: 28 s after the sending it goes on."""
    world = World(0, Weather(), processes=1)
    process = world.processes[0]
    sent: list[Message] = []

    def fate(message: Message) -> Fate | None:
        if message.is_write:
            sent.append(message)
            return [(20.0, World.apply), (21.0, World.answer)] if len(sent) == 1 else []
        return None

    world.fate = fate
    job = world.start(process, once=True, work=1.0, stubborn=False)
    world.pause(process)
    world.advance(28.0)
    world.resume(process)
    world.advance(20.0)  # Violation: busy, for its own write
    assert job is not None
    assert job.outcome == "unresolved"


# --- Wrong readings, each of which the same walks find ---------------------------------------


def _now() -> float:
    process = World.running
    assert process is not None
    return process.clock.monotonic()


def owner_in_place_of_write(patch: pytest.MonkeyPatch) -> None:
    """After the first heartbeat every record names our own owner."""
    claim_saw, tenancy_saw = Claim.saw, Tenancy.saw

    def named(sighting: Sighting, owner: str) -> tuple[Record, Version] | None:
        content, version = sighting.content, sighting.version
        if isinstance(content, Record) and isinstance(version, str):
            held = content.state is State.HELD
            return (content, version) if held and content.owner == owner else None
        return None

    def claim(self: Claim, sighting: Sighting) -> Finding:
        attempts = [sent for _expect, sent in self._attempts.values()]
        found, ours = claim_saw(self, sighting), named(sighting, self.owner)
        return Grant(*ours, attempts[-1]) if ours and attempts else found

    def tenancy(self: Tenancy, sighting: Sighting) -> Standing:
        sents, ours = list(self._renewals.values()), named(sighting, self.record.owner)
        return self._adopt(*ours, sents[-1]) if ours and sents else tenancy_saw(self, sighting)

    patch.setattr(Claim, "saw", claim)
    patch.setattr(Tenancy, "saw", tenancy)


def sent_of_the_last_attempt(patch: pytest.MonkeyPatch) -> None:
    claim_saw, tenancy_saw = Claim.saw, Tenancy.saw

    def claim(self: Claim, sighting: Sighting) -> Finding:
        last = max((sent for _expect, sent in self._attempts.values()), default=0.0)
        found = claim_saw(self, sighting)
        return evolve_grant(found, last) if isinstance(found, Grant) else found

    def tenancy(self: Tenancy, sighting: Sighting) -> Standing:
        last = max(self._renewals.values(), default=0.0)
        found = tenancy_saw(self, sighting)
        return Landed(last) if isinstance(found, Landed) else found

    def evolve_grant(grant: Grant, sent: float) -> Grant:
        return evolve(grant, sent=sent)

    patch.setattr(Claim, "saw", claim)
    patch.setattr(Tenancy, "saw", tenancy)


def only_the_last_acquisition_remembered(patch: pytest.MonkeyPatch) -> None:
    draft = Claim.draft

    def forgetful(self: Claim, *args: Any) -> Draft:
        self._attempts.clear()
        return draft(self, *args)

    patch.setattr(Claim, "draft", forgetful)


def only_the_last_renewal_remembered(patch: pytest.MonkeyPatch) -> None:
    renewal = Tenancy.renewal

    def forgetful(self: Tenancy, *args: Any) -> Draft:
        self._renewals.clear()
        return renewal(self, *args)

    patch.setattr(Tenancy, "renewal", forgetful)


def expires_trusted(patch: pytest.MonkeyPatch) -> None:
    judge = rules.judge

    def trusting(sighting: Sighting) -> Free | Held:
        content, now = sighting.content, sighting.snapshot.now
        if isinstance(content, Record) and content.state is State.HELD and now is not None:
            expires = moment(content.expires)
            assert expires is not None
            if World.epoch(now.earliest) >= expires:
                return Free("expired", sighting.version, content, now)
        return judge(sighting)

    patch.setattr(rules, "judge", trusting)


def a_break_that_frees_at_once(patch: pytest.MonkeyPatch) -> None:
    broken = rules.broken

    def hasty(*args: Any, now: bool) -> Record:
        return broken(*args, now=True)

    patch.setattr(rules, "broken", hasty)


def deadline_from_the_reply(patch: pytest.MonkeyPatch) -> None:
    claim_landed, tenancy_landed = Claim.landed, Tenancy.landed

    def claim(self: Claim, draft: Draft, version: Version) -> Grant:
        return claim_landed(self, evolve(draft, sent=_now()), version)

    def tenancy(self: Tenancy, draft: Draft, version: Version) -> Landed:
        return tenancy_landed(self, evolve(draft, sent=_now()), version)

    patch.setattr(Claim, "landed", claim)
    patch.setattr(Tenancy, "landed", tenancy)


def observation_from_the_sending(patch: pytest.MonkeyPatch) -> None:
    first_seen = Known.first_seen

    def hasty(self: Known, version: Version, arrived: float) -> float:
        process = World.running
        assert process is not None
        return first_seen(self, version, process.asked)

    patch.setattr(Known, "first_seen", hasty)


def a_late_answer_extends(patch: pytest.MonkeyPatch) -> None:
    def prolong(self: Lease, sent: float) -> bool:
        self._end = None
        self._deadline = max(self._deadline, sent + self._assured_from_sent)
        return True

    patch.setattr(Lease, "prolong", prolong)


def a_conflict_proves_it_dead(patch: pytest.MonkeyPatch) -> None:
    tenancy_saw = Tenancy.saw

    def saw(self: Tenancy, sighting: Sighting) -> Standing:
        self._renewals.popitem()
        return tenancy_saw(self, sighting)

    patch.setattr(Tenancy, "saw", saw)


def observation_without_the_margin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        rules,
        "_left_by_observation",
        lambda sighting, content: sighting.since + content.ttl - sighting.arrived,
    )


def a_renewal_that_drops_the_request(patch: pytest.MonkeyPatch) -> None:
    """The holder's look must recognise its own: an older record of this hold, with a flag."""
    patch.setattr(Tenancy, "_is_last_landed", lambda self, content: False)


def versions_reused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Register, "cycle", 3)


WRONG_READINGS = [
    owner_in_place_of_write,
    sent_of_the_last_attempt,
    only_the_last_acquisition_remembered,
    only_the_last_renewal_remembered,
    expires_trusted,
    a_break_that_frees_at_once,
    versions_reused,
    deadline_from_the_reply,
    observation_from_the_sending,
    a_late_answer_extends,
    a_conflict_proves_it_dead,
    observation_without_the_margin,
    a_renewal_that_drops_the_request,
]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("wrong", WRONG_READINGS, ids=lambda wrong: wrong.__name__)
def test_a_wrong_reading_is_found(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong(monkeypatch)
    with pytest.raises(Violation):
        _search()


def _search() -> None:
    blind = Weather(ticking=False)
    for seed in range(2_000):
        duel(seed)
        duel(seed, blind)
        if seed % 10 == 0:
            walk(seed)


# --- The state machine -----------------------------------------------------------------------

PROCESSES = st.integers(0, 2)
SECONDS = st.sampled_from([0.01, 0.7, 2.5, 4.9, 10.0, 13.0, 27.0, 30.0, 33.1])


class Protocol(RuleBasedStateMachine):
    """As the walks, but moved by hypothesis, which makes what it finds small.

    The network is fast until a rule makes it slow for someone; then each request is moved by
    hand.
    """

    @initialize(
        seed=st.integers(0, 2**16),
        weather=st.sampled_from([Weather(), Weather(width=0.5, skew=2.0), Weather(ticking=False)]),
    )
    def begin(self, seed: int, weather: Weather) -> None:
        self.world = World(seed, weather)
        self.slow: set[str] = set()
        self.world.fate = lambda message: (
            () if message.sender is not None and message.sender.name in self.slow else None
        )

    def process(self, number: int) -> Process:
        return self.world.processes[number]

    @rule(
        number=PROCESSES,
        once=st.booleans(),
        work=st.sampled_from([0.5, 15.0, 100.0]),
        stubborn=st.booleans(),
    )
    def start(self, number: int, once: bool, work: float, stubborn: bool) -> None:
        self.world.start(self.process(number), once=once, work=work, stubborn=stubborn)

    @rule(seconds=SECONDS)
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule()
    def advance_to_next(self) -> None:
        self.world.advance_to_next()

    @rule(number=PROCESSES)
    def make_slow_or_fast(self, number: int) -> None:
        self.slow ^= {self.process(number).name}

    @precondition(lambda self: self.world.flying)
    @rule(
        which=st.integers(0, 20),
        move=st.sampled_from(
            [World.apply, World.answer, World.apply, World.answer, World.fail, World.refuse]
        ),
    )
    def move_a_request(self, which: int, move: Move) -> None:
        move(self.world, self.world.flying[which % len(self.world.flying)])
        self.world.advance(0.0)

    @rule(number=PROCESSES)
    def pause_or_resume(self, number: int) -> None:
        process = self.process(number)
        (self.world.resume if process.paused else self.world.pause)(process)

    @rule(number=PROCESSES)
    def kill(self, number: int) -> None:
        self.world.kill(self.process(number))

    @rule(number=PROCESSES)
    def cancel(self, number: int) -> None:
        self.world.cancel(self.process(number))

    @rule(number=PROCESSES)
    def ask(self, number: int) -> None:
        self.world.ask(self.process(number))

    @rule()
    def release_again(self) -> None:
        self.world.release_again()

    @rule(how=st.sampled_from(["break", "hand over", "break now"]))
    def operate(self, how: str) -> None:
        if how == "hand over":
            self.world.request_handover()
        else:
            self.world.break_lease(now=how == "break now")

    @invariant()
    def one_believes_at_most(self) -> None:
        if hasattr(self, "world"):
            self.world.check_believed()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.make_peace()


TestProtocol = Protocol.TestCase
TestProtocol.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)

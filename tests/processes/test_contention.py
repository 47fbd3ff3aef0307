"""Several processes on one file: in turn, each call once, and nobody left out."""

from __future__ import annotations

import threading
from collections import Counter

from processes.kit_processes import Crew, Post, Report, check_order
from tako_sync import campaign
from tako_sync.ctx import Ctx
from tako_sync.flag import Flag

LONG = 60.0
"""A ttl that no test waits for."""


def requests_after(moment: float, reports: list[Report]) -> list[str]:
    return [one["op"] for one in reports if one["what"] == "request" and one["at"] > moment]


# --- Many short calls ----------------------------------------------------------------------


def do_many(post: Post, path: str, calls: int) -> None:
    lock = post.lock(path, LONG, 0.03)
    post.report("ready")
    post.order()
    for number in range(calls):

        def body(ctx: Ctx, number: int = number) -> int:
            with post.running(ctx):
                post.report("ran", number=number)
            return number

        post.report("returned", number=number, value=lock.do(body))


def test_four_processes_with_many_short_calls_never_overlap_and_run_each_once(
    crew: Crew, path: str
) -> None:
    calls = 20
    workers = [crew.start(do_many, path, calls) for _ in range(4)]
    for worker in workers:
        worker.expect("ready")
    for worker in workers:
        worker.tell("go")
    for worker in workers:
        worker.ends_well()
        expected = Counter(range(calls))
        assert Counter(one["number"] for one in worker.all("ran")) == expected
        assert Counter(one["value"] for one in worker.all("returned")) == expected
        assert not worker.all("Lost")
    found = check_order(crew.reports)
    assert len(found) == 4 * calls
    assert {run.who for run in found} == {worker.name for worker in workers}


# --- From one process to another -------------------------------------------------------------


def hold_until_told(post: Post, path: str, poll: float) -> None:
    lock = post.lock(path, LONG, poll)

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            post.order()

    lock.do(body)
    post.report("done")


def test_after_a_clean_release_the_next_poll_of_another_process_gets_in(
    crew: Crew, path: str
) -> None:
    poll = 0.5
    first = crew.start(hold_until_told, path, poll)
    first.expect("begin")
    second = crew.start(hold_until_told, path, poll)
    second.expect("Waiting")
    first.tell("end")
    released = first.expect("Released")
    began = second.expect("begin")
    # One look, at most, and the write. A look under way may have seen the release already.
    after = requests_after(released["at"], second.reports)
    assert after in (["read", "write"], ["write"])
    assert second.all("Acquired")[0]["how"] == "released"
    assert began["at"] - released["at"] <= 1.25 * poll + 20, "and it does not wait for an expiry"
    second.tell("end")
    second.ends_well()
    first.ends_well()
    assert len(check_order(crew.reports)) == 2


def test_two_processes_hand_over_to_and_fro(crew: Crew, path: str) -> None:
    poll = 0.1
    fences = []
    holder = crew.start(hold_until_told, path, poll)
    fences.append(holder.expect("begin")["fence"])
    for _ in range(3):
        heir = crew.start(hold_until_told, path, poll)
        heir.expect("Waiting")
        holder.tell("end")
        fences.append(heir.expect("begin")["fence"])
        holder.ends_well()
        holder = heir
    holder.tell("end")
    holder.ends_well()
    assert fences == sorted(set(fences))
    assert len(check_order(crew.reports)) == 4


# --- Against a process that never stops --------------------------------------------------------


def hold_back_to_back(post: Post, path: str, poll: float, for_long: float) -> None:
    """Hold again and again, with next to no pause, until told that it is enough."""
    campaign._BACK_TO_BACK = for_long  # type: ignore[misc]  # ten seconds, for a test in a hurry
    lock, enough = post.lock(path, LONG, poll), Flag()
    threading.Thread(target=lambda: post.order() and enough.set(), daemon=True).start()

    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            ctx.wait(0.02)

    while not enough.is_set():
        lock.do(body)


def wait_for_it(post: Post, path: str, poll: float) -> None:
    def body(ctx: Ctx) -> None:
        with post.running(ctx):
            pass

    post.lock(path, LONG, poll).do(body)


def test_a_process_that_holds_back_to_back_lets_a_waiter_in_within_a_few_polls(
    crew: Crew, path: str
) -> None:
    poll = 0.2
    greedy = crew.start(hold_back_to_back, path, poll, 1.0, name="greedy")
    greedy.expect("begin")
    patient = crew.start(wait_for_it, path, poll, name="patient")
    patient.expect("begin")
    patient.ends_well()
    looks = [one for one in patient.all("request") if one["op"] == "read"]
    assert 1 <= len(looks) <= 20
    greedy.tell("enough")
    greedy.ends_well()
    found = check_order(crew.reports)
    assert found[0].who == "greedy"
    assert [run.who for run in found].count("patient") == 1

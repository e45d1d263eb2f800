"""Which workers are a group (those of a host, or so many as were asked for), and which have the same place in theirs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from stretto.collectives.group import Group
from stretto.job import Job
from stretto.launching.peers import Peer


def groups_of(peers: Sequence[Peer], group_size: int | None) -> list[list[int]]:
    """The ranks of each group, in the order of their first ranks: the workers of a host, or `group_size` that follow each other.
    The last group may be smaller."""
    if group_size is not None:
        return [list(range(first, min(first + group_size, len(peers)))) for first in range(0, len(peers), group_size)]
    ranks: dict[str, list[int]] = defaultdict(list)
    for peer in peers:
        ranks[peer.host].append(peer.rank)
    return list(ranks.values())


def group_of(job: Job, group_size: int | None) -> Group:
    """This worker's. All workers call it together."""
    mine = next(group for group in groups_of(job.peers, group_size) if job.rank in group)
    return job.world.alone() if mine == [job.rank] else job.world.sub(mine)


class Hosts:
    """The groups that one worker belongs to: `within` its host, and `across` hosts. (With `group_size` a host is that many
    workers that follow each other, wherever they are.)

    The k-th worker of each host is in the k-th group across hosts. Where hosts have different numbers of workers, those beyond
    the smallest number have nobody to speak to: their group across hosts has no other member, and they get no share.
    """

    def __init__(self, job: Job, group_size: int | None = None) -> None:
        hosts = groups_of(job.peers, group_size)
        number_of = {rank: number for number, host in enumerate(hosts) for rank in host}
        self.numbers = [number_of[rank] for rank in range(job.world_size)]  # of each worker's host
        mine = hosts[self.numbers[job.rank]]
        place = mine.index(job.rank)
        self.num_hosts = len(hosts)
        self.num_speakers = min(map(len, hosts))
        self.are_even = {len(each) for each in hosts} == {self.num_speakers}
        speaks = place < self.num_speakers
        self.within: Group = job.world.sub(mine)
        self.across: Group = job.world.sub([each[place] for each in hosts] if speaks else [job.rank])

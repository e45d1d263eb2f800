"""Which workers share a host, and which have the same place on theirs."""

from __future__ import annotations

from collections import defaultdict

from stretto.collectives.group import Group
from stretto.job import Job


class Hosts:
    """The groups that one worker belongs to: `within` its host, and `across` hosts.

    The k-th worker of each host is in the k-th group across hosts. Where hosts have different numbers of workers, those beyond
    the smallest number have nobody to speak to: their group across hosts has no other member, and they get no share.
    """

    def __init__(self, job: Job) -> None:
        ranks: dict[str, list[int]] = defaultdict(list)
        for peer in job.peers:
            ranks[peer.host].append(peer.rank)
        mine = ranks[job.peers[job.rank].host]
        place = mine.index(job.rank)
        self.num_hosts = len(ranks)
        names = list(ranks)
        self.numbers = [names.index(peer.host) for peer in job.peers]  # of each worker's host, in the order of their first ranks
        self.num_speakers = min(map(len, ranks.values()))
        self.are_even = {len(each) for each in ranks.values()} == {self.num_speakers}
        speaks = place < self.num_speakers
        self.within: Group = job.world.sub(mine)
        self.across: Group = job.world.sub([each[place] for each in ranks.values()] if speaks else [job.rank])

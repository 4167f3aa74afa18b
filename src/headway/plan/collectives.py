"""What collectives cost on a cluster of fast domains joined by a network: volume, bandwidth, latency.

Volumes per rank, S the whole buffer in bytes and n ranks: all-reduce 2(n-1)/n·S, all-gather, reduce-scatter and
all-to-all (n-1)/n·S (Thakur, Rabenseifner and Gropp 2005; NCCL's "bus bandwidth" is these volumes over the time).
The latency term puts small messages on the slope of NCCL's bandwidth curve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headway.plan.cluster import Cluster
from headway.plan.constants import Constants


@dataclass(frozen=True)
class Group:
    """`size` ranks that are `stride` apart; `inside` of them share one fast domain."""

    size: int
    stride: int
    inside: int

    @property
    def crosses(self) -> bool:
        """Whether traffic leaves the fast domain."""
        return self.inside < self.size


@dataclass(frozen=True)
class Network:
    """The bandwidths a group sees, in bytes/s, and the latency of one doubling of ranks, in seconds."""

    link: float
    inter: float
    hop: float
    hop_inside: float
    domain: int
    rail: int
    oversubscription: float
    in_network: bool = False

    @classmethod
    def of(cls, cluster: Cluster, constants: Constants) -> Network:
        return cls(
            link=cluster.device.link * constants.intra,
            inter=cluster.inter_node * constants.inter * (constants.onloaded if cluster.onloaded else 1.0),
            hop=constants.hop if cluster.hop is None else cluster.hop,
            hop_inside=constants.hop_inside if cluster.hop_inside is None else cluster.hop_inside,
            domain=max(1, min(cluster.domain, cluster.gpus)),
            rail=cluster.rail,
            oversubscription=cluster.oversubscription,
            in_network=cluster.in_network,
        )

    def group(self, size: int, stride: int) -> Group:
        """Ranks are laid out TP innermost, then CP and EP, DP, PP outermost; `stride` is the product inside."""
        return Group(size, stride, max(1, min(size, self.domain // max(1, stride))))

    def ring(self, group: Group) -> float:
        """Bus bandwidth of a ring: between domains as many network ports as ranks of the group share a domain."""
        if not group.crosses:
            return self.link
        return min(self.link, self._port(group) * group.inside)

    def _port(self, group: Group) -> float:
        """One rank's share of the network; beyond the rail it crosses the oversubscribed spine."""
        spine = self.rail and group.size * group.stride > self.rail
        return self.inter / self.oversubscription if spine else self.inter

    def latency(self, group: Group) -> float:
        """Seconds of a collective on an empty message: a tree's, taken wherever a ring's n - 1 hops are more."""
        if group.size < 2:
            return 0.0
        return (self.hop if group.crosses else self.hop_inside) * math.log2(group.size)

    def gather(self, size: float, group: Group) -> float:
        """Seconds of an all-gather or reduce-scatter of a whole buffer of `size` bytes."""
        if group.size < 2:
            return 0.0
        return self.latency(group) + (group.size - 1) / group.size * size / self.ring(group)

    def all_reduce(self, size: float, group: Group) -> float:
        """Seconds of an all-reduce of `size` bytes: two halves of a ring, or once up and down through the switches."""
        if self.in_network and group.size > 2:
            return self.latency(group) + size / self.ring(group)
        return 2 * self.gather(size, group)

    def all_to_all(self, size: float, group: Group, copies: int = 1) -> float:
        """Seconds of an all-to-all in which each rank holds `size` bytes; its share for other domains uses its port.

        `size` holds `copies` of each token; a domain gets one of them over the network and spreads it inside (DeepEP).
        """
        if group.size < 2:
            return 0.0
        domains = group.size / group.inside
        reached = domains * (1 - (1 - 1 / domains) ** copies) / copies if domains > 1 else 1.0
        outside = (group.size - group.inside) / group.size * size * min(1.0, reached)
        within = (group.inside - 1) / group.size * size
        return self.latency(group) + max(within / self.link, outside / self._port(group) if group.crosses else 0.0)

    def send(self, size: float, crosses: bool) -> float:
        """Seconds of one point-to-point message."""
        return (self.hop + size / self.inter) if crosses else (self.hop_inside + size / self.link)

"""Explains the state of a node to people: a view of every peer, and why a peer is alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ringfort.cluster.core.link_kinds import LinkKind
from ringfort.cluster.core.other_clusters import HOW_TO_JOIN, describe_other_clusters
from ringfort.cluster.core.peer_messages import Epoch, Hello
from ringfort.cluster.core.proposer import TOO_FEW
from ringfort.cluster.discovery.interfaces import host_of
from ringfort.cluster.net.control import Control
from ringfort.cluster.net.host import clock
from ringfort.cluster.view import PeerView

MAX_LISTED: Final = 6
"""Entries of each list that are shown."""


def view_peers(control: Control) -> tuple[PeerView, ...]:
    """Return this peer and all that are connected: members first, in the order of their ranks."""
    core, setup = control.core, control.setup
    hellos: dict[str, Hello] = {setup.peer: Hello(core.me, setup.name, setup.version, setup.config.run)}
    hellos.update({contact.peer: contact.hello for contact in core.contacts if contact.hello is not None})
    views = [_view(control, peer, hello) for peer, hello in hellos.items()]
    return tuple(
        sorted(views, key=lambda view: (not view.is_member, view.run, view.ranks, not view.is_self, view.peer))
    )


def _view(control: Control, peer: str, hello: Hello) -> PeerView:
    core, epoch = control.core, control.core.epoch_of(peer)
    leader = core.leader if hello.run == control.setup.config.run else None
    is_self = peer == control.setup.peer
    contact = core.contacts.get(peer)
    link = None if contact is None else control.links.open.get(contact.link)
    bandwidths = control.link_metrics.bandwidths(peer)
    machine = control.link_metrics.node(peer)
    remote = control.link_metrics.address(peer) or (link.remote if link else "")
    address = next(iter(control.listener.addresses), "") if is_self else _listening_address(remote, hello)
    interface = control.connector.choice.interface_at(address if is_self else remote)
    return PeerView(
        peer=peer,
        name=hello.name,
        host=hello.member.host,
        address=address,
        interface="" if interface is None else interface.name,
        kind=LinkKind.UNKNOWN if interface is None else interface.kind,
        round_trip=core.health.round_trip(peer),
        bandwidth=bandwidths[1] if bandwidths else None,
        bandwidth_range=(bandwidths[0], bandwidths[2]) if bandwidths else None,
        health=core.health.status(peer),
        is_busy=core.health.is_busy(peer),
        is_self=is_self,
        is_leader=peer == (leader or (epoch and epoch.leader)),
        is_member=epoch is not None and peer in epoch.peers,
        version=hello.version,
        run=hello.run,
        slots=hello.member.slots,
        is_witness=hello.member.witness,
        ranks=_ranks(epoch, peer),
        program=machine.program,
        step=contact.beat.step if contact else 0,
        uptime=None if machine.started is None else clock() - machine.started,
        accelerators=tuple(one.name for one in machine.accelerators),
    )


def _listening_address(remote: str, hello: Hello) -> str:
    """Return the address that the peer listens on at the host of `remote`, whose port may be an ephemeral one."""
    host = host_of(remote).partition("%")[0]  # without its scope, which means nothing on another machine
    there = (address for address in hello.member.addresses if host and host_of(address).partition("%")[0] == host)
    return next(there, remote)


def _ranks(epoch: Epoch | None, peer: str) -> tuple[int, ...]:
    if epoch is None or peer not in epoch.peers:
        return ()
    first = epoch.first_rank(peer)
    return tuple(range(first, first + epoch.members[epoch.peers.index(peer)].slots))


def why_alone(control: Control) -> str:
    """Say who was seen, who was refused and why, and what to try."""
    connector, recent = control.connector, control.recent
    interfaces = [f"{one.name} ({one.addresses[0]})" for one in connector.choice.interfaces]
    run = control.setup.config.run
    views = [view for view in view_peers(control) if not view.is_self]
    return in_words(
        seen=[_seen(view, run) for view in views],
        is_running=control.core.epoch is None and any(view.is_member and view.run == run for view in views),
        gone=list(recent.lost.values()),
        refused=[*connector.refusals, *recent.refused],
        no_answer=[f"{address} ({why})" for address, why in connector.directory.troubles()],
        other_clusters=connector.other_clusters(),
        waiting_for=recent.waiting_for,
        disk="" if control.votes.trouble is None else str(control.votes.trouble),
        troubles=[f"{trouble.what}: {trouble.fix}" for trouble in connector.troubles.values()],
        listening=", ".join(interfaces) or "no interface",
        port=control.listener.port,
    )


def _seen(view: PeerView, run: str) -> str:
    """Describe a connected peer; `run` is this peer's own."""
    other = (
        "" if view.run == run or view.role == "observer" else f" of the run {view.run!r}" if view.run else " of no run"
    )
    return f"{view.name or view.peer} at {view.address} ({view.role}{other}, {view.health.value})"


def in_words(
    *,
    seen: Sequence[str],
    gone: Sequence[str],
    refused: Sequence[str],
    no_answer: Sequence[str],
    other_clusters: Sequence[str],
    waiting_for: str,
    troubles: Sequence[str],
    listening: str,
    port: int = 0,
    disk: str = "",
    is_running: bool = False,
) -> str:
    """Return one line for each thing that is known, then what to try. Pure.

    `listening` are the interfaces, and `port` is 0 for a viewer, which only connects to others. `disk` says why votes
    cannot be written. `is_running`: the peers in `seen` form a group without this one.
    """
    if not seen and waiting_for.endswith(TOO_FEW):
        waiting_for = ""  # nobody is here, as the first line says
    lines = [
        *_listed("seen", seen),
        *_listed("was here and is gone", gone),
        *([] if seen or gone else ["no other peer was seen"]),
        *_listed("refused", refused),
        *_listed("no answer from", no_answer),
        *(
            [describe_other_clusters(other_clusters), f"  if they should be one cluster: {HOW_TO_JOIN}"]
            if other_clusters
            else []
        ),
        *(_sentences(f"no group yet: {waiting_for}") if waiting_for else []),
        *(_sentences(disk) if disk else []),
        *troubles,
        f"this machine listens on {listening}, port {port}" if port else f"this command looks on {listening}",
    ]
    if is_running:
        lines.append("to try: wait; they are a group already, and let others in when their run is over")
    else:
        where = "on more machines" if seen else "on the other machines"
        lines.append(f"to try: start the same program {where}; `ringfort doctor` here and there;")
        lines.append("        --peer HOST (or RINGFORT_PEERS) where the network blocks multicast")
    return "\n".join(lines)


def _listed(title: str, items: Sequence[str]) -> list[str]:
    """Put a single item beside the title, and several on a line each."""
    if len(items) <= 1:
        return [f"{title}: {item}" for item in items]
    more = [f"  and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"{title}:", *(f"  {item}" for item in items[:MAX_LISTED]), *more]


def _sentences(text: str) -> list[str]:
    """Put each sentence on a line of its own."""
    first, *rest = text.split(". ")
    return [first, *(f"  {sentence}" for sentence in rest)]

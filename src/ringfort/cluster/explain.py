"""What a node knows at one moment, for people: a view of every peer, and why nobody came."""

from __future__ import annotations

from ringfort.cluster.control import Control
from ringfort.cluster.kinds import LinkKind
from ringfort.cluster.messages import Epoch, Hello
from ringfort.cluster.view import PeerView
from ringfort.config import parse_address
from ringfort.errors import ConfigError


def view_peers(control: Control) -> tuple[PeerView, ...]:
    """This peer and all in sight; members first, in the order of their ranks."""
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
    line = None if contact is None else control.lines.get(contact.link)
    best = control.speeds.best(peer)
    where = best[0] if best else line.where if line else ""
    address = next(iter(control.entrance.addresses), "") if is_self else _door(where, hello) if where else ""
    interface = control.finder.interface_of(address if is_self else where)
    return PeerView(
        peer=peer,
        name=hello.name,
        host=hello.member.host,
        address=address,
        interface="" if interface is None else interface.name,
        kind=LinkKind.UNKNOWN if interface is None else interface.kind,
        round_trip=core.health.round_trip(peer),
        bandwidth=best[1] if best else None,
        health=core.health.status(peer),
        is_busy=core.health.is_busy(peer),
        is_self=is_self,
        is_leader=peer == (leader or (epoch and epoch.leader)),
        is_member=epoch is not None and peer in epoch.peers,
        version=hello.version,
        run=hello.run,
        slots=hello.member.slots,
        ranks=_ranks(epoch, peer),
    )


def _door(where: str, hello: Hello) -> str:
    """Where the peer is found: where its link comes from, but at the port it listens on and not at a passing one."""
    host = _host(where)
    return next((address for address in hello.member.addresses if _host(address) == host), where)


def _host(address: str) -> str:
    """Without scope and port; empty for what is no address, since peers may say anything."""
    try:
        return parse_address(address)[0].partition("%")[0]
    except ConfigError:
        return ""


def _ranks(epoch: Epoch | None, peer: str) -> tuple[int, ...]:
    if epoch is None or peer not in epoch.peers:
        return ()
    first = epoch.first_rank(peer)
    return tuple(range(first, first + epoch.members[epoch.peers.index(peer)].slots))


def why_alone(control: Control) -> str:
    """Who was seen, who was refused and why, and what to try."""
    parts = [_seen(control)]
    unanswered = [f"{address} ({why})" for address, why in control.finder.directory.troubles()]
    if unanswered:
        parts.append(f"no answer from {'; '.join(unanswered[:8])}")
    if control.finder.refusals:
        parts.append(f"refused: {'; '.join(control.finder.refusals)}")
    if control.disk_trouble is not None:
        parts.append(str(control.disk_trouble))
    if control.events:
        parts.append(f"reported: {'; '.join(control.events)}")
    others = control.finder.others()
    if others:
        parts.append(
            f"{others} peer{'s' if others > 1 else ''} of other clusters announce themselves here; if they should be "
            "in this one, run `ringfort key show` on one machine and `ringfort key join` on the others"
        )
    parts += [f"{trouble.what}: {trouble.fix}" for trouble in control.finder.troubles.values()]
    parts.append(_advice(control))
    return ". ".join(parts)


def _seen(control: Control) -> str:
    views = [view for view in view_peers(control) if not view.is_self]
    if not views:
        return "no other peer was seen"
    return "seen: " + ", ".join(
        f"{view.name or view.peer} at {view.address} ({view.role}, {view.health.value})" for view in views
    )


def _advice(control: Control) -> str:
    where = ", ".join(f"{one.name} ({one.addresses[0]})" for one in control.finder.choice.interfaces) or "no interface"
    port = control.entrance.port
    return (
        f"This peer listens on {where}, port {port}. To try: start the same program on the other machines; `ringfort "
        "doctor`; name a peer by address (--peer, peers=, RINGFORT_PEERS); choose the interface (RINGFORT_INTERFACES)"
    )

"""The controller's lease: its holder and expiry."""

from sqlalchemy import Connection, delete, insert, select, update

from service.control.store import tables

ROW_VERSION = 1
CONTROLLER = "controller"


def take_lease(tx: Connection, holder: str, time_us: int, lease_us: int) -> bool:
    """Take or renew the lease for `holder`; False while another holds it."""
    lease = tables.leases.c
    row = tx.execute(
        select(lease.holder, lease.expires_at).where(lease.name == CONTROLLER).with_for_update()
    ).one_or_none()
    if row is None:
        tx.execute(
            insert(tables.leases).values(
                name=CONTROLLER, version=ROW_VERSION, holder=holder, expires_at=time_us + lease_us
            )
        )
        return True
    if row.holder != holder and row.expires_at > time_us:
        return False
    tx.execute(
        update(tables.leases)
        .where(lease.name == CONTROLLER)
        .values(holder=holder, expires_at=time_us + lease_us, version=ROW_VERSION)
    )
    return True


def holds_lease(tx: Connection, holder: str) -> bool:
    """Whether `holder` has the lease; stable within a write transaction."""
    lease = tables.leases.c
    query = select(lease.holder).where(lease.name == CONTROLLER).with_for_update()
    return tx.execute(query).scalar_one_or_none() == holder


def lease_holder(tx: Connection, time_us: int) -> str | None:
    lease = tables.leases.c
    query = select(lease.holder).where(lease.name == CONTROLLER, lease.expires_at > time_us)
    return tx.execute(query).scalar_one_or_none()


def release_lease(tx: Connection, holder: str) -> None:
    lease = tables.leases.c
    tx.execute(delete(tables.leases).where(lease.name == CONTROLLER, lease.holder == holder))

"""Mark of a recovered attempt that its cluster has not confirmed yet."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    op.add_column("jobs", sa.Column("unconfirmed_since", sa.BigInteger()))

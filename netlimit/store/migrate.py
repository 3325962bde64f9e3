"""Bringing a database to the schema of this code, with the migrations of the installed package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sqlalchemy import Connection

from netlimit.packages import find_package
from netlimit.store.engine import schema
from netlimit.store.tables import SCHEMA

if TYPE_CHECKING:  # it takes long to load, and is needed once
    from alembic.config import Config


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, found by import and not by directory; migrations run on `connection`."""
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(find_package("migrations")))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Take every migration that the database lacks, in the transaction of `connection`."""
    if schema(connection) == SCHEMA:
        return
    from alembic import command

    command.upgrade(alembic_config(connection), "head")

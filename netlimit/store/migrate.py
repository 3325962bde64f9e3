"""Bringing a database to the schema of this code, with the migrations of the installed package."""

from __future__ import annotations

from importlib.resources import files

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection


def alembic_config(connection: Connection | None = None) -> Config:
    """Alembic's configuration, found by import and not by directory; migrations run on `connection`."""
    config = Config()
    config.set_main_option("script_location", str(files("migrations")))
    config.attributes["connection"] = connection
    return config


def upgrade(connection: Connection) -> None:
    """Take every migration that the database lacks, in the transaction of `connection`."""
    command.upgrade(alembic_config(connection), "head")

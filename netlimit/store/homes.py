"""Where in a database of PostgreSQL the tables are, their home, and who else may make something there.

What a statement names without a schema, be it `=`, PostgreSQL looks for in all schemas of the session's path, and takes
what fits best, whoever has made it: it runs with the rights of who asks (CVE-2018-1058). So sessions look for it among
PostgreSQL's own alone, and each table is named with its schema. Migrations name theirs without: they run only where
nobody else may make anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Column, Connection, MetaData, String, Table

from netlimit.errors import StoreError
from netlimit.several import name_some

versions = Table("alembic_version", MetaData(), Column("version_num", String(32), nullable=False, primary_key=True))
"""What Alembic keeps in a database; where it is, all tables are."""

_HOME, _PATH = "netlimit_home", "netlimit_path"
"""Under what is kept of a connection where the tables are, and where the server would have looked for them."""
_MOST_NAMED = 3

_LEAVE = "SELECT pg_catalog.current_schemas(false), pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false)"
"""The first that a session asks: it names nothing that others could have made."""

_FIND = """
SELECT n.nspname, o.rolname,
  o.oid = d.datdba OR o.rolsuper OR o.oid = me.oid OR (NOT me.rolsuper AND pg_has_role(me.oid, o.oid, 'MEMBER'))
FROM unnest(%s::text[]) WITH ORDINALITY AS p (name, place)
  JOIN pg_namespace AS n ON n.nspname = p.name
  JOIN pg_class AS c ON c.relnamespace = n.oid AND c.relname = %s
  JOIN pg_roles AS o ON o.oid = c.relowner
  JOIN pg_roles AS me ON me.rolname = current_user
  JOIN pg_database AS d ON d.datname = current_database()
ORDER BY p.place
"""

_STRANGERS = """
SELECT r.rolname, may.make
FROM pg_roles AS r
  JOIN pg_namespace AS n ON n.nspname = %s
  JOIN pg_roles AS me ON me.rolname = current_user
  JOIN pg_database AS d ON d.datname = current_database()
  CROSS JOIN LATERAL (
    SELECT r.rolcanlogin AND has_database_privilege(r.oid, d.oid, 'CONNECT') AND EXISTS (
        SELECT FROM aclexplode(n.nspacl) AS a
        WHERE a.privilege_type = 'CREATE' AND (a.grantee = 0 OR pg_has_role(r.oid, a.grantee, 'MEMBER'))),
      EXISTS (SELECT FROM pg_proc WHERE pronamespace = n.oid AND pg_has_role(r.oid, proowner, 'MEMBER'))
      OR EXISTS (SELECT FROM pg_operator WHERE oprnamespace = n.oid AND pg_has_role(r.oid, oprowner, 'MEMBER'))
  ) AS may (make, have_run)
WHERE (may.make OR may.have_run) AND NOT r.rolsuper AND r.oid <> me.oid
  AND NOT pg_has_role(r.oid, n.nspowner, 'MEMBER') AND NOT pg_has_role(r.oid, d.datdba, 'MEMBER')
  AND (me.rolsuper OR NOT pg_has_role(me.oid, r.oid, 'MEMBER'))
ORDER BY r.rolname
"""
"""Who is neither the user, nor could do anything anyway as a superuser or an owner of the database or the schema."""


class Exposure(NamedTuple):
    """What others could do, and what ends that, in sentences."""

    what: str
    advice: str


def settle(connection: Any, info: dict[Any, Any], name: str) -> None:
    """Have the session of a new connection of the driver look among PostgreSQL's own alone, and note in its `info`
    where the tables are. Raises StoreError where only somebody else's are there; `name` is the database's."""
    info[_PATH] = connection.execute(_LEAVE).fetchone()[0]
    info[_HOME] = _find(connection, info[_PATH], name)


def _find(connection: Any, path: Sequence[str], name: str) -> str | None:
    found = connection.execute(_FIND, [path, versions.name]).fetchall()
    for schema, _owner, is_trusted in found:
        if is_trusted:
            return str(schema)
    for schema, owner, _ in found:
        raise StoreError(
            f"The table {schema}.{versions.name} of the database {name} belongs to {owner}, neither to this user nor "
            "to the database's owner, so that what runs there with this user's rights is not his to say. All parts of "
            "netlimit must come as the user who has run `netlimit db upgrade`; if nobody of yours has made that table, "
            "drop it.",
            "The tables of the database belong to somebody else.",
        )
    return None


def find_home(connection: Connection) -> str | None:
    """The schema in which the tables are; None where there are none yet, and for SQLite."""
    home: str | None = connection.info.get(_HOME)
    return home


def use_home(connection: Connection) -> None:
    """Have all tables be named with their schema."""
    home = find_home(connection)
    if home is not None:
        connection.execution_options(schema_translate_map={None: home})


def name_tables(connection: Connection, names: Iterable[str]) -> str:
    """Tables as a statement that is made by hand has to name them, with commas between."""
    home = find_home(connection)
    before = "" if home is None else f"{connection.dialect.identifier_preparer.quote(home)}."
    return ", ".join(f"{before}{name}" for name in names)


def enter(connection: Connection, name: str) -> None:
    """Have what names no schema be found, and made, where the tables are or are to be, until the transaction ends.
    Raises StoreError where others could have made something there."""
    path = connection.info[_PATH]
    home = find_home(connection) or (path[0] if path else None)
    if home is None:
        raise StoreError(
            f"The database {name} has no schema that its search_path names and this user may use; have its owner run "
            "`CREATE SCHEMA AUTHORIZATION` with the name of the user, and try again."
        )
    exposure = find_exposure(connection, home)
    if exposure is not None:
        raise StoreError(
            f"The database {name} is exposed: {exposure.what} Nothing was changed. {exposure.advice} Then try again.",
            "Others may have operators and functions run where the tables are.",
        )
    _go(connection, home)
    connection.info[_HOME] = home
    use_home(connection)


@contextmanager
def by_name(connection: Connection) -> Iterator[None]:
    """Have tables be found by their names alone meanwhile, as functions of triggers name them. What is asked meanwhile,
    by these too, must have operators of just its types among PostgreSQL's own, which come first."""
    home = find_home(connection)
    if home is None:
        yield
        return
    _go(connection, home)
    yield
    connection.exec_driver_sql("SET LOCAL search_path = pg_catalog, pg_temp")


def _go(connection: Connection, home: str) -> None:
    connection.exec_driver_sql(
        "SELECT pg_catalog.set_config('search_path', pg_catalog.quote_ident(%s) || ', pg_temp', true)", (home,)
    )


def look_again(connection: Connection, name: str) -> None:
    """Look where the tables are by now; raises StoreError where only somebody else's are there."""
    driver: Any = connection.connection.driver_connection
    connection.info[_HOME] = _find(driver, connection.info[_PATH], name)


def find_exposure(connection: Connection, home: str) -> Exposure | None:
    """By what others could have something run in a migration; None where nobody could."""
    driver: Any = connection.connection.driver_connection
    found = driver.execute(_STRANGERS, [home]).fetchall()
    makers = [role for role, may_make in found if may_make]
    if makers:
        return Exposure(
            f"In the schema {home} others ({name_some(makers, _MOST_NAMED)}) may make operators and functions, which "
            "would run with this user's rights while tables are made or changed.",
            f"Have the schema's owner or a superuser run `REVOKE CREATE ON SCHEMA {home} FROM PUBLIC` (and from each "
            "to whom it was granted by name), or keep them out by `REVOKE CONNECT ON DATABASE … FROM PUBLIC`.",
        )
    if found:
        owners = name_some([role for role, _ in found], _MOST_NAMED)
        return Exposure(
            f"In the schema {home} there are operators or functions of others ({owners}), "
            "which could run with this user's rights while tables are made or changed.",
            f"Look at them in psql (`\\df+ {home}.*`, `\\do+ {home}.*`), and drop them or move them to another schema.",
        )
    return None

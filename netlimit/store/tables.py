"""The tables. Portable between SQLite and PostgreSQL; `migrations/` makes them, and a test compares the two."""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Integer, MetaData, Table, Text, text

from netlimit.store.columns import Amount, Document, Flag, Moment, Small, Whole, Words

SCHEMA = "0014"
"""The migration that this code works with: the newest in `migrations/versions`."""

LARGEST = 2**63 - 1
"""The largest whole number that a column holds."""

Id = BigInteger().with_variant(Integer, "sqlite")
"""SQLite makes a column its row id only if the type is called INTEGER."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)

clock = Table(
    "clock",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("revision", Whole, nullable=False),
    Column("last_rule", Whole, nullable=False),
    Column("pruned", Whole, nullable=False),
    Column("oldest", Whole, nullable=False, server_default="0"),
    Column("audit_pruned", Whole, nullable=False, server_default="0"),
    Column("limits", Whole, nullable=False, server_default="0"),
    Column("stamp", Whole, nullable=False, server_default="0"),
    Column("limits_stamp", Whole, nullable=False, server_default="0"),
    Column("identity", Words),
)
"""One row. Every change of rules updates it first, so that changes queue up and commit in the order of revisions.
`last_rule` is the highest id ever given, `pruned` the newest revision of which tombstones may be gone, `oldest` the
oldest revision that can be returned to, `audit_pruned` the last audit line that may be gone, `limits` the revision of
the limiter's documents, which is none of the rules'. Numbers go on from an older one when a server that lags takes
another's place: `stamp` and `limits_stamp`, random with each change, tell one revision from another of its number.
`identity` are the random words that tell this database from others; those of a copy are of the database it was taken
from."""

rules = Table(
    "rules",
    metadata,
    Column("id", Id, primary_key=True, autoincrement=False),
    Column("revision", BigInteger, nullable=False),
    Column("target", Text, nullable=False),
    Column("action", Text, nullable=False),
    Column("direction", Text, nullable=False),
    Column("protocol", Text, nullable=False),
    Column("ports", Text, nullable=False),
    Column("source_ports", Text, nullable=False),
    Column("interface", Text),
    Column("rate", Text),
    Column("burst", BigInteger),
    Column("per", Text),
    Column("ceil", Text),
    Column("on_failure", Text, nullable=False),
    Column("enabled", Flag, nullable=False),
    Column("expires_at", Moment),
    Column("hosts", Text, nullable=False),
    Column("name", Text),
    Column("labels", Text, nullable=False),
    Column("comment", Text, nullable=False),
    Column("forced_by", Text),
    Column("identity", Text, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Index(None, "revision"),
    Index(None, "target"),
    Index(None, "identity", "revision"),
    Index(None, "name", unique=True, sqlite_where=text("name IS NOT NULL"), postgresql_where=text("name IS NOT NULL")),
)
"""`hosts` and `labels` are for reading; what is searched for stands in `rule_hosts` and `rule_labels` too."""

rule_hosts = Table(
    "rule_hosts",
    metadata,
    Column("host", Words, primary_key=True),
    Column("rule_id", Id, ForeignKey("rules.id", ondelete="CASCADE"), primary_key=True, index=True),
)

rule_labels = Table(
    "rule_labels",
    metadata,
    Column("key", Words, primary_key=True),
    Column("value", Words, primary_key=True),
    Column("rule_id", Id, ForeignKey("rules.id", ondelete="CASCADE"), primary_key=True, index=True),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("rule_id", Id, primary_key=True, autoincrement=False),
    Column("revision", Whole, nullable=False, index=True),
)

hosts = Table(
    "hosts",
    metadata,
    Column("host", Words, primary_key=True),
    Column("backend", Words, nullable=False),
    Column("applied_revision", Whole, nullable=False),
    Column("hz", Small, nullable=False),
    Column("capabilities", Document, nullable=False),
    Column("own", Document, nullable=False),
    Column("safe", Document, nullable=False),
    Column("notes", Document, nullable=False),
    Column("drift", Whole, nullable=False),
    Column("last_error", Words),
    Column("seen_at", Moment, nullable=False),
    Column("repairs", Document(none_as_null=True)),
    Column("applying", Document(none_as_null=True)),
    Column("desired", Whole, nullable=False, server_default="0"),
    Column("enforced", Whole, nullable=False, server_default="0"),
    Column("degraded", Whole, nullable=False, server_default="0"),
    Column("drifted", Whole, nullable=False, server_default="0"),
    Column("lifted", Whole, nullable=False, server_default="0"),
    Column("safe_reasons", Document(none_as_null=True)),
    Column("management", Document(none_as_null=True)),
    Column("faults", Whole, nullable=False, server_default="0"),
    Column("networks", Document(none_as_null=True)),
    Column("reporter", Words),
    Column("peers", Document(none_as_null=True)),
    Column("local", Document(none_as_null=True)),
    Column("refused", Words),
)
"""`repairs` are counts by kind; `applying` is the histogram of how long passes took."""

pauses = Table("pauses", metadata, Column("host", Words, primary_key=True))
"""A row for every gateway whose controller is to keep its hands off: only who pauses writes it, never a report."""

rule_states = Table(
    "rule_states",
    metadata,
    Column("host", Words, primary_key=True),
    Column("rule_id", Id, primary_key=True, index=True),
    Column("state", Words, nullable=False),
    Column("message", Words, nullable=False),
    Column("layer", Words),
)
"""`layer` is what enforces the rule, if it is not the back end of its host. No foreign key, here and in `counters`: a
controller may speak of a rule that was removed a moment ago. Readers join `rules`, and pruning tombstones sweeps up."""

counters = Table(
    "counters",
    metadata,
    Column("host", Words, primary_key=True),
    Column("rule_id", Id, primary_key=True, index=True),
    Column("matched_packets", Whole, nullable=False),
    Column("matched_bytes", Whole, nullable=False),
    Column("dropped_packets", Whole, nullable=False),
    Column("dropped_bytes", Whole, nullable=False),
    Column("raw_matched_packets", Whole, nullable=False),
    Column("raw_matched_bytes", Whole, nullable=False),
    Column("raw_dropped_packets", Whole, nullable=False),
    Column("raw_dropped_bytes", Whole, nullable=False),
    Column("delayed", Whole, nullable=False, server_default="0"),
    Column("raw_delayed", Whole, nullable=False, server_default="0"),
    Column("queued_packets", Whole, nullable=False, server_default="0"),
    Column("queued_bytes", Whole, nullable=False, server_default="0"),
    Column("since", Moment, nullable=False),
    Column("as_of", Moment, nullable=False),
)

assignments = Table(
    "assignments",
    metadata,
    Column("host", Words, primary_key=True),
    Column("rule_id", Id, primary_key=True, index=True),
    Column("revision", Whole, nullable=False),
)
"""What the limiters of a gateway enforce, because its kernel cannot: the rules, and at which revision they are so. The
row of rule 0 has the serial of it all in the place of a revision."""

limiters = Table(
    "limiters",
    metadata,
    Column("host", Words, primary_key=True),
    Column("process", Words, primary_key=True),
    Column("loaded", Whole, nullable=False),
    Column("since", Moment, nullable=False),
    Column("seen_at", Moment, nullable=False),
)
"""The limiters that run on a gateway, and the serial of the assignments that each has loaded."""

request_counters = Table(
    "request_counters",
    metadata,
    Column("host", Words, primary_key=True),
    Column("rule_id", Id, primary_key=True, index=True),
    Column("matched_packets", Whole, nullable=False),
    Column("matched_bytes", Whole, nullable=False),
    Column("dropped_packets", Whole, nullable=False),
    Column("dropped_bytes", Whole, nullable=False),
    Column("since", Moment, nullable=False),
    Column("as_of", Moment, nullable=False),
)
"""What rules have counted in limiters (requests, and the bytes of their bodies), besides what they count in the kernel:
the counters of a rule are the sum of both, wherever it is enforced now."""

numbers = Table(
    "numbers",
    metadata,
    Column("host", Words, primary_key=True),
    Column("limit_group", Words, primary_key=True),
    Column("profile", Words, primary_key=True),
    Column("number", Whole, nullable=False),
)
"""The mark number of a profile within its group, on each gateway."""

saved_roots = Table(
    "saved_roots",
    metadata,
    Column("host", Words, primary_key=True),
    Column("device", Words, primary_key=True),
    Column("handle", Whole, nullable=False),
    Column("kind", Words, nullable=False),
    Column("options", Words, nullable=False),
)
"""Root qdiscs that ours took the place of; `options` are the kernel's own bytes, hexadecimal."""

requests = Table(
    "requests",
    metadata,
    Column("id", Id, primary_key=True),
    Column("host", Words, nullable=False),
    Column("kind", Words, nullable=False),
    Column("argument", Document, nullable=False),
    Column("asked_at", Moment, nullable=False),
    Column("answer", Document(none_as_null=True)),
    sqlite_autoincrement=True,
)

tokens = Table(
    "tokens",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Words, nullable=False, unique=True),
    Column("hash", Words, nullable=False),
    Column("role", Words, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("expires_at", Moment),
    Column("revoked_at", Moment),
    Column("handle", Words, unique=True, index=True),
    sqlite_autoincrement=True,
)

audit = Table(
    "audit",
    metadata,
    Column("id", Id, primary_key=True),
    Column("at", Moment, nullable=False),
    Column("actor", Words, nullable=False),
    Column("revision", Whole, nullable=False),
    Column("action", Words, nullable=False),
    Column("rule_id", Whole),
    Column("before", Document(none_as_null=True)),
    Column("after", Document(none_as_null=True)),
    Column("address", Words),
    Column("request", Words),
    sqlite_autoincrement=True,
)
"""`rule_id` is null where one row speaks of a whole batch; `after` then says how many rules and which ids."""

revisions = Table(
    "revisions",
    metadata,
    Column("revision", Id, primary_key=True, autoincrement=False),
    Column("at", Moment, nullable=False),
    Column("actor", Words, nullable=False),
    Column("address", Words),
    Column("request", Words),
    Column("action", Words, nullable=False),
    Column("rules", Small, nullable=False),
    Column("returned_to", Whole),
    Column("stamp", Whole, nullable=False, server_default="0"),
    Column("size", Whole, nullable=False, server_default="0"),
)
"""Each change of rules that can be undone: who made it, what it was, how many rules it touched, and for a rollback to
which revision. `stamp` is what the clock had then, `size` how many bytes of `undo` it takes."""

undo = Table(
    "undo",
    metadata,
    Column("revision", Id, primary_key=True),
    Column("first_rule", Id, primary_key=True),
    Column("last_rule", Id, nullable=False),
    Column("before", Document(none_as_null=True)),
)
"""What each change replaced: the row of a rule as it was before, or null for rules from first to last that were not
there. The rule set of a revision is the present one, with every change after it undone, the newest first."""

windows = Table(
    "windows",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("base", BigInteger, nullable=False),
    Column("opened_at", Moment, nullable=False),
    Column("seconds", Small, nullable=False),
    Column("actor", Words, nullable=False),
    Column("paused", Document, nullable=False),
    Column("outcome", Words),
    Column("ended_at", Moment),
    Column("revision", Whole),
)
"""At most one row: the window of confirmation that was opened last. Unless it is confirmed in time, revision `base`
comes back, and the gateways in `paused` are torn down again; among their names stands `{"forces": true}` where who has
opened it may force, `{"forces": false}` where not. `outcome` is null while it is open; then `revision` is the one that
it left."""

guards = Table("guards", metadata, Column("host", Words, primary_key=True), Column("seen_at", Moment, nullable=False))

repairs = Table(
    "repairs",
    metadata,
    Column("id", Id, primary_key=True),
    Column("host", Words, nullable=False),
    Column("at", Moment, nullable=False),
    Column("kind", Words, nullable=False),
    Column("found", Words, nullable=False),
    Column("took", Amount, nullable=False),
    sqlite_autoincrement=True,
)
"""The newest repairs of each gateway: what kind of thing had changed, what was found, and the seconds until it was put
right."""

clients = Table(
    "clients",
    metadata,
    Column("host", Words, primary_key=True),
    Column("address", Words, primary_key=True),
    Column("seen_at", Moment, nullable=False),
    Column("since", Moment),
    Column("token", Words),
    Column("role", Words),
)
"""Who has spoken to the API of a gateway lately, with a token that is good: they join its safe set. Of several tokens
`token` (its name) and `role` are those of the one that may do most."""

limit_documents = Table(
    "limit_documents",
    metadata,
    Column("domain", Words, primary_key=True),
    Column("document", Words, nullable=False),
    Column("content_type", Words, nullable=False),
    Column("revision", Whole, nullable=False),
    Column("created_at", Moment, nullable=False),
    Column("updated_at", Moment, nullable=False),
    Column("actor", Words, nullable=False),
)
"""The limiter's rules: the document of a domain as it was given; `actor` is who gave it last."""

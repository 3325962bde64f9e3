"""What bodies look like, for the OpenAPI description.

Only `netlimit.rules.parse_rule` decides what is a rule; these models tell readers and clients beforehand. Lists
of rules are written by `api.representation`, not by these models: a hundred thousand would take too long.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from netlimit.records import State
from netlimit.rules import Action, Direction, OnFailure, Protocol

_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_IPV4 = rf"({_OCTET}\.){{3}}{_OCTET}(/(3[0-2]|[12]?[0-9]))?"
_IPV6 = r"[0-9A-Fa-f]{0,4}(:[0-9A-Fa-f]{0,4}){2,7}(/(12[0-8]|1[01][0-9]|[1-9]?[0-9]))?"
_QUANTITY = r"[0-9]+(\.[0-9]+)? ?(k|M|G|T|Ki|Mi|Gi)?(packets?|pkts?|bits?|B|bytes?|connections?|conns?)"
_PERIOD = r" ?/ ?(s|sec|second|m|min|minute|h|hour|d|day)"
_PORTS = r"[0-9]{1,5}([-:][0-9]{1,5})?"
_NAME = r"[a-z][a-z0-9._-]{0,62}"
_WORD = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,62}"

RateText = Annotated[str, Field(pattern=f"^{_QUANTITY}({_PERIOD})?$", examples=["200 packets/s", "20 Mbit/s"])]
Port = Annotated[int, Field(ge=0, le=65535)]
PortText = Annotated[str, Field(pattern=f"^{_PORTS}(, ?{_PORTS})*$", examples=["8000-8100", "80,443"])]
Word = Annotated[str, Field(pattern=f"^{_WORD}$")]
LabelText = Annotated[str, Field(max_length=255)]
PositiveInt = Annotated[int, Field(ge=1)]


def _read_flag(value: object) -> object:
    """Of the many words that could mean yes, only the one of JSON is read."""
    if value in ("true", "false", True, False):
        return value
    raise ValueError('it is "true" or "false"')


Flag = Annotated[bool, BeforeValidator(_read_flag)]


class Strict(BaseModel):
    """A body that has these members and no others."""

    model_config = ConfigDict(extra="forbid")


class RateIn(Strict):
    """A rate in the form in which it is returned. `text` is what counts; the others must not contradict it."""

    text: RateText
    amount: float | None = None
    unit: str | None = None
    seconds: int | None = None


class RuleFields(Strict):
    """The fields of a rule that have defaults. `null` is the default, too."""

    name: Annotated[str, Field(pattern=f"^{_NAME}$")] | None = Field(
        None, description="A unique name of your own; small letters, digits, `.`, `_`, `-`.", examples=["office-guests"]
    )
    direction: Direction | None = Field(
        None, description="`from` (the default): traffic that the target sends. `to`: traffic sent to it."
    )
    protocol: Protocol | None = Field(
        None, description="Which protocol, `any` by default. `icmp` is ICMPv6 for an IPv6 target."
    )
    ports: Port | PortText | list[Port | PortText] | None = Field(
        None,
        description="Destination ports and ranges, for tcp and udp; after DNAT for direction `to`. At most 15, "
        "where a range counts as two.",
        examples=[[53], [80, 443, "8000-8100"]],
    )
    source_ports: Port | PortText | list[Port | PortText] | None = Field(
        None, description="Source ports and ranges, as `ports`.", examples=[[123]]
    )
    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]{1,15}$")] | None = Field(
        None,
        description="Only traffic that enters (`from`) or leaves (`to`) here. For `shape`: the device that it leaves "
        "by, in both directions; by default the routes tell.",
        examples=["eth0"],
    )
    rate: RateText | RateIn | None = Field(
        None,
        description="How much: packets, connections (new ones, with a period; at once, without), bits or bytes. "
        "Periods are s, min, h, day. `Mbit` is 10^6 bits, `MiB` 2^20 bytes. Needed for every action but `allow` "
        "and `block`.",
        examples=["200 packets/s", "20 Mbit/s", "5 MB/s", "10 connections/min", "50 connections"],
    )
    burst: PositiveInt | Annotated[str, Field(pattern=r"^[0-9.]+ ?[A-Za-z]*$")] | None = Field(
        None,
        description="How much may come at once, in the unit of the rate. By default a tenth of a second of the "
        "rate (at least 5); for bytes and bits it is a second of it, and nothing else works. For `shape` it can only "
        "raise what a queue may send at once: a few packets.",
        examples=[100, "100 packets"],
    )
    per: Annotated[str, Field(pattern=r"^(host|target|peer|/[0-9]{1,3})$")] | None = Field(
        None,
        description="Whose bucket the rate is: `host`, each address in the target has one; `target`, one for all; "
        "`/24`, one for each block; `peer`, one for each address that talks with the target. Needed when the "
        "target is a subnet and the action limits.",
        examples=["host", "target", "/24", "peer"],
    )
    action: Action | None = Field(
        None,
        description="What happens to what is over the rate: `drop` (the default), `reject`, `observe` (only counted). "
        "`allow` exempts the traffic from all limits and `block` lets nothing through; neither takes a rate. "
        "`shape` queues what is over where it leaves; its rate is in bits or bytes (of Ethernet frames).",
    )
    ceil: RateText | RateIn | None = Field(
        None,
        description="For `shape`: while others leave room it may send up to here; by default not above the rate.",
        examples=["50 Mbit/s"],
    )
    on_failure: OnFailure | None = Field(
        None, description="When the controller fails: `closed` (the default), what is in the kernel stays, or `open`."
    )
    enabled: bool | None = Field(None, description="Whether the rule is enforced; by default it is.")
    expires_at: datetime | None = Field(
        None,
        description="When the rule ends, in the kernel too. Not together with `ttl`.",
        examples=["2035-01-31T18:00:00Z"],
    )
    ttl: PositiveInt | Annotated[str, Field(pattern=r"^[0-9]+ ?(s|m|min|h|d|w)?$")] | None = Field(
        None,
        description="How long the rule lasts: seconds, or with a unit. Is returned as `expires_at`.",
        examples=[600, "10m"],
    )
    hosts: list[Word] | None = Field(
        None,
        description="The gateways that enforce the rule (256 at most); by default all.",
        examples=[["gw1", "gw2"]],
    )
    labels: Annotated[dict[Word, LabelText], Field(max_length=128)] | None = Field(
        None,
        description="Texts of your own to find rules by, 4096 letters in all; no control characters.",
        examples=[{"customer": "acme"}],
    )
    comment: Annotated[str, Field(max_length=1000)] | None = Field(
        None, description="A note; no control characters but line ends and tabs."
    )
    forced_by: Annotated[str, Field(min_length=1, max_length=255)] | None = Field(
        None,
        description="Who has forced the rule (`force=true`): then it comes before who is safe, where its target is one "
        "such address, or the gateway's own. Only an admin can bring in a rule that has it; `null` takes it away.",
    )


TargetText = Annotated[
    str,
    Field(
        pattern=f"^({_IPV4}|{_IPV6})$",
        description="An address or CIDR, IPv4 or IPv6; where there is NAT, the internal one. Host bits are refused.",
        examples=["10.1.2.3", "10.1.0.0/16", "2001:db8::/48"],
    ),
]


class NewRule(RuleFields):
    """A rule as it is sent: the target, and whatever is not to be as by default."""

    target: TargetText


class RuleReplacement(NewRule):
    """A rule as it is sent, or as it was returned: what only netlimit sets is ignored."""

    id: Any = Field(None, description="Ignored.")
    revision: Any = Field(None, description="Ignored; use `If-Match`.")
    created_at: Any = Field(None, description="Ignored.")
    updated_at: Any = Field(None, description="Ignored.")
    status: Any = Field(None, description="Ignored.")
    effective_rate: Any = Field(None, description="Ignored.")
    effective_burst: Any = Field(None, description="Ignored.")
    warnings: Any = Field(None, description="Ignored.")


class RuleChanges(RuleFields):
    """A JSON merge patch (RFC 7396): what is named changes, `null` puts a field back to its default."""

    target: TargetText = ""


class Rate(Strict):
    """A rate: `amount` of `unit` in `seconds`; `seconds` is null for connections at once."""

    text: str = Field(examples=["200 packets/s"])
    amount: float = Field(examples=[200])
    unit: Literal["packets", "bits", "bytes", "connections"]
    seconds: int | None = Field(examples=[1])


EnforcedBy = Literal["iptables", "tc", "nftables", "ebpf", "l7"] | None


class HostStanding(Strict):
    """How a rule stands on one gateway."""

    state: State
    enforced_by: EnforcedBy
    message: str | None


class Standing(HostStanding):
    """How a rule stands: `state` is the worst of its gateways, `hosts` has each."""

    hosts: dict[str, HostStanding]


class Rule(Strict):
    """A rule as it is kept."""

    id: int
    name: str | None
    target: str = Field(description="One address stands without its length.")
    direction: Direction
    protocol: Protocol
    ports: list[int | str]
    source_ports: list[int | str]
    interface: str | None
    rate: Rate | None
    burst: int | None
    per: str | None
    action: Action
    ceil: Rate | None
    on_failure: OnFailure
    enabled: bool
    expires_at: datetime | None
    hosts: list[str]
    labels: dict[str, str]
    comment: str
    forced_by: str | None = Field(description="Who has forced it; without that it spares who is safe.")
    revision: int = Field(description="Of the rule set, when this rule last changed; also its `ETag`.")
    created_at: datetime
    updated_at: datetime
    status: Standing
    effective_rate: Rate | None = Field(description="What the kernel really holds: it counts in whole numbers.")
    effective_burst: int | None = Field(
        description="The burst that the kernel really holds; null for `shape`, where each gateway's clock decides."
    )
    warnings: list[str] = Field(
        [],
        description="In answers to changes: whom the rule spares although they are in its target, for they are safe; "
        "which connections it does not count; what kernel memory limits may take; that a window of confirmation is "
        "open.",
    )


class RulePage(Strict):
    """Some rules, the cursor of those that follow (null at the end), and how many there are in all."""

    items: list[Rule]
    next: str | None
    total: int


class BulkAdded(Strict):
    """What a bulk import kept: how many, at which revision, their ids in the order in which they were sent."""

    added: int
    revision: int
    ids: list[int]
    state: State = Field(description="How they stand: the worst of them.")
    warnings: list[str] = Field(description="Of the kernel's memory, and of an open window of confirmation.")


class RuleCounters(Strict):
    """What a rule matched and dropped since `since`, on all gateways together; read at `as_of`, null: never.

    For `observe`, dropped is what would have been dropped. Bytes are IP bytes, but Ethernet bytes for `shape`.
    """

    matched_packets: int
    matched_bytes: int
    dropped_packets: int
    dropped_bytes: int = Field(description="Always 0 for `shape`: tc does not count them.")
    delayed: int = Field(description="How often packets of a rule that shapes had to wait for their class.")
    queued_packets: int = Field(description="For `shape`: what waited when it was read.")
    queued_bytes: int
    since: datetime | None
    as_of: datetime | None


class CountersOfRule(RuleCounters):
    """The counters of one rule among several."""

    rule: int
    name: str | None


class CountersOfRules(Strict):
    """The counters of several rules; `missing` are those asked for that are not there."""

    items: list[CountersOfRule]
    missing: list[str]


class HostPlan(Strict):
    """The steps from what a gateway's kernel holds to what it should hold; none when they are the same."""

    words: list[str] = Field(
        description="What they come to, in sentences.",
        examples=[["Rule 9 changes from 100 packets/s to 200 packets/s: at most 200 packets/s from 10.1.2.3; …"]],
    )
    text: str = Field(description="The steps, the first of many.")
    steps: list[Any]


class Plan(HostPlan):
    """The plans of all gateways, one after the other, and each of them; `silent` are those that did not answer."""

    hosts: dict[str, HostPlan]
    silent: list[str]


class HostPreview(HostPlan):
    """What would become of a rule on one gateway. `state` is `pending` where nobody could tell."""

    state: State
    enforced_by: EnforcedBy
    message: str | None = Field(description="Why it could not be enforced, or what there is to know of it.")
    relations: list[str] = Field(
        description="What it would have to do with others: which it takes the place of, in which it nests.",
        examples=[["For 10.1.2.3, the new rule takes the place of rule 4 (10.1.0.0/16): …"]],
    )


class Preview(HostPlan):
    """What a rule would do on all gateways, and on each of them; `silent` are those that did not answer."""

    message: str | None = Field(description="Why no gateway could tell; null if one could.")
    hosts: dict[str, HostPreview]
    silent: list[str]


class RuleDraft(Rule):
    """A rule as it would be kept, and what it would do: nothing was kept."""

    # What a kept rule has and this has not is null: the types say so, against those of a kept rule.
    id: int | None = Field(description="Of the rule whose place it would take; null for a new one.")  # type: ignore[assignment]
    revision: None = None  # type: ignore[assignment]
    created_at: None = None  # type: ignore[assignment]
    updated_at: None = None  # type: ignore[assignment]
    status: None = None  # type: ignore[assignment]
    preview: Preview


class Verdict(Strict):
    """What one rule has to do with the packet; `rule` is null for what is never limited."""

    rule: int | None
    name: str | None
    summary: str | None
    hits: bool
    reason: str


class Explanation(Strict):
    """What happens to a packet, and which rules are why, in the order in which they are asked."""

    verdict: str = Field(
        description="`passes`, `limited`, `shaped` (it is queued, and nothing else limits it), `allowed` or `blocked`."
    )
    text: str
    steps: list[Verdict]


class Capability(Strict):
    """Whether something works here, and if not, why and what would help."""

    available: bool
    reason: str | None
    needed: bool = Field(description="False: there is something else in its place, and no rule fails without it.")


class Repair(Strict):
    """Something of netlimit's that others had changed in the kernel, and that was put right."""

    at: datetime
    kind: str = Field(description="`chains`, `sets`, `entries`, `queues` or `ingress`.")
    found: str = Field(description="What was done, as a plan prints it.")
    seconds: float = Field(description="How long it took.")


class HostReport(Strict):
    """What a gateway's controller says of itself."""

    host: str
    backend: str
    applied_revision: int = Field(description="0 while nothing is in force, such as after a teardown.")
    paused: bool
    capabilities: dict[str, Capability]
    own: list[str]
    safe: list[str]
    safe_reasons: dict[str, str] = Field(
        description="Why each network is in the safe set. Of default gateways, hosts of the database and of the "
        "counter store, and far ends of tunnels, rules leave alone what they exchange with the gateway itself."
    )
    management: list[int] = Field(description="Open connections to these TCP ports pass whatever the rules say.")
    notes: list[str]
    desired: int = Field(description="Rules that are in force here, by the database.")
    enforced: int = Field(description="Those of them that the kernel holds.")
    degraded: int = Field(description="Those that it does not hold for all that they speak of.")
    drifted: int = Field(description="Things found changed by others and not yet put right.")
    lifted: int = Field(description="Rules with `on_failure: open`, out of force for want of a database.")
    drift: int = Field(description="Repairs since the controller began.")
    repairs: dict[str, int] = Field(description="The same by kind of thing.")
    last_repairs: list[Repair] = Field(description="The newest, the last one first.")
    guarded: bool = Field(description="Whether a guard has reported lately, who undoes what is not confirmed.")
    last_error: str | None
    seen_at: datetime | None
    live: bool = Field(description="Whether it has been heard of in the last 15 seconds.")
    gone: bool = Field(description="Whether it has been silent for an hour: then nothing waits for it any more.")


class Gateway(Strict):
    """A gateway that has reported."""

    name: str
    state: Literal["live", "silent", "gone"] = Field(
        description="`silent`: for 15 seconds; `gone`: for an hour, so that nothing waits for it any more."
    )
    paused: bool = Field(description="Whether a teardown has paused it.")
    backend: str
    applied_revision: int = Field(description="0 while nothing is in force, such as after a teardown.")
    seen_at: datetime | None = Field(description="When its controller was last heard of.")
    rules: int = Field(description="How many rules name it in `hosts`.")


class GatewayList(Strict):
    """The gateways that have reported, by name."""

    items: list[Gateway]


class Status(Strict):
    """How the whole stands."""

    backend: str | None
    capabilities: dict[str, Capability]
    wanted_revision: int
    applied_revision: int | None = Field(
        description="The lowest of all gateways that no teardown has paused; 0 where there is none."
    )
    drift: int = Field(description="Repairs of what others changed in the kernel, since the controllers began.")
    window: Window | None = Field(description="The window of confirmation, if one is open.")
    last_error: str | None
    rules: dict[str, int] = Field(description="How many rules are in which state, and `total`.")
    hosts: list[HostReport]
    notes: list[str]


class Offender(Strict):
    """An address that is being limited, and what was dropped of its traffic."""

    address: str
    packets: int
    bytes: int


class Offenders(Strict):
    """Who is being limited now, worst first; `silent` are the gateways that did not answer."""

    items: list[Offender]
    silent: list[str]


class AuditEntry(Strict):
    """One change: who made it, when, and the fields of the rule before and after.

    What is no change of one rule has a null `rule`; `old` and `new` say what there is to say. A large batch is one
    entry, too: `new` says how many rules, and the first and last id.
    """

    id: int
    at: datetime
    actor: str = Field(description="The name of a token; for what was done on a gateway itself, the user.")
    address: str | None = Field(description="Where the request came from.")
    request: str | None = Field(description="Its `X-Request-ID`.")
    revision: int = Field(description="That of the rule set after it.")
    action: str = Field(examples=["add", "replace", "remove", "create-token", "revoke-token", "apply", "pause"])
    rule: int | None
    old: dict[str, Any] | None
    new: dict[str, Any] | None


class AuditPage(Strict):
    """Some changes, the latest first, and the cursor of those before (null at the end)."""

    items: list[AuditEntry]
    next: str | None


class Revision(Strict):
    """A change of rules that can be undone: who made it, and how many rules it touched."""

    revision: int
    at: datetime
    actor: str = Field(description="As in the audit.")
    address: str | None
    request: str | None
    action: Literal["add", "replace", "remove", "rollback", "restore"]
    rules: int
    returned_to: int | None = Field(description="For a rollback: which revision came back.")


class RevisionPage(Strict):
    """Some revisions, the latest first, and the cursor of those before (null at the end)."""

    items: list[Revision]
    next: str | None


class RuleDifference(Strict):
    """A rule that two revisions do not have in common, with the fields in which it differs; null where it is not there.

    A field that is empty on one side is null there.
    """

    rule: int
    name: str | None
    kind: Literal["added", "removed", "changed"]
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class RevisionDiff(Strict):
    """How many rules one revision has, lacks, or has otherwise than another; a page of those rules, by id."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)

    from_: int = Field(alias="from")
    to: int
    added: int
    removed: int
    changed: int
    items: list[RuleDifference]
    next: str | None


class Rollback(Strict):
    """The revision that came back, and the present one."""

    returned_to: int
    revision: int
    warnings: list[str] = Field(description="That a window of confirmation is open.")


class NewWindow(Strict):
    """A window of confirmation as it is asked for."""

    seconds: int = Field(ge=10, le=86400, description="How long there is to confirm.", examples=[60])


class Window(Strict):
    """A window of confirmation: unless it is confirmed until the deadline, the rules of revision `base` come back."""

    open: bool
    base: int
    seconds: int
    opened_at: datetime
    deadline: datetime
    left: float = Field(description="Seconds until the deadline; 0 once it has ended.")
    actor: str = Field(description="Who has opened it.")
    outcome: Literal["confirmed", "expired", "abandoned"] | None = Field(description="How it has ended.")
    ended_at: datetime | None
    revision: int | None = Field(description="The revision that its end left.")
    guards: list[str] = Field(description="The gateways with a guard that undoes what is not confirmed.")


Words = str | int | float | bool
"""A text; a number or a flag is taken for what it looks like."""


class LimitReplaced(Strict):
    """The name of a `rate_limit` that does not count where this one does."""

    name: Words


class LimitRate(Strict):
    """How many requests may pass, and how they are counted."""

    unit: Literal["second", "minute", "hour", "day", "week", "month", "year"] | None = Field(
        None, description="Needed unless `unlimited`. A month has 30 days, a year 365."
    )
    requests_per_unit: Annotated[int, Field(ge=0, le=2**32 - 1)] | None = Field(
        None, description="Needed unless `unlimited`; 0 refuses every request."
    )
    unit_multiplier: PositiveInt | None = Field(None, description="So many units are one window; 1 by default.")
    unlimited: bool | None = None
    name: Words | None = Field(None, description="By which others can replace this one.")
    replaces: list[LimitReplaced] | None = None
    algorithm: (
        Literal[
            "fixed_window",
            "sliding_window_log",
            "sliding_window_counter",
            "token_bucket",
            "leaky_bucket",
            "gcra",
        ]
        | None
    ) = Field(None, description="`fixed_window` by default.")
    burst: PositiveInt | None = Field(None, description="For buckets and GCRA: how many may come at once.")
    refill: Literal["continuous", "interval"] | None = Field(None, description="For token buckets.")
    count_refused: bool | None = Field(None, description="For the log: whether refused requests count; they do.")


class LimitConcurrency(Strict):
    """How many requests may be in flight at once, and for how long one counts that nobody ends."""

    limit: Annotated[int, Field(ge=0, le=2**32 - 1)]
    lease: Words | None = Field(None, examples=["60s"])


class LimitEscalation(Strict):
    """A client that is refused so often within this time is blocked for that long, in the kernel."""

    after: PositiveInt
    within: Words = Field(examples=["1m"])
    block: Words = Field(examples=["10m"])


class LimitDescriptor(Strict):
    """What is told of a request (a key, or a key with a value), and the limit of requests of which just that is told.
    Those of which more is told go on in `descriptors`."""

    key: Words
    value: Words | None = Field(None, description="`*` in it stands for any text; without it each value has a counter.")
    rate_limit: LimitRate | None = None
    concurrency: Annotated[int, Field(ge=0, le=2**32 - 1)] | LimitConcurrency | None = None
    mode: Literal["hard", "soft", "elastic", "observe"] | None = None
    overshoot: Annotated[int, Field(ge=0, le=1000)] | str | None = Field(None, description="Percent over the limit.")
    priority: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="For elastic limits.")
    on_limit: Literal["reject", "queue", "defer", "observe"] | None = None
    max_wait: Words | None = Field(None, description="How long a request waits at most.", examples=["30s"])
    on_failure: Literal["open", "closed"] | None = None
    emergency: Words | None = Field(
        None, description="What passes while the counters are away.", examples=["100/minute"]
    )
    escalate: LimitEscalation | None = None
    shadow_mode: bool | None = None
    quota_mode: bool | None = None
    detailed_metric: bool | None = None
    value_to_metric: bool | None = None
    share_threshold: bool | None = None
    metadata: Any = None
    descriptors: list[LimitDescriptor] | None = None


class LimitDocument(Strict):
    """The limits of a domain, in the format of Envoy's ratelimit with more keys. `null` is as good as nothing."""

    domain: Words
    descriptors: list[LimitDescriptor] | None = None


class LimitPlace(Strict):
    """A slip that was understood, or something that has no effect, and where it stands. With an empty field, what is to
    be said of the whole document: that an open window of confirmation does not undo its change."""

    detail: str
    field: str
    line: int | None


class LimitSource(Strict):
    """Where the limits of a domain come from."""

    domain: str
    content_type: str = Field(description="Of the document as it was given.", examples=["application/yaml"])
    actor: str = Field(description="Who gave it: the name of a token, or a user of a gateway.")


class LimitHead(LimitSource):
    """What is known of the limits of a domain but for what they are."""

    revision: int
    created_at: datetime
    updated_at: datetime


class LimitKept(LimitSource):
    """The limits of a domain as they are kept now, or for a dry run would be: then all that is not known is null."""

    revision: int | None
    created_at: datetime | None
    updated_at: datetime | None
    rules: list[str] = Field(description="The names of its rules.")
    warnings: list[LimitPlace]


class LimitList(Strict):
    """All domains that have limits in the database, and the revision of them all."""

    items: list[LimitHead]
    revision: int


RoleName = Literal["viewer", "operator", "admin"]


class NewToken(Strict):
    """A token as it is asked for."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")] = Field(
        description="Who is to have it; the audit names this. Never given twice.", examples=["ci"]
    )
    role: RoleName = Field(
        description="`viewer` may look, `operator` may change rules, `admin` may also force rules and deal with tokens."
    )
    ttl: PositiveInt | Annotated[str, Field(pattern=r"^[0-9]+ ?(s|m|min|h|d|w)?$")] | None = Field(
        None, description="How long it is good: seconds, or with a unit. By default until it is revoked."
    )


class Token(Strict):
    """A token, without its text, which nobody knows."""

    id: int
    name: str
    role: RoleName
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class MadeToken(Token):
    """A token that was just made."""

    token: str = Field(description="What to send: `Authorization: Bearer TOKEN`.")


class TokenList(Strict):
    """All tokens there ever were, by id."""

    items: list[Token]


class Health(Strict):
    """Whether the API works, and what is missing."""

    status: Literal["ok"]


class ProblemError(BaseModel):
    """One of several things that are wrong; `line` counts from 1."""

    detail: str
    field: str | None = None
    line: int | None = None


class Problem(BaseModel):
    """An error, as RFC 9457 has it."""

    type: str
    title: str
    status: int
    detail: str = Field(description="What was asked, what is wrong, what would work.")
    field: str | None = Field(None, description="The field or parameter that is wrong.")
    errors: list[ProblemError] = Field([], description="Each thing that is wrong, when there are several.")
    rule: dict[str, Any] | None = Field(None, description="The other rule, for a conflict: its `id` and `name`.")


SENT = (NewWindow, NewRule, RuleReplacement, RuleChanges, NewToken, LimitDocument, Problem)
"""Models that no answer names, so that the framework does not see them."""

NEW_RULES: dict[str, dict[str, Any]] = {
    "one address": {"target": "10.1.2.3", "rate": "200 packets/s"},
    "every host of a subnet": {
        "name": "office-hosts",
        "target": "10.1.0.0/16",
        "rate": "20 Mbit/s",
        "per": "host",
        "direction": "to",
        "labels": {"site": "office"},
    },
    "one budget for a subnet": {"target": "10.2.0.0/16", "rate": "100 Mbit/s", "per": "target"},
    "DNS of every client": {
        "name": "dns-clients",
        "target": "10.0.0.0/12",
        "protocol": "udp",
        "ports": [53],
        "rate": "50 packets/s",
        "burst": 100,
        "per": "host",
        "comment": "Resolvers are exempt by a rule of their own.",
    },
    "connections to a server": {
        "target": "192.0.2.10",
        "direction": "to",
        "protocol": "tcp",
        "ports": [80, 443, "8000-8100"],
        "rate": "30 connections/s",
        "per": "peer",
        "action": "reject",
    },
    "connections at once": {"target": "10.3.0.0/24", "protocol": "tcp", "rate": "50 connections", "per": "host"},
    "IPv6 customers": {"target": "2001:db8::/48", "rate": "50 Mbit/s", "per": "/64"},
    "look first": {"target": "10.4.0.0/16", "rate": "1000 packets/s", "per": "host", "action": "observe"},
    "a queue for every guest": {
        "name": "guests-down",
        "target": "10.50.0.0/16",
        "direction": "to",
        "rate": "5 Mbit/s",
        "ceil": "20 Mbit/s",
        "per": "host",
        "action": "shape",
    },
    "one queue for all that leaves by a device": {
        "target": "0.0.0.0/0",
        "direction": "to",
        "interface": "wan",
        "rate": "95 Mbit/s",
        "per": "target",
        "action": "shape",
    },
    "a ban for ten minutes": {"target": "203.0.113.7", "action": "block", "ttl": "10m"},
    "an exemption": {"target": "10.1.0.53", "protocol": "udp", "ports": "53", "action": "allow", "hosts": ["gw1"]},
}
REPLACEMENTS: dict[str, dict[str, Any]] = {
    "a larger rate": {"target": "10.1.2.3", "rate": "400 packets/s", "burst": 100},
    "a rule as returned": {
        "id": 1,
        "name": None,
        "target": "10.1.2.3",
        "rate": {"text": "250 packets/s", "amount": 250, "unit": "packets", "seconds": 1},
        "per": "host",
        "revision": 1,
    },
}
RULE_CHANGES: dict[str, dict[str, Any]] = {
    "another rate": {"rate": "300 packets/s", "burst": None},
    "switched off": {"enabled": False},
    "one label": {"labels": {"site": "office", "owner": None}},
}
LIMITS: dict[str, dict[str, Any]] = {
    "logins": {
        "domain": "auth",
        "descriptors": [
            {
                "key": "auth_type",
                "value": "login",
                "rate_limit": {"unit": "minute", "requests_per_unit": 5, "algorithm": "sliding_window_log"},
                "escalate": {"after": 100, "within": "1m", "block": "10m"},
            }
        ],
    },
    "requests by address and path": {
        "domain": "edge",
        "descriptors": [
            {
                "key": "remote_address",
                "rate_limit": {"unit": "second", "requests_per_unit": 20, "algorithm": "gcra", "burst": 40},
                "descriptors": [
                    {"key": "path", "value": "/api/*", "concurrency": 10, "on_limit": "queue", "max_wait": "2s"}
                ],
            },
            {"key": "remote_address", "value": "192.0.2.7", "rate_limit": {"unit": "day", "requests_per_unit": 0}},
        ],
    },
}

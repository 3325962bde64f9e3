BEGIN TRANSACTION;
CREATE TABLE alembic_version (
	version_num VARCHAR(32) NOT NULL, 
	CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num)
);
INSERT INTO "alembic_version" VALUES('0004');
CREATE TABLE assignments (
	host TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	CONSTRAINT pk_assignments PRIMARY KEY (host, rule_id)
);
CREATE TABLE audit (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	at BIGINT NOT NULL, 
	actor TEXT NOT NULL, 
	revision BIGINT NOT NULL, 
	action TEXT NOT NULL, 
	rule_id BIGINT, 
	"before" JSON, 
	"after" JSON
, address TEXT, request TEXT);
INSERT INTO "audit" VALUES(1,1795376292951316,'soak',1,'add',1,NULL,'{"target": "10.1.81.0/24", "action": "block", "direction": "from", "protocol": "any", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(2,1795376292951316,'soak',1,'add',2,NULL,'{"target": "10.1.81.1/32", "action": "allow", "direction": "from", "protocol": "any", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(3,1795376292951316,'soak',1,'add',3,NULL,'{"target": "10.1.83.0/24", "action": "drop", "direction": "from", "protocol": "any", "rate": "100 packets/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(4,1795376292951316,'soak',1,'add',4,NULL,'{"target": "10.1.84.0/24", "action": "reject", "direction": "from", "protocol": "any", "rate": "100 packets/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(5,1795376292951316,'soak',1,'add',5,NULL,'{"target": "10.1.85.1/32", "action": "drop", "direction": "from", "protocol": "udp", "ports": "9000-9010", "rate": "100 packets/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(6,1795376292951316,'soak',1,'add',6,NULL,'{"target": "10.1.86.0/24", "action": "drop", "direction": "from", "protocol": "any", "rate": "100 packets/s", "per": "target", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(7,1795376292951316,'soak',1,'add',7,NULL,'{"target": "10.1.87.1/32", "action": "drop", "direction": "from", "protocol": "any", "rate": "200 kbit/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(8,1795376292951316,'soak',1,'add',8,NULL,'{"target": "10.1.88.1/32", "action": "shape", "direction": "from", "protocol": "any", "rate": "200 kbit/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(9,1795376292951316,'soak',1,'add',9,NULL,'{"target": "10.1.90.0/24", "action": "drop", "direction": "from", "protocol": "any", "rate": "20 connections", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(10,1795376292951316,'soak',1,'add',10,NULL,'{"target": "10.1.91.1/32", "action": "drop", "direction": "to", "protocol": "any", "rate": "10 connections/s", "per": "peer", "on_failure": "closed", "enabled": true}',NULL,NULL);
INSERT INTO "audit" VALUES(11,1795376292951316,'soak',1,'add',11,NULL,'{"target": "10.1.92.0/24", "action": "observe", "direction": "from", "protocol": "any", "rate": "10 packets/s", "per": "host", "on_failure": "closed", "enabled": true}',NULL,NULL);
CREATE TABLE clients (
	host TEXT NOT NULL, 
	address TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT pk_clients PRIMARY KEY (host, address)
);
CREATE TABLE clock (
	id INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	last_rule BIGINT NOT NULL, 
	pruned BIGINT NOT NULL, oldest BIGINT DEFAULT '0' NOT NULL, audit_pruned BIGINT DEFAULT '0' NOT NULL, limits BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_clock PRIMARY KEY (id)
);
INSERT INTO "clock" VALUES(1,1,11,0,0,0,0);
CREATE TABLE counters (
	host TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	matched_packets BIGINT NOT NULL, 
	matched_bytes BIGINT NOT NULL, 
	dropped_packets BIGINT NOT NULL, 
	dropped_bytes BIGINT NOT NULL, 
	raw_matched_packets BIGINT NOT NULL, 
	raw_matched_bytes BIGINT NOT NULL, 
	raw_dropped_packets BIGINT NOT NULL, 
	raw_dropped_bytes BIGINT NOT NULL, 
	since BIGINT NOT NULL, 
	as_of BIGINT NOT NULL, delayed BIGINT DEFAULT '0' NOT NULL, raw_delayed BIGINT DEFAULT '0' NOT NULL, queued_packets BIGINT DEFAULT '0' NOT NULL, queued_bytes BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_counters PRIMARY KEY (host, rule_id)
);
CREATE TABLE guards (
	host TEXT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT pk_guards PRIMARY KEY (host)
);
CREATE TABLE hosts (
	host TEXT NOT NULL, 
	backend TEXT NOT NULL, 
	applied_revision BIGINT NOT NULL, 
	hz INTEGER NOT NULL, 
	capabilities JSON NOT NULL, 
	own JSON NOT NULL, 
	safe JSON NOT NULL, 
	notes JSON NOT NULL, 
	drift BIGINT NOT NULL, 
	last_error TEXT, 
	seen_at BIGINT NOT NULL, repairs JSON, applying JSON, safe_reasons JSON, management JSON, desired BIGINT DEFAULT '0' NOT NULL, enforced BIGINT DEFAULT '0' NOT NULL, degraded BIGINT DEFAULT '0' NOT NULL, drifted BIGINT DEFAULT '0' NOT NULL, lifted BIGINT DEFAULT '0' NOT NULL, 
	CONSTRAINT pk_hosts PRIMARY KEY (host)
);
INSERT INTO "hosts" VALUES('upgraded','iptables',1,250,'{"iptables": null, "ip6tables": null, "raw": null, "mangle": null, "security": null, "hashlimit": null, "connlimit": null, "conntrack": null, "socket": null, "multiport": null, "ipset": null, "reject": null, "raw6": null, "mangle6": null, "security6": null, "hashlimit6": null, "connlimit6": null, "conntrack6": null, "socket6": null, "multiport6": null, "reject6": null, "htb": null, "tbf": null, "fq_codel": "Flows that share a class wait in one line; `modprobe sch_fq_codel` would part them.", "bpf": null, "ifb": null, "marks": null}','["10.1.0.1", "10.2.0.1", "127.0.0.1", "::1", "fd00:1::1", "fd00:2::1", "fe80::ff:fe01:1", "fe80::ff:fe02:1"]','[]','[]',0,NULL,1795376297156405,'{}','{"0.005": 0, "0.01": 0, "0.025": 0, "0.05": 0, "0.1": 0, "0.25": 1, "0.5": 1, "1.0": 1, "2.5": 1, "5.0": 1, "10.0": 1, "30.0": 1, "+Inf": 1, "sum": 0.21957}','{}','[]',11,11,0,0,0);
CREATE TABLE limit_documents (
	domain TEXT NOT NULL, 
	document TEXT NOT NULL, 
	content_type TEXT NOT NULL, 
	revision BIGINT NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	actor TEXT NOT NULL, 
	CONSTRAINT pk_limit_documents PRIMARY KEY (domain)
);
CREATE TABLE limiters (
	host TEXT NOT NULL, 
	process TEXT NOT NULL, 
	loaded BIGINT NOT NULL, 
	since BIGINT NOT NULL, 
	seen_at BIGINT NOT NULL, 
	CONSTRAINT pk_limiters PRIMARY KEY (host, process)
);
CREATE TABLE numbers (
	host TEXT NOT NULL, 
	limit_group TEXT NOT NULL, 
	profile TEXT NOT NULL, 
	number BIGINT NOT NULL, 
	CONSTRAINT pk_numbers PRIMARY KEY (host, limit_group, profile)
);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"block",24,false]','',0);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"allow",32,false]','',0);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"packets","host",0,0,false,""]','["100 packets/s",null,"drop",0,""]',1);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"packets","host",0,0,false,""]','["100 packets/s",null,"reject",0,""]',2);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["udp",[[9000,9010]],[],null],"packets","host",0,0,false,""]','["100 packets/s",null,"drop",0,""]',1);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"packets","target",24,24,false,""]','["100 packets/s",null,"drop",0,""]',1);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"bytes","host",0,0,false,""]','["200 kbit/s",null,"drop",0,""]',1);
INSERT INTO "numbers" VALUES('upgraded','tc root','wan',1);
INSERT INTO "numbers" VALUES('upgraded','tc root','nl-in',2);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"concurrent","host",0,0,false,""]','["20 connections",null,"drop",24,""]',0);
INSERT INTO "numbers" VALUES('upgraded','[4,"to",["any",[],[],null],"connections","peer",0,0,false,""]','["10 connections/s",null,"drop",32,""]',1);
INSERT INTO "numbers" VALUES('upgraded','[4,"from",["any",[],[],null],"packets","host",0,0,false,"10 packets/s None"]','["10 packets/s",null,"observe",0,""]',0);
INSERT INTO "numbers" VALUES('upgraded','tc shard','75ddcca091 under 6e02ffff 0',1);
INSERT INTO "numbers" VALUES('upgraded','tc shard','4fbb168747 under 6e04ffff 0',2);
CREATE TABLE pauses (
	host TEXT NOT NULL, 
	CONSTRAINT pk_pauses PRIMARY KEY (host)
);
CREATE TABLE repairs (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	host TEXT NOT NULL, 
	at BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	found TEXT NOT NULL, 
	took FLOAT NOT NULL
);
CREATE TABLE request_counters (
	host TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	matched_packets BIGINT NOT NULL, 
	matched_bytes BIGINT NOT NULL, 
	dropped_packets BIGINT NOT NULL, 
	dropped_bytes BIGINT NOT NULL, 
	since BIGINT NOT NULL, 
	as_of BIGINT NOT NULL, 
	CONSTRAINT pk_request_counters PRIMARY KEY (host, rule_id)
);
CREATE TABLE requests (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	host TEXT NOT NULL, 
	kind TEXT NOT NULL, 
	argument JSON NOT NULL, 
	asked_at BIGINT NOT NULL, 
	answer JSON
);
CREATE TABLE revisions (
	revision INTEGER NOT NULL, 
	at BIGINT NOT NULL, 
	actor TEXT NOT NULL, 
	address TEXT, 
	request TEXT, 
	action TEXT NOT NULL, 
	rules INTEGER NOT NULL, 
	returned_to BIGINT, 
	CONSTRAINT pk_revisions PRIMARY KEY (revision)
);
INSERT INTO "revisions" VALUES(1,1795376292951316,'soak',NULL,NULL,'add',11,NULL);
CREATE TABLE rule_hosts (
	host TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	CONSTRAINT pk_rule_hosts PRIMARY KEY (host, rule_id), 
	CONSTRAINT fk_rule_hosts_rule_id FOREIGN KEY(rule_id) REFERENCES rules (id) ON DELETE CASCADE
);
CREATE TABLE rule_labels (
	"key" TEXT NOT NULL, 
	value TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	CONSTRAINT pk_rule_labels PRIMARY KEY ("key", value, rule_id), 
	CONSTRAINT fk_rule_labels_rule_id FOREIGN KEY(rule_id) REFERENCES rules (id) ON DELETE CASCADE
);
CREATE TABLE rule_states (
	host TEXT NOT NULL, 
	rule_id INTEGER NOT NULL, 
	state TEXT NOT NULL, 
	message TEXT NOT NULL, layer TEXT, 
	CONSTRAINT pk_rule_states PRIMARY KEY (host, rule_id)
);
CREATE TABLE rules (
	id INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	target TEXT NOT NULL, 
	action TEXT NOT NULL, 
	direction TEXT NOT NULL, 
	protocol TEXT NOT NULL, 
	ports TEXT NOT NULL, 
	source_ports TEXT NOT NULL, 
	interface TEXT, 
	rate TEXT, 
	burst BIGINT, 
	per TEXT, 
	ceil TEXT, 
	on_failure TEXT NOT NULL, 
	enabled BOOLEAN NOT NULL, 
	expires_at BIGINT, 
	hosts TEXT NOT NULL, 
	name TEXT, 
	labels TEXT NOT NULL, 
	comment TEXT NOT NULL, 
	identity TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	updated_at BIGINT NOT NULL, 
	CONSTRAINT pk_rules PRIMARY KEY (id)
);
INSERT INTO "rules" VALUES(1,1,'10.1.81.0/24','block','from','any','','',NULL,NULL,NULL,NULL,NULL,'closed',1,NULL,'',NULL,'','','from 10.1.81.0/24 any verdict per None',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(2,1,'10.1.81.1/32','allow','from','any','','',NULL,NULL,NULL,NULL,NULL,'closed',1,NULL,'',NULL,'','','from 10.1.81.1/32 any verdict per None',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(3,1,'10.1.83.0/24','drop','from','any','','',NULL,'100 packets/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.83.0/24 any packets per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(4,1,'10.1.84.0/24','reject','from','any','','',NULL,'100 packets/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.84.0/24 any packets per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(5,1,'10.1.85.1/32','drop','from','udp','9000-9010','',NULL,'100 packets/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.85.1/32 udp ports 9000-9010 packets per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(6,1,'10.1.86.0/24','drop','from','any','','',NULL,'100 packets/s',NULL,'target',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.86.0/24 any packets per target',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(7,1,'10.1.87.1/32','drop','from','any','','',NULL,'200 kbit/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.87.1/32 any bytes per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(8,1,'10.1.88.1/32','shape','from','any','','',NULL,'200 kbit/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.88.1/32 any bytes per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(9,1,'10.1.90.0/24','drop','from','any','','',NULL,'20 connections',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.90.0/24 any concurrent per host',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(10,1,'10.1.91.1/32','drop','to','any','','',NULL,'10 connections/s',NULL,'peer',NULL,'closed',1,NULL,'',NULL,'','','to 10.1.91.1/32 any connections per peer',1795376292951316,1795376292951316);
INSERT INTO "rules" VALUES(11,1,'10.1.92.0/24','observe','from','any','','',NULL,'10 packets/s',NULL,'host',NULL,'closed',1,NULL,'',NULL,'','','from 10.1.92.0/24 any packets per host observe 10 packets/s None',1795376292951316,1795376292951316);
CREATE TABLE saved_roots (
	host TEXT NOT NULL, 
	device TEXT NOT NULL, 
	handle BIGINT NOT NULL, 
	kind TEXT NOT NULL, 
	options TEXT NOT NULL, 
	CONSTRAINT pk_saved_roots PRIMARY KEY (host, device)
);
CREATE TABLE tokens (
	id INTEGER NOT NULL PRIMARY KEY AUTOINCREMENT, 
	name TEXT NOT NULL, 
	hash TEXT NOT NULL, 
	role TEXT NOT NULL, 
	created_at BIGINT NOT NULL, 
	expires_at BIGINT, 
	revoked_at BIGINT, handle TEXT, 
	CONSTRAINT uq_tokens_name UNIQUE (name)
);
CREATE TABLE tombstones (
	rule_id INTEGER NOT NULL, 
	revision BIGINT NOT NULL, 
	CONSTRAINT pk_tombstones PRIMARY KEY (rule_id)
);
CREATE TABLE undo (
	revision INTEGER NOT NULL, 
	first_rule INTEGER NOT NULL, 
	last_rule INTEGER NOT NULL, 
	"before" JSON, 
	CONSTRAINT pk_undo PRIMARY KEY (revision, first_rule)
);
INSERT INTO "undo" VALUES(1,1,11,NULL);
CREATE TABLE windows (
	id INTEGER NOT NULL, 
	base BIGINT NOT NULL, 
	opened_at BIGINT NOT NULL, 
	seconds INTEGER NOT NULL, 
	actor TEXT NOT NULL, 
	paused JSON NOT NULL, 
	outcome TEXT, 
	ended_at BIGINT, 
	revision BIGINT, 
	CONSTRAINT pk_windows PRIMARY KEY (id)
);
CREATE INDEX ix_counters_rule_id ON counters (rule_id);
CREATE INDEX ix_rule_states_rule_id ON rule_states (rule_id);
CREATE INDEX ix_rules_identity_revision ON rules (identity, revision);
CREATE UNIQUE INDEX ix_rules_name ON rules (name) WHERE name IS NOT NULL;
CREATE INDEX ix_rules_revision ON rules (revision);
CREATE INDEX ix_rules_target ON rules (target);
CREATE INDEX ix_tombstones_revision ON tombstones (revision);
CREATE INDEX ix_rule_hosts_rule_id ON rule_hosts (rule_id);
CREATE INDEX ix_rule_labels_rule_id ON rule_labels (rule_id);
CREATE UNIQUE INDEX ix_tokens_handle ON tokens (handle);
CREATE TRIGGER audit_no_change BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN OLD.id > (SELECT audit_pruned FROM clock) BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
CREATE TRIGGER audit_no_replace BEFORE INSERT ON audit WHEN EXISTS (SELECT 1 FROM audit WHERE id = NEW.id) BEGIN SELECT RAISE(ABORT, 'the audit is append-only'); END;
CREATE INDEX ix_assignments_rule_id ON assignments (rule_id);
CREATE INDEX ix_request_counters_rule_id ON request_counters (rule_id);
DELETE FROM "sqlite_sequence";
INSERT INTO "sqlite_sequence" VALUES('audit',11);
COMMIT;

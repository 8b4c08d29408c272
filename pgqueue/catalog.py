"""What a schema holds, read from the system catalogs as stable text: for the golden listing and to find drift.

The text is the same on every supported version of PostgreSQL and for every schema name. Left out is what changes by
itself or between versions: the partitions of the archive and of messages, NOT NULL constraints (PostgreSQL 18 lists them,
the column says it anyway), owners and grants, and the table in which Alembic keeps the revision.
"""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sqlalchemy import Connection

# Each statement returns (key, text); the key names one object, for example ``column job.id``.
_TABLES = """
    SELECT 'table ' || c.relname,
           concat_ws(', ',
               CASE c.relkind WHEN 'p' THEN 'partitioned by ' || pg_get_partkeydef(c.oid) WHEN 'r' THEN 'table'
                              WHEN 'v' THEN 'view' WHEN 'm' THEN 'materialized view' ELSE 'foreign' END,
               CASE c.relpersistence WHEN 'p' THEN NULL ELSE 'not logged' END,
               'partition of ' || (SELECT p.relname FROM pg_inherits i JOIN pg_class p ON p.oid = i.inhparent
                                   WHERE i.inhrelid = c.oid AND c.relispartition)
                               || ' ' || pg_get_expr(c.relpartbound, c.oid),
               CASE WHEN c.relrowsecurity THEN 'row security' END,
               (SELECT string_agg(o, ', ' ORDER BY o COLLATE "C") FROM unnest(c.reloptions) AS o))
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {ours}
    ORDER BY c.relname COLLATE "C"
"""
# The collation of a column only where it is not its type's own: the name of the latter differs between databases.
_COLUMNS = """
    SELECT format('column %%s.%%s', c.relname, a.attname),
           concat_ws(' ', format_type(a.atttypid, a.atttypmod),
               CASE WHEN a.attcollation <> t.typcollation THEN 'collate ' || l.collname END,
               CASE WHEN a.attnotnull THEN 'not null' END,
               CASE a.attidentity WHEN 'a' THEN 'identity always' WHEN 'd' THEN 'identity by default' END,
               CASE WHEN a.attgenerated = '' THEN 'default ' ELSE 'generated ' END || pg_get_expr(d.adbin, d.adrelid))
    FROM pg_attribute a
    JOIN pg_class c ON c.oid = a.attrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    JOIN pg_type t ON t.oid = a.atttypid
    LEFT JOIN pg_collation l ON l.oid = a.attcollation
    LEFT JOIN pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE n.nspname = %(schema)s AND c.relkind IN ('r', 'p', 'v', 'm', 'f') AND {ours}
      AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY c.relname COLLATE "C", a.attnum
"""
_CONSTRAINTS = """
    SELECT format('constraint %%s.%%s', c.relname, o.conname), pg_get_constraintdef(o.oid)
    FROM pg_constraint o JOIN pg_class c ON c.oid = o.conrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND o.contype IN ('p', 'u', 'c', 'f', 'x') AND {ours}
    ORDER BY c.relname COLLATE "C", o.conname COLLATE "C"
"""
# An index that is not valid is what a killed CREATE INDEX CONCURRENTLY leaves: it looks right and is never used.
_INDEXES = """
    SELECT format('index %%s.%%s', c.relname, x.relname),
           pg_get_indexdef(i.indexrelid) || CASE WHEN i.indisvalid THEN '' ELSE ' (invalid)' END
    FROM pg_index i
    JOIN pg_class c ON c.oid = i.indrelid
    JOIN pg_class x ON x.oid = i.indexrelid
    JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND {ours}
    ORDER BY c.relname COLLATE "C", x.relname COLLATE "C"
"""
_TRIGGERS = """
    SELECT format('trigger %%s.%%s', c.relname, t.tgname), pg_get_triggerdef(t.oid)
    FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s AND NOT t.tgisinternal AND {ours}
    ORDER BY c.relname COLLATE "C", t.tgname COLLATE "C"
"""
_SEQUENCES = """
    SELECT 'sequence ' || c.relname,
           format('%%s start %%s increment %%s min %%s max %%s cache %%s%%s', format_type(s.seqtypid, NULL), s.seqstart,
                  s.seqincrement, s.seqmin, s.seqmax, s.seqcache, CASE WHEN s.seqcycle THEN ' cycle' ELSE '' END)
    FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = %(schema)s
    ORDER BY c.relname COLLATE "C"
"""
_FUNCTIONS = """
    SELECT format('function %%s(%%s)', p.proname, pg_get_function_identity_arguments(p.oid)),
           concat_ws(' ',
               CASE p.prokind WHEN 'f' THEN 'returns ' || pg_get_function_result(p.oid)
                              WHEN 'p' THEN 'procedure' ELSE 'aggregate or window' END,
               'language ' || l.lanname,
               CASE p.provolatile WHEN 'i' THEN 'immutable' WHEN 's' THEN 'stable' END,
               CASE WHEN p.prosecdef THEN 'security definer' END,
               (SELECT string_agg('set ' || o, ' ' ORDER BY o COLLATE "C") FROM unnest(p.proconfig) AS o)),
           p.prosrc
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace JOIN pg_language l ON l.oid = p.prolang
    WHERE n.nspname = %(schema)s AND NOT EXISTS (
        SELECT FROM pg_depend e WHERE e.classid = 'pg_proc'::regclass AND e.objid = p.oid AND e.deptype = 'e')
    ORDER BY 1
"""
_OURS = r"c.relname !~ '^(archive_[0-9]{8}|message_[0-9]+(_(rest|[0-9]+))?)$' AND c.relname <> 'schema_version'"
_STATEMENTS = (_TABLES, _COLUMNS, _CONSTRAINTS, _INDEXES, _TRIGGERS, _SEQUENCES, _FUNCTIONS)


def catalog_listing(connection: Connection, schema: str) -> str:
    """One line per object of `schema`, ``kind name: definition``, with the schema's own name written as ``{schema}``.

    Needs no rights on the schema. Runs in the transaction of `connection` and leaves its settings as they were.
    """
    path = connection.exec_driver_sql("SELECT current_setting('search_path')").scalar_one()
    _set_search_path(
        connection, "pg_catalog, pg_temp"
    )  # with our schema on the path, definitions come back unqualified
    lines: list[str] = []
    for statement in _STATEMENTS:
        rows = connection.exec_driver_sql(statement.replace("{ours}", _OURS), {"schema": schema})
        lines.extend(_line(schema, *row) for row in rows)
    _set_search_path(connection, path)
    return "".join(line + "\n" for line in lines)


def differences(expected: str, actual: str) -> list[str]:
    """What differs between two listings, one short phrase per object; empty when `actual` is as good as `expected`.

    Tables, sequences and functions that `expected` does not know are nobody's fault: they belong to the host.
    """
    wanted, found = _objects(expected), _objects(actual)
    owners = {_owner(key) for key in wanted}
    phrases = [f"{key} is missing" for key in wanted if key not in found]
    phrases += [f"{key} is different" for key in wanted if key in found and wanted[key] != found[key]]
    phrases += [f"{key} is not ours" for key in found if key not in wanted and _owner(key) in owners]
    return phrases


def _set_search_path(connection: Connection, path: str) -> None:
    connection.exec_driver_sql("SELECT set_config('search_path', %(path)s, true)", {"path": path})


def _line(schema: str, key: Any, definition: Any, source: Any = None) -> str:
    qualifier = re.compile(rf'(?<![\w"])(?:"{schema}"|{schema})\.')
    text = qualifier.sub("{schema}.", definition)
    if source is not None:
        normal = " ".join(source.replace(f'"{schema}"', "{schema}").split())
        text += " source " + hashlib.md5(normal.encode(), usedforsecurity=False).hexdigest()
    return f"{key}: {text}"


def _objects(listing: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in listing.splitlines() if line)


def _owner(key: str) -> str:
    """The table, sequence or function that the object is, or is part of."""
    return re.split(r"[.(]", key.split(" ", 1)[1], maxsplit=1)[0]

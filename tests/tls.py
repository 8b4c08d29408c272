"""A server that speaks TLS: the embedded one listens on a Unix socket only, where PostgreSQL has no TLS.

The client's side is what matters after a fork, so this stands in front of the real server and takes the TLS off.
"""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

SSL_REQUEST = struct.pack("!ii", 8, 80877103)


@contextmanager
def over_tls(database: str, folder: Path) -> Iterator[str]:
    """A URL that leads to `database` over TLS, with a certificate made for this test; skips where openssl is missing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*_certificate(folder))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=_serve, args=(listening, context, database), daemon=True).start()
        port = listening.getsockname()[1]
        yield psycopg.conninfo.make_conninfo(
            database, host="127.0.0.1", port=port, sslmode="verify-ca", sslrootcert=str(folder / "cert.pem")
        )


def _certificate(folder: Path) -> tuple[Path, Path]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"),
            *("-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


def _serve(listening: socket.socket, context: ssl.SSLContext, database: str) -> None:
    with suppress(OSError):  # the end of the test closes the socket
        while True:
            client, _ = listening.accept()
            threading.Thread(target=_carry, args=(client, context, database), daemon=True).start()


def _carry(client: socket.socket, context: ssl.SSLContext, database: str) -> None:
    with suppress(OSError, ssl.SSLError), client, _server_socket(database) as server:
        if client.recv(8, socket.MSG_WAITALL) != SSL_REQUEST:
            return  # somebody wants to go without TLS
        client.sendall(b"S")
        with context.wrap_socket(client, server_side=True) as tls:
            while True:
                ready = [tls] if tls.pending() else select.select([tls, server], [], [])[0]
                for end, other in ((tls, server), (server, tls)):
                    if end in ready:
                        data = end.recv(65536)
                        if not data:
                            return
                        other.sendall(data)


def _server_socket(database: str) -> socket.socket:
    parts = psycopg.conninfo.conninfo_to_dict(database)
    host, port = str(parts.get("host") or "127.0.0.1"), int(str(parts.get("port") or 5432))
    if not host.startswith("/"):
        return socket.create_connection((host, port))
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.connect(f"{host}/.s.PGSQL.{port}")
    return server

"""Certificates for the server and keys for the nodes, for federations without a certificate authority."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_public_key,
)

from pfedbayes.errors import UserError

MOST_NODES = 10_000
LONGEST_NAME = 253  # characters of a host name, each label at most 63
HOST_NAME = re.compile(
    r"(\*\.)?[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?)*\.?", re.I | re.A
)
VALID = timedelta(days=825)  # some systems refuse longer periods
SSH_CURVES = (ec.SECP256R1, ec.SECP384R1, ec.SECP521R1)
ROSTER = """\
# Which key belongs to which client: set federation.roster to the absolute path of this file, on the server's machine.
# `ssh-keygen -lf node-0.pub` prints the fingerprint of a key. You can add for each client
#     name = "Hospital A"   its name in the report, instead of the one that the node claims
#     train_size = 1200     the most training examples that it may claim
#     left = true           to remove it for good
"""


def make_keys(folder: Path, hosts: Sequence[str], nodes: int) -> list[Path]:
    """Write certificates and keys to a folder and return their paths.

    ca.crt, server.crt and server.key are for a SuperLink that is reached under these host names or addresses; node-0,
    node-0.pub, … are for its nodes; roster.toml tells the server which key belongs to which client. Keep ca.key in a
    safe place: it signs later certificates.
    """
    places = [_place(host) for host in hosts]
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(f"{nodes} nodes are not possible: give 1 to {MOST_NODES}")
    names = ["ca.key", "ca.crt", "server.key", "server.crt"]
    names += [name for i in range(nodes) for name in (f"node-{i}", f"node-{i}.pub")] + ["roster.toml"]
    paths = [folder / name for name in names]
    try:
        if there := [path for path in paths if path.exists()]:
            raise UserError(f"{there[0]} exists already: choose an empty folder, so that no key is lost")
        folder.mkdir(parents=True, exist_ok=True)
        contents = [*_certificates(places)]
        roster = ROSTER
        for i in range(nodes):
            key = ec.generate_private_key(ec.SECP384R1())
            contents.append(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
            contents.append(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n")
            roster += f'\n[[client]]\nnumber = {i}\nkey = "{_fingerprint(key.public_key())}"\n'
        contents.append(roster.encode())
        for path, content in zip(paths, contents, strict=True):
            mode = 0o644 if path.suffix in (".crt", ".pub", ".toml") else 0o600
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
                file.write(content)
    except OSError as error:
        raise UserError(f"cannot write to {folder} ({error.strerror}): give another folder") from None
    return paths


def fingerprint(public_key: bytes) -> str | None:
    """Return the fingerprint of a node's public key in PEM, as ssh-keygen prints it; None if it is no key.

    Flower checks that every real node owns its key. Only nodes that Flower simulates have none.
    """
    try:
        return _fingerprint(load_pem_public_key(public_key))
    except (ValueError, UnsupportedAlgorithm):
        return None


def _fingerprint(key: PublicKeyTypes) -> str:
    """Return the SHA-256 fingerprint of a key: of its form in OpenSSH or, where that has none, of its DER form."""
    if isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, SSH_CURVES):
        content = base64.b64decode(key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).split()[1])
    else:
        content = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    return "SHA256:" + base64.b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def _certificates(places: Sequence[x509.GeneralName]) -> tuple[bytes, bytes, bytes, bytes]:
    """Return ca.key, ca.crt, server.key and server.crt as PEM."""
    authority, server = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer = _named("federation authority")
    signs = x509.KeyUsage(
        False, False, False, False, False, True, True, False, False
    )  # sign certificates and revocation lists
    root = (
        _unsigned(issuer, issuer, authority, authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs, critical=True)
    )
    leaf = (
        _unsigned(_named("federation server"), issuer, server, authority)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(places), critical=False)
    )
    (ca, certificate) = (each.sign(authority, hashes.SHA384()).public_bytes(Encoding.PEM) for each in (root, leaf))
    (ca_key, server_key) = (
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) for key in (authority, server)
    )
    return ca_key, ca, server_key, certificate


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _unsigned(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    start = datetime.now(UTC) - timedelta(hours=1)  # tolerate clocks that differ
    own, signer = (x509.SubjectKeyIdentifier.from_public_key(each.public_key()) for each in (key, by))
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + VALID)
        .add_extension(own, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(signer), critical=False)
    )


def _place(host: str) -> x509.GeneralName:
    """Return an address or a host name as it stands in a certificate; refuse any other text."""
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    if len(host) > LONGEST_NAME or not HOST_NAME.fullmatch(host):
        raise UserError(f"--host {host!r} is neither an address nor a host name: give one, e.g. server.example.org")
    return x509.DNSName(host)

"""Certificates made for a test: a CA, and what it signs for processes with roles, for clients, and for yesterday."""

import datetime
from collections.abc import Iterable
from ipaddress import ip_address
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from services.runtime.tls import ROLE_URI_PREFIX, TlsFiles

DAY = datetime.timedelta(days=1)


class Authority:
    """A CA whose files lie in `folder`."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._ca = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self._folder = folder
        self.path = folder / "ca.pem"
        self._ca.cert_pem.write_to_path(str(self.path))

    def issue(
        self,
        name: str,
        *,
        roles: Iterable[str] = (),
        hosts: Iterable[str] = ("127.0.0.1", "localhost"),
        days: tuple[int, int] = (-1, 365),
        passphrase: bytes | None = None,
    ) -> TlsFiles:
        """A certificate that is valid from one day to another, 0 being now. Files of the same name are replaced."""
        key = ec.generate_private_key(ec.SECP256R1())
        signer = x509.load_pem_x509_certificate(self._ca.cert_pem.bytes())
        signing_key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(signing_key, ec.EllipticCurvePrivateKey)
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(signer.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now + days[0] * DAY)
            .not_valid_after(now + days[1] * DAY)
            .add_extension(x509.SubjectAlternativeName([*_hosts(hosts), *_uris(roles)]), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False)
            .sign(signing_key, hashes.SHA256())
        )
        files = TlsFiles(self._folder / f"{name}.crt", self._folder / f"{name}.key", self.path)
        encryption = (
            serialization.NoEncryption() if passphrase is None else serialization.BestAvailableEncryption(passphrase)
        )
        form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
        files.cert.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files.key.write_bytes(key.private_bytes(*form, encryption))
        return files


def serial_of(pem: bytes) -> int:
    """Number of a certificate, by which it is told from another one for the same name."""
    return x509.load_pem_x509_certificate(pem).serial_number


def _hosts(hosts: Iterable[str]) -> list[x509.GeneralName]:
    return [x509.IPAddress(ip_address(host)) if host[0].isdigit() else x509.DNSName(host) for host in hosts]


def _uris(roles: Iterable[str]) -> list[x509.GeneralName]:
    return [x509.UniformResourceIdentifier(ROLE_URI_PREFIX + role) for role in roles]

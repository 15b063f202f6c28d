"""Signatures: a DSSE envelope (v1) around an in-toto statement, ed25519 keys in PEM (extra ``sign``).

``openssl genpkey -algorithm ed25519 -out key.pem`` makes a key, ``openssl pkey -in key.pem -pubout`` its
public half. What is signed is not the payload alone but its DSSE encoding, which includes the type, so
that a signature cannot be taken for one of something else.
"""

from __future__ import annotations

import base64
import importlib
from pathlib import Path
from typing import Any

from halfulp import canonical
from halfulp.errors import TamperingError, UsageError
from halfulp.study.protocol import Json

PAYLOAD = "application/vnd.in-toto+json"


def envelope(payload: bytes, key: Path) -> dict[str, Json]:
    """The payload, signed."""
    private = _load(key, "load_pem_private_key", "Ed25519PrivateKey", password=None)
    return {
        "payloadType": PAYLOAD,
        "payload": base64.b64encode(payload).decode(),
        "signatures": [
            {
                "keyid": _identity(private.public_key()),
                "sig": base64.b64encode(private.sign(_encoded(payload))).decode(),
            }
        ],
    }


def verify(content: Json, payload: bytes, key: Path, where: Path) -> str:
    """The id of the key, if the envelope holds this payload and one of its signatures is by that key."""
    public = _load(key, "load_pem_public_key", "Ed25519PublicKey")
    try:
        signed = base64.b64decode(content["payload"], validate=True)
        signatures = [base64.b64decode(s["sig"], validate=True) for s in content["signatures"]]
        kind = content["payloadType"]
    except (KeyError, TypeError, ValueError):  # of base64, or text that is not ASCII
        raise TamperingError(f"{where} is not a DSSE envelope.") from None
    if kind != PAYLOAD or signed != payload:
        raise TamperingError(f"{where} signs something else than the statement beside it.")
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    for signature in signatures:
        try:
            public.verify(signature, _encoded(payload))
        except invalid:
            continue
        return _identity(public)
    raise TamperingError(f"{where} has no valid signature by the key {key}.")


def _encoded(payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)


def _identity(public: Any) -> str:
    return canonical.sha256(public.public_bytes_raw())


def _load(path: Path, loader: str, kind: str, **options: Any) -> Any:
    try:
        serialization = importlib.import_module("cryptography.hazmat.primitives.serialization")
        ed25519 = importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError:
        raise UsageError("Signatures need the cryptography package: pip install 'halfulp[sign]'.") from None
    try:
        key = getattr(serialization, loader)(path.read_bytes(), **options)
    except OSError as error:
        raise UsageError(f"The key {path} cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError) as error:
        raise UsageError(f"The key {path} is not a PEM key that can be used: {error}.") from None
    if not isinstance(key, getattr(ed25519, kind)):
        raise UsageError(f"The key {path} is not an ed25519 key.")
    return key

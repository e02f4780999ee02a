"""Secrets of addresses and of the environment, hidden wherever text leaves the process.

Tracking URIs hold passwords (`postgresql://user:secret@host`), and so do the errors of whatever
opened them. `masked` goes over every message, tag, parameter and description that holds an address
or the words of another library.
"""

from __future__ import annotations

import os
import re

HIDDEN = "***"
SECRET_VARIABLES = (
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "DATABRICKS_TOKEN",
    "DATABRICKS_CLIENT_SECRET",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_CONNECTION_STRING",
    "PGPASSWORD",
)
"""Environment variables from which MLflow and its databases take a secret."""
_SHORTEST = 4
"""A shorter value would hide half of every message, and is no secret."""

_NAMES = r"(?:password|passwd|pwd|token|secret|signature|sig|api[_-]?key|access[_-]?key)"
_PATTERNS = (
    # user:password@ of an address; a password may hold @ and /, and one with a space is still one
    (re.compile(r"(?<=://)[^\s'\"]*@"), f"{HIDDEN}@"),
    (re.compile(r"(?<=://)[^\s/:@'\"]+:(?!\d{1,5}\b)[^@\n]*@"), f"{HIDDEN}@"),
    (re.compile(rf"(?i)\b([\w.-]*{_NAMES}(?:=|%3d))[^&\s'\";]+"), rf"\1{HIDDEN}"),
    (re.compile(rf"(?i)([\"'][\w.-]*{_NAMES}[\"']\s*:\s*)([\"'])[^\"']*\2"), rf"\1\2{HIDDEN}\2"),
    (re.compile(r"(?i)\b(authorization\W{1,4}(?:bearer|basic)|bearer)\s+\S+"), rf"\1 {HIDDEN}"),
)


def masked(text: object) -> str:
    """`text` without what may be a secret.

    Hidden are `user:password@` in addresses, values of `password=`, `token=` and their kin,
    Authorization headers, and the values of SECRET_VARIABLES wherever they stand.
    """
    hidden = str(text)
    for pattern, shown in _PATTERNS:
        hidden = pattern.sub(shown, hidden)
    for name in SECRET_VARIABLES:
        value = os.environ.get(name, "")
        if len(value) >= _SHORTEST:
            hidden = hidden.replace(value, HIDDEN)
    return hidden

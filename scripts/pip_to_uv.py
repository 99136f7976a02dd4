"""pip's configuration as settings of uv: `pip config list | python pip_to_uv.py` prints `export UV_...=...` lines.

uv (eight times as fast as pip here) reads none of pip's files and variables. A variable of uv's own that is set already
stays as it is.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
from collections.abc import Iterable, Mapping

# Name in pip -> (variable of uv, what separates several values).
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "no-index": ("UV_NO_INDEX", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "cert": ("SSL_CERT_FILE", " "),
    "client-cert": ("SSL_CLIENT_CERT", " "),
    "proxy": ("ALL_PROXY", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "retries": ("UV_HTTP_RETRIES", " "),
    "keyring-provider": ("UV_KEYRING_PROVIDER", " "),
}
SECTIONS = ("global", "install", ":env:")
"""In pip's order: a later one replaces an earlier one."""


def uv_settings(pip_config: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for uv.

    Args: pip_config is the output of `pip config list`, lines such as `global.index-url='https://host/simple'`;
        environment holds what is set already.
    """
    # pip takes the best version from all its indexes together, and uses the CA bundle of `requests` where one is set.
    found = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    if "REQUESTS_CA_BUNDLE" in environment:
        found["SSL_CERT_FILE"] = environment["REQUESTS_CA_BUNDLE"]
    values: dict[tuple[str, str], str] = {}
    for line in pip_config:
        match = re.fullmatch(r"(global|install|:env:)\.([\w-]+)=(.*)", line.strip())
        if match is not None:
            values[match[1], match[2].replace("_", "-").lower()] = str(ast.literal_eval(match[3]))
    for section in SECTIONS:
        for name, (variable, separator) in SETTINGS.items():
            parts = values.get((section, name), "").split()
            if parts:
                found[variable] = separator.join(parts)
    return {variable: value for variable, value in found.items() if variable not in environment}


if __name__ == "__main__":
    for variable, value in uv_settings(sys.stdin, os.environ).items():
        print(f"export {variable}={shlex.quote(value)}")

"""Audits the dependencies without a network.

    python -m tools.audit

- The installed versions are those of constraints.txt, which were tested together.
- No package has a licence outside LICENCES.
- constraints.txt and the lower bounds of setup.cfg are not below the version that fixed a known vulnerability (MENDED).

It knows only the vulnerabilities in MENDED.  With a network, `pip-audit -r constraints.txt` knows all.
"""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]

# Packages that parse untrusted bytes: the version that fixed the last vulnerability in the parts that epdd uses, and
# its number, as of 2026-11-30.
MENDED = {
    "aiohttp": ("3.14.3", "CVE-2026-59881, CVE-2026-69243, CVE-2026-69244"),
    "h11": ("0.16.0", "CVE-2025-43859: chunked bodies read too leniently"),
    "jinja2": ("3.1.6", "CVE-2025-27516: a template leaves the sandbox by |attr"),
    "pillow": ("13.0.0", "CVE-2026-96639 and others: JPEG and animations decoded beyond their buffers"),
    "torch": ("2.6.0", "CVE-2025-32434: torch.load runs code in spite of weights_only"),
    "transformers": ("4.53.0", "CVE-2025-3933 and others: regular expressions that take for ever"),
}

# SPDX names, then what older packages write instead.
LICENCES = frozenset({
    "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC", "LLVM-exception",
    "MIT", "MIT-CMU", "MPL-2.0", "PSF-2.0", "Public Domain", "Zlib",
    "Apache 2.0", "Apache 2.0 License", "Apache Software License", "BSD License", "ISC License (ISCL)", "MIT License",
    "Mozilla Public License 2.0 (MPL 2.0)", "Python Software Foundation License"})

# Licences of files in a package's sources that are not installed: docutils' mode for Emacs.
NOT_INSTALLED = {"docutils": "GNU General Public License (GPL)"}

OURS = frozenset({"epdd", "pip", "setuptools", "wheel"})        # not pinned: the project, and what installs it
OF_TORCH = ("nvidia-", "cuda-", "triton")                       # which torch itself pins, where it comes with CUDA


def main() -> int:
    pinned = dict(_pins((ROOT / "constraints.txt").read_text().splitlines()))
    installed = {canonicalize_name(found.metadata["Name"]): found for found in metadata.distributions()}
    faults = [*differing(pinned, {name: found.version for name, found in installed.items()}), *holes(pinned),
              *(fault for name, found in installed.items() if not name.startswith(OF_TORCH) or name in pinned
                for fault in licence_faults(name, found.metadata))]
    for fault in faults:
        print(f"audit: {fault}", file=sys.stderr)
    print(f"audit: {len(installed)} packages, {len(faults)} faults")
    return 1 if faults else 0


def _pins(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    for line in lines:
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            yield canonicalize_name(name), version


def differing(pinned: dict[str, str], installed: dict[str, str]) -> Iterator[str]:
    """Installed versions that differ from the tested ones."""
    for name, version in sorted(installed.items()):
        if name in pinned and Version(version).public != pinned[name]:
            yield f"{name} {version} is installed, constraints.txt has {pinned[name]}"
        elif name not in pinned and name not in OURS and not name.startswith(OF_TORCH):
            yield f"{name} {version} is installed and not in constraints.txt"


def holes(pinned: dict[str, str]) -> Iterator[str]:
    """Versions that are or may be installed and have a vulnerability with a fix."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    asked = [settings["options"]["install_requires"], *settings["options.extras_require"].values()]
    least: dict[str, Version] = {}
    for need in (Requirement(line) for lines in asked for line in lines.split("\n") if line):
        bounds = [Version(spec.version) for spec in need.specifier if spec.operator == ">="]
        least[canonicalize_name(need.name)] = max(bounds, default=Version("0"))
    for name, (version, hole) in MENDED.items():
        if name in pinned and Version(pinned[name]) < Version(version):
            yield f"constraints.txt has {name} {pinned[name]}; {version} mended {hole}"
        if name in least and least[name] < Version(version):
            yield f"setup.cfg lets {name} {least[name]} in; {version} mended {hole}"


def licence_faults(name: str, told: metadata.PackageMetadata) -> Iterator[str]:
    """Packages with a licence that is unknown or not in LICENCES."""
    classifiers = [value.rpartition("::")[2].strip() for value in told.get_all("Classifier") or []
                   if value.startswith("License ::")]
    expression = told.get("License-Expression")
    words = [expression] if expression else classifiers or [(told.get("License") or "none").partition("\n")[0]]
    for word in words:
        if word == NOT_INSTALLED.get(name):
            continue
        for licence in re.split(r"\s+(?:AND|OR|WITH)\s+", word if word in LICENCES else re.sub(r"[()]", "", word)):
            if licence.strip() not in LICENCES:
                yield f"{name} has the licence {licence.strip()!r}"


if __name__ == "__main__":
    sys.exit(main())

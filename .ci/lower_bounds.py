"""Prints every `name>=version` of pyproject.toml as the constraint `name==version`."""

import re
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
required = [
    *project["dependencies"],
    *(r for extra in project["optional-dependencies"].values() for r in extra),
]
bounds = [match.groups() for r in required if (match := re.fullmatch(r"([\w-]+)>=([\w.]+)", r))]
print("\n".join(f"{name}=={version}" for name, version in bounds))
